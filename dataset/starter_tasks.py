"""The starter's chat set: small sums with checkable answers, in English and Chinese, made from a seed.

Five kinds of question (`KINDS`), each with several phrasings a language, a short worked reasoning and one right
answer, a whole number. A question is held out when the numbers in it, in any order, fall into the held-out fifth
(`is_held_out`). The choice knows neither kind nor phrasing nor language: where 47 + 35 is held out, so are 35 + 47,
47 - 35 and "which is larger, 35 or 47".

Nothing but the standard library, and only `Random.random()` is drawn from, whose stream Python promises to keep:
the same seed gives the same bytes everywhere.
"""

import hashlib
import json
from dataclasses import dataclass
from random import Random

KINDS = ("add", "sub", "compare", "extreme", "digit_sum")
# Prompts for reinforcement learning and for the held-out set ask more often what the supervised model gets right now
# and then: a group whose answers are all right, or all wrong, teaches nothing.
PROMPT_KINDS = ("add", "digit_sum", "sub", "add", "compare", "digit_sum", "add", "sub", "extreme", "digit_sum")
LANGUAGES = ("en", "zh")
HELD_OUT_SHARE = 5  # one operand set in five is held out

ANSWERS = {"en": "The answer is {}.", "zh": "答案是{}。"}

# {a} {b} {c} are the operands as asked. No other digits may stand in a question: the test reads operands from the text.
QUESTIONS = {
    ("add", "en"): (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "Please work out {a} plus {b}.",
        "I have {a} apples and get {b} more. How many apples do I have?",
    ),
    ("add", "zh"): (
        "{a} + {b} 等于多少？",
        "请计算{a}加{b}。",
        "{a}与{b}的和是多少？",
        "我有{a}个苹果，又得到{b}个，一共有多少个苹果？",
    ),
    ("sub", "en"): (
        "What is {a} - {b}?",
        "Subtract {b} from {a}.",
        "Please work out {a} minus {b}.",
        "I have {a} apples and give away {b}. How many apples are left?",
    ),
    ("sub", "zh"): (
        "{a} - {b} 等于多少？",
        "请计算{a}减{b}。",
        "{a}比{b}多多少？",
        "我有{a}个苹果，送出{b}个，还剩多少个苹果？",
    ),
    ("compare_max", "en"): (
        "Which is larger, {a} or {b}?",
        "Compare {a} and {b}. Which one is greater?",
        "Tell me the larger of {a} and {b}.",
    ),
    ("compare_max", "zh"): (
        "{a}和{b}哪个更大？",
        "比较{a}与{b}，较大的是哪个？",
        "请说出{a}、{b}中较大的数。",
    ),
    ("compare_min", "en"): (
        "Which is smaller, {a} or {b}?",
        "Compare {a} and {b}. Which one is less?",
        "Tell me the smaller of {a} and {b}.",
    ),
    ("compare_min", "zh"): (
        "{a}和{b}哪个更小？",
        "比较{a}与{b}，较小的是哪个？",
        "请说出{a}、{b}中较小的数。",
    ),
    ("extreme_max", "en"): (
        "What is the largest of {a}, {b} and {c}?",
        "Find the biggest number: {a}, {b}, {c}.",
        "Which of {a}, {b}, {c} is the largest?",
    ),
    ("extreme_max", "zh"): (
        "{a}、{b}、{c}中最大的是哪个？",
        "请找出最大的数：{a}，{b}，{c}。",
        "{a}，{b}和{c}里哪个数最大？",
    ),
    ("extreme_min", "en"): (
        "What is the smallest of {a}, {b} and {c}?",
        "Find the least number: {a}, {b}, {c}.",
        "Which of {a}, {b}, {c} is the smallest?",
    ),
    ("extreme_min", "zh"): (
        "{a}、{b}、{c}中最小的是哪个？",
        "请找出最小的数：{a}，{b}，{c}。",
        "{a}，{b}和{c}里哪个数最小？",
    ),
    ("digit_sum", "en"): (
        "What is the sum of the digits of {a}?",
        "Add up the digits of {a}.",
        "Please give the digit sum of {a}.",
    ),
    ("digit_sum", "zh"): (
        "{a}的各位数字之和是多少？",
        "请把{a}的每一位数字相加。",
        "{a}的数字和是几？",
    ),
}


@dataclass(frozen=True)
class Task:
    """One question: kind, language, operands in the order asked, question text, working and right answer (both text).

    `kind` tells the two directions of a comparison apart: "compare_max", "compare_min", "extreme_max", "extreme_min".
    """

    kind: str
    language: str
    operands: tuple
    question: str
    working: str
    answer: str

    @property
    def answer_text(self):
        """The sentence that states the answer, without reasoning."""
        return ANSWERS[self.language].format(self.answer)

    @property
    def response(self):
        """What the assistant should write after an opened `<think>` and newline: working, closing tag, answer."""
        return f"{self.working}\n</think>\n\n{self.answer_text}"

    def row(self):
        """A row in MiniMind's JSONL format, plus the fields `answer`, `kind` and `lang`."""
        turns = [{"role": "user", "content": self.question},
                 {"role": "assistant", "content": f"<think>\n{self.response}"}]
        return {"conversations": turns, "answer": self.answer, "kind": self.kind, "lang": self.language}


