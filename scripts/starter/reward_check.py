"""How good the starter's reward model is, measured through the loader that the training scripts use."""

from random import Random

import torch

from scripts.starter.pairs import malformed, rambling, wrong_answer
from scripts.starter.sft import answer_part, is_right, sample
from trainer.reward_model import LMForRewardModel

SEED = 31
SAMPLES = 4


def conversations(tasks):
    """The messages of each task before its answer."""
    return [[{"role": "user", "content": task.question}] for task in tasks]


def share_before(better, worse):
    """Share of pairs whose first score is the higher one; a tie counts half."""
    return sum((a > b) + 0.5 * (a == b) for a, b in zip(better, worse, strict=True)) / len(better)


def area_under_curve(positive, negative):
    """Chance that a random positive scores above a random negative, ties counting half (AUC)."""
    values, order = torch.tensor(positive + negative, dtype=torch.float64).unique(return_inverse=True)
    high = torch.bincount(order[:len(positive)], minlength=len(values)).double()
    low = torch.bincount(order[len(positive):], minlength=len(values)).double()
    below = low.cumsum(0) - low
    return float((high * (below + low / 2)).sum() / (len(positive) * len(negative)))


def pair_report(scorer, tasks):
    """Accuracy on held-out pairs of each sort, as {sort: share}, and all scores."""
    rng = Random(SEED)
    asked = conversations(tasks)
    right = scorer.get_scores(asked, [task.answer_text for task in tasks])
    makers = {
        "wrong": lambda task: wrong_answer(rng, task),
        "malformed": lambda task: malformed(rng, task),
        "rambling": lambda task: rambling(rng, task),
    }
    shares, scores = {}, list(right)
    for sort, maker in makers.items():
        worse = scorer.get_scores(asked, [maker(task) for task in tasks])
        shares[sort] = share_before(right, worse)
        scores += worse
        if sort == "wrong":
            for kind in sorted({task.kind for task in tasks}):
                chosen = [place for place, task in enumerate(tasks) if task.kind == kind]
                shares[f"wrong:{kind}"] = share_before([right[i] for i in chosen], [worse[i] for i in chosen])
    return shares, scores


def sampled_report(scorer, tokenizer, sft_model, tasks):
    """What the scores say about sampled answers of the supervised model.

    Returns: (AUC of right against wrong answers, mean AUC within a question that got both, mean score of right ones,
    mean score of wrong ones, all scores).
    """
    right, wrong, within = [], [], []
    rounds = [sample(sft_model, tokenizer, tasks, 0.8, SEED + index) for index in range(SAMPLES)]
    scores = [scorer.get_scores(conversations(tasks), [answer_part(text) for text, _ in one]) for one in rounds]
    for place, task in enumerate(tasks):
        split = {True: [], False: []}
        for one, values in zip(rounds, scores, strict=True):
            split[is_right(task, one[place][0])].append(values[place])
        right, wrong = right + split[True], wrong + split[False]
        if split[True] and split[False]:
            within.append(area_under_curve(split[True], split[False]))
    return (area_under_curve(right, wrong), sum(within) / len(within), sum(right) / len(right),
            sum(wrong) / len(wrong), right + wrong)


def report(folder, tokenizer, sft_model, tasks):
    """Lines that say how the saved model does on held-out questions."""
    scorer = LMForRewardModel(str(folder), device="cpu", dtype=torch.float32, batch_size=64)
    shares, pair_scores = pair_report(scorer, tasks)
    auc, within, right, wrong, scores = sampled_report(scorer, tokenizer, sft_model, tasks)
    clipped = sum(abs(score) >= 3.0 for score in scores + pair_scores) / len(scores + pair_scores)
    sorts = ", ".join(f"{sort} {share:.1%}" for sort, share in shares.items() if ":" not in sort)
    kinds = ", ".join(f"{sort.partition(':')[2]} {share:.0%}" for sort, share in shares.items() if ":" in sort)
    return [f"held out, right before: {sorts}", f"right before wrong by kind: {kinds}",
            f"sampled answers of the supervised model: AUC {auc:.3f}, within a question {within:.3f}; "
            f"mean score right {right:+.2f}, wrong {wrong:+.2f}",
            f"scores from {min(scores + pair_scores):+.2f} to {max(scores + pair_scores):+.2f}, "
            f"{clipped:.1%} clipped at 3"]
