"""Seeds, schedules, the optimizer step, metrics and stopping, for both scripts; nothing here knows PPO or GRPO.

Processes are in distributed.py, files in checkpoints.py, models and data in loading.py; what scripts need of them is
importable from here too.
"""

import contextlib
import ctypes
import math
import os
import random
import signal
import sys
import traceback

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.arguments import REPO_ROOT
from trainer.checkpoints import lm_checkpoint, save_weights, weights_path
from trainer.distributed import (
    Logger, all_reduce_sum, any_rank, check_same_weights, global_share, grad_sync, init_distributed_mode,
    is_main_process, rank_and_world, row_is_real, unwrap_model, wrap_ddp,
)  # fmt: skip
from trainer.loading import (
    SkipBatchSampler, get_model_params, init_model, load_resumed_model, load_roles, load_tokenizer, open_loader,
    shard_epoch, start_critic,
)  # fmt: skip
from trainer.prompts import encode_prompts
from trainer.reward_model import LMForRewardModel

__all__ = [
    "REPO_ROOT", "CosineSchedule", "Interrupted", "Interrupts", "LMForRewardModel", "Logger", "SkipBatchSampler",
    "SkipGuard", "all_reduce_sum", "any_rank", "autocast_context", "check_same_weights", "encode_prompts", "get_lr",
    "get_model_params", "global_share", "grad_sync", "init_distributed_mode", "init_model", "is_main_process",
    "lm_checkpoint", "load_resumed_model", "load_roles", "load_tokenizer", "open_loader", "open_optimizer",
    "open_scaler",
    "optimizer_step",
    "rank_and_world", "row_is_real", "run_main", "save_weights", "setup_seed", "shard_epoch", "shuffle_within_groups",
    "start_critic", "start_process", "unwrap_model", "weights_path", "wrap_ddp",
]  # fmt: skip

# glibc's mallopt: the numbers of two options (malloc.h) and the largest values that they take
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST_MMAP_THRESHOLD = 2**31 - 1, 32 << 20
SHUFFLE_STREAM = 5  # first word of random keys, like those of run_state.py, samples.py and self_check.py


# ---------------------------------------------------------------------------------------------- seeds and schedule
def setup_seed(seed: int) -> None:
    """Seed python, numpy and torch, and ask cuDNN for its deterministic kernels."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step: given back, it is mapped and cleared anew, a twentieth of a step.

    Does nothing with another C library, or where the environment sets up glibc's malloc itself.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, NEVER)


def start_process(args) -> str:
    """Threads, process group and seeds as the flags say; gives the device, and settles what depends on it."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = init_distributed_mode(args.device)
    # a GPU needs large products to be busy, a CPU is at its limit with small ones
    if getattr(args, "micro_batch_tokens", 0) is None:
        args.micro_batch_tokens = 1024 if device == "cpu" else 8192
    if device == "cpu":
        keep_freed_memory()
    setup_seed(args.seed)
    return device


def get_lr(current_step: int, total_steps: int, lr: float) -> float:
    """MiniMind's cosine decay from `lr` at step 0 to 0.1 · lr at `total_steps`, and 0.1 · lr after it."""
    # Differs from MiniMind: clamped, since a cosine past its end rises again.
    progress = min(current_step / max(total_steps, 1), 1.0)
    return lr * (0.1 + 0.45 * (1.0 + math.cos(math.pi * progress)))


class CosineSchedule:
    """`get_lr` applied to an optimizer once an optimizer step; a function of the step count, so resume is exact.

    The rate never rises: a resumed run with more epochs plans a longer cosine, but stays at or below the rate reached.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: float, total_steps: int):
        self.optimizer, self.learning_rate, self.total_steps = optimizer, learning_rate, total_steps
        self.steps_done, self.ceiling = 0, 1.0
        self._apply()

    def _apply(self) -> None:
        self.ceiling = min(self.ceiling, get_lr(self.steps_done, self.total_steps, 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * self.ceiling

    def step(self) -> None:
        self.steps_done += 1
        self._apply()

    @property
    def lr(self) -> float:
        return self.learning_rate * self.ceiling

    def state_dict(self) -> dict:
        return {"steps_done": self.steps_done, "ceiling": self.ceiling}

    def load_state_dict(self, state: dict) -> None:
        self.steps_done, self.ceiling = int(state["steps_done"]), float(state["ceiling"])
        self._apply()


# ---------------------------------------------------------------------------------------------- the update
def autocast_context(device: str, dtype: str):
    """Mixed precision for `--dtype` on this device; weights stay float32, so float32 means no autocast at all."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device_type=device.partition(":")[0], dtype=getattr(torch, dtype))


