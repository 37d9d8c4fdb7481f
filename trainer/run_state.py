"""What a run knows about itself: how far it is, what is left, how it was started; and the steps from start to end."""

import hashlib
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from model.model_minimind import MiniMindConfig
from trainer.checkpoints import lm_checkpoint, save_weights, weights_path
from trainer.distributed import Logger, any_rank, check_same_weights, is_main_process, rank_and_world
from trainer.evaluation import Evaluator, report
from trainer.metrics import StepClock
from trainer.reward_plugins import reward_settings
from trainer.rl_math import adapt_kl_coef
from trainer.rollout_engine import RolloutEngine, create_rollout_engine
from trainer.run_log import DryLog, HealthStop, RolloutBar, RunLog
from trainer.samples import SampleWriter
from trainer.self_check import peak_memory, self_check
from trainer.trainer_utils import Interrupted, Interrupts, SkipGuard, autocast_context

TRAIN_STREAM, MINIBATCH_STREAM = 1, 3  # first words of random keys; evaluation uses 2


@dataclass
class Progress:
    """Counters at the last moment when all gradients had been applied; what a resume file holds and resume starts from.

    epoch: finished epochs; consumed: prompts used of the current one (on all ranks); step: rollout steps done since the
    run began; optimizer_steps: optimizer steps taken; planned_steps: those planned for the rollout steps done, of which
    early stops and skipped steps take fewer; tokens: those of prompts and answers so far; kl_coef: the KL's weight
    once --kl_target has adapted it. The learning rate's schedule
    ends after all that are planned, so that a resumed run, which plans the rest, ends where it would have.
    """

    epoch: int = 0
    consumed: int = 0
    step: int = 0
    optimizer_steps: int = 0
    planned_steps: int = 0
    tokens: int = 0
    kl_coef: float | None = None

    def next_step(self, rows: int, tokens: float) -> "Progress":
        """After one more rollout step of `rows` prompts, and this many tokens with the answers to them."""
        return replace(self, consumed=self.consumed + rows, step=self.step + 1, tokens=self.tokens + int(tokens))

    def next_epoch(self) -> "Progress":
        return replace(self, epoch=self.epoch + 1, consumed=0)


def planned_rows(progress: Progress, size: int, args) -> list[list[int]]:
    """For each epoch that is left, how many of the `size` prompts each of its steps will use on all ranks together.

    The first entry is the rest of the current epoch. --max_steps (0 = no limit) counts all steps of the run.
    """
    global_batch = args.batch_size * rank_and_world()[1]
    left = args.max_steps - progress.step if args.max_steps > 0 else math.inf
    plan, consumed = [], progress.consumed
    for _ in range(progress.epoch, args.epochs):
        rows = [min(global_batch, size - start) for start in range(consumed, size, global_batch)]
        rows = rows[: int(max(0, min(left, len(rows))))]
        left -= len(rows)
        plan.append(rows)
        consumed = 0
    return plan


def windows(micro_steps: int, accumulation_steps: int) -> list[int]:
    """Sizes of the accumulation windows that `micro_steps` gradients fall into; the last may be smaller."""
    full, rest = divmod(micro_steps, accumulation_steps)
    return [accumulation_steps] * full + ([rest] if rest else [])


def window_places(micro_steps: int, accumulation_steps: int) -> list[tuple[int, bool]]:
    """For each of `micro_steps` gradients: the size of its window, and whether it is the last one there."""
    return [(size, k == size - 1) for size in windows(micro_steps, accumulation_steps) for k in range(size)]


