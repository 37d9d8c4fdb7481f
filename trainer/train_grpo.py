"""GRPO on a MiniMind chat model: sample G answers a prompt, score them, learn from how each compares with its group.

    python trainer/train_grpo.py --starter                       a small model of this project's own, on any CPU
    torchrun --nproc_per_node 4 trainer/train_grpo.py            MiniMind's weights in out/, on four GPUs

One step: roll out, score, advantages within the group, one CISPO or GRPO loss, one gradient. Sources: GRPO, arXiv
2402.03300; CISPO, arXiv 2506.13585. Letters: B prompts, G answers a prompt, N = B·G rows, R answer width.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.arguments import (
    STARTER_DEFAULTS, FlagParser, add_file_flags, add_group_flags, add_input_flags, add_kl_flags, add_lora_flags,
    add_rollout_flags, add_sglang_flags, add_start_flags, add_update_flags, non_negative_float, non_negative_int,
    parse_with_starter, positive_float, positive_fraction, positive_int, settle_grpo, switch,
)  # fmt: skip
from trainer.reward_plugins import add_reward_flags

STARTER = {**STARTER_DEFAULTS, "batch_size": 16, "num_generations": 8, "learning_rate": 2e-4, "beta": 0.01,
           "answer_reward": 4.0, "epochs": 3, "max_steps": 220, "save_interval": 50, "eval_prompts": 300}  # fmt: skip


def parse_args(argv=None) -> argparse.Namespace:
    """The flags; defaults are MiniMind's where MiniMind has the flag. Exits with status 2 on a wrong one."""
    parser = FlagParser("GRPO / CISPO training of a MiniMind chat model.")
    add_start_flags(parser)
    add_input_flags(parser, any_model=True)
    add_rollout_flags(parser, num_generations=True)

    add = parser.group("reward")
    add("--answer_reward", non_negative_float, 0.0, "added where the answer equals the row's 'answer'; 0 = off")
    add_reward_flags(parser)
    add("--shuffle_rewards", switch, 0, "1 = a control experiment: rewards change places within their group")

    add = parser.group("loss")
    add("--loss_type", ["cispo", "grpo", "gspo", "dapo"], "cispo", "cispo caps the weight of a token, grpo clips it, "
        "gspo clips whole answers, dapo = grpo with --epsilon_high 0.28 and --loss_agg token")
    add("--beta", non_negative_float, 0.1, "weight of KL(policy || reference) in the loss; 0 = no reference is loaded")
    add("--epsilon", positive_fraction, 0.2, "grpo, dapo: the ratio is kept in [1 - epsilon, 1 + epsilon_high]; gspo: "
        "the answer's ratio, 3e-4 unless given")
    add("--epsilon_high", positive_float, 5.0, "cispo: largest ratio kept (a ratio, not an offset from 1); else the "
        "upper offset: grpo epsilon, dapo 0.28, gspo 4e-4 unless given")
    add_kl_flags(add, "--beta")
    add_group_flags(add)

    add = parser.group("optimisation")
    add("--batch_size", positive_int, 2, "prompts a step and a process, B")
    add("--learning_rate", positive_float, 3e-07, "rate of AdamW at the start; a cosine takes it to a tenth")
    add("--accumulation_steps", positive_int, 1, "rollout steps whose gradients make one optimizer step")
    add("--num_iterations", positive_int, 1, "passes over a rollout, each an optimizer step or more")
    add("--mini_batch_size", non_negative_int, 0, "answers an optimizer step and a process; 0 = all of the rollout's")
    add_update_flags(add)
    add_lora_flags(add)
    add_sglang_flags(parser, shared_path="sglang_ckpt_grpo")
    add_file_flags(parser, save_weight="grpo", wandb_project="MiniMind-GRPO")
    args = parse_with_starter(parser, argv, STARTER)
    settle_grpo(parser, args, argv)
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.hf_model import prompt_share
from trainer.metrics import (
    MetricSums, StepClock, answer_metrics, clip_metrics, debug_print, group_metrics, step_line, token_metrics,
)  # fmt: skip
from trainer.rewards import calculate_rewards
from trainer.rl_math import (
    aggregate, aggregation_count, cispo_clip_ratio, cispo_token_loss, flat_groups, group_advantages,
    group_relative_advantages, grpo_token_loss, gspo_token_loss, kl_estimate, overlong_penalty, sequence_mean,
    sequence_ratios, sequence_rewards_with_kl, token_ratios,
)  # fmt: skip
from trainer.rollout_engine import (
    RolloutResult, micro_batches, sample_answers, score_all, score_answers, scoring_pieces, with_groups,
)  # fmt: skip
from trainer.run_state import (
    TRAIN_STREAM, Progress, RunState, adapt_kl, end_epoch, finish_step, minibatch_order, open_engine, planned_rows,
    resumed_progress, rollout_bar, run_parts, save_run, train_until_done, window_places, windows,
)  # fmt: skip
from trainer.tis import against_engine, old_logps_known
from trainer.trainer_utils import (
    CosineSchedule, Interrupted, all_reduce_sum, any_rank, autocast_context, clear_gradients, global_share, grad_sync,
    load_resumed_model, load_roles, open_loader, open_optimizer, open_scaler, optimizer_step, rank_and_world,
    row_is_real, run_main, shuffle_within_groups, start_process, wrap_ddp,
)  # fmt: skip


