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
    STARTER_DEFAULTS, FlagParser, add_file_flags, add_input_flags, add_sglang_flags, add_start_flags, any_float,
    fraction, non_negative_float, non_negative_int, parse_with_starter, positive_float, positive_fraction,
    positive_int, switch,
)  # fmt: skip

STARTER = {**STARTER_DEFAULTS, "batch_size": 64, "mini_batch_size": 32, "learning_rate": 1e-4,
           "critic_learning_rate": 5e-4, "answer_reward": 4.0, "epochs": 5, "max_steps": 100, "save_interval": 50,
           "eval_prompts": 300}  # fmt: skip


def parse_args(argv=None) -> argparse.Namespace:
    """The flags; defaults are MiniMind's where MiniMind has the flag. Exits with status 2 on a wrong one."""
    parser = FlagParser("PPO training of a MiniMind chat model.")
    add_start_flags(parser)
    add_input_flags(parser)

    add = parser.group("rollout")
    add("--rollout_engine", ["torch", "sglang"], "torch", "what samples the answers: this process, or SGLang servers")
    add("--max_gen_len", positive_int, 1024, "longest answer in tokens")
    add("--temperature", positive_float, 0.8, "sampling temperature")
    add("--top_p", positive_fraction, 1.0, "sample from the smallest set of tokens that holds this much probability; 1 "
        "= all")
    add("--top_k", non_negative_int, 0, "sample from the k likeliest tokens; 0 = all")
    add("--logp_temperature", positive_float, None, "what logits are divided by when answers are scored; 1.0 scores as "
        "MiniMind does, None = the sampling temperature")

    add = parser.group("reward")
    add("--answer_reward", non_negative_float, 0.0, "added where the answer equals the row's 'answer'; 0 = off")

    add = parser.group("loss")
    add("--clip_epsilon", positive_fraction, 0.2, "the ratio is kept in [1 - c, 1 + c]")
    add("--vf_coef", non_negative_float, 0.5, "weight of the critic's loss")
    add("--kl_coef", non_negative_float, 0.02, "weight of KL(policy || reference) in the loss; 0 = no reference is "
        "loaded")
    add("--gamma", fraction, 1.0, "discount of rewards a token later")
    add("--lam", fraction, 0.95, "GAE's lambda: 1 = whole returns, 0 = one-step differences")
    add("--cliprange_value", positive_float, 0.2, "a value may leave its old one by this much an update")
    add("--ppo_update_iters", positive_int, 2, "passes over a rollout's rows")
    add("--early_stop_kl", any_float, 0.25, "end a rollout's updates once 0.5·mean(log ratio²) to the sampling policy "
        "exceeds this; negative = before the first")

    add = parser.group("optimisation")
    add("--batch_size", positive_int, 2, "prompts a step and a process")
    add("--mini_batch_size", positive_int, 2, "rows a minibatch and a process")
    add("--learning_rate", positive_float, 3e-07, "AdamW rate of the actor at the start; a cosine takes it to a tenth")
    add("--critic_learning_rate", positive_float, 5e-07, "the same for the critic")
    add("--accumulation_steps", positive_int, 1, "minibatches whose gradients make one optimizer step, within a "
        "rollout step")
    add("--grad_clip", non_negative_float, 1.0, "largest gradient norm; 0 = no clipping")
    add("--max_skipped_steps", positive_int, 20, "the run stops once this many optimizer steps in a row were skipped "
        "for a non-finite loss or gradient")
    add("--dtype", ["bfloat16", "float16", "float32"], "bfloat16", "precision of forward passes; weights stay float32")
    add("--use_compile", switch, 0, "1 = torch.compile actor and critic")
    add_sglang_flags(parser, shared_path="sglang_ckpt_ppo")
    add_file_flags(parser, save_weight="ppo_actor", wandb_project="MiniMind-PPO")
    return parse_with_starter(parser, argv, STARTER)


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.metrics import MetricSums, answer_metrics, debug_print
from trainer.rewards import calculate_rewards
from trainer.rl_math import (
    approx_policy_kl, clip_fraction, compute_gae, explained_variance, masked_mean, normalize_advantages,
    ppo_policy_loss, ppo_value_loss, reference_kl_penalty, response_logp_positions, terminal_rewards,
)  # fmt: skip
from trainer.rollout_engine import (
    RolloutResult, compute_per_token_logps, sample_answers, score_tokens,
)  # fmt: skip
from trainer.run_state import (
    Progress, RunState, end_epoch, finish_step, open_engine, planned_rows, resume_entries, resumed_progress, run_parts,
    train_until_done, windows,
)  # fmt: skip
from trainer.trainer_utils import (
    CosineSchedule, Interrupted, all_reduce_sum, autocast_context, global_share, grad_sync, is_main_process,
    lm_checkpoint, load_resumed_model, load_roles, open_loader, optimizer_step, rank_and_world,
    row_is_real, run_main, save_weights, start_process, unwrap_model, weights_path, wrap_ddp,
)  # fmt: skip

