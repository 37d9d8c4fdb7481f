"""The order of measurement: build, prove equal, take turns, scale, weigh."""

import contextlib
import signal
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.check import check
from benchmarks.limits import attention_seconds, machine_limits, peak_flops, step_flops
from benchmarks.memory import HOW, peak_on_cuda, peaks_on_cpu
from benchmarks.product import Product, Work, take_step
from benchmarks.stopwatch import Stopwatch
from benchmarks.textbook import Textbook
from trainer.trainer_utils import Logger

LONGER_ANSWERS = (1, 4, 8)  # times --max_gen_len
SHORTER = 8


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each name over the rows; a name that a row lacks is 0 there."""
    names = {name: None for row in rows for name in row}
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def timed_step(product: Product, side, work: Work) -> dict[str, float]:
    """Seconds by phase of one step from the starting weights."""
    product.restore()
    watch = Stopwatch(product.device)
    take_step(side, work, watch)
    return watch.stop()


def take_turns(product: Product, sides: list, work: Work, repeats: int) -> tuple[dict, dict]:
    """({side: its steps' seconds by phase, in order}, medians of the limits): ABL, ABL, …"""
    steps: dict[str, list] = {side.name: [] for side in sides}
    limits = []
    for _ in range(repeats):
        for side in sides:
            steps[side.name].append(timed_step(product, side, work))
        limits.append(machine_limits(product, work))
    names = [name for name, value in limits[0].items() if isinstance(value, dict)]
    tables = {name: medians([row.pop(name) for row in limits]) for name in names}
    return steps, {**tables, **medians(limits)}


def scaling(product: Product, repeats: int) -> dict:
    """How seconds grow with prompts, with answers, and with the length of answers (decoding alone)."""
    sizes = {"prompts": {"prompts": 2 * product.args.batch_size}}
    if product.algo == "grpo":
        sizes["answers"] = {"copies": 2 * product.args.num_generations}
    works = {"once": product.work(), **{name: product.work(**size) for name, size in sizes.items()}}
    rows = [{name: timed_step(product, product, work)["step"] for name, work in works.items()} for _ in range(repeats)]
    seconds = medians(rows)
    lengths = []
    for times in LONGER_ANSWERS:
        work = product.work(longest=times * product.args.max_gen_len)
        columns = product.args.max_seq_len + sum(work.lengths) // (2 * len(work.lengths))
        watch = Stopwatch(product.device)
        watch.switch("decode")
        product.decode(work)
        lengths.append({"max_gen_len": work.args.max_gen_len, "token_step": watch.stop()["step"] / max(work.lengths),
                        "attention": attention_seconds(product, len(work.lengths), columns)})  # fmt: skip
    return {"seconds": seconds, "twice": {name: seconds[name] / seconds["once"] for name in sizes}, "lengths": lengths}


def peaks(args, product: Product, sides: list, work: Work) -> dict | None:
    """{"bytes": {side: peak}, "how": …}; None where it cannot be told."""
    if not product.device.startswith("cuda"):
        found = peaks_on_cpu(args, [side.name for side in sides])
        return found and {"bytes": found, "how": HOW["cpu"]}
    return {"bytes": {side.name: peak_on_cuda(product, side, work) for side in sides}, "how": HOW["cuda"]}


@contextlib.contextmanager
def machine_as_it_was() -> Iterator[None]:
    """Afterwards the signal handlers and the thread count that a run sets are as before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def prove(product: Product, textbook: Textbook) -> tuple[Work, dict]:
    """(the work to time, how closely both agree), on answers of an eighth if the GPU has not the memory for all in
    float32. Raises: as `check`."""
    longest = product.args.max_gen_len
    try:
        return check(product, textbook, longest)
    except torch.OutOfMemoryError:
        product.restore()
    torch.cuda.empty_cache()
    return product.work(), check(product, textbook, max(1, longest // SHORTER))[1]


def warm_up(product: Product, sides: list, work: Work) -> list:
    """The sides that can do the work, after an untimed step each: kernels are chosen and loaded on a first call.

    Raises: torch.OutOfMemoryError if it is this project's step that has not the memory.
    """
    able = []
    for side in sides:
        try:
            timed_step(product, side, work)
            able.append(side)
        except torch.OutOfMemoryError as error:
            if side is product:
                raise
            Logger(f"the {side.name} step runs out of memory at this size and is left out: {str(error).split('. ')[0]}")
            torch.cuda.empty_cache()
    return able


def measure(args) -> dict:
    """Everything that scripts/benchmark.py prints, as plain values.

    Raises: RuntimeError if textbook and product do not give the same.
    """
    with tempfile.TemporaryDirectory() as folder, machine_as_it_was():
        product = Product(args, Path(folder))
        sides, agreement = [product], None
        work = product.work()
        if args.textbook:
            textbook = Textbook(product, args.prompt_len + args.max_gen_len)
            work, agreement = prove(product, textbook)
            sides.insert(0, textbook)
        if not agreement or args.dtype != "float32":
            sides = warm_up(product, sides, work)
        steps, limits = take_turns(product, sides, work, args.repeats)
        middle = {name: medians(rows) for name, rows in steps.items()}
        device, peak = peak_flops(product.device)
        flops = step_flops(product, work)
        return {
            "settings": {**vars(args), "device": product.device, "device_name": device,
                         "threads": torch.get_num_threads(), "torch": torch.__version__},
            "agreement": agreement,
            "tokens": {"prompts": args.batch_size * args.prompt_len, "answers": sum(work.lengths),
                       "longest": max(work.lengths), "rows": len(work.lengths)},
            "phases": middle, "steps": {name: [row["step"] for row in rows] for name, rows in steps.items()},
            "limits": limits, "flops": flops,
            "mfu": flops / peak / middle[product.name]["step"] if peak and args.dtype != "float32" else None,
            "memory": peaks(args, product, sides, work) if args.memory else None,
            "scaling": scaling(product, args.repeats) if args.scale else None,
        }  # fmt: skip