def open_optimizer(model: nn.Module, rate: float, total_steps: int, resumed: dict | None, prefix: str = ""):
    """(AdamW of a model, its schedule over `total_steps` optimizer steps), with the state a resume file holds of them
    under {prefix}optimizer and {prefix}scheduler."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)  # one kernel, on a CPU a third of the time
    schedule = CosineSchedule(optimizer, rate, total_steps)
    if resumed:
        optimizer.load_state_dict(resumed[f"{prefix}optimizer"])
        schedule.load_state_dict(resumed[f"{prefix}scheduler"])
    return optimizer, schedule


def open_scaler(device: str, dtype: str, resumed: dict | None) -> torch.amp.GradScaler:
    """The loss scaler that float16 needs, off for other dtypes."""
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=dtype == "float16")
    if resumed:
        scaler.load_state_dict(resumed["scaler"])
    return scaler


def clear_gradients(optimizers: list[torch.optim.Optimizer]) -> None:
    """Drop what has been gathered of the next step's gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def optimizer_step(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], schedules: list[CosineSchedule], *,
                   grad_clip: float, scaler: torch.amp.GradScaler) -> tuple[list[float], bool]:
    """Clip each model's gradient to norm `grad_clip` (0 = never), step all optimizers and schedules, clear gradients.

    Returns: (gradient norms before clipping, whether the step was taken). A non-finite norm in any model skips the step
    for all of them; under DDP every rank sees the same gradients and decides alike.
    """
    norms = []
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), grad_clip if grad_clip > 0 else math.inf))
    norms = torch.stack(norms).tolist()
    taken = all(math.isfinite(norm) for norm in norms)
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        if taken:
            scaler.step(optimizer)
            schedule.step()
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return norms, taken


class SkipGuard:
    """Counts optimizer steps skipped for a non-finite loss or gradient, and ends the run after too many in a row."""

    def __init__(self, limit: int):
        self.limit, self.in_a_row = limit, 0

    def record(self, taken: bool) -> None:
        """Raises RuntimeError after `limit` skipped steps in a row; the last checkpoint stays as it is."""
        self.in_a_row = 0 if taken else self.in_a_row + 1
        if self.in_a_row >= self.limit:
            raise RuntimeError(f"{self.in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                               "(--max_skipped_steps): lower --learning_rate, or try --dtype bfloat16 or float32; the "
                               "last checkpoint is untouched")


def shuffle_within_groups(rewards: Tensor, keys: list[tuple[int, ...]]) -> Tensor:
    """rewards [B·G] with places changed within each of the B groups, as that group's key alone says: the same on any
    number of ranks."""
    groups = rewards.view(len(keys), -1)
    draws = [np.random.Generator(np.random.Philox(np.random.SeedSequence((SHUFFLE_STREAM, *key)))) for key in keys]
    order = torch.from_numpy(np.stack([draw.permutation(groups.shape[1]) for draw in draws]))
    return groups.gather(1, order.to(rewards.device)).flatten()


# ---------------------------------------------------------------------------------------------- stopping
class Interrupted(BaseException):
    """Ctrl-C or SIGTERM, to be answered with a checkpoint; not an Exception, so that no handler swallows it."""


class Interrupts:
    """Turns SIGINT and SIGTERM into a save at a moment when the weights are those of a whole step.

    In a single process the signal interrupts rollout and scoring at once (`Interrupted` is raised), but waits for the
    end of a `deferred()` block, where weights change. With several ranks it only sets `signal`, and the ranks agree at
    the end of the step: one that left early would leave the others waiting. A second signal ends the process at once.
    """

    def __init__(self):
        self.signal, self._deferred = None, rank_and_world()[1] > 1
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number, frame) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        if not self._deferred:
            raise Interrupted(self.exit_status)

    @contextlib.contextmanager
    def deferred(self):
        """A block that is finished before the signal is answered."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before
        if self.signal is not None and not self._deferred:
            raise Interrupted(self.exit_status)

    def stop_together(self, device: str) -> bool:
        """True on every rank once a signal reached one of them."""
        if any_rank(self.signal is not None, device):
            self.signal = self.signal or signal.SIGTERM
            return True
        return False

    @property
    def exit_status(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, as a shell reports them."""
        return 128 + self.signal


def run_main(main) -> None:
    """Run a script's `main()`: a user's slip ends in one line and status 1, without a traceback.

    Set MINIMIND_TRACEBACK=1 to see where the error was raised.
    """
    status = 0
    try:
        status = main() or 0
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("MINIMIND_TRACEBACK") == "1":
            traceback.print_exc()
        rank, world = rank_and_world()
        where = f"error on rank {rank}" if world > 1 else "error"
        words = " ".join(str(error).split())
        print(f"{where}: {words} (MINIMIND_TRACEBACK=1 shows where)", file=sys.stderr, flush=True)
        status = 1
    except (KeyboardInterrupt, Interrupted) as stop:  # while loading, or after all is saved
        status = stop.args[0] if stop.args else 130
    if dist.is_available() and dist.is_initialized() and status == 0:
        dist.destroy_process_group()
    sys.exit(status)