TRAIN_STREAM, MINIBATCH_STREAM = 1, 3  # first words of random keys; evaluation uses 2


class CriticModel(MiniMindForCausalLM):
    """A MiniMind body with a linear head that says what the rest of an answer will earn: values [N, W], in rewards."""

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden_states = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        # MiniMind: the body has applied its final norm already; kept, since its critics are trained that way.
        return self.value_head(self.model.norm(hidden_states)).squeeze(-1)


class Experience(NamedTuple):
    """One rollout, ready to learn from. All [N, R] but output_ids and attention_mask [N, W]; nothing has a gradient."""

    output_ids: Tensor
    attention_mask: Tensor
    mask: Tensor  # response tokens that count
    positions: Tensor  # where the critic's value before each response token stands
    old_logps: Tensor
    ref_logps: Tensor | None  # None when kl_coef is 0
    old_values: Tensor
    advantages: Tensor
    returns: Tensor

    def rows(self, chosen: slice) -> "Experience":
        return Experience(*(None if tensor is None else tensor[chosen] for tensor in self))


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
    full_mask, width = rollout.attention_mask.long(), mask.size(1)
    positions = response_logp_positions(rollout.prompt_lens, width)
    inputs = (rollout.output_ids, width, full_mask, args.logp_temperature)
    with autocast_context(run.device, args.dtype):
        old_values = run.critic(rollout.output_ids, full_mask).float().gather(1, positions)
        ref_logps = compute_per_token_logps(run.reference, *inputs) if run.reference is not None else None
        # In half precision decoding and training round differently, so the ratio would not start at 1.
        exact = args.dtype == "float32" and not run.engine.must_recompute(args.temperature, args.logp_temperature)
        old_logps = rollout.per_token_logps if exact else compute_per_token_logps(run.actor, *inputs)
    advantages, returns = compute_gae(
        terminal_rewards(rewards, mask), old_values, mask, gamma=args.gamma, lam=args.lam
    )
    advantages = normalize_advantages(advantages, mask, reduce_sum=all_reduce_sum)
    return Experience(
        rollout.output_ids, full_mask, mask, positions, old_logps, ref_logps, old_values, advantages, returns
    )


def update(run: Run, args, experience: Experience) -> MetricSums:
    """Several passes over the rollout in minibatches, an optimizer step a window; ends early when the policy has moved.

    A minibatch is mini_batch_size consecutive rows of every rank, so it holds the same rows on any number of ranks;
    each pass takes the minibatches in another order.
    """
    sums = MetricSums(run.device)
    starts = range(0, len(experience.mask), args.mini_batch_size)
    places = [(size, k == size - 1) for size in windows(args.ppo_update_iters * len(starts), args.accumulation_steps)
              for k in range(size)]  # fmt: skip
    tokens_in_window = 0.0
    for number, (start, (window, last)) in enumerate(zip(minibatch_order(run, args, starts), places, strict=True)):
        part = experience.rows(slice(start, start + args.mini_batch_size))
        tokens_in_window += all_reduce_sum(part.mask.sum().float()).item()
        if not minibatch_backward(run, args, part, window, last, sums, first=number == 0):
            clear_gradients(run)
            sums.add("early_stop", 1.0)
            break
        if last and tokens_in_window > 0:
            apply_gradients(run, args, sums)
        if last:
            clear_gradients(run)
            tokens_in_window = 0.0
    else:
        sums.add("early_stop", 0.0)
    run.engine.update_policy(run.actor)
    return sums


def minibatch_order(run: Run, args, starts: range) -> list[int]:
    """First rows of the minibatches in the order in which they are used, pass after pass; the same on every rank."""
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(
        (MINIBATCH_STREAM, args.seed, run.progress.step)
    )))
    return [starts[i] for _ in range(args.ppo_update_iters) for i in draw.permutation(len(starts))]


