"""Four answers through every formula between logits and loss: rewards, log-probs, ratios, KL, masks, and DPO beside it.

    python scripts/trace_reward_logprob_kl.py              in English
    python scripts/trace_reward_logprob_kl.py --lang zh    in Chinese

The "model" is a table: the probability of the next token given the last one, so that every log-prob can be looked up.
Numbers come from trainer/rl_math.py and are compared with sums that do not use it; exit status 1 when one differs.
CPU, seconds, torch and numpy only. Letters: B = 2 prompts, G = 2 answers each, N = 4 rows, P = 2, R = 4, W = 6, V = 4.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.lesson import Lesson, lesson_from_flags, number
from trainer.rl_math import (
    approx_policy_kl,
    cispo_policy_loss,
    clip_fraction,
    compute_gae,
    dpo_logratio_loss,
    gather_response_logps,
    group_relative_advantages,
    grpo_policy_loss,
    kl_k1,
    mask_until_eos,
    masked_mean,
    normalize_advantages,
    ppo_policy_loss,
    reference_kl_penalty,
    response_logp_positions,
    sequence_mean,
    terminal_rewards,
    token_kl_penalty,
)

TOKENS = ("<pad>", "a", "<eos>", "b")
EOS = 2
# Next-token probabilities after <pad>, a, <eos>, b (rows), for <pad>, a, <eos>, b (columns).
UNIFORM = [0.25, 0.25, 0.25, 0.25]
OLD = [UNIFORM, [0.1, 0.4, 0.3, 0.2], UNIFORM, [0.1, 0.3, 0.2, 0.4]]
POLICY = [[0.2, 0.275, 0.25, 0.275], [0.05, 0.3, 0.5, 0.15], UNIFORM, [0.1, 0.15, 0.35, 0.4]]
REFERENCE = [UNIFORM, [0.1, 0.45, 0.25, 0.2], UNIFORM, [0.1, 0.35, 0.15, 0.4]]
PROMPT_WIDTH, RESPONSE_WIDTH, GROUP = 2, 4, 2
OUTPUT_IDS = torch.tensor([[1, 3, 1, 3, 2, 0], [1, 3, 3, 2, 1, 1], [3, 1, 1, 0, 3, 1], [3, 1, 2, 0, 0, 0]])
# What the engine says it produced: row 1 ran on after its EOS, row 2 sampled a pad id and was cut before an EOS.
COMPLETION_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]).bool()
COUNTED = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=bool)  # worked out by eye
REWARDS = torch.tensor([1.0, -0.5, 0.5, 1.5])
NAN = float("nan")


@dataclass
class Trace:
    """What one section hands to the next: [N, R] each, but `logits` [N, W, V], the trained policy's, with gradient."""

    mask: torch.Tensor
    logits: torch.Tensor
    logps: torch.Tensor
    old_logps: torch.Tensor
    ref_logps: torch.Tensor


def table_logits(probabilities) -> torch.Tensor:
    """Logits [N, W, V] of a table model. 3 is added to each: softmax does not see a constant."""
    return torch.tensor(probabilities).log()[OUTPUT_IDS] + 3.0


def looked_up(probabilities) -> np.ndarray:
    """The probability of every response token, read from the table without torch: P(token | token before), [N, R]."""
    rows = OUTPUT_IDS.tolist()
    return np.array([[probabilities[row[j - 1]][row[j]] for j in range(PROMPT_WIDTH, len(row))] for row in rows])


def names_of(ids) -> str:
    """Token names in one cell."""
    return " ".join(TOKENS[i] for i in ids)


def bits(mask) -> str:
    """A mask row as 1 1 0 0."""
    return " ".join(str(int(m)) for m in mask)


def quotient(above, below) -> str:
    """Two log-probs as a quotient of probabilities, written out."""
    return f"{number(above.exp(), 3)}/{number(below.exp(), 3)}"


