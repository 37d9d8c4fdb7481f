"""Rewards of a response: text rules, a reward-model plug-in, an exact-answer check, own functions. Imports no model.

Letters: B prompts, G answers a prompt, N = B * G responses; response i belongs to prompt i // G.
A response is what the policy wrote after the prompt. Where the prompt opened a think block it reads
"working</think>\\n\\nanswer"; its *answer part* is what follows the first `</think>`, or all of it without that tag.
"""

import math
import re
from decimal import Decimal

import torch
from torch import Tensor

from trainer.reward_plugins import REWARD_PARTS, RULE_PARTS, RewardFunction

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

# Scripts whose characters are tokens: Han (々 〇 and the extensions too), kana (half-width too), bopomofo, Hangul.
_CJK = (
    "\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3041-\u318f"
    "\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    "\uff66-\uff9f\uffa0-\uffdc\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
_REPETITION_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")

_CHAT_HEADER = re.compile(r"<\|im_start\|>(system|user|assistant|tool)(?=\s)")
_CHAT_END = "<|im_end|>"

# A minus sign is a sign only where no operand stands before it: "5-3" ends in 3, "= -3" and "是-3" end in -3.
_NUMBER = re.compile(
    r"(?:(?<![\dA-Za-z)\]])[-+])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\dA-Za-z.])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?![\dA-Za-z]))?"
)
_WIDE_SIGNS = str.maketrans({"－": "-", "−": "-", "＋": "+", "．": "."})
_TRAILING_PUNCTUATION = "。.!！"


def rep_penalty(text: str, n: int = 3, cap: float = 0.5) -> float:
    """Penalty in [0, cap] for repeated n-grams: min(cap, 2 * cap * repeated / all).

    `repeated` counts the n-grams that occurred before. Tokens are lower-cased words and single punctuation marks.
    Differs from MiniMind: each Chinese, Japanese or Korean character is a token of its own. MiniMind's `\\w+` takes a
    run of them for one word, so "我爱你" * 100 is a single token, has no 3-gram and costs nothing.
    Raises: ValueError if n < 1.
    """
    if n < 1:
        raise ValueError(f"rep_penalty: n is {n}, expected an n-gram length of at least 1")
    tokens = _REPETITION_TOKEN.findall(text.lower())
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(tokens[i : i + n]) for i in range(total)})
    return min(cap, 2 * cap * (total - distinct) / total)


def parse_chat_prompt(prompt: str) -> list[dict]:
    """Messages [{"role", "content"}, ...] of a ChatML prompt text; the open header at its end is not a message.

    A message ends at the last `<|im_end|>` before the next header, so one that was typed into a message stays in it.
    Contents are stripped, as MiniMind does. A text without any ChatML header is one message of the user.
    """
    headers = list(_CHAT_HEADER.finditer(prompt))
    if not headers:
        return [{"role": "user", "content": prompt.strip()}]
    messages = []
    ends = [header.start() for header in headers[1:]] + [len(prompt)]
    for header, end in zip(headers, ends):
        content, closing, _ = prompt[header.end() : end].rpartition(_CHAT_END)
        if closing:
            messages.append({"role": header.group(1), "content": content.strip()})
    return messages


def answer_part(response: str) -> str:
    """What follows the first `</think>`, stripped; the whole response, unchanged, where that tag is missing."""
    _, tag, answer = response.partition(THINK_CLOSE)
    return answer.strip() if tag else response


def rule_parts(response: str) -> dict[str, float]:
    """Signed contributions of the text rules by name (RULE_PARTS); they sum to `rule_reward`.

    length: +0.5 if 20 <= characters (stripped) <= 800, else -0.5. thinking, only with `</think>`: +1.0 if what stands
    before the first one has 20 to 300 characters, else -0.5. tag, only with `</think>`: +0.25 if there is exactly one,
    else -0.25. repetition: minus `rep_penalty` of the answer part. Source: MiniMind, trainer/train_grpo.py.
    """
    length = 0.5 if 20 <= len(response.strip()) <= 800 else -0.5
    thinking, tag = 0.0, 0.0
    if THINK_CLOSE in response:
        working = response.split(THINK_CLOSE, 1)[0].strip()
        thinking = 1.0 if 20 <= len(working) <= 300 else -0.5
        tag = 0.25 if response.count(THINK_CLOSE) == 1 else -0.25
    return {"length": length, "thinking": thinking, "tag": tag, "repetition": -rep_penalty(answer_part(response))}


