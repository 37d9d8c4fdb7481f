"""Processes: who this rank is, how ranks agree on numbers, decisions and weights. One process is one rank.

A single process runs the same code: its sums are its own, and nothing is exchanged.
"""

import contextlib
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def rank_and_world() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_main_process() -> bool:
    """True on rank 0 and in a single process."""
    return rank_and_world()[0] == 0


def Logger(content) -> None:
    """Print one line on the main process, above a running progress bar (MiniMind's name)."""
    if is_main_process():
        from tqdm import tqdm

        tqdm.write(str(content), file=sys.stdout)
        sys.stdout.flush()


def init_distributed_mode(device: str = "auto") -> str:
    """Join the process group that torchrun describes in the environment, if any; gives this rank's device.

    Args: device "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:K".
    Returns: "cpu" or "cuda:K". Under torchrun each local rank takes its own GPU and talks nccl; with `--device cpu`, or
    where there is no GPU, ranks talk gloo.
    Raises: ValueError for a device this machine does not have.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: expected auto, cpu, cuda or cuda:K")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no CUDA GPU here; use --device cpu")
    if "RANK" in os.environ:
        if kind == "cuda":
            device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group(backend="nccl" if kind == "cuda" else "gloo")
    elif kind == "cuda":
        device = device if ":" in device else "cuda:0"
        torch.cuda.set_device(device)
    return device


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum of `values` over all ranks, as a new tensor without gradient; `values` itself in a single process."""
    if rank_and_world()[1] == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def all_reduce_max(values: Tensor) -> Tensor:
    """The largest of `values` over all ranks, entry by entry, as a new tensor; `values` itself in a single process."""
    if rank_and_world()[1] == 1:
        return values
    largest = values.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def any_rank(flag: bool, device: str) -> bool:
    """True on every rank if `flag` is true on one of them: a decision that all ranks must take alike."""
    if rank_and_world()[1] == 1:
        return flag
    return bool(all_reduce_sum(torch.tensor(float(flag), device=device)) > 0)


def global_share(divisor: Tensor, counted: Tensor) -> Tensor:
    """Factor that turns this rank's mean over `divisor` things into its part of the mean over all that is `counted`.

    DDP averages gradients over W ranks, so a rank's mean is weighted by W · divisor / (sum of `counted` over ranks):
    the result equals one process that held everything, however unevenly tokens or rows lie on the ranks. Zero if
    nothing counts anywhere. Without other ranks, and if all of `divisor` counts, it is 1.
    """
    total = all_reduce_sum(counted.to(torch.float32))
    return rank_and_world()[1] * divisor * (total > 0) / total.clamp(min=1.0)


def row_is_real(prompts: int, num_generations: int, device: str) -> Tensor:
    """bool [N] for this rank's rows of a step that has `prompts` prompts on all ranks together; False = filled in.

    Rank r holds prompts r, r + W, …; where they do not divide, its last one is a copy that must not count.
    """
    rank, world = rank_and_world()
    held, real = math.ceil(prompts / world), len(range(rank, prompts, world))
    return (torch.arange(held, device=device) < real).repeat_interleave(num_generations)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The bare model under DistributedDataParallel and torch.compile."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)


def wrap_ddp(model: nn.Module, device: str) -> nn.Module:
    """`model` under DDP where there are several ranks (its constructor copies rank 0's weights to all), else itself."""
    if rank_and_world()[1] == 1:
        return model
    device_ids = [torch.device(device).index] if device.startswith("cuda") else None
    return DistributedDataParallel(model, device_ids=device_ids)


def grad_sync(model: nn.Module, sync: bool):
    """Context in which backward all-reduces gradients only if `sync`: once an accumulation window, not once a batch."""
    return contextlib.nullcontext() if sync or not isinstance(model, DistributedDataParallel) else model.no_sync()


def check_same_weights(models: dict[str, nn.Module], when: str) -> None:
    """Prove that all ranks hold bitwise equal weights; a few numbers a model are exchanged, not the weights.

    Raises: RuntimeError naming the model and the ranks that differ.
    """
    rank, world = rank_and_world()
    if world == 1:
        return
    for name, model in models.items():
        # Bit patterns summed as integers: any changed bit changes the sum, and no rounding can hide it.
        bits = [p.detach().float().contiguous().view(torch.int32).to(torch.int64) for p in model.parameters()]
        plain = torch.stack([b.sum() for b in bits])
        weighted = torch.stack([(b.flatten() * torch.arange(1, b.numel() + 1, device=b.device)).sum() for b in bits])
        mine = torch.stack([plain, weighted])
        theirs = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(theirs, mine)
        different = [r for r in range(world) if not torch.equal(theirs[r], theirs[0])]
        if different:
            raise RuntimeError(f"{when}: the weights of {name} on rank {different} differ from rank 0's; "
                               "the ranks trained apart, so this run's numbers cannot be trusted")