def show_masks(lesson: Lesson) -> torch.Tensor:
    """Section 1: which tokens count. Returns the response mask [N, R]."""
    lesson.title("1. Four answers, and which mask decides", "1. 四个回答, 由哪个掩码决定")
    mask = mask_until_eos(OUTPUT_IDS[:, PROMPT_WIDTH:], COMPLETION_MASK, EOS)
    remarks = [
        ("ends with EOS, then padding", "以 EOS 结束, 其后是填充"),
        ("the engine ran on after EOS", "EOS 之后引擎仍继续生成"),
        ("cut at the limit; the pad id was sampled", "到长度上限被截断; pad 是采样出来的"),
        ("EOS right away: one token", "立即 EOS: 只有一个 token"),
    ]
    lesson.table(
        [("row", "行"), ("prompt", "提示"), ("answer", "回答"), ("completion mask", "完成掩码"),
         ("response mask", "回答掩码"), ("remark", "说明")],
        [[i, names_of(ids[:PROMPT_WIDTH]), names_of(ids[PROMPT_WIDTH:]), bits(COMPLETION_MASK[i]), bits(mask[i]),
          remarks[i]] for i, ids in enumerate(OUTPUT_IDS.tolist())],
    )
    lesson.check("mask.response", mask, COUNTED)
    lesson.table([("mask", "掩码"), ("decides", "决定什么")], [
        [("attention mask (prompt mask + completion mask)", "注意力掩码 (提示掩码 + 完成掩码)"),
         ("what the model may look at", "模型能看到哪些 token")],
        [("completion mask", "完成掩码"), ("what the engine produced", "引擎生成了哪些 token")],
        [("response mask (up to the first EOS)", "回答掩码 (到第一个 EOS 为止)"),
         ("what counts: reward position, GAE, whitening, every loss, every metric",
          "哪些 token 计入: 奖励位置, GAE, 标准化, 所有损失与指标")],
    ])
    lesson.say(
        "No mask is ever made from `ids != pad`: row 2 would lose a token it really sampled.",
        "任何掩码都不是由 `ids != pad` 得到的: 否则第 2 行会丢掉一个真正采样出来的 token。",
    )
    return mask


def show_logps(lesson: Lesson, mask: torch.Tensor) -> Trace:
    """Section 2: the log-probs of the same tokens under three policies."""
    lesson.title("2. Three log-probs of the same tokens", "2. 同一批 token 的三种 log-prob")
    lesson.table([("name", "名称"), ("which policy", "来自哪个策略"), ("when", "何时计算"), ("gradient", "梯度"),
                  ("used in", "用于")], [
        ["old_logps", ("the policy that sampled", "采样时的策略"), ("once, at rollout", "采样时一次"), ("no", "无"),
         ("ratio, approx_kl, clip_fraction", "ratio, approx_kl, clip_fraction")],
        ["logps", ("the policy being trained", "正在训练的策略"), ("at every update", "每次更新"), ("YES", "有"),
         ("every loss", "所有损失")],
        ["ref_logps", ("the frozen reference", "冻结的参考模型"), ("once a rollout", "每次采样后一次"), ("no", "无"),
         ("reference KL (DPO: the baseline)", "参考 KL (DPO: 基准)")],
    ])
    positions = response_logp_positions(torch.full((4,), PROMPT_WIDTH), RESPONSE_WIDTH)
    lesson.say(
        f"logits[:, p] predict the token at p + 1, so answer token j is read at prompt_len - 1 + j: "
        f"{positions[0].tolist()}.\nTemperature 1 here; the scripts divide all logits by --logp_temperature first.",
        f"logits[:, p] 预测位置 p + 1 的 token, 所以第 j 个回答 token 在 prompt_len - 1 + j 处读取: "
        f"{positions[0].tolist()}。\n这里温度为 1; 训练脚本会先把所有 logits 除以 --logp_temperature。",
    )
    logits = table_logits(POLICY).requires_grad_()
    logps = gather_response_logps(logits, OUTPUT_IDS, positions)
    old_logps = gather_response_logps(table_logits(OLD), OUTPUT_IDS, positions)
    ref_logps = gather_response_logps(table_logits(REFERENCE), OUTPUT_IDS, positions)
    headers = [("row", "行"), ("token", "token"), "P old", "P policy", "P ref", "old_logps", "logps", "ref_logps"]
    lesson.table(headers, [
        [i, TOKENS[OUTPUT_IDS[i, PROMPT_WIDTH + j]], old_logps[i, j].exp(), logps[i, j].exp(), ref_logps[i, j].exp(),
         old_logps[i, j], logps[i, j], ref_logps[i, j]]
        for i, j in zip(*np.nonzero(COUNTED))
    ])
    shapes = [tuple(t.shape) for t in (old_logps, logps, ref_logps, mask)]
    lesson.say(f"Shapes of old, policy, ref, mask: {shapes}", f"old, policy, ref, 掩码的形状: {shapes}")
    lesson.check("logps.positions", positions, [[1, 2, 3, 4]] * 4)
    for name, found, table in (("old", old_logps, OLD), ("policy", logps, POLICY), ("ref", ref_logps, REFERENCE)):
        lesson.check(f"logps.{name}", found, np.log(looked_up(table)))
    lesson.check("logps.only_the_policy_has_gradient",
                 [float(t.requires_grad) for t in (old_logps, logps, ref_logps)], [0.0, 1.0, 0.0])
    return Trace(mask, logits, logps, old_logps, ref_logps)


