"""Make the starter: prompts, tokenizer, supervised model and reward model, all from seeds written in this repository.

    python scripts/make_starter.py                              # everything, into the repository
    python scripts/make_starter.py --stage data --out /tmp/new  # only the prompts, elsewhere, to compare

Stages build on each other and read what earlier ones wrote under --out:
    data       dataset/rlaif_starter.jsonl and rlaif_starter_heldout.jsonl
    tokenizer  model/tokenizer.json and tokenizer_config.json
    sft        model/starter/starter_sft_128.pth        (needs the tokenizer)
    rm         model/starter/reward_model/              (needs tokenizer and sft)

What is reproducible: data byte for byte everywhere, the tokenizer byte for byte with the releases of `tokenizers` tried
(0.22.1 and 0.23.3). Weights come out bit for bit only with the same torch build, processor kind and --threads;
elsewhere float sums round differently, training amplifies it, and accuracies come out some points apart.
"""

import argparse
import sys
import time
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))

STAGES = ("data", "tokenizer", "sft", "rm")
TRAIN_PROMPTS, TRAIN_SEED = 1440, 101
HELD_OUT_PROMPTS, HELD_OUT_SEED = 360, 202
SAMPLES = 4  # answers a held-out prompt when measuring sampled accuracy

# Where each thing lies below the root: the repository, or --out.
PROMPTS = "dataset/rlaif_starter.jsonl"
HELD_OUT = "dataset/rlaif_starter_heldout.jsonl"
TOKENIZER = "model"
SFT_WEIGHTS = "model/starter/starter_sft_128.pth"
REWARD_MODEL = "model/starter/reward_model"


def held_out_tasks():
    """The held-out tasks, in the order of their file."""
    from dataset.starter_tasks import make_tasks

    return make_tasks(HELD_OUT_PROMPTS, HELD_OUT_SEED, held_out=True)


def make_data(root):
    """Write both prompt files."""
    from dataset.starter_tasks import jsonl, make_tasks
    from scripts.train_tokenizer import write_text

    write_text(root / PROMPTS, jsonl(make_tasks(TRAIN_PROMPTS, TRAIN_SEED, held_out=False)))
    write_text(root / HELD_OUT, jsonl(held_out_tasks()))
    print(f"  {TRAIN_PROMPTS} prompts to train on, {HELD_OUT_PROMPTS} held out")


def make_tokenizer(root):
    """Train and write the tokenizer."""
    from scripts.train_tokenizer import STARTER_VOCAB, starter_texts, write_tokenizer

    tokenizer = write_tokenizer(starter_texts(), STARTER_VOCAB, root / TOKENIZER)
    print(f"  {tokenizer.get_vocab_size()} entries")


def load_tokenizer(root):
    """The tokenizer under the root. Raises FileNotFoundError saying which stage makes it."""
    from transformers import AutoTokenizer

    if not (root / TOKENIZER / "tokenizer.json").is_file():
        raise FileNotFoundError(f"no tokenizer in {root / TOKENIZER}: run --stage tokenizer with the same --out first")
    return AutoTokenizer.from_pretrained(root / TOKENIZER)


def make_sft(root):
    """Train, round to half precision, measure and write the supervised model."""
    import torch

    from scripts.starter import sft

    tokenizer = load_tokenizer(root)
    state = sft.half_state(sft.train(tokenizer))
    path = root / SFT_WEIGHTS
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
    model, tasks = sft.from_half_state(state), held_out_tasks()
    print(f"  {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    for name, temperature, samples in (("greedy", 0.0, 1), ("sampled at 0.8", 0.8, SAMPLES)):
        found = sft.accuracy(model, tokenizer, tasks, temperature, samples)
        kinds = "  ".join(f"{kind} {share:.0%}" for kind, share in found["by_kind"].items())
        print(f"  held out, {name}: {found['accuracy']:.1%} right, standard error {found['standard_error']:.1%}; "
              f"{found['mean_tokens']:.1f} tokens on average, {found['max_tokens']} at most")
        print(f"    {kinds}")


def make_reward_model(root):
    """Train, write, load back as the training scripts do, and measure the reward model."""
    import torch

    from scripts.starter import reward, reward_check, sft

    tokenizer = load_tokenizer(root)
    if not (root / SFT_WEIGHTS).is_file():
        raise FileNotFoundError(f"no {root / SFT_WEIGHTS}: run --stage sft with the same --out first")
    state = torch.load(root / SFT_WEIGHTS, map_location="cpu", weights_only=True)
    sft_model = sft.from_half_state(state)
    reward.save(reward.train(tokenizer, sft_model, state), root / TOKENIZER, root / REWARD_MODEL)
    for line in reward_check.report(root / REWARD_MODEL, tokenizer, sft_model, held_out_tasks()):
        print(f"  {line}")


def print_sizes(root):
    """One line for each file made, and the sum."""
    total = 0
    for name in (PROMPTS, HELD_OUT, TOKENIZER, SFT_WEIGHTS, REWARD_MODEL):
        paths = [root / name] if (root / name).is_file() else sorted((root / name).glob("*.*"))
        for path in (path for path in paths if path.suffix in (".jsonl", ".json", ".pth", ".safetensors")):
            total += path.stat().st_size
            print(f"  {path.relative_to(root)}  {path.stat().st_size / 1e6:.2f} MB")
    print(f"  together {total / 1e6:.2f} MB")


def parse_args(argv=None):
    """The command line, as a namespace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all", help="what to make (default: all of it)")
    parser.add_argument("--out", default=str(REPO_ROOT), metavar="DIR",
                        help="root folder to write under, laid out like the repository, files there are replaced "
                             "(default: the repository)")
    parser.add_argument("--threads", type=int, default=1, metavar="N",
                        help="torch threads; the weights' last bits depend on it (default: 1, as committed)")
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: expected at least 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    root = Path(args.out).expanduser().resolve()
    makers = dict(zip(STAGES, (make_data, make_tokenizer, make_sft, make_reward_model), strict=True))
    if args.stage in ("sft", "rm", "all"):
        import torch

        torch.set_num_threads(args.threads)
    try:
        for stage in STAGES if args.stage == "all" else (args.stage,):
            print(f"{stage}:", flush=True)
            started, cpu = time.monotonic(), time.process_time()
            makers[stage](root)
            print(f"  took {time.monotonic() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU", flush=True)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"make_starter: {error}")
    print_sizes(root)


if __name__ == "__main__":
    main()