@dataclass(kw_only=True)
class Run(RunState):
    """The policy and its optimizer, beside what every run has."""

    policy: nn.Module  # under DDP where there are several ranks
    optimizer: torch.optim.Optimizer
    schedule: CosineSchedule
    window_count: float = 0.0  # what counts of the current window, on all ranks; see aggregation_count


# ---------------------------------------------------------------------------------------------- one step
def sample_and_score(run: Run, args, batch: dict) -> tuple[RolloutResult, Tensor, dict[str, Tensor]]:
    """(answers to a batch of prompts, reward of each float32 [N], its parts by name), on the run's device.

    With --dynamic_sampling, prompts whose answers all earned the same are answered again, in other words, some times.
    """
    rollout, rewards, parts = answer(run, args, batch, attempt=0)
    for attempt in range(1, args.dynamic_sampling + 1):
        flat = flat_groups(rewards, args.num_generations)
        if not any_rank(bool(flat.any()), run.device):
            break
        # Ranks meet in an engine of servers, so one without flat groups asks too, and drops what it gets.
        chosen = flat.nonzero().flatten().tolist() or [0]
        again = answer(run, args, {name: [values[i] for i in chosen] for name, values in batch.items()}, attempt)
        if flat.any():
            rollout = with_groups(rollout, again[0], chosen, args.num_generations, run.tokenizer.pad_token_id)
            rows = flat.repeat_interleave(args.num_generations)
            rewards[rows] = again[1]
            for name, values in parts.items():
                values[rows] = again[2][name]
    return rollout, rewards, parts


def answer(run: Run, args, batch: dict, attempt: int) -> tuple[RolloutResult, Tensor, dict[str, Tensor]]:
    """As sample_and_score; the randomness of each prompt is fixed by (seed, epoch, prompt, attempt)."""
    extra = (attempt,) if attempt else ()
    keys = [(TRAIN_STREAM, args.seed, run.progress.epoch, index, *extra) for index in batch["index"]]
    with rollout_bar(run, args, len(keys) * args.num_generations) as bar:
        rollout = sample_answers(run.engine, run.tokenizer, batch["prompt_ids"], keys, args, run.device,
                                 num_generations=args.num_generations, temperature=args.temperature,
                                 on_progress=bar.advance)
    run.clock.mark("gen")
    rewards, parts = calculate_rewards(
        batch["prompt"], rollout.completions, run.reward_model, messages=batch["messages"], answers=batch["answer"],
        metadata=batch["metadata"], finished=rollout.finished, return_parts=True, **run.rewards,
    )  # fmt: skip
    if args.shuffle_rewards:
        rewards = shuffle_within_groups(rewards, keys)
    run.clock.mark("reward")
    return rollout, rewards.to(run.device), {name: values.to(run.device) for name, values in parts.items()}


class Experience(NamedTuple):
    """One rollout, ready to learn from; nothing has a gradient."""

    rollout: RolloutResult
    counted: Tensor  # bool [N], rows that can be learnt from
    mask: Tensor  # bool [N, R], their tokens
    advantages: Tensor  # [N]
    old_logps: Tensor | None  # [N, R]; None: the policy's own when it first scores the answers
    ref_logps: Tensor | None  # [N, R]; None when beta is 0


