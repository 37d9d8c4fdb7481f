"""PPO on a MiniMind chat model: sample an answer a prompt, score it, let a critic spread the reward over its tokens.

    python trainer/train_ppo.py --starter                        a small model of this project's own, on any CPU
    torchrun --nproc_per_node 4 trainer/train_ppo.py             MiniMind's weights in out/, on four GPUs

One step: roll out, score, values, GAE, then several clipped updates of actor and critic on minibatches, until they are
done or the policy has moved too far. Sources: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; the setting, arXiv
2203.02155. Letters: N = B rows (one answer a prompt), P prompt width, R answer width, W = P + R.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.arguments import (
    STARTER_DEFAULTS, FlagParser, add_actor_critic_flags, add_file_flags, add_input_flags, add_kl_flags,
    add_lora_flags, add_rollout_flags, add_sglang_flags, add_start_flags, add_update_flags, any_float, fraction,
    non_negative_float, parse_with_starter, positive_float, positive_fraction, positive_int, settle_ppo,
)  # fmt: skip
from trainer.reward_plugins import add_reward_flags

STARTER = {**STARTER_DEFAULTS, "batch_size": 64, "mini_batch_size": 32, "learning_rate": 1e-4,
           "critic_learning_rate": 5e-4, "answer_reward": 4.0, "epochs": 5, "max_steps": 100, "save_interval": 50,
           "eval_prompts": 300}  # fmt: skip


def parse_args(argv=None) -> argparse.Namespace:
    """The flags; defaults are MiniMind's where MiniMind has the flag. Exits with status 2 on a wrong one."""
    parser = FlagParser("PPO training of a MiniMind chat model.")
    add_start_flags(parser)
    add_input_flags(parser)
    add_rollout_flags(parser, num_generations=False)

    add = parser.group("reward")
    add("--answer_reward", non_negative_float, 0.0, "added where the answer equals the row's 'answer'; 0 = off")
    add_reward_flags(parser)

    add = parser.group("loss")
    add("--clip_epsilon", positive_fraction, 0.2, "the ratio is kept in [1 - c, 1 + c]")
    add("--vf_coef", non_negative_float, 0.5, "weight of the critic's loss")
    add("--kl_coef", non_negative_float, 0.02, "weight of KL(policy || reference); 0 = no reference is loaded")
    add("--gamma", fraction, 1.0, "discount of rewards a token later")
    add("--lam", fraction, 0.95, "GAE's lambda: 1 = whole returns, 0 = one-step differences")
    add("--cliprange_value", positive_float, 0.2, "a value may leave its old one by this much an update")
    add("--ppo_update_iters", positive_int, 2, "passes over a rollout's rows")
    add("--early_stop_kl", any_float, 0.25, "end a rollout's updates once 0.5·mean(log ratio²) to the sampling policy "
        "exceeds this; negative = before the first")
    add_kl_flags(add, "--kl_coef")
    add_actor_critic_flags(add)

    add = parser.group("optimisation")
    add("--batch_size", positive_int, 2, "prompts a step and a process")
    add("--mini_batch_size", positive_int, 2, "rows a minibatch and a process")
    add("--learning_rate", positive_float, 3e-07, "AdamW rate of the actor at the start; a cosine takes it to a tenth")
    add("--critic_learning_rate", positive_float, 5e-07, "the same for the critic")
    add("--accumulation_steps", positive_int, 1, "minibatches of a rollout whose gradients make one optimizer step")
    add_update_flags(add)
    add_lora_flags(add)
    add_sglang_flags(parser, shared_path="sglang_ckpt_ppo")
    add_file_flags(parser, save_weight="ppo_actor", wandb_project="MiniMind-PPO")
    args = parse_with_starter(parser, argv, STARTER)
    settle_ppo(parser, args, argv)
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.metrics import MetricSums, StepClock, answer_metrics, clip_metrics, debug_print, step_line, token_metrics
from trainer.rewards import calculate_rewards
from trainer.rl_math import (
    approx_policy_kl, compute_gae, explained_variance, kl_estimate, masked_mean, normalize_advantages,
    penalize_missing_eos, ppo_token_loss, ppo_value_loss, response_logp_positions, terminal_rewards, token_ratios,
    token_rewards_with_kl, whiten_rewards,
)  # fmt: skip
from trainer.rollout_engine import (
    RolloutResult, Scores, micro_batches, sample_answers, score_all, score_answers, scoring_pieces,
)  # fmt: skip
from trainer.run_state import (
    TRAIN_STREAM, Progress, RunState, adapt_kl, end_epoch, finish_step, minibatch_order, open_engine,
    planned_optimizer_steps, planned_rows, resumed_progress, rollout_bar, run_parts, save_run, train_until_done,
    window_places, windows,
)  # fmt: skip
from trainer.tis import against_engine, old_logps_known
from trainer.trainer_utils import (
    CosineSchedule, Interrupted, all_reduce_sum, autocast_context, clear_gradients, global_share, grad_sync,
    load_resumed_model, load_roles, open_loader, open_optimizer, open_scaler, optimizer_step, row_is_real, run_main,
    start_critic, start_process, wrap_ddp,
)  # fmt: skip


