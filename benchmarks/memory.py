"""Peak memory of one step above what was there before it: weights, optimizer states, libraries."""

import concurrent.futures
import gc
import multiprocessing
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch

from benchmarks.product import Product, take_step
from benchmarks.stopwatch import Stopwatch
from benchmarks.textbook import Textbook

SIDES = ("textbook", "this project")
WARM_UP_TOKENS = 8  # answers of the step that makes the optimizer's states and loads the kernels
# Blocks of 64 KiB and more go back to the system when they are freed, and one arena serves all threads: resident memory
# is then that of living tensors. By default glibc keeps freed blocks for later, more of them the more sizes there were.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
HOW = {
    "cpu": "each side in a fresh process after a short step; largest resident set (VmHWM) of the step, less what was "
    "resident before it; malloc gives freed blocks back at once",
    "cuda": "torch.cuda.max_memory_allocated of the step, less what was allocated before it",
}


def build_side(args, folder: Path, name: str):
    """(the product, the side of this name)."""
    product = Product(args, folder)
    longest = args.prompt_len + max(args.max_gen_len, WARM_UP_TOKENS)
    return product, product if name == product.name else Textbook(product, longest)


def resident(field: str) -> int:
    """Bytes that Linux reports of this process: VmRSS, what is resident now, or VmHWM, the most so far."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_on_cpu(args, name: str) -> int:
    """Bytes; to be called in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        product, side = build_side(args, Path(folder), name)
        take_step(side, product.work(longest=WARM_UP_TOKENS), Stopwatch("cpu"))
        product.restore()
        work = product.work()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again from VmRSS
        before = resident("VmRSS")
        take_step(side, work, Stopwatch("cpu"))
        return resident("VmHWM") - before


def peak_on_cuda(product: Product, side, work) -> int:
    """Bytes, in this process; the side has taken a step before."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_step(side, work, Stopwatch(product.device))
    product.restore()
    return torch.cuda.max_memory_allocated() - before


def peaks_on_cpu(args, names: list[str]) -> dict[str, int] | None:
    """{side: bytes}; None where the system does not tell (it takes Linux and its /proc)."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    peaks = {}
    for name in names:
        with mock.patch.dict(os.environ, MALLOC), concurrent.futures.ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")
        ) as process:
            peaks[name] = process.submit(peak_on_cpu, args, name).result()
    return peaks
