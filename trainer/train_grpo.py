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
    STARTER_DEFAULTS, FlagParser, add_file_flags, add_input_flags, add_sglang_flags, add_start_flags, at_least_two,
    non_negative_float, non_negative_int, parse_with_starter, positive_float, positive_fraction, positive_int, switch,
)  # fmt: skip

STARTER = {**STARTER_DEFAULTS, "batch_size": 16, "num_generations": 8, "learning_rate": 2e-4, "beta": 0.01,
           "answer_reward": 4.0, "epochs": 3, "max_steps": 220, "save_interval": 50, "eval_prompts": 300}  # fmt: skip


def parse_args(argv=None) -> argparse.Namespace:
    """The flags; defaults are MiniMind's where MiniMind has the flag. Exits with status 2 on a wrong one."""
    parser = FlagParser("GRPO / CISPO training of a MiniMind chat model.")
    add_start_flags(parser)
    add_input_flags(parser)

    add = parser.group("rollout")
    add("--rollout_engine", ["torch", "sglang"], "torch", "what samples the answers: this process, or SGLang servers")
    add("--num_generations", at_least_two, 6, "answers sampled for each prompt, G")
    add("--max_gen_len", positive_int, 1024, "longest answer in tokens")
    add("--temperature", positive_float, 0.8, "sampling temperature")
    add("--top_p", positive_fraction, 1.0, "sample from the smallest set of tokens that holds this much probability; 1 "
        "= all")
    add("--top_k", non_negative_int, 0, "sample from the k likeliest tokens; 0 = all")
    add("--logp_temperature", positive_float, None, "what logits are divided by when answers are scored; 1.0 scores as "
        "MiniMind does, None = the sampling temperature")

    add = parser.group("reward")
    add("--answer_reward", non_negative_float, 0.0, "added where the answer equals the row's 'answer'; 0 = off")
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
    add("--grad_clip", non_negative_float, 1.0, "largest gradient norm; 0 = no clipping")
    add("--max_skipped_steps", positive_int, 20, "the run stops once this many optimizer steps in a row were skipped "
        "for a non-finite loss or gradient")
    add("--dtype", ["bfloat16", "float16", "float32"], "bfloat16", "precision of forward passes; weights stay float32")
    add("--use_compile", switch, 0, "1 = torch.compile the policy")
    add_sglang_flags(parser, shared_path="sglang_ckpt_grpo")
    add_file_flags(parser, save_weight="grpo", wandb_project="MiniMind-GRPO")
    return parse_with_starter(parser, argv, STARTER)


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.metrics import MetricSums, answer_metrics, debug_print, group_metrics
from trainer.rewards import calculate_rewards
from trainer.rl_math import (
    cispo_policy_loss, group_relative_advantages, grpo_policy_loss, masked_mean, sequence_mean, token_kl_penalty,
)  # fmt: skip
from trainer.rollout_engine import RolloutResult, sample_answers, score_answers
from trainer.run_state import (
    Progress, RunState, end_epoch, finish_step, open_engine, planned_rows, resume_entries, resumed_progress, run_parts,
    train_until_done, windows,
)  # fmt: skip
from trainer.trainer_utils import (
    CosineSchedule, Interrupted, all_reduce_sum, autocast_context, global_share, grad_sync, is_main_process,
    lm_checkpoint, load_resumed_model, load_roles, open_loader, optimizer_step, row_is_real, run_main,
    save_weights, shuffle_within_groups, start_process, weights_path, wrap_ddp,
)  # fmt: skip

TRAIN_STREAM = 1  # first word of the random keys of training prompts; evaluation uses 2


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
        answer_reward=args.answer_reward, return_parts=True,
    )  # fmt: skip
    if args.shuffle_rewards:
        rewards = shuffle_within_groups(rewards, args.num_generations, (args.seed, run.progress.epoch, *batch["index"]))
    return rewards.to(run.device), {name: values.to(run.device) for name, values in parts.items()}


