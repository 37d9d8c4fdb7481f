"""The arithmetic of PPO and GRPO in seven small examples, every number computed by trainer/rl_math.py and checked.

    python scripts/rl_demo.py              in English
    python scripts/rl_demo.py --lang zh    in Chinese

CPU, seconds, torch and numpy only. Each section prints a table and compares it with plain arithmetic that does not use
rl_math; the exit status is 1 when any comparison fails.
"""

import sys
from pathlib import Path

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lesson import Lesson, lesson_from_flags, number
from trainer.rl_math import (
    cispo_policy_loss,
    clip_fraction,
    compute_gae,
    group_relative_advantages,
    grpo_policy_loss,
    kl_k1,
    kl_k2,
    masked_mean,
    normalize_advantages,
    ppo_policy_loss,
    selective_logps,
    token_kl_penalty,
)

ONE_TOKEN = torch.ones(1, 1, dtype=torch.bool)


def row(values) -> torch.Tensor:
    """A list of numbers as one response, [1, R]."""
    return torch.tensor([values], dtype=torch.float32)


def all_counted(values: torch.Tensor) -> torch.Tensor:
    """A mask of the same shape in which everything counts."""
    return torch.ones(values.shape, dtype=torch.bool)


def show_gae(lesson: Lesson) -> np.ndarray:
    """Section 1: advantages by the backward recursion and by the expanded sum. Returns the advantages [T]."""
    lesson.title("1. Generalised advantage estimation (GAE)", "1. 广义优势估计 GAE")
    gamma, lam = 0.99, 0.95
    rewards, values = [1.0, 0.0, 0.0, 0.0, 0.5], [0.5, 0.6, 0.4, 0.5, 0.2]
    lesson.say(
        f"T = 5, gamma = {gamma}, lambda = {lam}. Nothing follows the last step, so its next value is 0.\n"
        "delta_t = r_t + gamma*V_(t+1) - V_t: how much better the step went than the critic thought.\n"
        "Recursion, backwards: A_t = delta_t + gamma*lambda*A_(t+1). The same, expanded: the sum of\n"
        "(gamma*lambda)^k * delta_(t+k).",
        f"T = 5, gamma = {gamma}, lambda = {lam}。最后一步之后回答已结束, 下一价值取 0。\n"
        "delta_t = r_t + gamma*V_(t+1) - V_t: 这一步的结果比 critic 的预计好多少。\n"
        "从后往前递推: A_t = delta_t + gamma*lambda*A_(t+1)。展开后就是 (gamma*lambda)^k * delta_(t+k) 之和。",
    )
    mask = all_counted(row(rewards))
    advantages, returns = compute_gae(row(rewards), row(values), mask, gamma=gamma, lam=lam)
    deltas, _ = compute_gae(row(rewards), row(values), mask, gamma=gamma, lam=0.0)
    _, monte_carlo = compute_gae(row(rewards), row(values), mask, gamma=gamma, lam=1.0)

    next_values = [*values[1:], 0.0]
    hand_deltas = [r + gamma * after - v for r, after, v in zip(rewards, next_values, values)]
    expanded = [sum((gamma * lam) ** k * d for k, d in enumerate(hand_deltas[t:])) for t in range(5)]
    columns = ["t", "r", "V", ("next V", "下一 V"), "delta", ("A, recursion", "A 递推"), ("A, expanded", "A 展开"),
               ("return A+V", "回报 A+V")]
    lesson.table(columns, [
        [t, rewards[t], values[t], next_values[t], deltas[0, t], advantages[0, t], expanded[t], returns[0, t]]
        for t in range(5)
    ])
    for t in range(5):
        terms = " + ".join(f"{(gamma * lam) ** k:.4f}*({number(d)})" for k, d in enumerate(hand_deltas[t:]))
        print(f"  A_{t} = {terms} = {number(expanded[t])}")
    lesson.check("gae.deltas", deltas[0], hand_deltas)
    lesson.check("gae.advantages", advantages[0], expanded)
    lesson.check("gae.returns", returns[0], np.add(expanded, values))
    discounted = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(5)]
    lesson.check("gae.lambda_1_returns_are_discounted_rewards", monte_carlo[0], discounted)
    lesson.say(
        "lambda = 0 gives delta itself (trusts the critic), lambda = 1 the discounted rewards (ignores it).",
        "lambda = 0 时 A 就是 delta (完全相信 critic); lambda = 1 时回报就是折扣奖励之和 (完全不用 critic)。",
    )
    return np.array(expanded)


