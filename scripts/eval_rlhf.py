"""How good are these weights? Accuracy, pass@k, rewards, length and KL on held-out prompts, alone or against others.

    python scripts/eval_rlhf.py --weights out/grpo_128.pth
    python scripts/eval_rlhf.py --weights out/grpo_128.pth --baseline model/starter/starter_sft_128.pth --json eval.json

Measures as the training scripts do (--eval_interval), with the same prompts and seeds. A and B draw the same random
numbers, so that every answer of A has its counterpart. Sizes are read off the weights.
"""

import argparse
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))

from trainer.arguments import (  # noqa: E402
    STARTER_DEFAULTS, STARTER_DIR, FlagParser, device_name, fraction, non_negative_float, non_negative_int,
    positive_float, positive_fraction, positive_int, seed_number, settle_weights, switch,
)  # fmt: skip
from trainer.reward_plugins import add_reward_flags, needs_reward_model  # noqa: E402

STARTER = {"data": STARTER_DEFAULTS["eval_data_path"], "answer_reward": 4.0,
           **{name: STARTER_DEFAULTS[name] for name in ("reward_model_path", "max_seq_len", "max_gen_len", "threads",
                                                        "thinking_ratio", "system_ratio")}}  # fmt: skip


def whole_numbers(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between."""
    return sorted({positive_int(part.strip()) for part in text.split(",")})


def build_parser() -> FlagParser:
    """The flags; without --data their defaults are the starter's."""
    parser = FlagParser("Measure weights on held-out prompts: accuracy, pass@k, reward by part, length, cut answers, "
                        "KL, and wins against other weights on the same prompts and seeds.")
    add = parser.group("what is measured")
    add("--weights", str, None, "A: the .pth to measure, whose sizes are read off it, or a folder of "
        "transformers such as out/grpo-hf")
    add("--baseline", str, None, "B: another, to compare it with; None = A alone")
    add("--reference", str, None, "another, that the KL is measured to; None = B, and no KL without B")
    add("--data", str, None, "JSONL of held-out prompts; without it, the starter's prompts with the starter's settings")
    add("--starter", bool, False, "the starter's settings also with --data; --weights is then the starter's own model "
        "unless given")
    add("--max_prompts", non_negative_int, 0, "prompts answered, from the file's start; 0 = all")
    add("--tokenizer_path", str, str(REPO_ROOT / "model"), "folder of the tokenizer the weights were trained with; "
        "that of --weights, where this is a folder, unless given")
    add("--trust_remote_code", switch, 0, "1 = run Python code that a model folder brings along")

    add = parser.group("how prompts are answered")
    add("--samples", positive_int, 4, "sampled answers a prompt, besides the greedy one")
    add("--pass_k", whole_numbers, None, "k of pass@k, with commas between, each at most --samples; None = 1, 2, 4 "
        "and so on up to it")
    add("--temperature", positive_float, 0.8, "sampling temperature")
    add("--top_p", positive_fraction, 1.0, "sample from the smallest set of tokens that holds this much probability; 1 "
        "= all")
    add("--top_k", non_negative_int, 0, "sample from the k likeliest tokens; 0 = all")
    add("--max_seq_len", positive_int, 768, "longest prompt in tokens; a longer one keeps its end")
    add("--max_gen_len", positive_int, 1024, "longest answer in tokens")
    add("--thinking_ratio", fraction, 0.9, "share of prompts that open a <think> block")
    add("--system_ratio", fraction, 0.2, "share of prompts without a system turn that are given one")
    add("--seed", seed_number, 42, "fixes which prompts think and what is sampled; the trainers' --seed gives their "
        "numbers")

    add = parser.group("reward")
    add("--reward_model_path", str, "none", "folder of the reward model; none = without one")
    add("--answer_reward", non_negative_float, 0.0, "added where the answer equals the row's 'answer'; 0 = off")
    add_reward_flags(parser)

    add = parser.group("where it runs, and where the numbers go")
    add("--device", device_name, "auto", "auto (CUDA where there is one), cpu, cuda or cuda:K")
    add("--dtype", ["float32", "bfloat16", "float16"], "float32", "precision of forward passes")
    add("--threads", non_negative_int, 0, "CPU threads; 0 = torch's choice, one a core")
    add("--batch_size", positive_int, 128, "answers sampled at once")
    add("--json", str, None, "file for all numbers and some answers")
    return parser


def parse_args(argv=None) -> argparse.Namespace:
    """The flags. Exits with status 2 on a wrong one, or on a file that is not there."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    if "--starter" in argv or not any(word.partition("=")[0] == "--data" for word in argv):
        parser.set_defaults(**STARTER)
    args = parser.parse_args(argv)
    if args.weights is None and args.starter:
        args.weights = str(STARTER_DIR / "starter_sft_128.pth")
    if args.weights is None:
        parser.error("argument --weights: name the .pth to measure, such as out/grpo_128.pth")
    settle_weights(parser, args, argv, "baseline", "reference")
    if not Path(args.data).is_file():
        found = "is a folder" if Path(args.data).is_dir() else "is not there"
        parser.error(f"argument --data: {args.data} {found}; expected a JSONL file")
    if args.json is not None and Path(args.json).is_dir():
        parser.error(f"argument --json: {args.json} is a folder; expected the name of a file to write")
    if args.pass_k is None:
        args.pass_k = [2**i for i in range(args.samples.bit_length())]
    if args.pass_k[-1] > args.samples:
        parser.error(f"argument --pass_k: {args.pass_k[-1]} is more than --samples {args.samples}")
    args.eval_prompts, args.logp_temperature = args.max_prompts or 2**62, args.temperature
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

import json  # noqa: E402
import math  # noqa: E402

from tqdm import tqdm  # noqa: E402

from dataset.lm_dataset import RLAIFDataset  # noqa: E402
from trainer.checkpoints import finite_or_none  # noqa: E402
from trainer.evaluation import (  # noqa: E402
    MEASURES, Evaluator, bootstrap_interval, by_name, load_for_inference, mean_and_error, pass_at_k, win_rate,
)  # fmt: skip
from trainer.loading import load_tokenizer, open_reward_model  # noqa: E402
from trainer.rollout_engine import TorchRolloutEngine  # noqa: E402
from trainer.run_files import require_writable, write_whole  # noqa: E402
from trainer.trainer_utils import (  # noqa: E402
    Logger, autocast_context, is_main_process, run_main, start_process,
)  # fmt: skip

INTERVAL = "95% percentile bootstrap over prompts, 2000 resamples"


def per_prompt_values(evaluator: Evaluator, table) -> dict:
    """What the table of `Evaluator.evaluate` says of each prompt, by name: float64 [P], a mean over its answers."""
    (greedy, _), (sampled, parts) = (by_name(part, evaluator.parts) for part in (table[:, :1], table[:, 1:]))
    values = {"accuracy": sampled["right"].nanmean(dim=1), "accuracy_greedy": greedy["right"][:, 0]}
    for k in evaluator.pass_k:
        values[f"pass@{k}"] = pass_at_k(sampled["right"].sum(dim=1), evaluator.samples, k)
    values |= {"reward": sampled["reward"].nanmean(dim=1), "reward_greedy": greedy["reward"][:, 0]}
    values |= {f"rewards/{name}": scores.nanmean(dim=1) for name, scores in parts.items()}
    values |= {"length": sampled["length"].mean(dim=1), "clipped_ratio": sampled["clipped"].mean(dim=1)}
    if evaluator.reference is not None:
        # weighted by tokens, so that the mean over prompts is the mean over tokens
        tokens = sampled["length"].sum(dim=1)
        values["kl"] = sampled["k3"].sum(dim=1) / tokens.mean()
        values["kl_sequence"] = sampled["log_ratio"].mean(dim=1)
    return values


def measure(args, weights: str, reference, shared: dict, device: str) -> dict:
    """Everything about one file of weights: per-prompt "values", "rewards" [P, S] of each answer, "samples"."""
    model = load_for_inference(weights, shared["tokenizer"], device, bool(args.trust_remote_code))
    engine = TorchRolloutEngine(model, shared["tokenizer"], device, autocast_context(device, args.dtype))
    evaluator = Evaluator(engine, shared["tokenizer"], shared["data"], shared["reward_model"], args, device,
                          policy=model, reference=reference, samples=args.samples, pass_k=tuple(args.pass_k))
    quiet = not (sys.stderr.isatty() and is_main_process())
    with tqdm(total=evaluator.count, unit="prompt", desc=Path(weights).name, disable=quiet, leave=False) as bar:
        result = evaluator.evaluate(bar.update)
    sampled_rewards = result["table"][:, 1:, MEASURES.index("reward")]
    return {"weights": weights, "values": per_prompt_values(evaluator, result["table"]), "rewards": sampled_rewards,
            "samples": result["samples"]}


def table_lines(ours: dict, theirs: dict | None) -> list[str]:
    """The numbers as text: mean and standard error of A and B, and of A - B on the same prompts with its interval."""
    title = "mean ± standard error over prompts"
    lines = [f"{title:<36}{'A':>17}" + (f"{'B':>17}{'A - B':>12}{'95% interval':>22}" if theirs else "")]
    for name, mine in ours["values"].items():
        mean, error = mean_and_error(mine)
        if math.isnan(mean):
            continue
        share = name.startswith(("accuracy", "pass@", "clipped"))
        scale, digits, unit = (100, 1, "%") if share else (1, 4 if name == "kl" else 2, "")
        line = f"{ROW_NAMES.get(name, name):<36}{f'{mean * scale:.{digits}f}{unit} ± {error * scale:.{digits}f}':>17}"
        if theirs is not None:
            other, other_error = mean_and_error(theirs["values"][name])
            gap = mine - theirs["values"][name]
            low, high = bootstrap_interval(gap * scale)
            line += f"{f'{other * scale:.{digits}f}{unit} ± {other_error * scale:.{digits}f}':>17}"
            line += f"{f'{mean_and_error(gap)[0] * scale:+.{digits}f}{unit}':>12}"
            line += f"{f'[{low:+.{digits}f}, {high:+.{digits}f}]':>22}"
        lines.append(line)
    return lines


ROW_NAMES = {
    "accuracy": "accuracy, sampled", "accuracy_greedy": "accuracy, greedy", "reward": "reward, sampled",
    "reward_greedy": "reward, greedy", "length": "length (tokens)", "clipped_ratio": "cut at --max_gen_len",
    "kl": "KL to the reference, k3 a token", "kl_sequence": "KL to the reference, k1 an answer",
}  # fmt: skip


def verdict(found: dict) -> str:
    """The line that says who won."""
    low, high = found["interval"]
    total = found["wins"] + found["ties"] + found["losses"]
    if not total:
        return "A against B by reward: no answer of both has a finite reward"
    word = "A earns more" if low > 0.5 else "A earns less" if high < 0.5 else "no clear difference"
    return (f"A against B by reward, same prompts and seeds: {found['wins']} won, {found['ties']} tied, "
            f"{found['losses']} lost of {total}\nwin rate {found['win_rate']:.1%} [{low:.1%}, {high:.1%}], ties being "
            f"half a win: {word}")


def as_json(args, results: list[dict], found: dict | None) -> dict:
    """All numbers under plain names; null where there is none."""

    def entry(result: dict) -> dict:
        numbers = {}
        for name, values in result["values"].items():
            numbers[name], numbers[f"{name}_se"] = map(finite_or_none, mean_and_error(values))
        return {"weights": result["weights"], "metrics": numbers, "samples": result["samples"]}

    content = {"settings": vars(args) | {"prompts": len(results[0]["rewards"])}, "a": entry(results[0])}
    if found is not None:
        gaps = {name: values - results[1]["values"][name] for name, values in results[0]["values"].items()}
        content["b"] = entry(results[1])
        content["a_minus_b"] = {name: {"mean": finite_or_none(mean_and_error(gap)[0]),
                                       "interval": [finite_or_none(end) for end in bootstrap_interval(gap)]}
                                for name, gap in gaps.items()}  # fmt: skip
        content["a_against_b"] = {**found, "win_rate": finite_or_none(found["win_rate"]),
                                  "interval": [finite_or_none(end) for end in found["interval"]]}
        content["interval"] = INTERVAL
    return content


def main(argv=None) -> int:
    """Measure and report; gives the process's exit status."""
    args = parse_args(argv)
    if args.json:
        require_writable(Path(args.json).resolve().parent)
    device = start_process(args)
    trust = bool(args.trust_remote_code)
    tokenizer = load_tokenizer(args.tokenizer_path, trust, pad_with_eos=Path(args.weights).is_dir())
    data = RLAIFDataset(args.data, tokenizer, max_length=args.max_seq_len, thinking_ratio=args.thinking_ratio,
                        system_ratio=args.system_ratio, seed=args.seed)
    reward_model = open_reward_model(args, device) if needs_reward_model(args) else None
    shared = {"tokenizer": tokenizer, "data": data, "reward_model": reward_model}
    against = args.reference or args.baseline
    reference = load_for_inference(against, tokenizer, device, trust) if against else None
    files = [args.weights, *([args.baseline] if args.baseline else [])]
    results = [measure(args, weights, reference, shared, device) for weights in files]
    found = win_rate(results[0]["rewards"], results[1]["rewards"]) if args.baseline else None
    Logger(f"{len(results[0]['rewards'])} prompts of {args.data}, {args.samples} answers each at temperature "
           f"{args.temperature}, seed {args.seed}")
    for letter, weights in zip("AB", files):
        Logger(f"{letter}  {weights}")
    if against:
        Logger(f"KL to  {against}")
    Logger("")
    for line in table_lines(results[0], results[1] if args.baseline else None):
        Logger(line)
    if found is not None:
        Logger(f"\n{verdict(found)}\nintervals: {INTERVAL}")
    if args.json and is_main_process():
        content = json.dumps(as_json(args, results, found), ensure_ascii=False, indent=1)
        write_whole(Path(args.json), content + "\n")
        Logger(f"wrote {args.json}")
    return 0


if __name__ == "__main__":
    run_main(main)
