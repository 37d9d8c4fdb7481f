r"""A reward function: 1 where the answer is the row's number, however it is written (0.5, 1/2, \frac{1}{2}), else 0.

    pip install math-verify
    python trainer/train_grpo.py --starter --reward_fn scripts/examples/math_reward.py:exact_number:2

Any function in a file of yours works like this one. It is given, by name, those lists it asks for, of one length N:
prompts (text), messages ([{"role", "content"}, …]), responses (text), answers ("" where a row has none), finished
(False = cut at --max_gen_len), metadata (the row's own object, or None). It gives N numbers, None where not applicable.
"""

from trainer.rewards import answer_matches, given_answer

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("math_reward.py needs the package math-verify: pip install math-verify") from error


def exact_number(prompts: list[str], responses: list[str], answers: list[str]) -> list[float | None]:
    """1.0 where the response's answer equals the row's as a number, 0.0 where not, None where the row has no number.

    Answers inside unfinished thinking do not count. math-verify reads fractions, percent and LaTeX; numbers amid text
    that it cannot read, such as "答案是134。", are compared by the project's own `answer_matches`.
    """
    scores: list[float | None] = []
    for prompt, response, answer in zip(prompts, responses, answers, strict=True):
        expected = parse(answer) if answer else []
        given = given_answer(prompt, response)
        if not expected:
            scores.append(None)
        elif given is None:
            scores.append(0.0)
        else:
            scores.append(float(answer_matches(given, answer) or verify(expected, parse(given))))
    return scores