def planned_optimizer_steps(args, plan: list[list[int]]) -> int:
    """Optimizer steps of PPO in the rollout steps of `plan`, if none of them stops early."""
    total = 0
    for rows in (rows for epoch in plan for rows in epoch):
        minibatches = -(-rows // (rank_and_world()[1] * args.mini_batch_size))
        total += len(windows(args.ppo_update_iters * minibatches, args.accumulation_steps))
    return total


def minibatch_order(run: "RunState", args, passes: int, starts: range) -> list[int]:
    """First rows of the minibatches in the order in which they are used, pass after pass; the same on every rank."""
    key = (MINIBATCH_STREAM, args.seed, run.progress.step)
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return [starts[i] for _ in range(passes) for i in draw.permutation(len(starts))]


def resume_entries(run: "RunState", args) -> dict:
    """The plain values a resume file holds beside tensors."""
    return {"progress": asdict(run.progress), "args": {k: v for k, v in vars(args).items() if _is_plain(v)},
            "run_dir": str(run.log.folder), "data_digest": file_digest(args.data_path), "before": run.before}


def save_run(run: "RunState", args, *, model: nn.Module, **states) -> None:
    """Weights as MiniMind reads them, then the resume file: killed in between, a resumed run writes both again.

    states: optimizer, scheduler, and whatever else lm_checkpoint is to keep. Written by the main process alone.
    """
    if not is_main_process():
        return
    save_weights(model, weights_path(args.save_dir, args.save_weight, run.config))
    lm_checkpoint(
        run.config, args.save_weight, model=model, epoch=run.progress.epoch, step=run.progress.step,
        wandb=run.log.tracker, save_dir=args.checkpoint_dir, scaler=run.scaler, **states, **resume_entries(run, args),
    )  # fmt: skip


def file_digest(path: str) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _is_plain(value) -> bool:
    return value is None or isinstance(value, (str, int, float, bool, list))


def resumed_progress(resumed: dict | None, args) -> Progress:
    """The counters in a resume file, or those of a fresh start. Raises ValueError if the data is not what it was."""
    if resumed is None:
        return Progress()
    if resumed["data_digest"] != file_digest(args.data_path):
        raise ValueError(f"--data_path {args.data_path} has other content than the run being resumed had, so which "
                         "prompts are left cannot be told; restore it, or start afresh with --from_resume 0")
    return Progress(**resumed["progress"])


@dataclass(kw_only=True)
class RunState:
    """What every run works with, whatever the algorithm, and how far it is."""

    config: MiniMindConfig
    device: str
    tokenizer: object
    dataset: object
    reference: nn.Module | None  # frozen; None when its weight in the loss is 0
    reward_model: object | None
    rewards: dict  # keyword arguments of calculate_rewards, from the flags
    engine: RolloutEngine
    evaluator: Evaluator
    sampler: SampleWriter | None  # None without held-out prompts, or with --sample_interval 0
    scaler: torch.amp.GradScaler
    skips: SkipGuard
    progress: Progress
    plan: list[list[int]]  # prompts of each step that is left, epoch by epoch
    models: dict[str, nn.Module]  # what is trained, by name, the policy first
    log: RunLog | None  # None, as `interrupts`, where nothing is left to do
    interrupts: Interrupts | None
    before: dict | None  # held-out evaluation before the first step
    evaluated: tuple[int, dict | None] | None = None  # step and result of the last evaluation of this process
    clock: StepClock = field(default_factory=StepClock)  # of the current rollout step

    def kl_coef(self, given: float) -> float:
        """The weight of the KL: the flag's, until --kl_target has adapted it."""
        return given if self.progress.kl_coef is None else self.progress.kl_coef


def open_engine(args, policy: nn.Module, tokenizer, device: str) -> RolloutEngine:
    """The engine that the flags describe, ready to sample from `policy`; all ranks take part."""
    return create_rollout_engine(
        args.rollout_engine, policy, tokenizer, device, autocast_context(device, args.dtype),
        sglang_base_url=args.sglang_base_url, sglang_model_path=args.sglang_model_path,
        sglang_shared_path=args.sglang_shared_path, dtype="bfloat16" if args.dtype == "bfloat16" else "float32",
        concurrency=args.sglang_concurrency, wait=args.sglang_wait, sync_interval=args.sync_interval,
        recompute_logps=args.recompute_logps, use_compile=bool(args.use_compile),
    )  # fmt: skip


def run_parts(roles, engine, args, device: str, defaults: dict, progress: Progress, plan: list[list[int]]) -> dict:
    """The fields of RunState that follow from what was loaded; opens the run's folder and takes over Ctrl-C."""
    log = interrupts = sampler = None
    if any(plan):
        total = progress.step + sum(map(len, plan))
        log = DryLog() if args.dry_run else RunLog(args, defaults, roles.resumed, device, total)
        interrupts = Interrupts()
    if args.sample_interval and roles.heldout is not None and log is not None and log.folder is not None:
        sampler = SampleWriter(engine, roles.tokenizer, roles.heldout, roles.reward_model, args, device, log.folder,
                               progress.step if roles.resumed else -1)
    return {"config": roles.config, "device": device, "tokenizer": roles.tokenizer, "dataset": roles.dataset,
            "reference": roles.reference, "reward_model": roles.reward_model, "log": log, "interrupts": interrupts,
            "evaluator": Evaluator(engine, roles.tokenizer, roles.heldout, roles.reward_model, args, device,
                                   policy=roles.model, reference=roles.reference),
            "rewards": reward_settings(args), "sampler": sampler,
            "skips": SkipGuard(args.max_skipped_steps), "before": roles.resumed and roles.resumed["before"],
            "engine": engine, "progress": progress, "plan": plan}


def passes(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; never for 0."""
    return every > 0 and before // every < after // every


def rollout_bar(run: RunState, args, answers: int) -> RolloutBar:
    """A bar that appears if sampling these answers takes long: tokens decoded here, or answers finished by servers."""
    if args.rollout_engine == "torch":
        return run.log.rollout_bar(args.max_gen_len, "token")
    return run.log.rollout_bar(answers, "answer")


def evaluate(run: RunState, step: int) -> dict | None:
    """What the evaluator finds for the newest weights, also where an engine of servers is not yet sent all updates."""
    if run.evaluated is None or run.evaluated[0] != step:  # the last step may be due by --eval_interval too
        run.engine.sync()
        run.evaluated = step, run.evaluator.measure(run.log, step)
    return run.evaluated[1]


def finish_step(run: RunState, args, done: Progress, save) -> None:
    """Count a step as done, and evaluate, compare ranks and save where that is due. No gradient may be pending."""
    before, run.progress = run.progress.step, done
    if passes(args.eval_interval, before, done.step):
        evaluate(run, done.step)
    if run.sampler is not None and passes(args.sample_interval, before, done.step):
        run.engine.sync()
        run.sampler.take(done.step)
    if passes(args.check_sync, before, done.step):
        check_same_weights(run.models, f"after step {done.step}")
    severe = bool(args.health_stop) and any_rank(run.log.severe is not None, run.device)
    if severe or passes(args.save_interval, before, done.step):
        save(run, args)
    if severe:
        raise HealthStop(run.log.severe)


def adapt_kl(run: RunState, args, at: Progress, given: float, metrics: dict, answers: int) -> None:
    """With --kl_target, the weight of the KL from the next update on, in `at`; the one that was used is logged."""
    if args.kl_target:
        metrics["kl_coef"] = run.kl_coef(given)  # within a window `at` is ahead of it
        before = given if at.kl_coef is None else at.kl_coef
        at.kl_coef = adapt_kl_coef(before, metrics["kl"], target=args.kl_target, horizon=args.kl_horizon, n=answers)


def end_epoch(run: RunState) -> None:
    """Go on to the next epoch if this one's prompts are used up; --max_steps may have ended it early."""
    if run.progress.consumed >= len(run.dataset):
        run.progress = run.progress.next_epoch()


def train_until_done(run: RunState, args, train_epoch, save, *, curves: list[str]) -> int:
    """Self-check, evaluate, every epoch that is left, save, evaluate, report; gives the process's exit status.

    A signal is answered with a checkpoint. `train_epoch(run, args, rows_per_step)` and `save(run, args)` are the
    script's own; `curves` are the metrics drawn at the end.
    """
    if not any(run.plan):
        Logger(f"nothing to do: {run.progress.step} steps and {run.progress.epoch} epochs are done; raise --epochs or "
               "--max_steps to go on")
        return 0
    try:
        if args.self_check or args.dry_run:
            self_check(run, args)
        if args.dry_run:
            return dry_run(run, args, train_epoch)
        if run.progress.step == 0 and run.before is None:
            run.before = evaluate(run, step=0)
            if run.sampler is not None:
                run.sampler.take(0)
        for rows_per_step in run.plan:
            train_epoch(run, args, rows_per_step)
        with run.interrupts.deferred():
            save(run, args)
        after = evaluate(run, run.progress.step)
        limit = f" --max_steps {2 * run.progress.step}" if args.max_steps else ""
        report(run.log, run.before, after, weights_path(args.save_dir, args.save_weight, run.config), curves,
               f"to train on: the same command with --epochs {2 * args.epochs}{limit} --from_resume 1")
    except Interrupted:
        if args.dry_run:
            return run.interrupts.exit_status
        save(run, args)
        Logger(f"stopped by a signal after step {run.progress.step}; saved, --from_resume 1 goes on from there")
        return run.interrupts.exit_status
    finally:
        run.log.close()
    return 0


def dry_run(run: RunState, args, train_epoch) -> int:
    """One rollout, reward and update with answers of at most 16 tokens; shows time and memory, writes nothing."""
    vars(args).update(max_gen_len=min(args.max_gen_len, 16), log_interval=1, eval_interval=0, save_interval=2**62,
                      health_stop=0)
    rows = next(rows_per_step[0] for rows_per_step in run.plan if rows_per_step)
    train_epoch(run, args, [rows])
    Logger(f"dry run: peak memory {peak_memory(run.device)}; nothing was written")
    return 0