def rule_reward(response: str) -> float:
    """Sum of the text rules of `rule_parts`; between -1.75 and 1.75."""
    return sum(rule_parts(response).values())


def _last_number(text: str) -> Decimal | None:
    """The last number written in the text ("1,234" and "-0.5" are one each), or None."""
    found = [match.group() for match in _NUMBER.finditer(text.translate(_WIDE_SIGNS))]
    return Decimal(found[-1].replace(",", "")) if found else None


def _as_number(text: str) -> Decimal | None:
    """The number that the whole text is, or None."""
    plain = text.translate(_WIDE_SIGNS)
    return Decimal(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else None


def _bare(text: str) -> str:
    return text.strip().rstrip(_TRAILING_PUNCTUATION).strip().casefold()


def given_answer(prompt: str, response: str) -> str | None:
    """The answer part; None where the prompt or the response opened a think block that the response never closes."""
    unfinished = prompt.rstrip().endswith(THINK_OPEN) or response.lstrip().startswith(THINK_OPEN)
    return None if unfinished and THINK_CLOSE not in response else answer_part(response)


def answer_matches(response: str, answer: str | None, *, thinking_open: bool = False) -> bool:
    """Whether the response's answer part gives the expected answer.

    True if the last number in it equals `answer` as a number ("42", "42.0", "1,234" and full-width digits compare by
    value), or if its text does (case, outer blanks and closing 。.!！ do not count).
    Args: thinking_open: the prompt had opened a think block. A response that never closes one has no answer part and
    never matches: a number in unfinished working is not an answer. The same holds where it opened the block itself.
    Returns: False also for an empty answer or None (the row has none).
    """
    if answer is None or not answer.strip():
        return False
    given = given_answer(THINK_OPEN if thinking_open else "", response)
    if given is None:
        return False
    expected = _as_number(_bare(answer))
    if expected is not None and _last_number(given) == expected:
        return True
    return _bare(given) == _bare(answer)


def _model_scores(reward_model, messages: list[list[dict]], responses: list[str]) -> list[float]:
    """One score a response from the plug-in, NaN where it is not finite. messages[i] belongs to responses[i]."""
    answers = [answer_part(response) for response in responses]
    if hasattr(reward_model, "get_scores"):
        scores = list(reward_model.get_scores(messages, answers))
    else:
        scores = [reward_model.get_score(row, answer) for row, answer in zip(messages, answers)]
    if len(scores) != len(responses):
        raise RuntimeError(
            f"the reward model gave {len(scores)} scores for {len(responses)} responses; expected one each"
        )
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"the reward model gave a score that is not a number: {error}") from error
    return [value if math.isfinite(value) else math.nan for value in values]


def _check_counts(prompts, responses, of_prompts: dict, of_responses: dict) -> int:
    """G = N / B. Raises ValueError where the counts do not fit."""
    batch, rows = len(prompts), len(responses)
    if batch == 0 or rows == 0 or rows % batch:
        raise ValueError(
            f"calculate_rewards got {batch} prompts and {rows} responses; expected at least one prompt and the same "
            "number of responses for each"
        )
    for lists, count, what in ((of_prompts, batch, "prompt"), (of_responses, rows, "response")):
        for name, values in lists.items():
            if values is not None and len(values) != count:
                raise ValueError(
                    f"calculate_rewards got {len(values)} {name} for {count} {what}s; expected one a {what}"
                )
    return rows // batch


def _spread(values: list, group: int) -> list:
    """One value a prompt [B] as one a response [N]."""
    return [value for value in values for _ in range(group)]


