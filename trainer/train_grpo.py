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
    STARTER_DEFAULTS, FlagParser, add_file_flags, add_input_flags, add_rollout_flags, add_sglang_flags,
    add_start_flags, add_update_flags, non_negative_float, parse_with_starter, positive_float, positive_fraction,
    positive_int, switch,
)  # fmt: skip
from trainer.reward_plugins import add_reward_flags

STARTER = {**STARTER_DEFAULTS, "batch_size": 16, "num_generations": 8, "learning_rate": 2e-4, "beta": 0.01,
           "answer_reward": 4.0, "epochs": 3, "max_steps": 220, "save_interval": 50, "eval_prompts": 300}  # fmt: skip


def parse_args(argv=None) -> argparse.Namespace:
    """The flags; defaults are MiniMind's where MiniMind has the flag. Exits with status 2 on a wrong one."""
    parser = FlagParser("GRPO / CISPO training of a MiniMind chat model.")
    add_start_flags(parser)
    add_input_flags(parser)
    add_rollout_flags(parser, num_generations=True)

    add = parser.group("reward")
    add("--answer_reward", non_negative_float, 0.0, "added where the answer equals the row's 'answer'; 0 = off")
    add_reward_flags(parser)
    add("--shuffle_rewards", switch, 0, "1 = a control experiment: rewards change places within their group, so "
        "nothing can be learnt from them")

    add = parser.group("loss")
    add("--loss_type", ["cispo", "grpo"], "cispo", "cispo caps the weight of a token, grpo clips it")
    add("--beta", non_negative_float, 0.1, "weight of KL(policy || reference) in the loss; 0 = no reference is loaded")
    add("--epsilon", positive_fraction, 0.2, "grpo: the ratio is kept in [1 - epsilon, 1 + epsilon]")
    add("--epsilon_high", positive_float, 5.0, "cispo: largest ratio kept (a ratio, not an offset from 1)")

    add = parser.group("optimisation")
    add("--batch_size", positive_int, 2, "prompts a step and a process, B")
    add("--learning_rate", positive_float, 3e-07, "rate of AdamW at the start; a cosine takes it to a tenth")
    add("--accumulation_steps", positive_int, 1, "rollout steps whose gradients make one optimizer step")
    add_update_flags(add)
    add_sglang_flags(parser, shared_path="sglang_ckpt_grpo")
    add_file_flags(parser, save_weight="grpo", wandb_project="MiniMind-GRPO")
    return parse_with_starter(parser, argv, STARTER)


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.metrics import (
    MetricSums, StepClock, answer_metrics, clip_metrics, debug_print, group_metrics, step_line,
    token_metrics,
)  # fmt: skip
from trainer.rewards import calculate_rewards
from trainer.rl_math import (
    cispo_clip_ratio, cispo_token_loss, group_relative_advantages, grpo_token_loss, sequence_mean, token_kl_penalty,
    token_ratios,
)  # fmt: skip
from trainer.rollout_engine import (
    RolloutResult, micro_batches, sample_answers, score_all, score_answers, scoring_pieces,
)  # fmt: skip
from trainer.run_state import (
    TRAIN_STREAM, Progress, RunState, end_epoch, finish_step, open_engine, planned_rows, resume_entries,
    resumed_progress, rollout_bar, run_parts, train_until_done, window_places, windows,
)  # fmt: skip
from trainer.tis import against_engine, old_logps_known
from trainer.trainer_utils import (
    CosineSchedule, Interrupted, all_reduce_sum, autocast_context, clear_gradients, global_share, grad_sync,
    is_main_process, lm_checkpoint, load_resumed_model, load_roles, open_loader, optimizer_step, row_is_real,
    run_main, save_weights, shuffle_within_groups, start_process, weights_path, wrap_ddp,
)  # fmt: skip

@dataclass(kw_only=True)
class Run(RunState):
    """The policy and its optimizer, beside what every run has."""

    policy: nn.Module  # under DDP where there are several ranks
    optimizer: torch.optim.Optimizer
    schedule: CosineSchedule
    window_rows: float = 0.0  # rows with a finite reward, on all ranks, in the current accumulation window


# ---------------------------------------------------------------------------------------------- one step
def score(run: Run, args, batch: dict, rollout: RolloutResult) -> tuple[Tensor, dict[str, Tensor]]:
    """(reward of each row float32 [N], its parts by name), on the run's device; NaN where it could not be scored."""
    rewards, parts = calculate_rewards(
        batch["prompt"], rollout.completions, run.reward_model, messages=batch["messages"], answers=batch["answer"],
        metadata=batch["metadata"], finished=rollout.finished, return_parts=True, **run.rewards,
    )  # fmt: skip
    if args.shuffle_rewards:
        rewards = shuffle_within_groups(rewards, args.num_generations, (args.seed, run.progress.epoch, *batch["index"]))
    return rewards.to(run.device), {name: values.to(run.device) for name, values in parts.items()}