@torch.no_grad()
def gather_experience(run: Run, args, rollout: RolloutResult, rewards: Tensor, real: Tensor) -> Experience:
    """Advantages within each group, and the log-probs that are to be known before the update."""
    counted = real & torch.isfinite(rewards)
    everything = torch.arange(len(rewards), device=run.device)
    pieces = [piece for rows in everything.split(args.mini_batch_size or len(rewards))
              for piece in micro_batches(rollout, prompt_share(args), args.micro_batch_tokens, rows)]

    def logps_of(model: nn.Module) -> Tensor:
        with autocast_context(run.device, args.dtype):
            return score_all(model, rollout, prompt_share(args), args.logp_temperature,
                             scoring_pieces(rollout, prompt_share(args), args, pieces))

    ref_logps = None if run.reference is None else logps_of(run.reference)
    old_logps = None
    if args.recompute_logps == "0" or several_updates(args, len(rewards)) or args.kl_in == "reward":
        old_logps = rollout.per_token_logps if old_logps_known(run.engine, args) else logps_of(run.policy)
    if args.kl_in == "reward":
        rewards = sequence_rewards_with_kl(rewards, old_logps, ref_logps, rollout.completion_mask,
                                           kl_coef=run.kl_coef(args.beta), estimator=args.kl_estimator)
    if args.overlong_buffer:
        lengths = rollout.completion_mask.sum(dim=1)
        rewards = rewards + overlong_penalty(lengths, max_len=args.max_gen_len, buffer=args.overlong_buffer)
    if args.advantage == "group":
        advantages = group_relative_advantages(rewards, args.num_generations)
    else:
        advantages = group_advantages(rewards.where(real, torch.nan), args.num_generations, how=args.advantage,
                                      reduce_sum=all_reduce_sum)
    if args.drop_flat_groups:
        counted = counted & ~flat_groups(rewards, args.num_generations).repeat_interleave(args.num_generations)
    if args.mask_truncated:
        counted = counted & rollout.finished
    return Experience(rollout, counted, rollout.completion_mask & counted[:, None], advantages, old_logps, ref_logps)


def several_updates(args, rows: int) -> bool:
    """Whether a rollout of this many rows makes more than one optimizer step."""
    return args.num_iterations > 1 or 0 < args.mini_batch_size < rows