class CriticModel(MiniMindForCausalLM):
    """A MiniMind body with a linear head that says what the rest of an answer will earn: values [N, W], in rewards."""

    def __init__(self, config: MiniMindConfig, norm_twice: bool = True):
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)
        self.norm_twice = norm_twice

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, wanted: Tensor | None = None) -> Tensor:
        hidden_states = self.model(input_ids=input_ids, attention_mask=attention_mask, wanted=wanted)[0]
        # MiniMind: normed a second time; kept, since its critics are trained that way (a reward model's head is not)
        return self.value_head(self.model.norm(hidden_states) if self.norm_twice else hidden_states).squeeze(-1)


class Experience(NamedTuple):
    """One rollout, ready to learn from. All [N, R] but the first and the last; the last alone has a gradient."""

    rollout: RolloutResult
    mask: Tensor  # response tokens that count
    positions: Tensor  # where the critic's value before each response token stands
    old_logps: Tensor
    ref_logps: Tensor | None  # None when kl_coef is 0
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    gap: Tensor | None  # |old - engine's log-prob| where both were worked out
    first_pass: tuple[Scores, Tensor] | None  # with gradient: what `read` gave, where one piece holds all rows


@dataclass(kw_only=True)
class Run(RunState):
    """The four roles and their optimizers, beside what every run has."""

    actor: nn.Module  # under DDP where there are several ranks, as is the critic
    critic: nn.Module
    optimizers: list[torch.optim.Optimizer]  # actor's, critic's
    schedules: list[CosineSchedule]


# ---------------------------------------------------------------------------------------------- one step
@torch.no_grad()
def gather_experience(run: Run, args, rollout: RolloutResult, rewards: Tensor, real: Tensor) -> Experience:
    """Values, old and reference log-probs, GAE and whitened advantages of one rollout."""
    mask = rollout.completion_mask & (real & torch.isfinite(rewards))[:, None]
    positions = response_logp_positions(rollout.prompt_lens, mask.size(1))
    everything = torch.arange(len(mask), device=mask.device)
    pieces = [piece for rows in everything.split(args.mini_batch_size)
              for piece in micro_batches(rollout, 1, args.micro_batch_tokens, rows)]
    first_pass = None
    if len(pieces) == 1:  # what the first pass computes is what is to be known before it
        sync = windows(args.ppo_update_iters, args.accumulation_steps)[0] == 1
        with torch.enable_grad(), grad_sync(run.actor, sync=sync), grad_sync(run.critic, sync=sync):
            first_pass = read(run, args, rollout, positions, everything)
    pieces = scoring_pieces(rollout, 1, args, pieces)

    def logps_of(model: nn.Module, temperature: float) -> Tensor:
        with autocast_context(run.device, args.dtype):
            return score_all(model, rollout, 1, temperature, pieces)

    old_values = torch.zeros(mask.shape, device=mask.device) if first_pass is None else first_pass[1].detach()
    with autocast_context(run.device, args.dtype):
        for rows in pieces if first_pass is None else []:
            old_values[rows] = values_of(run.critic, rollout, positions, rows)
    ref_logps = None if run.reference is None else logps_of(run.reference, args.logp_temperature)
    old_logps, gap, weights = rollout.per_token_logps, None, 1.0
    if not old_logps_known(run.engine, args):
        old_logps = first_pass[0].logps.detach() if first_pass else logps_of(run.actor, args.logp_temperature)
        gap, weights = against_engine(run.engine, args, old_logps, rollout.per_token_logps, mask,
                                      lambda temperature: logps_of(run.actor, temperature))
    if args.missing_eos_penalty:
        rewards = penalize_missing_eos(rewards, rollout.finished, missing_eos_penalty=args.missing_eos_penalty)
    token_rewards = terminal_rewards(rewards, mask)
    if args.kl_in == "reward":
        token_rewards = token_rewards_with_kl(rewards, old_logps, ref_logps, mask, kl_coef=run.kl_coef(args.kl_coef),
                                              estimator=args.kl_estimator)
    if args.whiten_rewards:
        token_rewards = whiten_rewards(token_rewards, mask, reduce_sum=all_reduce_sum)
    advantages, returns = compute_gae(token_rewards, old_values, mask, gamma=args.gamma, lam=args.lam)
    advantages = normalize_advantages(advantages, mask, reduce_sum=all_reduce_sum) * weights
    return Experience(rollout, mask, positions, old_logps, ref_logps, old_values, advantages, returns, gap, first_pass)