def show_normalisation(lesson: Lesson, advantages: np.ndarray) -> None:
    """Section 2: advantages to mean 0 and variance 1; a padding entry of 10000 stays out."""
    lesson.title("2. Advantage normalisation", "2. 优势标准化")
    lesson.say(
        "(A - mean) / sqrt(variance + 1e-8), over counted tokens only; the variance divides by n, not n - 1.\n"
        "The last column is padding that holds 10000: the mask keeps it out.",
        "(A - 均值) / sqrt(方差 + 1e-8), 只对计入的 token; 方差除以 n 而不是 n - 1。\n"
        "最后一列是填充位, 里面是 10000: 掩码把它排除在外。",
    )
    padded, mask = row([*advantages, 1e4]), torch.tensor([[True] * 5 + [False]])
    normalised = normalize_advantages(padded, mask)
    mean, variance = masked_mean(padded, mask), masked_mean((padded - masked_mean(padded, mask)).square(), mask)
    lesson.table(
        [("step", "步"), *(str(t) for t in range(5)), ("padding", "填充")],
        [[("before", "标准化前"), *padded[0]], [("after", "标准化后"), *normalised[0]]],
    )
    lesson.say(
        f"mean {number(mean)}, variance {number(variance)}", f"均值 {number(mean)}, 方差 {number(variance)}"
    )
    lesson.check("normalise.mean", mean, advantages.sum() / 5)
    lesson.check("normalise.variance", variance, ((advantages - advantages.sum() / 5) ** 2).sum() / 5)
    expected = (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8)
    lesson.check("normalise.values", normalised[0], [*expected, 0.0])
    lesson.check("normalise.mean_is_0", normalised[mask].mean(), 0.0)
    lesson.check("normalise.variance_is_1", normalised[mask].square().mean(), 1.0)


def loss_and_slope(loss_of, logp: float) -> tuple[float, float]:
    """A loss of one token's log-prob and its derivative there, by autograd."""
    leaf = torch.tensor([[logp]], requires_grad=True)
    loss = loss_of(leaf)
    loss.backward()
    return loss.item(), leaf.grad.item()


def show_ppo_clip(lesson: Lesson) -> None:
    """Section 3: which tokens the clip silences, for A = +1 and A = -1."""
    lesson.title("3. PPO's clip", "3. PPO 的裁剪")
    lesson.say(
        "loss = -min(ratio*A, clamp(ratio, 0.8, 1.2)*A). The minimum is the pessimistic choice: it clips only where\n"
        "clipping lowers the objective. A ratio outside [0.8, 1.2] is therefore not yet a clipped token.",
        "loss = -min(ratio*A, clamp(ratio, 0.8, 1.2)*A)。取最小值是悲观的选择: 只有裁剪会让目标变小时才裁剪。\n"
        "所以 ratio 落在 [0.8, 1.2] 之外, 并不等于这个 token 被裁剪。",
    )
    old, new = -1.0, [-0.5, -0.9, -1.3, -2.5]
    reasons = {
        "free": ("no: inside the range", "否: 在范围之内"),
        "high": ("YES: has risen enough, A asks for more", "是: 已升够, 而 A 还想再升"),
        "low": ("YES: has fallen enough, A asks for less", "是: 已降够, 而 A 还想再降"),
        "back": ("no: the minimum keeps the ratio, so it can come back", "否: 最小值保留 ratio, 它还能回来"),
    }
    for advantage, why in ((1.0, ["high", "free", "back", "back"]), (-1.0, ["back", "free", "low", "low"])):
        lines, losses, slopes = [], [], []
        for index, logp in enumerate(new):
            ratio = float(np.exp(logp - old))
            loss, slope = loss_and_slope(lambda x, a=advantage: ppo_policy_loss(
                x, row([old]), row([a]), ONE_TOKEN, clip_epsilon=0.2), logp)
            losses.append(loss)
            slopes.append(slope)
            lines.append([index, logp, ratio, float(np.clip(ratio, 0.8, 1.2)), loss, slope, reasons[why[index]]])
        lesson.say(f"\nA = {advantage:+.0f}, old log-prob -1:", f"\nA = {advantage:+.0f}, 旧 log-prob -1:")
        lesson.table(["token", ("new logp", "新 logp"), "ratio", "clamp(ratio)", "loss", ("d loss/d logp", "梯度"),
                      ("clipped?", "是否被裁剪")], lines)
        ratios = np.exp(np.array(new) - old)
        chosen = np.minimum(ratios * advantage, np.clip(ratios, 0.8, 1.2) * advantage)
        sign = "+1" if advantage > 0 else "-1"
        lesson.check(f"clip.losses A={sign}", losses, -chosen)
        silent = np.array([reason in ("high", "low") for reason in why])
        lesson.check(f"clip.slopes A={sign}", slopes, np.where(silent, 0.0, -ratios * advantage))
        whole = ppo_policy_loss(row(new), row([old] * 4), row([advantage] * 4), all_counted(row(new)), clip_epsilon=0.2)
        lesson.check(f"clip.mean_loss A={sign}", whole, -chosen.mean())
    fraction = clip_fraction(row(new), row([old] * 4), all_counted(row(new)), clip_epsilon=0.2)
    lesson.check("clip.fraction_outside", fraction, 0.75)
    lesson.say(
        f"clip_fraction = {number(fraction, 2)} counts ratios outside the range on either side, silenced or not:\n"
        "with A = +1 three tokens are outside and only token 0 has lost its gradient.",
        f"clip_fraction = {number(fraction, 2)} 统计两侧超出范围的比例, 不管梯度是否消失:\n"
        "A = +1 时有三个 token 在范围外, 但只有 token 0 失去了梯度。",
    )