def show_rewards(lesson: Lesson, trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3: one score an answer becomes advantages, the PPO way [N, R] and the GRPO way [N]. Returns both."""
    lesson.title("3. From one reward an answer to advantages", "3. 从每个回答一个奖励到优势")
    token_rewards = terminal_rewards(REWARDS, trace.mask)
    values = torch.tensor([[0.2, 0.4, 0.6, NAN], [-0.1, -0.3, 9.0, 9.0], [0.1, 0.2, 0.3, 0.4], [0.5, NAN, NAN, NAN]])
    raw, returns = compute_gae(token_rewards, values, trace.mask, gamma=1.0, lam=0.95)
    whitened = normalize_advantages(raw, trace.mask)
    lesson.say(
        f"PPO: rewards {tuple(REWARDS.shape)} land on each row's last counted token, {tuple(token_rewards.shape)};\n"
        "GAE (gamma 1, lambda 0.95) with the critic's values spreads them; then whitening over all counted tokens.\n"
        "The critic's values in the padding are NaN and 9 here: nothing of them arrives.",
        f"PPO: 奖励 {tuple(REWARDS.shape)} 落在每行最后一个计入的 token 上, 成为 {tuple(token_rewards.shape)};\n"
        "再用 critic 的价值做 GAE (gamma 1, lambda 0.95), 最后在所有计入的 token 上标准化。\n"
        "这里填充位上的价值是 NaN 和 9: 它们不会影响任何结果。",
    )
    lesson.table([("row", "行"), "t", ("token reward", "token 奖励"), "V", ("A by GAE", "GAE 优势 A"),
                  ("return", "回报"), ("A whitened", "标准化后的 A")],
                 [[i, j, token_rewards[i, j], values[i, j], raw[i, j], returns[i, j], whitened[i, j]]
                  for i, j in zip(*np.nonzero(COUNTED))])
    lesson.check("reward.on_last_token", token_rewards, [[0, 0, 1, 0], [0, -0.5, 0, 0], [0, 0, 0, 0.5], [1.5, 0, 0, 0]])
    # Row 0, backwards: 1 - .6 = .4; (.6 - .4) + .95 * .4 = .58; (.4 - .2) + .95 * .58 = .751. The others likewise.
    by_hand = np.array([[0.751, 0.58, 0.4, 0], [-0.39, -0.2, 0, 0], [0.3709875, 0.28525, 0.195, 0.1], [1.0, 0, 0, 0]])
    lesson.check("reward.gae", raw, by_hand)
    kept = by_hand[COUNTED]
    lesson.check("reward.whitened", whitened[trace.mask], (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8))

    grouped = group_relative_advantages(REWARDS, GROUP)
    lesson.say(
        f"\nGRPO: rewards {tuple(REWARDS.shape)} = [B * G]; rows 0-1 answer prompt 0, rows 2-3 prompt 1, in order.\n"
        "Each is measured against its own group, and every token of the row gets that one number.",
        f"\nGRPO: 奖励 {tuple(REWARDS.shape)} = [B * G], 第 0-1 行回答提示 0, 第 2-3 行回答提示 1, 顺序不能乱;\n"
        "每个奖励只与同组比较, 该行的每个 token 都用这一个数。",
    )
    lesson.table([("row", "行"), ("group", "组"), ("reward", "奖励"), ("group mean", "组均值"),
                  ("group std", "组标准差"), "A"],
                 [[i, i // GROUP, REWARDS[i], (0.25, 1.0)[i // GROUP], (0.75, 0.5)[i // GROUP], grouped[i]]
                  for i in range(4)])
    lesson.check("reward.group_advantages", grouped, [0.75 / 0.7501, -0.75 / 0.7501, -0.5 / 0.5001, 0.5 / 0.5001])
    lesson.say(
        "With G = 2 only the sign survives (plus or minus 1); larger groups tell how much better.",
        "G = 2 时只剩下符号 (正负 1); 组更大时才能看出好多少。",
    )
    return whitened, grouped


def show_ratio_and_kl(lesson: Lesson, trace: Trace) -> None:
    """Section 4: policy against old (ratio, approx_kl) and policy against reference (k3), then two ways to average."""
    lesson.title("4. Two comparisons that must not be mixed up", "4. 两种不能混淆的比较")
    lesson.say(
        "policy / old: how far this batch has moved the policy. ratio = exp(logps - old_logps);\n"
        "approx_kl = 0.5 * mean((logps - old_logps)^2), for the early stop only.\n"
        "policy / reference: how far training as a whole has moved it. k3 = exp(d) - d - 1, d = ref_logps - logps.",
        "policy / old: 这一批更新让策略走了多远。ratio = exp(logps - old_logps);\n"
        "approx_kl = 0.5 * mean((logps - old_logps)^2), 只用于提前停止。\n"
        "policy / reference: 整个训练让策略走了多远。k3 = exp(d) - d - 1, d = ref_logps - logps。",
    )
    log_ratio, k3 = kl_k1(trace.logps, trace.old_logps), token_kl_penalty(trace.logps, trace.ref_logps)
    lesson.table([("row", "行"), "token", "P policy / P old", "log ratio", "ratio", "P ref / P policy", "k3"],
                 [[i, TOKENS[OUTPUT_IDS[i, PROMPT_WIDTH + j]],
                   quotient(trace.logps[i, j], trace.old_logps[i, j]), log_ratio[i, j], log_ratio[i, j].exp(),
                   quotient(trace.ref_logps[i, j], trace.logps[i, j]), k3[i, j]]
                  for i, j in zip(*np.nonzero(COUNTED))])
    ratio = looked_up(POLICY) / looked_up(OLD)
    down = looked_up(REFERENCE) / looked_up(POLICY)
    hand_k3 = down - np.log(down) - 1
    lesson.check("kl.ratio", log_ratio.exp(), ratio)
    lesson.check("kl.k3", k3, hand_k3)
    approx = approx_policy_kl(trace.logps, trace.old_logps, trace.mask)
    lesson.check("kl.approx_kl", approx, 0.5 * (np.log(ratio) ** 2)[COUNTED].mean())
    outside = clip_fraction(trace.logps, trace.old_logps, trace.mask, clip_epsilon=0.2)
    lesson.check("kl.clip_fraction", outside, (np.abs(ratio - 1) > 0.2)[COUNTED].mean())

    by_token = reference_kl_penalty(trace.logps, trace.ref_logps, trace.mask)
    by_row = sequence_mean(k3, trace.mask)
    row_means = [hand_k3[i][COUNTED[i]].mean() for i in range(4)]
    lesson.say(
        "\nThe reference KL of the batch, averaged in two ways (rows have 3, 2, 4 and 1 counted tokens):",
        "\n这一批的参考 KL, 两种平均方式 (各行计入的 token 数为 3, 2, 4, 1):",
    )
    lesson.table([("reduction", "平均方式"), ("sum", "算式"), "KL"], [
        [("masked mean (PPO)", "掩码平均 (PPO)"), " + ".join(number(k) for k in hand_k3[COUNTED]) + "  / 10", by_token],
        [("sequence mean (GRPO)", "按行平均 (GRPO)"), " + ".join(number(m) for m in row_means) + "  / 4", by_row],
    ])
    lesson.say(
        "Row 3 has one token: a tenth of the first average, a quarter of the second.",
        "第 3 行只有一个 token: 在第一种平均里占十分之一, 在第二种里占四分之一。",
    )
    lesson.check("kl.masked_mean", by_token, hand_k3[COUNTED].mean())
    lesson.check("kl.sequence_mean", by_row, np.mean(row_means))


def show_losses(lesson: Lesson, trace: Trace, whitened: torch.Tensor, grouped: torch.Tensor) -> None:
    """Section 5: the policy losses, which logits their gradients reach, and garbage in the padding."""
    lesson.title("5. The losses, and where their gradients go", "5. 损失, 以及梯度流向哪里")

    def losses(logps, old_logps, advantages):
        return {
            "PPO": ppo_policy_loss(logps, old_logps, advantages, trace.mask, clip_epsilon=0.2),
            "GRPO": grpo_policy_loss(logps, old_logps, grouped, trace.mask, epsilon=0.2),
            "CISPO": cispo_policy_loss(logps, old_logps, grouped, trace.mask, epsilon_high=5.0),
        }

    found = losses(trace.logps, trace.old_logps, whitened)
    ratio, logp = looked_up(POLICY) / looked_up(OLD), np.log(looked_up(POLICY))
    token_a, row_a = whitened.double().numpy(), grouped.double().numpy()[:, None]
    clipped = np.clip(ratio, 0.8, 1.2)
    by_hand = {
        "PPO": -np.minimum(ratio * token_a, clipped * token_a)[COUNTED].mean(),
        "GRPO": -np.mean([np.minimum(ratio * row_a, clipped * row_a)[i][COUNTED[i]].mean() for i in range(4)]),
        "CISPO": -np.mean([(np.minimum(ratio, 5) * row_a * logp)[i][COUNTED[i]].mean() for i in range(4)]),
    }
    reached = {}
    for name, loss in found.items():
        grad, = torch.autograd.grad(loss, trace.logits, retain_graph=True)
        reached[name] = (grad.abs().sum(dim=-1) > 0).numpy()
    lesson.table([("loss", "损失"), ("value", "值"), *((f"row {i}, W = 6", f"第 {i} 行, W = 6") for i in range(4))],
                 [[name, loss, *(bits(row) for row in reached[name])] for name, loss in found.items()])
    lesson.say(
        "1 marks a position whose logits get a gradient: always one before a counted token, never the prompt's own,\n"
        "never after EOS. The 0s inside PPO's and GRPO's answers are clipped tokens; CISPO has none.",
        "1 表示该位置的 logits 得到梯度: 总在计入 token 的前一个位置, 不会是提示自身的预测, 也不会在 EOS 之后。\n"
        "PPO 和 GRPO 回答里的 0 是被裁剪的 token; CISPO 没有。",
    )
    for name, loss in found.items():
        advantages = token_a if name == "PPO" else row_a
        silenced = ((ratio > 1.2) & (advantages > 0) | (ratio < 0.8) & (advantages < 0)) & (name != "CISPO")
        learns = np.zeros((4, 6), dtype=bool)
        learns[:, PROMPT_WIDTH - 1 : -1] = COUNTED & ~silenced
        lesson.check(f"loss.{name}", loss, by_hand[name])
        lesson.check(f"loss.{name}_gradient_reaches", reached[name], learns)

    garbage = losses(*(t.masked_fill(~trace.mask, NAN) for t in (trace.logps, trace.old_logps, whitened)))
    for name, loss in garbage.items():
        lesson.check(f"loss.{name}_with_NaN_in_the_padding", loss, found[name].item(), tolerance=0.0)


def show_dpo(lesson: Lesson, trace: Trace) -> None:
    """Section 6: DPO uses the reference as a baseline on a preference, not as a KL over tokens."""
    lesson.title("6. The contrast: DPO's reference is a baseline", "6. 对照: DPO 的参考是基准")
    lesson.say(
        "DPO sums log-probs over each answer and asks whether the policy prefers the chosen one more than the\n"
        "reference does: loss = -log sigmoid(beta * ((pc - pr) - (rc - rr))), beta 0.1. No sampling, no reward model,\n"
        "no ratio. Chosen / rejected: rows 0 / 1 and rows 3 / 2.",
        "DPO 把每个回答的 log-prob 求和, 再看策略比参考模型更偏好 chosen 多少:\n"
        "loss = -log sigmoid(beta * ((pc - pr) - (rc - rr))), beta 0.1。没有采样, 没有奖励模型, 没有 ratio。\n"
        "chosen / rejected: 第 0 / 1 行与第 3 / 2 行。",
    )
    lengths = trace.mask.sum(dim=1)

    def sums(logps):
        return torch.stack([masked_mean(row, kept) for row, kept in zip(logps, trace.mask)]) * lengths

    policy, ref, chosen, rejected = sums(trace.logps), sums(trace.ref_logps), [0, 3], [1, 2]
    loss = dpo_logratio_loss(policy[chosen], policy[rejected], ref[chosen], ref[rejected], beta=0.1)
    same = dpo_logratio_loss(ref[chosen], ref[rejected], ref[chosen], ref[rejected], beta=0.1)
    shifted = dpo_logratio_loss(policy[chosen], policy[rejected], ref[chosen] - 1, ref[rejected] - 1, beta=0.1)
    hand = [np.array([np.log(looked_up(t))[i][COUNTED[i]].sum() for i in range(4)]) for t in (POLICY, REFERENCE)]
    margins = (hand[0][chosen] - hand[0][rejected]) - (hand[1][chosen] - hand[1][rejected])
    lesson.table([("pair", "对"), "pc", "pr", "rc", "rr", ("margin", "差值")],
                 [[f"{c}/{r}", policy[c], policy[r], ref[c], ref[r], margin]
                  for c, r, margin in zip(chosen, rejected, margins)])
    moved_kl = reference_kl_penalty(trace.logps, trace.ref_logps - 1, trace.mask)
    kl = reference_kl_penalty(trace.logps, trace.ref_logps, trace.mask)
    none = reference_kl_penalty(trace.ref_logps, trace.ref_logps, trace.mask)
    print()
    lesson.table(["", "DPO loss", ("reference KL", "参考 KL")], [
        [("as it is", "原样"), loss, kl],
        [("reference 1 nat lower: per answer (DPO), per token (KL)", "参考降低 1 nat: DPO 每个回答, KL 每个 token"),
         shifted, moved_kl],
        ["policy = reference", same, none],
    ])
    lesson.say(
        "A shift of the reference common to both answers cancels in DPO and shows in the KL. With policy = reference\n"
        "the KL is 0 while DPO's loss is log 2: there is still a preference to learn.",
        "对两个回答相同的参考平移, 在 DPO 中抵消, 在 KL 中则显现出来。policy = reference 时 KL 为 0,\n"
        "而 DPO 的损失是 log 2: 偏好仍有待学习。",
    )
    ratio = looked_up(REFERENCE) * np.exp(-1) / looked_up(POLICY)
    lesson.check("dpo.sequence_logps", policy, hand[0])
    lesson.check("dpo.loss", loss, np.log1p(np.exp(-0.1 * margins)).mean())
    lesson.check("dpo.shift_cancels", shifted, loss.item())
    lesson.check("dpo.policy_is_reference", same, np.log(2))
    lesson.check("dpo.kl_of_shifted_reference", moved_kl, (ratio - np.log(ratio) - 1)[COUNTED].mean())
    lesson.check("dpo.kl_of_policy_is_reference", none, 0.0, tolerance=0.0)


def run(lesson: Lesson) -> int:
    """All six sections. Returns the exit status."""
    mask = show_masks(lesson)
    trace = show_logps(lesson, mask)
    whitened, grouped = show_rewards(lesson, trace)
    show_ratio_and_kl(lesson, trace)
    show_losses(lesson, trace, whitened, grouped)
    show_dpo(lesson, trace)
    return lesson.finish()


def main(argv: list[str] | None = None) -> int:
    """Runs the walk-through in the language asked for. Returns 0 when every check held, 1 otherwise."""
    return run(lesson_from_flags("Four answers from logits to loss, every number checked.", argv))


if __name__ == "__main__":
    sys.exit(main())
