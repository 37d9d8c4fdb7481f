"""What one RL step costs: a textbook's step and this project's, on the same weights, prompts and answers.

    python scripts/benchmark.py                                   GRPO, 512 x 8, 2 prompts x 6 answers, on this machine
    python scripts/benchmark.py --lengths varied --threads 2      answers of 1/8 … 1 of the longest
    python scripts/benchmark.py --algo ppo --json ppo.json

First it proves that both give the same tokens, log-probs, rewards, losses and gradients (1e-5 in float32). Then it
takes turns: textbook, this project, limits; and again. Medians are printed. The limit is the time of the same matrix
products alone (one F.linear a matrix, on every real token once, nothing around them); best, their time in the fastest
of several ways to ask for them. The textbook step is benchmarks/textbook.py.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.arguments import (
    FlagParser, at_least_two, device_name, model_width, non_negative_int, positive_int, seed_number, switch,
)  # fmt: skip

MOST_POSITIONS = 32768
LONGEST_TIMES = 8  # --scale decodes answers up to this many times as long


def parse_args(argv=None) -> argparse.Namespace:
    """The flags. Exits with status 2 on a wrong one."""
    parser = FlagParser("Time and memory of one RL step, against a textbook's step and the machine's limits.")
    add = parser.group("what to measure")
    add("--algo", ["grpo", "ppo"], "grpo", "which script's step")
    add("--lengths", ["fixed", "varied"], "fixed", "fixed = every answer has max_gen_len tokens, varied = spread "
        "evenly over 1/8 … 1 of it")
    add("--textbook", switch, 1, "0 = leave the textbook step out, and the proof that both are equal with it")
    add("--memory", switch, 1, "1 = measure peak memory too, on a CPU in processes of their own")
    add("--scale", switch, 0, "1 = also time twice the prompts, twice the answers, and decoding of answers 4 and 8 "
        "times as long")
    add("--repeats", positive_int, 3, "turns; medians over them are printed")
    add("--json", str, None, "file for everything that was measured; None = print only")

    add = parser.group("sizes")
    add("--hidden_size", model_width, 512, "width of the model, a multiple of 16")
    add("--num_hidden_layers", positive_int, 8, "layers of the model")
    add("--use_moe", switch, 0, "1 = mixture of experts")
    add("--vocab_size", positive_int, 6400, "rows of the embedding, at least the tokenizer's")
    add("--batch_size", positive_int, 2, "prompts, B")
    add("--num_generations", at_least_two, None, "grpo: answers to each prompt, G; None = 6")
    add("--prompt_len", positive_int, 64, "tokens of each prompt, P")
    add("--max_gen_len", positive_int, 128, "tokens of the longest answer, R")

    add = parser.group("how to run")
    add("--device", device_name, "auto", "auto (CUDA where there is one), cpu, cuda or cuda:K")
    add("--dtype", ["float32", "bfloat16", "float16"], "float32", "precision of forward passes; weights stay float32")
    add("--threads", non_negative_int, 0, "CPU threads; 0 = torch's choice, one a core")
    add("--seed", seed_number, 0, "fixes weights, prompts and sampling")
    add("--use_compile", switch, 0, "1 = this project's step with torch.compile")
    add("--micro_batch_tokens", non_negative_int, None, "as in the training scripts; None = their default")
    add("--gradient_checkpointing", switch, None, "as in the training scripts; None = their default")
    args = parser.parse_args(argv)
    if args.algo == "ppo" and args.num_generations is not None:
        parser.error("argument --num_generations: PPO samples one answer a prompt; leave it out with --algo ppo")
    longest = args.prompt_len + args.max_gen_len * (LONGEST_TIMES if args.scale else 1)
    if longest > MOST_POSITIONS:
        parser.error(f"argument --prompt_len/--max_gen_len: {longest} tokens are more than the model's "
                     f"{MOST_POSITIONS} positions; lower one of them")  # fmt: skip
    if args.json and not Path(args.json).resolve().parent.is_dir():
        parser.error(f"argument --json: there is no folder {Path(args.json).resolve().parent}")
    args.num_generations = 1 if args.algo == "ppo" else args.num_generations or 6
    return args


def main(argv=None) -> int:
    """Measure and print; gives the process's exit status."""
    args = parse_args(argv)
    from benchmarks.report import print_report, write_json
    from benchmarks.turns import measure

    result = measure(args)
    print_report(result)
    if args.json:
        write_json(result, Path(args.json))
    return 0


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes
    from trainer.trainer_utils import run_main

    run_main(main)