def values_of(critic: nn.Module, rollout: RolloutResult, positions: Tensor, rows: Tensor) -> Tensor:
    """The critic's value before each response token of these rows, float32 [n, R]; grad flows."""
    wanted = torch.zeros_like(rollout.attention_mask[rows], dtype=torch.bool).scatter_(1, positions[rows], True)
    return critic(rollout.output_ids[rows], rollout.attention_mask[rows], wanted).float().gather(1, positions[rows])


def read(run: Run, args, rollout: RolloutResult, positions: Tensor, rows: Tensor) -> tuple[Scores, Tensor]:
    """What actor and critic say of these rows; grad flows."""
    with autocast_context(run.device, args.dtype):
        scores = score_answers(run.actor, rollout, 1, args.logp_temperature, rows)
        return scores, values_of(run.critic, rollout, positions, rows)


def update(run: Run, args, experience: Experience) -> MetricSums:
    """Several passes over the rollout in minibatches, an optimizer step a window; ends early when the policy has moved.

    A minibatch is mini_batch_size consecutive rows of every rank, so it holds the same rows on any number of ranks;
    each pass takes the minibatches in another order.
    """
    sums = MetricSums(run.device)
    everything = torch.arange(len(experience.mask), device=experience.mask.device)
    starts = range(0, len(everything), args.mini_batch_size)
    places = window_places(args.ppo_update_iters * len(starts), args.accumulation_steps)
    order, tokens_in_window = minibatch_order(run, args, args.ppo_update_iters, starts), 0.0
    for number, (start, (window, last)) in enumerate(zip(order, places, strict=True)):
        rows = everything[start : start + args.mini_batch_size]
        tokens_in_window += all_reduce_sum(experience.mask[rows].sum().float()).item()
        if not minibatch_backward(run, args, experience, rows, window, last, sums, first=number == 0):
            clear_gradients(run.optimizers)
            sums.add("early_stop", 1.0)
            break
        if last and tokens_in_window > 0:
            apply_gradients(run, args, sums)
        if last:
            clear_gradients(run.optimizers)
            tokens_in_window = 0.0
    else:
        sums.add("early_stop", 0.0)
    run.engine.update_policy(run.actor)
    return sums


def minibatch_backward(run: Run, args, experience: Experience, rows: Tensor, window: int, last: bool, sums: MetricSums,
                       first: bool) -> bool:
    """Add one minibatch's gradient as its part of a window of `window`; False if PPO is to stop instead, and what was
    gathered of this window's gradient is then to be dropped."""
    tokens = experience.mask[rows].sum()
    share = global_share(tokens, tokens) / tokens.clamp(min=1)  # of one token
    found, moved = MetricSums(run.device), 0.0
    pieces = micro_batches(experience.rollout, 1, args.micro_batch_tokens, rows)
    for number, piece in enumerate(pieces):
        final = number + 1 == len(pieces)
        with grad_sync(run.actor, sync=last and final), grad_sync(run.critic, sync=last and final):
            loss, approx_kl = piece_loss(run, args, experience, piece, found, first)
            counted = experience.mask[piece].sum()
            moved = moved + approx_kl * counted
            if final and stops_early(args, moved, tokens, sums):
                return False
            run.scaler.scale(loss * counted * share / window).backward()
    sums.merge(found)
    return True


def stops_early(args, moved: Tensor, tokens: Tensor, sums: MetricSums) -> bool:
    """Whether the policy's mean distance over a minibatch, on all ranks, is beyond --early_stop_kl."""
    sums.add("approx_kl", moved / tokens.clamp(min=1), tokens)
    kl_sum, kl_tokens = all_reduce_sum(torch.stack([moved, tokens.to(moved.dtype)])).tolist()
    return kl_sum / max(kl_tokens, 1.0) > args.early_stop_kl