class Experience(NamedTuple):
    """One rollout, ready to learn from; nothing has a gradient."""

    rollout: RolloutResult
    counted: Tensor  # bool [N], rows that can be learnt from
    mask: Tensor  # bool [N, R], their tokens
    advantages: Tensor  # [N]
    old_logps: Tensor | None  # [N, R]; None: the policy's own when it first scores the answers
    ref_logps: Tensor | None  # [N, R]; None when beta is 0
    pieces: list[Tensor]  # rows to read at once


@torch.no_grad()
def gather_experience(run: Run, args, rollout: RolloutResult, rewards: Tensor, real: Tensor) -> Experience:
    """Advantages within each group, and the log-probs of the reference."""
    counted = real & torch.isfinite(rewards)
    pieces = micro_batches(rollout, args.num_generations, args.micro_batch_tokens)
    old_logps = ref_logps = None
    if args.recompute_logps == "0" and old_logps_known(run.engine, args):
        old_logps = rollout.per_token_logps
    if run.reference is not None:
        with autocast_context(run.device, args.dtype):
            ref_logps = score_all(run.reference, rollout, args.num_generations, args.logp_temperature,
                                  scoring_pieces(rollout, args.num_generations, args, pieces))
    advantages = group_relative_advantages(rewards, args.num_generations)
    mask = rollout.completion_mask & counted[:, None]
    return Experience(rollout, counted, mask, advantages, old_logps, ref_logps, pieces)


def update(run: Run, args, rollout: RolloutResult, rewards: Tensor, real: Tensor, window: int, last: bool):
    """Backpropagate one batch's loss as its part of a window of `window` batches; step the optimizer at the `last`."""
    experience = gather_experience(run, args, rollout, rewards, real)
    run.clock.mark("ref")
    sums = MetricSums(run.device)
    rows = experience.counted.sum()
    run.window_rows += all_reduce_sum(rows.float()).item()
    # Turns sums over rows into means over those that count, on all ranks.
    share = global_share(torch.ones((), device=run.device), rows) / window
    for number, piece in enumerate(experience.pieces):
        with grad_sync(run.policy, sync=last and number + 1 == len(experience.pieces)):
            loss = piece_loss(run, args, experience, piece, sums)
            run.scaler.scale(loss * share).backward()
    sums.add_each("advantages/mean", experience.advantages, experience.counted)
    sums.add_each("advantages/square", experience.advantages.square(), experience.counted)
    if last:
        apply_gradients(run, args, sums)
    return sums


def piece_loss(run: Run, args, experience: Experience, piece: Tensor, sums: MetricSums) -> Tensor:
    """The loss of some of a rollout's rows, summed over them; its parts are added to `sums`."""
    rollout, mask, advantages = experience.rollout, experience.mask[piece], experience.advantages[piece]
    with autocast_context(run.device, args.dtype):
        logps, entropy, aux_loss = score_answers(
            run.policy, rollout, args.num_generations, args.logp_temperature, piece
        )
    # The policy has not moved since it sampled, so its own log-probs are the old ones: the ratio is exactly 1.
    old_logps = logps.detach() if experience.old_logps is None else experience.old_logps[piece]
    if args.loss_type == "cispo":
        token_losses = cispo_token_loss(logps, old_logps, advantages, mask, epsilon_high=args.epsilon_high)
    else:
        token_losses = grpo_token_loss(
            logps, old_logps, advantages, mask, epsilon=args.epsilon, epsilon_high=args.epsilon
        )

    def rescore(temperature: float) -> Tensor:
        with autocast_context(run.device, args.dtype):
            return score_all(run.policy, rollout, args.num_generations, temperature, [piece])[piece]

    gap, weights = against_engine(run.engine, args, old_logps, rollout.per_token_logps[piece], mask, rescore)
    ref_logps = None if experience.ref_logps is None else experience.ref_logps[piece]
    token_kl = token_kl_penalty(logps, logps.detach() if ref_logps is None else ref_logps)
    policy_loss = sequence_mean(token_losses * weights, mask)
    loss = policy_loss + args.beta * sequence_mean(token_kl, mask)

    rows = experience.counted[piece].sum()
    sums.add("policy_loss", policy_loss * len(piece) / rows.clamp(min=1), rows)  # over the rows that count
    sums.add("aux_loss", aux_loss, rows)
    token_metrics(sums, mask, logps=logps, entropy=entropy, ref_logps=ref_logps, gap=gap)
    ratios = token_ratios(logps.detach(), old_logps, mask)
    if args.loss_type == "cispo":
        capped = cispo_clip_ratio(ratios, advantages, mask, epsilon_high=args.epsilon_high)
        sums.add("cispo_clip_ratio", capped, mask.sum())
    else:
        clip_metrics(sums, mask, ratios, advantages, epsilon=args.epsilon, epsilon_high=args.epsilon)
    # The balance loss is over tokens that count already, and is to weigh as much as the rows that count.
    return loss * len(piece) + aux_loss * rows