def minibatch_backward(run: Run, args, part: Experience, window: int, last: bool, sums: MetricSums, first: bool):
    """Add one minibatch's gradient as its part of a window of `window`; False, and no gradient, if PPO is to stop."""
    tokens = part.mask.sum()
    with grad_sync(run.actor, sync=last), grad_sync(run.critic, sync=last):
        with autocast_context(run.device, args.dtype):
            logps, aux_loss = score_tokens(
                run.actor, part.output_ids, part.mask.size(1), part.attention_mask, args.logp_temperature
            )
            values = run.critic(part.output_ids, part.attention_mask).float().gather(1, part.positions)
        approx_kl = approx_policy_kl(logps.detach(), part.old_logps, part.mask)
        kl_sum, kl_tokens = all_reduce_sum(torch.stack([approx_kl * tokens, tokens.to(approx_kl.dtype)])).tolist()
        sums.add("approx_kl", approx_kl, tokens)
        if kl_sum / max(kl_tokens, 1.0) > args.early_stop_kl:
            return False
        policy_loss = ppo_policy_loss(
            logps, part.old_logps, part.advantages, part.mask, clip_epsilon=args.clip_epsilon
        )
        ref_logps = logps.detach() if part.ref_logps is None else part.ref_logps
        reference_kl = reference_kl_penalty(logps, ref_logps, part.mask)
        value_loss = ppo_value_loss(
            values, part.old_values, part.returns, part.mask, cliprange_value=args.cliprange_value
        )
        loss = policy_loss + args.kl_coef * reference_kl + args.vf_coef * value_loss + aux_loss
        run.scaler.scale(loss * global_share(tokens, tokens) / window).backward()
    sums.add("policy_loss", policy_loss, tokens)
    sums.add("kl", reference_kl, tokens)
    sums.add("aux_loss", aux_loss, tokens)
    sums.add("critic/vf_loss", value_loss, tokens)
    clipped = clip_fraction(logps.detach(), part.old_logps, part.mask, clip_epsilon=args.clip_epsilon)
    sums.add("clip_ratio/region_mean", clipped, tokens)
    if first:
        gap = masked_mean((logps.detach() - part.old_logps).abs(), part.mask)
        sums.add("sampling/logp_difference/mean", gap, tokens)
    return True


def clear_gradients(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)


def apply_gradients(run: Run, args, sums: MetricSums) -> None:
    """One optimizer step of actor and critic together, or of neither if a gradient is not finite."""
    norms, taken = optimizer_step(
        [run.actor, run.critic], run.optimizers, run.schedules, grad_clip=args.grad_clip, scaler=run.scaler
    )
    sums.add("grad_norm", norms[0])
    sums.add("critic/grad_norm", norms[1])
    sums.add("skipped_steps", float(not taken))
    run.skips.record(taken)
    run.progress.optimizer_steps += taken


# ---------------------------------------------------------------------------------------------- the loop
def train_epoch(run: Run, args, rows_per_step: list[int]) -> None:
    """The steps that are left of the current epoch."""
    loader = open_loader(run.dataset, run.progress, args, steps=len(rows_per_step))
    for batch, rows in zip(loader, rows_per_step, strict=True):
        began = time.perf_counter()
        keys = [(TRAIN_STREAM, args.seed, run.progress.epoch, index) for index in batch["index"]]
        rollout = sample_answers(run.engine, run.tokenizer, batch["prompt_ids"], keys, args, run.device,
                                 num_generations=1, temperature=args.temperature)
        sampled = time.perf_counter()
        rewards, parts = calculate_rewards(
            batch["prompt"], rollout.completions, run.reward_model, messages=batch["messages"],
            answers=batch["answer"], answer_reward=args.answer_reward, return_parts=True,
        )  # fmt: skip
        rewards, parts = rewards.to(run.device), {name: values.to(run.device) for name, values in parts.items()}
        scored = time.perf_counter()
        real = row_is_real(rows, 1, run.device)
        with run.interrupts.deferred():
            experience = gather_experience(run, args, rollout, rewards, real)
            sums = update(run, args, experience)
            answer_metrics(sums, rollout, rewards, parts, real)
            foreseen = explained_variance(
                experience.old_values, experience.returns, experience.mask, reduce_sum=all_reduce_sum
            )
            sums.add("critic/explained_var", foreseen)
            timing = {"gen": sampled - began, "reward": scored - sampled, "update": time.perf_counter() - scored,
                      "step": time.perf_counter() - began}
            done = run.progress.next_step(rows)
            done.planned_steps += planned_optimizer_steps(args, [[rows]])
            log_step(run, args, done, sums.reduce(), timing)
            finish_step(run, args, done, save)
        debug_print(args, run.progress.step, batch, rollout, rewards)
        if run.interrupts.stop_together(run.device):
            raise Interrupted
    end_epoch(run)