def piece_loss(run: Run, args, experience: Experience, piece: Tensor, sums: MetricSums, first: bool):
    """(loss [], approximate KL to the sampling policy []), means over the tokens of some rows of a minibatch."""
    mask, old_logps = experience.mask[piece], experience.old_logps[piece]
    tokens = mask.sum()
    if first and experience.first_pass is not None:
        (logps, entropy, aux_loss), values = experience.first_pass
    else:
        (logps, entropy, aux_loss), values = read(run, args, experience.rollout, experience.positions, piece)
    token_losses = ppo_token_loss(logps, old_logps, experience.advantages[piece], mask, clip_epsilon=args.clip_epsilon,
                                  clip_epsilon_high=args.clip_epsilon_high, dual_clip=args.dual_clip)
    policy_loss = masked_mean(token_losses, mask)
    ref_logps = None if experience.ref_logps is None else experience.ref_logps[piece]
    token_kl = kl_estimate(logps, old_logps, logps.detach() if ref_logps is None else ref_logps, mask,
                           estimator=args.kl_estimator)
    value_loss = ppo_value_loss(values, experience.old_values[piece], experience.returns[piece], mask,
                                cliprange_value=args.cliprange_value)
    sums.add("policy_loss", policy_loss, tokens)
    sums.add("aux_loss", aux_loss, tokens)
    sums.add("critic/vf_loss", value_loss, tokens)
    moved = (values.detach() - experience.old_values[piece]).abs() > args.cliprange_value
    sums.add("critic/vf_clipfrac", masked_mean(moved.float(), mask), tokens)
    gap = None
    if first:  # without an old log-prob of its own, the trainer's first one tells how the engine's differs
        gap = (logps.detach() - old_logps).abs() if experience.gap is None else experience.gap[piece]
    token_metrics(sums, mask, logps=logps, entropy=entropy, ref_logps=ref_logps, gap=gap)
    clip_metrics(sums, mask, token_ratios(logps.detach(), old_logps, mask), experience.advantages[piece],
                 epsilon=args.clip_epsilon, epsilon_high=args.clip_epsilon_high)
    kl_coef = run.kl_coef(args.kl_coef) if args.kl_in == "loss" else 0.0
    loss = policy_loss + kl_coef * masked_mean(token_kl, mask) + args.vf_coef * value_loss + aux_loss
    if args.entropy_coef:
        loss = loss - args.entropy_coef * masked_mean(entropy, mask)
    return loss, approx_policy_kl(logps.detach(), old_logps, mask)


def apply_gradients(run: Run, args, sums: MetricSums) -> None:
    """One optimizer step of actor and critic together, or of neither if a gradient is not finite."""
    first = int(run.progress.step < args.critic_warmup_steps)  # 1: only the critic learns, but both rates move on
    clear_gradients(run.optimizers[:first])
    norms, taken = optimizer_step([run.actor, run.critic][first:], run.optimizers[first:], run.schedules[first:],
                                  grad_clip=args.grad_clip, scaler=run.scaler)
    if first and taken:
        run.schedules[0].step()
    sums.add("grad_norm", 0.0 if first else norms[0])
    sums.add("critic/grad_norm", norms[-1])
    sums.add("skipped_steps", float(not taken))
    run.skips.record(taken)
    run.progress.optimizer_steps += taken


# ---------------------------------------------------------------------------------------------- the loop
def train_epoch(run: Run, args, rows_per_step: list[int]) -> None:
    """The steps that are left of the current epoch."""
    loader = open_loader(run.dataset, run.progress, args, steps=len(rows_per_step))
    for batch, rows in zip(loader, rows_per_step, strict=True):
        run.clock = StepClock(run.device)
        keys = [(TRAIN_STREAM, args.seed, run.progress.epoch, index) for index in batch["index"]]
        with rollout_bar(run, args, len(keys)) as bar:
            rollout = sample_answers(run.engine, run.tokenizer, batch["prompt_ids"], keys, args, run.device,
                                     num_generations=1, temperature=args.temperature, on_progress=bar.advance)
        run.clock.mark("gen")
        rewards, parts = calculate_rewards(
            batch["prompt"], rollout.completions, run.reward_model, messages=batch["messages"], return_parts=True,
            answers=batch["answer"], metadata=batch["metadata"], finished=rollout.finished, **run.rewards,
        )  # fmt: skip
        rewards, parts = rewards.to(run.device), {name: values.to(run.device) for name, values in parts.items()}
        run.clock.mark("reward")
        real = row_is_real(rows, 1, run.device)
        with run.interrupts.deferred():
            experience = gather_experience(run, args, rollout, rewards, real)
            run.clock.mark("ref")
            sums = update(run, args, experience)
            run.clock.mark("update")
            answer_metrics(sums, rollout, rewards, parts, real)
            foreseen = (experience.old_values, experience.returns, experience.mask)
            sums.add("critic/explained_var", explained_variance(*foreseen, reduce_sum=all_reduce_sum))
            metrics = sums.reduce()
            done = run.progress.next_step(rows, metrics["num_tokens"])
            adapt_kl(run, args, done, args.kl_coef, metrics, rows)
            done.planned_steps += planned_optimizer_steps(args, [[rows]])
            log_step(run, args, done, metrics)
            finish_step(run, args, done, save)
        debug_print(args, run.progress.step, batch, rollout, rewards)
        if run.interrupts.stop_together(run.device):
            raise Interrupted
    end_epoch(run)