def apply_gradients(run: Run, args, sums: MetricSums) -> None:
    """One optimizer step on the window's gradients; none if no row of the window could be scored on any rank."""
    if run.window_rows == 0:
        clear_gradients([run.optimizer])
        return
    norms, taken = optimizer_step(
        [run.policy], [run.optimizer], [run.schedule], grad_clip=args.grad_clip, scaler=run.scaler
    )
    sums.add("grad_norm", norms[0])
    sums.add("skipped_steps", float(not taken))
    run.skips.record(taken)
    run.progress.optimizer_steps += taken
    run.window_rows = 0.0
    run.engine.update_policy(run.policy)


# ---------------------------------------------------------------------------------------------- the loop
def train_epoch(run: Run, args, rows_per_step: list[int]) -> None:
    """The steps that are left of the current epoch."""
    loader = open_loader(run.dataset, run.progress, args, steps=len(rows_per_step))
    places = window_places(len(rows_per_step), args.accumulation_steps)
    ahead = run.progress
    for batch, rows, (window, last) in zip(loader, rows_per_step, places, strict=True):
        run.clock = StepClock(run.device)
        keys = [(TRAIN_STREAM, args.seed, run.progress.epoch, index) for index in batch["index"]]
        with rollout_bar(run, args, len(keys) * args.num_generations) as bar:
            rollout = sample_answers(run.engine, run.tokenizer, batch["prompt_ids"], keys, args, run.device,
                                     num_generations=args.num_generations, temperature=args.temperature,
                                     on_progress=bar.advance)
        run.clock.mark("gen")
        rewards, parts = score(run, args, batch, rollout)
        run.clock.mark("reward")
        real = row_is_real(rows, args.num_generations, run.device)
        with run.interrupts.deferred():
            sums = update(run, args, rollout, rewards, real, window, last)
            run.clock.mark("update")
            answer_metrics(sums, rollout, rewards, parts, real)
            group_metrics(sums, rewards, real, args.num_generations)
            metrics = sums.reduce()
            ahead = ahead.next_step(rows, metrics["num_tokens"])
            ahead.optimizer_steps = run.progress.optimizer_steps
            log_step(run, args, ahead, metrics)
            if last:
                ahead.planned_steps += 1
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
    """Weights as MiniMind reads them, then the resume file: killed in between, a resumed run writes both again."""
    if not is_main_process():
        return
    save_weights(run.policy, weights_path(args.save_dir, args.save_weight, run.config))
    lm_checkpoint(
        run.config, args.save_weight, model=run.policy, optimizer=run.optimizer, epoch=run.progress.epoch,
        step=run.progress.step, wandb=run.log.tracker, save_dir=args.checkpoint_dir, scheduler=run.schedule,
        scaler=run.scaler, **resume_entries(run, args),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- set-up
def build_run(args, device: str) -> Run:
    """Load everything the run needs, cheap checks first; resumed state is loaded into it when asked for."""
    roles = load_roles(args, device, with_reference=args.beta > 0)
    resumed = roles.resumed
    if resumed:
        load_resumed_model(roles.model, resumed["model"])
    model = torch.compile(roles.model) if args.use_compile else roles.model
    policy = wrap_ddp(model, device)
    progress = resumed_progress(resumed, args)
    plan = planned_rows(progress, len(roles.dataset), args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, fused=device.startswith("cuda"))
    steps_left = sum(len(windows(len(rows), args.accumulation_steps)) for rows in plan)
    schedule = CosineSchedule(optimizer, args.learning_rate, progress.planned_steps + steps_left)
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=args.dtype == "float16")
    if resumed:
        optimizer.load_state_dict(resumed["optimizer"])
        schedule.load_state_dict(resumed["scheduler"])
        scaler.load_state_dict(resumed["scaler"])
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