def show_groups(lesson: Lesson) -> None:
    """Section 4: rewards to advantages within each group; a flat group and a missing reward."""
    lesson.title("4. GRPO: the group is the baseline", "4. GRPO: 以组为基线")
    lesson.say(
        "A = (r - mean of the group) / (std of the group + 1e-4), population std. No critic.\n"
        "Equal rewards teach nothing (A = 0); a reward that is not a number is left out and gets A = 0.",
        "A = (r - 组内均值) / (组内标准差 + 1e-4), 标准差除以 n。不需要 critic。\n"
        "奖励全部相同则学不到东西 (A = 0); 不是数的奖励不参与统计, 其 A = 0。",
    )
    groups = [[0.8, 0.4, 0.6, 0.2], [0.1, 0.3, 0.9, 0.5], [0.1, 0.1, 0.1, 0.1], [1.0, float("nan"), 3.0, 2.0]]
    advantages = group_relative_advantages(torch.tensor(groups).flatten(), 4).view(-1, 4)
    names = ["A", "B", ("C, all equal", "C 全部相同"), ("D, one NaN", "D 有 NaN")]
    lines, expected = [], []
    for name, rewards, found in zip(names, groups, advantages):
        finite = [r for r in rewards if r == r]
        mean = sum(finite) / len(finite)
        std = (sum((r - mean) ** 2 for r in finite) / len(finite)) ** 0.5
        expected.append([(r - mean) / (std + 1e-4) if r == r else 0.0 for r in rewards])
        lines.append([name, " ".join(number(r, 1) for r in rewards), mean, std, *found])
    headers = [("group", "组"), ("rewards", "奖励"), ("mean", "均值"), ("std", "标准差"), "A_0", "A_1", "A_2", "A_3"]
    lesson.table(headers, lines)
    lesson.check("group.advantages", advantages, expected)
    lesson.check("group.sums_are_0", advantages.sum(dim=1), [0.0] * 4)
    lesson.check("group.equal_rewards_exactly_0", advantages[2], [0.0] * 4, tolerance=0.0)


