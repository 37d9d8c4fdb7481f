"""What was measured, as text and as a JSON file."""

import json
import os
import statistics
from pathlib import Path

PHASES = ("decode", "old log-probs", "reference", "values", "reward", "forward", "backward", "optimizer", "other")


def row(cells: list[str]) -> str:
    return f"{cells[0]:<14}" + "".join(f"{cell:>11}" for cell in cells[1:])


def phase_table(result: dict) -> list[str]:
    """Seconds and answer tokens a second of each phase, for each side; ratios to the textbook and to both limits."""
    sides, limits, tokens = result["phases"], result["limits"], result["tokens"]["answers"]
    product, textbook = sides["this project"], sides.get("textbook", {})
    lines = [row(["phase", "textbook s", "tokens/s", "project s", "tokens/s", "ratio", "limit s", "x limit", "best s",
                  "x best"])]  # fmt: skip
    for phase in (*PHASES, "step"):
        mine, theirs = product.get(phase, 0.0), textbook.get(phase, 0.0)
        if not (mine or theirs):
            continue
        cells = [phase]
        for seconds in (theirs, mine):
            cells += [f"{seconds:.3f}", f"{tokens / seconds:.0f}"] if seconds else ["-", "-"]
        cells.append(f"{theirs / mine:.2f}" if theirs and mine else "-")
        for limit in (limits[name].get(phase, 0.0) for name in ("phases", "best_phases")):
            cells += [f"{limit:.3f}", f"{mine / limit:.2f}"] if limit and mine else ["-", "-"]
        lines.append(row(cells))
    return lines


def paired_ratio(steps: dict) -> str:
    """How many times longer the textbook took, turn by turn."""
    ratios = [a / b for a, b in zip(steps["textbook"], steps["this project"], strict=True)]
    return (f"step: the textbook takes {statistics.median(ratios):.2f} times as long (median of {len(ratios)} turns, "
            f"{min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip


def token_step_line(result: dict) -> str:
    """Milliseconds of one token step, of its products alone, and of reading the weights once."""
    limits, tokens = result["limits"], result["tokens"]
    sides = ", ".join(f"{name} {1000 * phases['decode'] / tokens['longest']:.1f} ms"
                      for name, phases in result["phases"].items())  # fmt: skip
    alone, best = (1000 * limits[name][tokens["rows"]] for name in ("token_step", "best_token_step"))
    return (f"token step (decode / longest answer): {sides}; the products alone {alone:.1f} ms at "
            f"{tokens['rows']} rows (limit: one F.linear a matrix), {best:.1f} ms in the fastest way (best); reading "
            f"{limits['weight_bytes'] / 1e6:.0f} MB of weights once {1000 * limits['weights_read']:.1f} ms at the "
            f"{limits['copy_bandwidth'] / 1e9:.1f} GB/s of a copy")  # fmt: skip


def memory_lines(memory: dict) -> list[str]:
    peaks = memory["bytes"]
    found = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in peaks.items())
    share = f" ({100 * peaks['this project'] / peaks['textbook']:.0f}%)" if "textbook" in peaks else ""
    return [f"peak memory above weights and optimizer: {found}{share}", f"  measured: {memory['how']}"]


def scaling_lines(scaling: dict) -> list[str]:
    lines = [f"twice the {name}: {ratio:.2f} times the step" for name, ratio in scaling["twice"].items()]
    for entry in scaling["lengths"]:
        lines.append(f"answers of {entry['max_gen_len']}: {1000 * entry['token_step']:.1f} ms a token step, of which "
                     f"attention alone takes {1000 * entry['attention']:.1f} ms")  # fmt: skip
    return lines


def report_lines(result: dict) -> list[str]:
    """Everything, in the order in which it is read."""
    settings, agreement, tokens = result["settings"], result["agreement"], result["tokens"]
    lines = [
        f"{settings['algo']}, {settings['hidden_size']} x {settings['num_hidden_layers']}, {tokens['rows']} answers to "
        f"{settings['batch_size']} prompts of {settings['prompt_len']} tokens, {tokens['answers']} answer tokens "
        f"({settings['lengths']}, longest {tokens['longest']}), {settings['dtype']}, {settings['device_name']}, "
        f"{settings['threads']} threads, torch {settings['torch']}"
    ]
    if agreement:
        lines.append(f"equal: {agreement['tokens']} tokens; log-probs to {agreement['logp_error']:.1e}, rewards to "
                     f"{agreement['reward_error']:.1e}, losses to {agreement['loss_error']:.1e}, gradients to "
                     f"{agreement['gradient_error']:.1e}")  # fmt: skip
    lines += ["", *phase_table(result), ""]
    if "textbook" in result["steps"]:
        lines.append(paired_ratio(result["steps"]))
    lines.append(token_step_line(result))
    if result["mfu"]:
        lines.append(f"MFU {100 * result['mfu']:.1f}%: {result['flops'] / 1e12:.2f} teraflops a step, by the chip's "
                     "peak in bfloat16")  # fmt: skip
    if result["memory"]:
        lines += memory_lines(result["memory"])
    if result["scaling"]:
        lines += scaling_lines(result["scaling"])
    return lines


def print_report(result: dict) -> None:
    print("\n".join(report_lines(result)), flush=True)


def write_json(result: dict, path: Path) -> None:
    """The whole result, written atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