def update(run: Run, args, rollout: RolloutResult, rewards: Tensor, real: Tensor, window: int, last: bool):
    """Backpropagate one batch's loss as its part of a window of `window` batches; step the optimizer at the `last`."""
    counted = real & torch.isfinite(rewards)  # rows that can be learnt from
    rows = counted.sum()
    run.window_rows += all_reduce_sum(rows.float()).item()
    advantages = group_relative_advantages(rewards, args.num_generations)
    mask = rollout.completion_mask & counted[:, None]
    inputs = (rollout, args.num_generations, args.logp_temperature)
    ref_logps = None
    if run.reference is not None:
        with autocast_context(run.device, args.dtype), torch.no_grad():
            ref_logps, _ = score_answers(run.reference, *inputs)
    with grad_sync(run.policy, sync=last):
        with autocast_context(run.device, args.dtype):
            logps, aux_loss = score_answers(run.policy, *inputs)
        # The policy has not moved since it sampled, so its own log-probs are the old ones: the ratio is exactly 1.
        old_logps = logps.detach()
        if args.loss_type == "cispo":
            policy_loss = cispo_policy_loss(logps, old_logps, advantages, mask, epsilon_high=args.epsilon_high)
        else:
            policy_loss = grpo_policy_loss(logps, old_logps, advantages, mask, epsilon=args.epsilon)
        token_kl = token_kl_penalty(logps, old_logps if ref_logps is None else ref_logps)
        # The share below turns means over all rows into means over those that count; the balance loss is one already.
        loss = policy_loss + args.beta * sequence_mean(token_kl, mask) + aux_loss * rows / len(rewards)
        share = global_share(torch.tensor(float(len(rewards)), device=run.device), rows)
        run.scaler.scale(loss * share / window).backward()

    sums, tokens = MetricSums(run.device), mask.sum()
    sums.add("kl", masked_mean(token_kl.detach(), mask), tokens)
    sums.add("sampling/logp_difference/mean", masked_mean((old_logps - rollout.per_token_logps).abs(), mask), tokens)
    sums.add("policy_loss", policy_loss * len(rewards) / rows.clamp(min=1), rows)  # over the rows that count
    sums.add("aux_loss", aux_loss, rows)
    sums.add_each("advantages/mean", advantages, counted)
    sums.add_each("advantages/square", advantages.square(), counted)
    if last:
        apply_gradients(run, args, sums)
    return sums


def apply_gradients(run: Run, args, sums: MetricSums) -> None:
    """One optimizer step on the window's gradients; none if no row of the window could be scored on any rank."""
    if run.window_rows == 0:
        run.optimizer.zero_grad(set_to_none=True)
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
    sizes = windows(len(rows_per_step), args.accumulation_steps)
    places = [(size, k == size - 1) for size in sizes for k in range(size)]
    ahead = run.progress
    for batch, rows, (window, last) in zip(loader, rows_per_step, places, strict=True):
        began = time.perf_counter()
        keys = [(TRAIN_STREAM, args.seed, run.progress.epoch, index) for index in batch["index"]]
        rollout = sample_answers(run.engine, run.tokenizer, batch["prompt_ids"], keys, args, run.device,
                                 num_generations=args.num_generations, temperature=args.temperature)
        sampled = time.perf_counter()
        rewards, parts = score(run, args, batch, rollout)
        scored = time.perf_counter()
        real = row_is_real(rows, args.num_generations, run.device)
        with run.interrupts.deferred():
            sums = update(run, args, rollout, rewards, real, window, last)
            answer_metrics(sums, rollout, rewards, parts, real)
            group_metrics(sums, rewards, real, args.num_generations)
            ahead = ahead.next_step(rows)
            ahead.optimizer_steps = run.progress.optimizer_steps
            timing = {"gen": sampled - began, "reward": scored - sampled, "update": time.perf_counter() - scored,
                      "step": time.perf_counter() - began}
            log_step(run, args, ahead, sums.reduce(), timing)
            if last:
                ahead.planned_steps += 1
                finish_step(run, args, ahead, save)
        debug_print(args, ahead.step, batch, rollout, rewards)
        if run.interrupts.stop_together(run.device):
            raise Interrupted
    end_epoch(run)


def log_step(run: Run, args, at: Progress, metrics: dict, timing: dict) -> None:
    """One line to metrics.jsonl, tracker and console, every --log_interval steps."""
    run.log.advance(reward=metrics["reward"], kl=metrics["kl"])
    if at.step % args.log_interval:
        return
    mean = metrics["advantages/mean"]
    metrics["advantages/std"] = max(metrics.pop("advantages/square") - mean**2, 0.0) ** 0.5
    metrics = {"step": at.step, "epoch": at.epoch, "consumed": at.consumed, **metrics, "lr": run.schedule.lr,
               **{f"timing_s/{name}": seconds for name, seconds in timing.items()}}
    line = (f"Epoch:[{at.epoch + 1}/{args.epochs}]({at.step}/{run.log.total}), Reward: {metrics['reward']:.4f}, "
            f"KL_ref: {metrics['kl']:.4f}, Adv Std: {metrics['advantages/std']:.4f}, Adv Mean: {mean:.4f}, "
            f"Actor Loss: {metrics['policy_loss']:.4f}, Avg Response Len: {metrics['completions/mean_length']:.2f}, "
            f"Learning Rate: {run.schedule.lr:.8f}")
    run.log.write(metrics, line)


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