def show_cispo(lesson: Lesson) -> None:
    """Section 5: what PPO's clip and CISPO's cap do to values and gradients, for both signs of A."""
    lesson.title("5. CISPO against PPO's clip", "5. CISPO 与 PPO 裁剪的对比")
    lesson.say(
        "PPO: -min(ratio*A, clamp(ratio, 0.8, 1.2)*A). CISPO: -w*A*logp with w = min(ratio, 2), a constant.\n"
        "New log-prob -1 everywhere. The values say little: what moves the weights are the gradient columns.",
        "PPO: -min(ratio*A, clamp(ratio, 0.8, 1.2)*A)。CISPO: -w*A*logp, 其中 w = min(ratio, 2) 视为常数。\n"
        "新 log-prob 都是 -1。只看损失值不够: 推动参数的是各自的梯度列。",
    )
    ratios = np.array([0.3, 0.9, 1.5, 3.0, 5.0])
    ppo_kept = {1.0: [1, 1, 0, 0, 0], -1.0: [0, 1, 1, 1, 1]}  # which ratios keep a gradient under PPO's clip
    for advantage in (1.0, -1.0):
        lines, found = [], {"ppo": [], "ppo slope": [], "cispo": [], "cispo slope": []}
        for ratio in ratios:
            old = row([-1.0 - np.log(ratio)])
            ppo = loss_and_slope(lambda x, o=old, a=advantage: ppo_policy_loss(
                x, o, row([a]), ONE_TOKEN, clip_epsilon=0.2), -1.0)
            cispo = loss_and_slope(lambda x, o=old, a=advantage: cispo_policy_loss(
                x, o, torch.tensor([a]), ONE_TOKEN, epsilon_high=2.0), -1.0)
            lines.append([f"{ratio:.1f}", *ppo, min(float(ratio), 2.0), *cispo])
            for key, value in zip(found, (*ppo, *cispo)):
                found[key].append(value)
        sign = "+1" if advantage > 0 else "-1"
        print(f"\nA = {sign}:")
        lesson.table(["ratio", "PPO loss", ("PPO gradient", "PPO 梯度"), ("CISPO w", "CISPO 权重 w"), "CISPO loss",
                      ("CISPO gradient", "CISPO 梯度")], lines)
        weights = np.minimum(ratios, 2.0)
        lesson.check(f"cispo.ppo_loss A={sign}", found["ppo"],
                     -np.minimum(ratios * advantage, np.clip(ratios, 0.8, 1.2) * advantage))
        lesson.check(f"cispo.ppo_slope A={sign}", found["ppo slope"], -ratios * advantage * ppo_kept[advantage])
        lesson.check(f"cispo.loss A={sign}", found["cispo"], weights * advantage)  # -w·A·(-1)
        lesson.check(f"cispo.slope A={sign}", found["cispo slope"], -weights * advantage)
    lesson.say(
        "Ratio 0.3, A = +1: the minimum keeps 0.3 (nothing is lifted to 0.8); both methods pull with 0.3.\n"
        "Above 1.2, A = +1: PPO falls silent, CISPO goes on with a weight of at most 2.\n"
        "Ratio 0.3, A = -1: PPO falls silent, CISPO still pushes with 0.3.\n"
        "Above 2, A = -1: PPO pushes with 3 and 5, without bound; CISPO with 2.",
        "ratio 0.3, A = +1: 最小值保留 0.3 (并不会抬到 0.8); 两种方法的梯度都是 0.3。\n"
        "ratio 大于 1.2, A = +1: PPO 不再有梯度, CISPO 继续, 权重最多为 2。\n"
        "ratio 0.3, A = -1: PPO 不再有梯度, CISPO 仍以 0.3 推动。\n"
        "ratio 大于 2, A = -1: PPO 的梯度是 3 和 5, 没有上限; CISPO 为 2。",
    )