def steps_of(args, prompts: list[int]) -> int:
    """Optimizer steps in rollout steps that use these numbers of prompts on all ranks together."""
    rows = [-(-count // rank_and_world()[1]) * args.num_generations for count in prompts]
    if any(several_updates(args, n) for n in rows):
        return sum(args.num_iterations * -(-n // (args.mini_batch_size or n)) for n in rows)
    return len(windows(len(prompts), args.accumulation_steps))


def update(run: Run, args, rollout: RolloutResult, rewards: Tensor, real: Tensor, window: int, last: bool):
    """Learn from one rollout: its part of a window of `window` rollouts, of which it may be the last, or, with
    --num_iterations or --mini_batch_size, several optimizer steps of its own."""
    experience = gather_experience(run, args, rollout, rewards, real)
    run.clock.mark("ref")
    sums = MetricSums(run.device)
    rows = torch.arange(len(rewards), device=run.device)
    if several_updates(args, len(rows)):
        size = args.mini_batch_size or len(rows)
        for start in minibatch_order(run, args, args.num_iterations, range(0, len(rows), size)):
            learn(run, args, experience, rows[start : start + size], 1, True, sums)
    else:
        learn(run, args, experience, rows, window, last, sums)
    sums.add_each("advantages/mean", experience.advantages, experience.counted)
    sums.add_each("advantages/square", experience.advantages.square(), experience.counted)
    return sums


def learn(run: Run, args, experience: Experience, rows: Tensor, window: int, last: bool, sums: MetricSums) -> None:
    """Backpropagate the loss of these rows as its part of a window; step the optimizer if it is the `last` there."""
    count = aggregation_count(experience.mask[rows], how=args.loss_agg, max_gen_len=args.max_gen_len)
    run.window_count += all_reduce_sum(count).item()
    stand_in = args.batch_size * args.num_generations * args.max_gen_len
    if args.loss_agg == "sequence":
        # Turns sums over rows into means over those that count, on all ranks.
        share = global_share(torch.ones((), device=run.device), experience.counted[rows].sum()) / window
    else:
        # Divided by the whole window's count once that is known; until then by a number of its order, for float16.
        share = rank_and_world()[1] / stand_in
    pieces = micro_batches(experience.rollout, prompt_share(args), args.micro_batch_tokens, rows)
    for number, piece in enumerate(pieces):
        with grad_sync(run.policy, sync=last and number + 1 == len(pieces)):
            run.scaler.scale(piece_loss(run, args, experience, piece, sums) * share).backward()
    if last:
        apply_gradients(run, args, stand_in, sums)


def piece_loss(run: Run, args, experience: Experience, piece: Tensor, sums: MetricSums) -> Tensor:
    """The loss of some of a rollout's rows, summed as --loss_agg says; its parts are added to `sums`."""
    rollout, mask, advantages = experience.rollout, experience.mask[piece], experience.advantages[piece]
    with autocast_context(run.device, args.dtype):
        scores = score_answers(run.policy, rollout, prompt_share(args), args.logp_temperature, piece)
    logps, entropy, aux_loss = scores
    # Before the first update the policy's own log-probs are the old ones: the ratio is exactly 1.
    old_logps = logps.detach() if experience.old_logps is None else experience.old_logps[piece]
    ref_logps = None if experience.ref_logps is None else experience.ref_logps[piece]
    gap, weights = against_engine(run.engine, args, old_logps, rollout.per_token_logps[piece], mask,
                                  lambda temperature: rescored(run, args, rollout, temperature, piece))
    token_losses = policy_token_losses(args, logps, old_logps, advantages, mask, sums) * weights
    token_kl = kl_estimate(logps, old_logps, logps.detach() if ref_logps is None else ref_logps, mask,
                           estimator=args.kl_estimator)

    def total(values: Tensor) -> Tensor:
        if args.loss_agg == "sequence":
            return sequence_mean(values, mask) * len(piece)
        return aggregate(values, mask, how=args.loss_agg, denominator=1.0)

    policy_loss = loss = total(token_losses)
    if args.kl_in == "loss":
        loss = loss + run.kl_coef(args.beta) * total(token_kl)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * total(entropy)
    count = aggregation_count(mask, how=args.loss_agg, max_gen_len=args.max_gen_len)
    sums.add("policy_loss", policy_loss / count.clamp(min=1), count)  # over what counts
    sums.add("aux_loss", aux_loss, count)
    token_metrics(sums, mask, logps=logps, entropy=entropy, ref_logps=ref_logps, gap=gap)
    # The balance loss is over tokens that count already, and is to weigh as much as what counts.
    return loss + aux_loss * count


def rescored(run: Run, args, rollout: RolloutResult, temperature: float, piece: Tensor) -> Tensor:
    """The policy's log-probs of these rows at another temperature, without gradient."""
    with autocast_context(run.device, args.dtype):
        return score_all(run.policy, rollout, prompt_share(args), temperature, [piece])[piece]


def policy_token_losses(args, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, sums: MetricSums):
    """The loss [n, R] of each token that --loss_type names; how much of it was clipped is added to `sums`."""
    if args.loss_type == "cispo":
        ratios = token_ratios(logps.detach(), old_logps, mask)
        capped = cispo_clip_ratio(ratios, advantages, mask, epsilon_high=args.epsilon_high)
        sums.add("cispo_clip_ratio", capped, mask.sum())
        return cispo_token_loss(logps, old_logps, advantages, mask, epsilon_high=args.epsilon_high)
    clip = {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
    whole = args.loss_type == "gspo"
    ratios = (sequence_ratios if whole else token_ratios)(logps.detach(), old_logps, mask)
    clip_metrics(sums, mask, ratios, advantages, **clip)
    return (gspo_token_loss if whole else grpo_token_loss)(logps, old_logps, advantages, mask, **clip)


def apply_gradients(run: Run, args, divisor: float, sums: MetricSums) -> None:
    """One optimizer step on the window's gradients, which --loss_agg token and constant have divided by `divisor` in
    place of the window's count; none if nothing of the window counts on any rank."""
    count, run.window_count = run.window_count, 0.0
    if count == 0:
        clear_gradients([run.optimizer])
        return
    if args.loss_agg != "sequence":
        for parameter in run.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(divisor / count)
    norms, taken = optimizer_step([run.policy], [run.optimizer], [run.schedule], grad_clip=args.grad_clip,
                                  scaler=run.scaler)
    sums.add("grad_norm", norms[0])
    sums.add("skipped_steps", float(not taken))
    run.skips.record(taken)
    run.progress.optimizer_steps += taken
    run.engine.update_policy(run.policy)


# ---------------------------------------------------------------------------------------------- the loop
def train_epoch(run: Run, args, rows_per_step: list[int]) -> None:
    """The steps that are left of the current epoch."""
    loader = open_loader(run.dataset, run.progress, args, steps=len(rows_per_step))
    places = window_places(len(rows_per_step), args.accumulation_steps)
    ahead = run.progress
    for batch, rows, (window, last) in zip(loader, rows_per_step, places, strict=True):
        run.clock = StepClock(run.device)
        rollout, rewards, parts = sample_and_score(run, args, batch)
        real = row_is_real(rows, args.num_generations, run.device)
        with run.interrupts.deferred():
            sums = update(run, args, rollout, rewards, real, window, last)
            run.clock.mark("update")
            answer_metrics(sums, rollout, rewards, parts, real)
            group_metrics(sums, rewards, real, args.num_generations)
            metrics = sums.reduce()
            ahead = ahead.next_step(rows, metrics["num_tokens"])
            adapt_kl(run, args, ahead, args.beta, metrics, rows * args.num_generations)
            ahead.optimizer_steps = run.progress.optimizer_steps
            log_step(run, args, ahead, metrics)
            if last:
                ahead.planned_steps += steps_of(args, [rows])
                finish_step(run, args, ahead, save)
        debug_print(args, ahead.step, batch, rollout, rewards)
        if run.interrupts.stop_together(run.device):
            raise Interrupted
    end_epoch(run)


def log_step(run: Run, args, at: Progress, metrics: dict) -> None:
    """One line to metrics.jsonl, tracker and console, every --log_interval steps."""
    speed = run.clock.metrics(metrics["num_tokens"])
    run.log.advance(reward=metrics["reward"], kl=metrics.get("kl", 0.0), **{"tokens/s": speed["perf/tokens_per_s"]})
    if at.step % args.log_interval:
        return
    mean = metrics["advantages/mean"]
    metrics["advantages/std"] = max(metrics.pop("advantages/square") - mean**2, 0.0) ** 0.5
    metrics = {"step": at.step, "epoch": at.epoch, "consumed": at.consumed, **metrics, "num_tokens": at.tokens,
               "lr": run.schedule.lr, **speed}
    run.log.write(metrics, step_line(args, at, run.log.total, {
        "Reward": metrics["reward"], "KL_ref": metrics["kl"], "Adv Std": metrics["advantages/std"], "Adv Mean": mean,
        "Actor Loss": metrics["policy_loss"], "Avg Response Len": metrics["completions/mean_length"],
        "Learning Rate": run.schedule.lr,
    }))  # fmt: skip


def save(run: Run, args) -> None:
    """The policy's weights as MiniMind reads them, and the resume file."""
    save_run(run, args, model=run.policy, optimizer=run.optimizer, scheduler=run.schedule)


# ---------------------------------------------------------------------------------------------- set-up
def build_run(args, device: str) -> Run:
    """Load everything the run needs, cheap checks first; resumed state is loaded into it when asked for."""
    roles = load_roles(args, device, with_reference=args.beta > 0)
    resumed = roles.resumed
    if resumed:
        load_resumed_model(roles.model, resumed["model"])
    policy = wrap_ddp(torch.compile(roles.model) if args.use_compile else roles.model, device)
    progress = resumed_progress(resumed, args)
    plan = planned_rows(progress, len(roles.dataset), args)
    total = progress.planned_steps + sum(steps_of(args, prompts) for prompts in plan)
    optimizer, schedule = open_optimizer(policy, args.learning_rate, total, resumed)
    scaler = open_scaler(device, args.dtype, resumed)
    engine = open_engine(args, policy, roles.tokenizer, device)
    return Run(
        policy=policy, models={"policy": policy}, optimizer=optimizer, schedule=schedule, scaler=scaler,
        **run_parts(roles, engine, args, device, vars(parse_args([])), progress, plan),
    )  # fmt: skip


def main(argv=None) -> int:
    """Run the script; gives the process's exit status."""
    args = parse_args(argv)
    return train_until_done(build_run(args, start_process(args)), args, train_epoch, save,
                            curves=["reward", "kl", "completions/mean_length"])


if __name__ == "__main__":
    run_main(main)