def log_step(run: Run, args, at: Progress, metrics: dict, timing: dict) -> None:
    """One line to metrics.jsonl, tracker and console, every --log_interval steps."""
    actor_lr, critic_lr = (schedule.lr for schedule in run.schedules)
    run.log.advance(reward=metrics["reward"], kl=metrics.get("kl", 0.0))
    if at.step % args.log_interval:
        return
    metrics = {"step": at.step, "epoch": at.epoch, "consumed": at.consumed, **metrics, "lr": actor_lr,
               "critic/lr": critic_lr, **{f"timing_s/{name}": seconds for name, seconds in timing.items()}}
    shown = {name: metrics.get(name, float("nan")) for name in ("kl", "clip_ratio/region_mean", "critic/vf_loss")}
    line = (f"Epoch:[{at.epoch + 1}/{args.epochs}]({at.step}/{run.log.total}), Reward: {metrics['reward']:.4f}, "
            f"KL_ref: {shown['kl']:.4f}, Approx KL: {metrics['approx_kl']:.4f}, "
            f"ClipFrac: {shown['clip_ratio/region_mean']:.4f}, Critic Loss: {shown['critic/vf_loss']:.4f}, "
            f"Avg Response Len: {metrics['completions/mean_length']:.2f}, Actor LR: {actor_lr:.8f}, "
            f"Critic LR: {critic_lr:.8f}")
    run.log.write(metrics, line)


def save(run: Run, args) -> None:
    """Weights as MiniMind reads them, then the resume file: killed in between, a resumed run writes both again."""
    if not is_main_process():
        return
    save_weights(run.actor, weights_path(args.save_dir, args.save_weight, run.config))
    lm_checkpoint(
        run.config, args.save_weight, model=run.actor, optimizer=run.optimizers[0], epoch=run.progress.epoch,
        step=run.progress.step, wandb=run.log.tracker, save_dir=args.checkpoint_dir, scheduler=run.schedules[0],
        critic_model=run.critic, critic_optimizer=run.optimizers[1], critic_scheduler=run.schedules[1],
        scaler=run.scaler, **resume_entries(run, args),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- set-up
def build_critic(config: MiniMindConfig, actor: nn.Module, resumed: dict | None, device: str) -> CriticModel:
    """The critic: the actor's starting weights under a fresh value head, or what a resume file holds."""
    critic = CriticModel(config)
    if resumed:
        load_resumed_model(critic, resumed["critic_model"])
    else:
        missing, unexpected = critic.load_state_dict(unwrap_model(actor).state_dict(), strict=False)
        if set(missing) != {"value_head.weight", "value_head.bias"} or unexpected:
            raise ValueError(f"critic: missing {missing}, unexpected {unexpected}; only value_head may be missing")
    return critic.to(device).eval()  # dropout off, as in the actor


def planned_optimizer_steps(args, plan: list[list[int]]) -> int:
    """Optimizer steps in the rollout steps of `plan`, if none of them stops early."""
    total = 0
    for rows in (rows for epoch in plan for rows in epoch):
        minibatches = -(-rows // (rank_and_world()[1] * args.mini_batch_size))
        total += len(windows(args.ppo_update_iters * minibatches, args.accumulation_steps))
    return total


def build_run(args, device: str) -> Run:
    """Load everything the run needs, cheap checks first; resumed state is loaded into it when asked for."""
    roles = load_roles(args, device, with_reference=args.kl_coef > 0)
    resumed = roles.resumed
    critic = build_critic(roles.config, roles.model, resumed, device)
    if resumed:
        load_resumed_model(roles.model, resumed["model"])
    models = [torch.compile(model) if args.use_compile else model for model in (roles.model, critic)]
    actor, critic = (wrap_ddp(model, device) for model in models)
    progress = resumed_progress(resumed, args)
    plan = planned_rows(progress, len(roles.dataset), args)
    total = progress.planned_steps + planned_optimizer_steps(args, plan)
    optimizers, schedules = [], []
    for model, rate, name in ((actor, args.learning_rate, ""), (critic, args.critic_learning_rate, "critic_")):
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=rate, fused=device.startswith("cuda")))
        schedules.append(CosineSchedule(optimizers[-1], rate, total))
        if resumed:
            optimizers[-1].load_state_dict(resumed[f"{name}optimizer"])
            schedules[-1].load_state_dict(resumed[f"{name}scheduler"])
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=args.dtype == "float16")
    if resumed:
        scaler.load_state_dict(resumed["scaler"])
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