def show_kl(lesson: Lesson) -> None:
    """Section 6: k1, k2 and k3 as numbers (bias, variance, sign) and as loss terms (which KL they descend)."""
    lesson.title("6. Three estimates of KL(p || q)", "6. KL(p || q) 的三种估计")
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.4, 0.15, 0.05])
    lesson.say(
        f"p = {p.tolist()} is the policy, which samples; q = {q.tolist()} the reference.\n"
        "With l = log p - log q: k1 = l, k2 = l*l/2, k3 = exp(-l) - 1 + l. All expectations are exact sums over p.",
        f"p = {p.tolist()} 是负责采样的策略; q = {q.tolist()} 是参考模型。\n"
        "记 l = log p - log q: k1 = l, k2 = l*l/2, k3 = exp(-l) - 1 + l。期望都是对 p 的精确求和。",
    )
    scores = torch.tensor(p).log().float().requires_grad_()  # the policy is softmax(scores)
    logps = selective_logps(scores.expand(1, 4, 4), torch.arange(4)[None], temperature=1.0)
    ref_logps, weights = torch.tensor(q).log().float()[None], torch.tensor(p).float()[None]
    estimates = {"k1": kl_k1(logps, ref_logps), "k2": kl_k2(logps, ref_logps), "k3": token_kl_penalty(logps, ref_logps)}
    log_ratio = np.log(p / q)
    exact = float((p * log_ratio).sum())
    by_hand = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": q / p - 1 + log_ratio}
    means = {name: (weights * estimate).sum() for name, estimate in estimates.items()}
    variances = {name: (weights * (k - means[name]).square()).sum() for name, k in estimates.items()}
    print(f"KL(p || q) = {number(exact, 6)}")
    lesson.table(
        [("estimate", "估计"), "x_0", "x_1", "x_2", "x_3", ("mean", "期望"), ("bias", "偏差"), ("variance", "方差"),
         ("sign", "符号")],
        [[name, *k[0], number(means[name], 6), number(means[name] - exact, 6), number(variances[name], 6),
          ("either sign", "可正可负") if name == "k1" else ("never negative", "从不为负")]
         for name, k in estimates.items()],
    )
    for name, k in estimates.items():
        mean = (p * by_hand[name]).sum()
        lesson.check(f"kl.{name}_values", k[0], by_hand[name])
        lesson.check(f"kl.{name}_mean", means[name], mean)
        lesson.check(f"kl.{name}_variance", variances[name], (p * (by_hand[name] - mean) ** 2).sum())
    lesson.say(
        "k1 and k3 are unbiased, k2 is not quite; k3 is close to k1 with far less noise here (not in general: where p\n"
        "is far below q, exp(-l) is the noisy one).",
        "k1 与 k3 无偏, k2 略有偏差; 在这里 k3 的噪声比 k1 小得多\n"
        "(并非总是如此: 当 p 远小于 q 时, exp(-l) 反而噪声很大)。",
    )
    show_kl_gradients(lesson, scores, weights, estimates, p, q)


def show_kl_gradients(lesson, scores, weights, estimates, p, q) -> None:
    """The expected gradient of each estimate as a loss term, with respect to the scores of softmax(scores) = p."""
    lesson.say(
        "\nAs a loss term the samples are given and the gradient flows through log p alone. Expected gradient:",
        "\n作为损失项时, 样本已经给定, 梯度只通过 log p 回传。梯度的期望:",
    )
    logps = estimates["k1"] + torch.tensor(q).log().float()
    ratio = (logps - logps.detach()).exp()  # 1 in value; its gradient is that of the sampling probability
    terms = {**estimates, "ratio*k1": ratio * estimates["k1"], "ratio*k3": ratio * estimates["k3"]}
    reverse = p * (np.log(p / q) - (p * np.log(p / q)).sum())
    targets = {"k1": 0 * p, "k2": reverse, "k3": p - q, "ratio*k1": reverse, "ratio*k3": reverse}
    meaning = {
        "k1": ("nothing: it is noise", "无: 只剩噪声"),
        "k2": ("reverse KL(p || q)", "反向 KL(p || q)"),
        "k3": ("forward KL(q || p)", "前向 KL(q || p)"),
        "ratio*k1": ("reverse KL(p || q)", "反向 KL(p || q)"),
        "ratio*k3": ("reverse KL(p || q)", "反向 KL(p || q)"),
    }
    grads = {
        name: torch.autograd.grad((weights * term).sum(), scores, retain_graph=True)[0] for name, term in terms.items()
    }
    lesson.table(
        [("loss term", "损失项"), "x_0", "x_1", "x_2", "x_3", ("descends", "实际下降的是")],
        [[name, *(number(g, 6) for g in grad), meaning[name]] for name, grad in grads.items()],
    )
    for name, grad in grads.items():
        lesson.check(f"kl.gradient {name}", grad, targets[name])
    lesson.say(
        "An unbiased value is not an unbiased gradient. PPO and GRPO here add k3 to the loss, as MiniMind does: its\n"
        "value estimates KL(p || q), its gradient is that of KL(q || p). Near p = q the two agree to first order.",
        "值无偏不等于梯度无偏。这里的 PPO 和 GRPO 与 MiniMind 一样把 k3 加进损失: 它的值估计 KL(p || q),\n"
        "它的梯度却是 KL(q || p) 的梯度。p 接近 q 时两者在一阶上一致。",
    )