def pick(rng, items):
    """One of the items, uniformly, from `rng.random()` alone (its stream is stable between Python versions)."""
    return items[int(rng.random() * len(items))]


def integer(rng, low, high):
    """A whole number in [low, high], both included."""
    return low + int(rng.random() * (high - low + 1))


def is_held_out(operands):
    """True when this set of numbers belongs to the held-out fifth, whatever is asked about it and in whatever order."""
    key = ",".join(str(number) for number in sorted(operands))
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def _add(rng, language):
    a, b = integer(rng, 10, 99), integer(rng, 10, 99)
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    tens = a // 10 + b // 10 + carry
    left = f"{a % 10}+{b % 10}={ones}"
    right = f"{a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    return "add", (a, b), _two_steps(language, left, right), a + b


def _sub(rng, language):
    a, b = integer(rng, 10, 99), integer(rng, 10, 99)
    a, b = max(a, b), min(a, b)
    borrow = a % 10 < b % 10
    top = a % 10 + (10 if borrow else 0)
    left = f"{top}-{b % 10}={top - b % 10}"
    right = f"{a // 10}{'-1' if borrow else ''}-{b // 10}={a // 10 - b // 10 - borrow}"
    return "sub", (a, b), _two_steps(language, left, right), a - b


def _two_steps(language, ones, tens):
    """Column arithmetic: the units first, then the tens."""
    return f"Ones: {ones}. Tens: {tens}." if language == "en" else f"先看个位：{ones}，再看十位：{tens}。"


def _sign(left, right):
    return "<" if left < right else ">" if left > right else "="


def _compare(rng, language):
    a, b = integer(rng, 10, 99), integer(rng, 10, 99)
    while a == b:
        b = integer(rng, 10, 99)
    largest = rng.random() < 0.5
    tens = f"{a // 10}{_sign(a // 10, b // 10)}{b // 10}"
    whole = f"{a}{_sign(a, b)}{b}"
    working = f"Tens: {tens}. So {whole} here." if language == "en" else f"先比较十位：{tens}，所以整个数{whole}。"
    return ("compare_max" if largest else "compare_min"), (a, b), working, (max(a, b) if largest else min(a, b))


def _extreme(rng, language):
    numbers = []
    while len(numbers) < 3:
        number = integer(rng, 10, 99)
        if number not in numbers:
            numbers.append(number)
    a, b, c = numbers
    largest = rng.random() < 0.5
    best = max(a, b) if largest else min(a, b)
    first, second = f"{a}{_sign(a, b)}{b}", f"{best}{_sign(best, c)}{c}"
    working = f"Compare: {first}, {second}." if language == "en" else f"两个两个地比较：{first}，{second}。"
    answer = max(numbers) if largest else min(numbers)
    return ("extreme_max" if largest else "extreme_min"), (a, b, c), working, answer


def _digit_sum(rng, language):
    number = integer(rng, 100, 999)
    x, y, z = (int(digit) for digit in str(number))
    first, second = f"{x}+{y}={x + y}", f"{x + y}+{z}={x + y + z}"
    working = f"Add up: {first}, {second}." if language == "en" else f"从左到右逐位相加：{first}，{second}。"
    return "digit_sum", (number,), working, x + y + z


MAKERS = {
    "add": _add, "sub": _sub, "compare": _compare, "extreme": _extreme, "digit_sum": _digit_sum,
}  # fmt: skip


def make_task(rng, kind, language, held_out):
    """A random task of this kind and language from the wanted side of the split.

    Args: rng, a `random.Random`; kind, one of KINDS; language, one of LANGUAGES; held_out, which side.
    Raises: ValueError for an unknown kind or language.
    """
    if kind not in MAKERS or language not in LANGUAGES:
        raise ValueError(f"unknown task {kind!r} in {language!r}: kinds are {KINDS}, languages {LANGUAGES}")
    while True:
        form, operands, working, answer = MAKERS[kind](rng, language)
        if is_held_out(operands) == held_out:
            break
    question = pick(rng, QUESTIONS[form, language]).format(**dict(zip("abc", operands, strict=False)))
    return Task(form, language, operands, question, working, str(answer))


def make_tasks(count, seed, held_out):
    """`count` tasks with different questions, PROMPT_KINDS and languages in turn, shuffled; fixed by the seed."""
    rng = Random(seed)
    tasks, seen = [], set()
    while len(tasks) < count:
        kind = PROMPT_KINDS[len(tasks) % len(PROMPT_KINDS)]
        language = LANGUAGES[len(tasks) // len(PROMPT_KINDS) % len(LANGUAGES)]
        task = make_task(rng, kind, language, held_out)
        if task.question not in seen:
            seen.add(task.question)
            tasks.append(task)
    return [task for _, task in sorted(((rng.random(), task) for task in tasks), key=lambda pair: pair[0])]


def make_stream(count, seed):
    """`count` training tasks for supervised learning; questions may repeat, held-out operands never occur."""
    rng = Random(seed)
    return [make_task(rng, pick(rng, KINDS), pick(rng, LANGUAGES), held_out=False) for _ in range(count)]


def jsonl(tasks):
    """The tasks as JSONL text: one row a line, UTF-8 kept readable, Unix line ends."""
    return "".join(json.dumps(task.row(), ensure_ascii=False) + "\n" for task in tasks)