def log_step(run: Run, args, at: Progress, metrics: dict) -> None:
    """One line to metrics.jsonl, tracker and console, every --log_interval steps."""
    actor_lr, critic_lr = (schedule.lr for schedule in run.schedules)
    speed = run.clock.metrics(metrics["num_tokens"])
    run.log.advance(reward=metrics["reward"], kl=metrics.get("kl", 0.0), **{"tokens/s": speed["perf/tokens_per_s"]})
    if at.step % args.log_interval:
        return
    metrics = {"step": at.step, "epoch": at.epoch, "consumed": at.consumed, **metrics, "num_tokens": at.tokens,
               "lr": actor_lr, "critic/lr": critic_lr, **speed}
    run.log.write(metrics, step_line(args, at, run.log.total, {
        "Reward": metrics["reward"], "KL_ref": metrics.get("kl", math.nan), "Approx KL": metrics["approx_kl"],
        "ClipFrac": metrics.get("clip_ratio/region_mean", math.nan),
        "Critic Loss": metrics.get("critic/vf_loss", math.nan),
        "Avg Response Len": metrics["completions/mean_length"], "Actor LR": actor_lr, "Critic LR": critic_lr,
    }))  # fmt: skip


def save(run: Run, args) -> None:
    """The actor's weights as MiniMind reads them, and the resume file."""
    save_run(run, args, model=run.actor, optimizer=run.optimizers[0], scheduler=run.schedules[0],
             critic_model=run.critic, critic_optimizer=run.optimizers[1], critic_scheduler=run.schedules[1])


# ---------------------------------------------------------------------------------------------- set-up
def build_run(args, device: str) -> Run:
    """Load everything the run needs, cheap checks first; resumed state is loaded into it when asked for."""
    roles = load_roles(args, device, with_reference=args.kl_coef > 0)
    resumed = roles.resumed
    critic = CriticModel(roles.config, norm_twice=args.critic_from == "policy")
    critic = start_critic(critic, roles.model, resumed, args.critic_from)
    critic = critic.to(device).eval()  # dropout off, as in the actor
    if resumed:
        load_resumed_model(roles.model, resumed["model"])
    models = [torch.compile(model) if args.use_compile else model for model in (roles.model, critic)]
    actor, critic = (wrap_ddp(model, device) for model in models)
    progress = resumed_progress(resumed, args)
    plan = planned_rows(progress, len(roles.dataset), args)
    total = progress.planned_steps + planned_optimizer_steps(args, plan)
    opened = [open_optimizer(actor, args.learning_rate, total, resumed),
              open_optimizer(critic, args.critic_learning_rate, total, resumed, "critic_")]
    optimizers, schedules = (list(pair) for pair in zip(*opened, strict=True))
    scaler = open_scaler(device, args.dtype, resumed)
    engine = open_engine(args, actor, roles.tokenizer, device)
    return Run(
        actor=actor, critic=critic, models={"actor": actor, "critic": critic}, optimizers=optimizers,
        schedules=schedules, scaler=scaler,
        **run_parts(roles, engine, args, device, vars(parse_args([])), progress, plan),
    )  # fmt: skip


def main(argv=None) -> int:
    """Run the script; gives the process's exit status."""
    args = parse_args(argv)
    return train_until_done(build_run(args, start_process(args)), args, train_epoch, save,
                            curves=["reward", "kl", "critic/explained_var", "completions/mean_length"])


if __name__ == "__main__":
    run_main(main)