def show_comparison(lesson: Lesson) -> None:
    """Section 7: PPO and GRPO side by side, and the one line in which their reductions differ, in numbers."""
    lesson.title("7. PPO and GRPO side by side", "7. PPO 与 GRPO 对照")
    lesson.table(["", "PPO", "GRPO / CISPO"], [
        [("models in memory", "内存中的模型"), ("actor, critic, reference, reward", "actor, critic, 参考, 奖励"),
         ("actor, reference, reward", "actor, 参考, 奖励")],
        [("answers a prompt", "每个提示的回答数"), ("1", "1"), ("G, at least 2", "G, 至少 2")],
        [("baseline", "基线"), ("the critic's value of each token", "critic 对每个 token 的估值"),
         ("the mean reward of the group", "组内平均奖励")],
        [("advantage", "优势"), ("GAE, one a token, whitened", "GAE, 每个 token 一个, 再标准化"),
         ("(r - mean)/(std + 1e-4), one an answer", "(r - 均值)/(标准差 + 1e-4), 每个回答一个")],
        [("where the reward goes", "奖励放在哪里"), ("on the last counted token", "最后一个计入的 token"),
         ("on every token of the answer, as A", "以 A 的形式给回答的每个 token")],
        [("what limits a step", "如何限制步长"), ("clip on the far side; early stop", "单侧生效的裁剪; 提前停止"),
         ("clip (grpo) or cap on the weight (cispo)", "裁剪 (grpo) 或权重上限 (cispo)")],
        [("reference KL (k3)", "参考 KL (k3)"), ("kl_coef 0.02 * token mean", "kl_coef 0.02 * 按 token 平均"),
         ("beta 0.1 * row mean", "beta 0.1 * 按行平均")],
        [("value loss", "价值损失"), ("0.5 * clipped squared error", "0.5 * 带裁剪的平方误差"), ("none", "无")],
        [("average over", "平均方式"), ("all counted tokens", "所有计入的 token"),
         ("each row first, then rows", "先每行内部, 再各行之间")],
        [("updates a rollout", "每次采样后的更新"), ("2 passes over minibatches", "小批次, 两轮"), ("one", "一次")],
        [("learns nothing when", "何时学不到东西"), ("all advantages are equal", "所有优势相同"),
         ("the group's rewards are equal", "组内奖励全部相同")],
    ])
    lesson.say(
        "The averages differ when answers differ in length. Two answers, A = 1 and A = 4, of 3 tokens and 1 token:",
        "回答长短不一时两种平均不同。两个回答, A = 1 与 A = 4, 长度分别为 3 和 1:",
    )
    mask, zeros = torch.tensor([[True] * 3, [True, False, False]]), torch.zeros(2, 3)
    advantages = torch.tensor([1.0, 4.0])
    ppo = ppo_policy_loss(zeros, zeros, advantages[:, None].expand(2, 3), mask, clip_epsilon=0.2)
    grpo = grpo_policy_loss(zeros, zeros, advantages, mask, epsilon=0.2)
    lesson.table([("reduction", "平均方式"), ("sum", "算式"), "loss"], [
        [("token mean (PPO)", "按 token (PPO)"), "-(1+1+1+4)/4", ppo],
        [("row mean (GRPO)", "按行 (GRPO)"), "-((1+1+1)/3 + 4/1)/2", grpo],
    ])
    lesson.check("table.token_mean", ppo, -7 / 4)
    lesson.check("table.row_mean", grpo, -5 / 2)


def run(lesson: Lesson) -> int:
    """All seven sections. Returns the exit status."""
    advantages = show_gae(lesson)
    show_normalisation(lesson, advantages)
    show_ppo_clip(lesson)
    show_groups(lesson)
    show_cispo(lesson)
    show_kl(lesson)
    show_comparison(lesson)
    return lesson.finish()


def main(argv: list[str] | None = None) -> int:
    """Runs the walk-through in the language asked for. Returns 0 when every check held, 1 otherwise."""
    return run(lesson_from_flags("The arithmetic of PPO and GRPO in seven small examples.", argv))


if __name__ == "__main__":
    sys.exit(main())