def _rows(prompts, responses, messages, answers, finished, metadata) -> dict[str, list]:
    """What reward functions are given: lists of length N; "" where there is no answer, None where a fact is missing."""
    group = len(responses) // len(prompts)
    flags = [None] * len(responses) if finished is None else [bool(flag) for flag in finished]
    return {
        "prompts": _spread(prompts, group),
        "messages": _spread(messages, group),
        "responses": responses,
        "answers": _spread([answer or "" for answer in answers or [None] * len(prompts)], group),
        "finished": flags,
        "metadata": _spread(metadata or [None] * len(prompts), group),
    }


def calculate_rewards(
    prompts: list[str],
    responses: list[str],
    reward_model,
    *,
    messages: list[list[dict]] | None = None,
    answers: list[str | None] | None = None,
    answer_reward: float = 0.0,
    return_parts: bool = False,
    reward_functions: list[RewardFunction] = (),
    reward_weights: dict[str, float] | None = None,
    finished: list[bool] | Tensor | None = None,
    metadata: list[dict | None] | None = None,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """Reward of each response: weighted sum of text rules, reward model, exact answer and own functions.

    Args:
        prompts [B], responses [N]: response i belongs to prompt i // (N / B).
        reward_model: None, or anything with `get_score(messages, response) -> float` and optionally
            `get_scores(messages of each, responses) -> floats`. It is given the answer part of the response, and is
            not asked where its weight is 0.
        messages [B]: the conversation as the policy saw it; without it the prompt text is parsed.
        answers [B]: expected answers, "" or None where a row has none; a match adds `answer_reward`.
        return_parts: also give the parts by name (REWARD_PARTS, then the functions'), each float32[N] before its
            weight. A part that does not apply to a row is NaN there and adds nothing.
        reward_functions: what `load_reward_functions` gave; finished [N] (ended by itself, not at the limit) and
            metadata [B] are for them alone.
        reward_weights: weight of built-in parts by name; 1 for those it does not name.
    Returns: float32[N] on the CPU, no grad. Where the reward model's or a function's score is not finite and counts,
    the row's part and its reward are NaN, never a number: the trainers leave such rows out and count them.
    Raises: ValueError if N is not a multiple of B or a list does not fit; RuntimeError if a plug-in misbehaves.
    """
    of_prompts = {"messages": messages, "answers": answers, "metadata": metadata}
    group = _check_counts(prompts, responses, of_prompts, {"values of finished": finished})
    weights = {**dict.fromkeys(REWARD_PARTS, 1.0), **(reward_weights or {})}
    rules = [rule_parts(response) for response in responses]
    parts = {name: [row[name] for row in rules] for name in RULE_PARTS}
    conversations = messages if messages is not None else [parse_chat_prompt(prompt) for prompt in prompts]
    parts["rm"] = [0.0] * len(responses)
    if reward_model is not None and weights["rm"] != 0:
        parts["rm"] = _model_scores(reward_model, _spread(conversations, group), responses)
    parts["answer"] = [0.0] * len(responses)
    if answers is not None:
        opened = [prompt.rstrip().endswith(THINK_OPEN) for prompt in prompts]
        parts["answer"] = [
            float(answer_reward) * answer_matches(response, answers[i // group], thinking_open=opened[i // group])
            for i, response in enumerate(responses)
        ]
    if reward_functions:
        rows = _rows(prompts, responses, conversations, answers, finished, metadata)
        parts |= {function.name: function.scores(rows) for function in reward_functions}
        weights |= {function.name: function.weight for function in reward_functions}
    total = _weighted_sum(parts, weights)
    if not return_parts:
        return total
    blank = {name: [math.nan if value is None else value for value in values] for name, values in parts.items()}
    return total, {name: torch.tensor(values, dtype=torch.float64).float() for name, values in blank.items()}


def _weighted_sum(parts: dict[str, list[float | None]], weights: dict[str, float]) -> Tensor:
    """float32[N]: the parts times their weights, summed in double precision; None and a weight of 0 add nothing."""
    terms = [[0.0 if value is None or weights[name] == 0 else weights[name] * value for value in values]
             for name, values in parts.items()]
    return torch.tensor(terms, dtype=torch.float64).sum(dim=0).float()
