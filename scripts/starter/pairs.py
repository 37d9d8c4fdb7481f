"""Preference data for the starter's reward model: answers of known quality to the same question.

Four sorts of answer: `right` (the sentence with the right number), `wrong` (the same with another number, or a wrong
answer of the supervised model), `malformed` (the right number in a broken form) and `rambling` (right, then going on).
A right one is better than each of the others.
"""

from random import Random

from dataset.starter_tasks import ANSWERS, KINDS, LANGUAGES, make_task, pick

OWN_SHARE = 0.25


def wrong_number(rng, task):
    """A whole number of at least 0 that is not the answer but could be taken for it: a slip, or one of the operands."""
    answer = int(task.answer)
    while True:
        near = [answer + 1, answer - 1, answer + 10, answer - 10, answer + 2, answer - 2]
        if task.kind.startswith(("compare", "extreme")) and rng.random() < 0.8:
            guess = pick(rng, task.operands)
        elif rng.random() < 0.6:
            guess = pick(rng, near)
        elif rng.random() < 0.3:
            guess = int(task.answer[::-1])
        else:
            guess = answer + int(rng.random() * 61) - 30
        if guess >= 0 and guess != answer:
            return guess


def wrong_answer(rng, task):
    """The usual sentence with a wrong number in it."""
    return ANSWERS[task.language].format(wrong_number(rng, task))


def malformed(rng, task):
    """The right answer in a broken form: cut, bare, in the other language, without number, with reasoning left in."""
    text = task.answer_text
    other = ANSWERS["zh" if task.language == "en" else "en"]
    forms = (text[:-1], task.answer, text[: text.index(task.answer)].strip(), other.format(task.answer), "",
             f"{task.working} {task.answer}", task.working, text.lower().replace("。", "，"),
             f"<think>{text}", f"{text[:3]} {text}", f"{task.answer} {task.answer}.", text.replace(task.answer, "?"))
    while True:
        form = pick(rng, forms)
        if form != text:
            return form


def rambling(rng, task):
    """The right answer, and then more than was asked: said again, said otherwise, or followed by the working."""
    text = task.answer_text
    gap = " " if task.language == "en" else ""
    more = (text, gap.join([text] * (2 + int(rng.random() * 4))), task.working, task.question + gap + text,
            ("Let me say it again. " if task.language == "en" else "让我再说一遍。") + text,
            ("So " if task.language == "en" else "所以") + text, f"{task.working}{gap}{text}")
    return text + gap + pick(rng, more)


def make_groups(count, seed, held_out, own_errors=()):
    """`count` groups (task, right text, [three worse texts]): two wrong, then malformed or rambling by turns.

    Args: own_errors, pairs (training task, wrong text) of the supervised model: a share OWN_SHARE of the groups is
    about such a question, and its first worse text is that answer.
    """
    rng = Random(seed)
    groups = []
    for index in range(count):
        if own_errors and rng.random() < OWN_SHARE:
            task, first = pick(rng, own_errors)
        else:
            task = make_task(rng, pick(rng, KINDS), pick(rng, LANGUAGES), held_out)
            first = wrong_answer(rng, task)
        last = malformed(rng, task) if index % 2 else rambling(rng, task)
        groups.append((task, task.answer_text, [first, wrong_answer(rng, task), last]))
    return groups
