"""What both scripts' flags have in common: value types that name what is wrong, and how --starter sets defaults.

Imports neither torch nor transformers: a slip on the command line is refused in a fraction of a second, not after the
seconds that importing them takes. The flags themselves are written out in each script.
"""

import argparse
import os
import math
import re
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent
STARTER_DIR = REPO_ROOT / "model" / "starter"


def _number(kind, low, high, low_open, words):
    """An argparse `type` that parses with `kind` and refuses what lies outside the interval."""

    def parse(text: str):
        try:
            value = kind(text)
            finite = math.isfinite(value)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}") from None
        below = value <= low if low_open else value < low
        if not finite or below or value > high:
            raise argparse.ArgumentTypeError(f"expected {words}, got {text!r}")
        return value

    return parse


positive_int = _number(int, 1, math.inf, False, "a whole number of at least 1")
non_negative_int = _number(int, 0, math.inf, False, "a whole number of at least 0")
seed_number = _number(int, 0, 2**63 - 1, False, "a whole number from 0 to 2**63 - 1")
at_least_two = _number(int, 2, math.inf, False, "a whole number of at least 2")
positive_float = _number(float, 0.0, math.inf, True, "a number above 0")
non_negative_float = _number(float, 0.0, math.inf, False, "a number of at least 0")
fraction = _number(float, 0.0, 1.0, False, "a number from 0 to 1")
positive_fraction = _number(float, 0.0, 1.0, True, "a number above 0, at most 1")
any_float = _number(float, -math.inf, math.inf, False, "a finite number")


def model_width(text: str) -> int:
    """A width that MiniMind's 8 heads divide into even sizes."""
    value = positive_int(text)
    if value % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16 (8 heads of an even size), got {text!r}")
    return value


def device_name(text: str) -> str:
    """auto, cpu, cuda or cuda:K; whether this machine has it is found out later."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda or cuda:K, got {text!r}")
    return text


def switch(text: str) -> int:
    """0 or 1, MiniMind's way of writing a yes/no flag."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"expected 0 or 1, got {text!r}")
    return int(text)


# What --starter points at, the same for both scripts; each adds its own sizes. Explicit flags win over all of it.
STARTER_DEFAULTS = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "from_weight": "starter_sft",
    "weight_dir": str(STARTER_DIR),
    "data_path": str(REPO_ROOT / "dataset" / "rlaif_starter.jsonl"),
    "eval_data_path": str(REPO_ROOT / "dataset" / "rlaif_starter_heldout.jsonl"),
    "reward_model_path": str(STARTER_DIR / "reward_model"),
    "dtype": "float32",
    "threads": 1,
    "num_workers": 0,
    "max_seq_len": 128,
    "max_gen_len": 64,
    "thinking_ratio": 1.0,
    "system_ratio": 0.0,
}


class FlagParser(argparse.ArgumentParser):
    """argparse with one line for an error and short declarations: `add = parser.group(title)`, `add(name, kind, …)`."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False,
                         formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def error(self, message: str):
        self.exit(2, f"error: {message} (see --help)\n")

    def group(self, title: str):
        """A function that declares flags of this group: add(name, kind, default, help).

        kind: a type from this module, a list of choices, or `bool` for a flag without a value.
        """
        target = self.add_argument_group(title)

        def add(name: str, kind, default, words: str) -> None:
            if kind is bool:
                target.add_argument(name, action="store_true", default=default, help=words)
            elif isinstance(kind, list):
                target.add_argument(name, choices=kind, default=default, help=words)
            else:
                target.add_argument(name, type=kind, default=default, help=words)

        return add


def add_start_flags(parser: FlagParser) -> None:
    """Flags that say what to run, for how long, and on what."""
    add = parser.group("start here")
    add("--starter", bool, False, "set the defaults for the built-in small model, its prompts and its reward model "
        "(seconds a step on a CPU); flags given explicitly still win")
    add("--max_steps", non_negative_int, 0, "stop after this many rollout steps in all, counting those before a "
        "resume; 0 = all epochs")
    add("--epochs", positive_int, 1, "passes over the prompts")
    add("--seed", seed_number, 42, "fixes data order, sampling and random weights")
    add("--device", device_name, "auto", "auto (CUDA where there is one), cpu, cuda or cuda:K")
    add("--threads", non_negative_int, 0, "CPU threads of each process; 0 = torch's choice, one a core")


def add_input_flags(parser: FlagParser, *, any_model: bool = False) -> None:
    """Flags that say what a run starts from: sizes, weights, tokenizer, reward model, prompts."""
    add = parser.group("model")
    add("--hidden_size", model_width, 768, "width of the model, a multiple of 16")
    add("--num_hidden_layers", positive_int, 8, "layers of the model")
    add("--use_moe", switch, 0, "1 = mixture of experts")
    add("--from_weight", str, "full_sft", "weights to start from and to stay close to, "
        "{weight_dir}/{from_weight}_{hidden_size}[_moe].pth; none = random")
    add("--tokenizer_path", str, str(REPO_ROOT / "model"), "folder of the tokenizer the weights were trained with")
    if any_model:
        add("--hf_model", str, None, "folder of another causal language model of transformers (Qwen3, Llama, ...) to "
            "train in MiniMind's place, with its own sizes, tokenizer and chat template; saved as {save_weight}-hf")
    add("--reward_model_path", str, str(REPO_ROOT.parent / "internlm2-1_8b-reward"), "folder of the reward model; none "
        "= text rules only")
    add("--trust_remote_code", switch, 0, "1 = run Python code that a model folder brings along "
        "(InternLM2-reward needs it)")

    add = parser.group("data")
    add("--data_path", str, str(REPO_ROOT / "dataset" / "rlaif.jsonl"), "JSONL of conversations")
    add("--max_seq_len", positive_int, 768, "longest prompt in tokens; a longer one keeps its end")
    add("--thinking_ratio", fraction, 0.9, "share of prompts that open a <think> block")
    add("--system_ratio", fraction, 0.2, "share of prompts without a system turn that are given one")
    add("--skip_bad_rows", switch, 0, "1 = leave out malformed rows and count them, 0 = stop at the first")
    add("--num_workers", non_negative_int, 8, "processes that prepare prompts, at most one a CPU core; 0 = the trainer "
        "itself")


def add_rollout_flags(parser: FlagParser, num_generations: bool) -> None:
    """Flags that say how answers are sampled and scored; --num_generations where a prompt gets several."""
    add = parser.group("rollout")
    add("--rollout_engine", ["torch", "sglang"], "torch", "what samples the answers: this process, or SGLang servers")
    if num_generations:
        add("--num_generations", at_least_two, 6, "answers sampled for each prompt, G")
    add("--max_gen_len", positive_int, 1024, "longest answer in tokens")
    add("--temperature", positive_float, 0.8, "sampling temperature")
    add("--top_p", positive_fraction, 1.0, "sample from the smallest set of tokens that holds this much probability; 1 "
        "= all")
    add("--top_k", non_negative_int, 0, "sample from the k likeliest tokens; 0 = all")
    add("--logp_temperature", positive_float, None, "what logits are divided by when answers are scored; 1.0 scores as "
        "MiniMind does, None = the sampling temperature")
    add("--recompute_logps", ["auto", "0", "1"], "auto", "where old log-probs come from: 0 = the rollout engine, 1 = "
        "the trainer scores the answers again, auto = again where the engine's are at another temperature or rounded "
        "to half precision")


def add_kl_flags(add, weight: str) -> None:
    """Flags of the loss group that say how the policy is held near the reference and kept from being too sure."""
    add("--kl_estimator", ["k1", "k2", "k3", "k3_unbiased"], "k3", "estimate of KL(policy || reference) that is "
        "penalised; in the loss k2 and k3_unbiased descend that KL, k3 the reverse one, k1 nothing")
    add("--kl_in", ["loss", "reward"], "loss", "where the penalty stands: a term of the loss, or taken off the reward")
    add("--kl_target", non_negative_float, 0.0, f"nats a token that {weight} is adapted to keep the KL at; 0 = "
        f"{weight} stays as it is")
    add("--kl_horizon", positive_float, 10000.0, f"answers over which {weight} adapts, more = slower")
    add("--entropy_coef", non_negative_float, 0.0, "weight of the policy's entropy, which the loss then rewards")


def add_group_flags(add) -> None:
    """Flags of the loss group for several answers a prompt: what MiniMind's GRPO does not have."""
    add("--advantage", ["group", "group_nostd", "batch_std", "rloo"], "group", "reward less the group's mean over the "
        "group's deviation; not divided (Dr. GRPO); over the batch's deviation; less the mean of the others (RLOO)")
    add("--loss_agg", ["sequence", "token", "constant"], "sequence", "mean over answers of each one's mean; over all "
        "tokens of the optimizer step; or sum over answers x --max_gen_len")
    add("--drop_flat_groups", switch, 0, "1 = groups whose rewards are all equal count in no mean, KL included")
    add("--dynamic_sampling", non_negative_int, 0, "answer prompts with equal rewards again, up to this many times")
    add("--mask_truncated", switch, 0, "1 = nothing is learnt from answers cut at --max_gen_len")
    add("--overlong_buffer", non_negative_int, 0, "tokens before --max_gen_len over which an answer loses up to 1 for "
        "its length; 0 = none")


def add_actor_critic_flags(add) -> None:
    """Flags of the loss group for an actor with a critic: what MiniMind's PPO does not have."""
    add("--clip_epsilon_high", positive_float, 0.2, "the upper clip is 1 + this; --clip_epsilon unless given")
    add("--dual_clip", non_negative_float, 0.0, "largest ratio that a token with a negative advantage is charged for, "
        "above 1; 0 = no limit")
    add("--critic_warmup_steps", non_negative_int, 0, "first rollout steps in which only the critic learns")
    add("--critic_from", str, "policy", "what the critic starts from: policy, or the folder of a reward model of its "
        "size, whose score then is the value")
    add("--whiten_rewards", switch, 0, "1 = token rewards are scaled to variance 1 over the batch; their mean stays")
    add("--missing_eos_penalty", non_negative_float, 0.0, "taken off the reward of an answer cut at --max_gen_len")


def add_lora_flags(add) -> None:
    """Flags of low-rank adapters."""
    add("--lora_rank", non_negative_int, 0, "train adapters of this rank beside frozen weights; the reference is then "
        "the model without them; 0 = train all weights")
    add("--lora_alpha", positive_float, 16.0, "their effect is scaled by alpha / rank")


def add_update_flags(add) -> None:
    """Flags of the optimisation group that hold whatever is optimised."""
    add("--grad_clip", non_negative_float, 1.0, "largest gradient norm; 0 = no clipping")
    add("--max_skipped_steps", positive_int, 20, "the run stops once this many optimizer steps in a row were skipped "
        "for a non-finite loss or gradient")
    add("--dtype", ["bfloat16", "float16", "float32"], "bfloat16", "precision of forward passes; weights stay float32")
    add("--use_compile", switch, 0, "1 = torch.compile what is trained, and decoding")
    add("--micro_batch_tokens", non_negative_int, None, "most tokens that a forward and backward pass reads at once "
        "(each prompt once, without padding); a larger batch is read in pieces whose gradients add up; 0 = all at "
        "once, None = 1024 on a CPU, 8192 on a GPU")
    add("--gradient_checkpointing", switch, 0, "1 = keep only each layer's input and work the rest out again in the "
        "backward pass: less memory, about a third more time in the update")


def add_sglang_flags(parser: FlagParser, *, shared_path: str) -> None:
    """Flags of --rollout_engine sglang."""
    add = parser.group("sglang servers")
    add("--sglang_base_url", str, "http://localhost:8998", "servers to sample from, several with commas between")
    add("--sglang_model_path", str, None, "folder they were launched with, to compare sizes; None = not compared")
    add("--sglang_shared_path", str, str(REPO_ROOT / shared_path), "folder for weights that trainer and servers see")
    add("--sglang_concurrency", positive_int, 64, "requests in flight, over all servers")
    add("--sglang_wait", positive_float, 300.0, "seconds to wait for a server that is not there")
    add("--sync_interval", positive_int, 1, "updates of the policy between pushes of its weights")
    add("--tis_cap", non_negative_float, 2.0, "each token's loss is weighted by the trainer's probability of it over "
        "the server's, at most this (truncated importance sampling); 0 = not weighted")


def add_file_flags(parser: FlagParser, *, save_weight: str, wandb_project: str) -> None:
    """Flags that say where things lie, how often they are written, and what is shown."""
    add = parser.group("files and logging")
    add("--save_dir", str, str(REPO_ROOT / "out"), "folder for the trained weights and runs/")
    add("--save_weight", str, save_weight, "name of the trained weights")
    add("--weight_dir", str, None, "folder --from_weight is read from; None = save_dir")
    add("--checkpoint_dir", str, str(REPO_ROOT / "checkpoints"), "folder for the resume file")
    add("--run_dir", str, None, "folder for metrics.jsonl; None = {save_dir}/runs/{save_weight}-{time}")
    add("--from_resume", switch, 0, "1 = go on from the resume file, if there is one")
    add("--save_interval", positive_int, 10, "rollout steps between saves")
    add("--log_interval", positive_int, 1, "rollout steps between logged lines")
    add("--eval_data_path", str, None, "JSONL of held-out prompts; None = no evaluation")
    add("--eval_prompts", non_negative_int, 100, "held-out prompts answered before and after; 0 = none")
    add("--eval_interval", non_negative_int, 0, "rollout steps between evaluations; 0 = before and after only")
    add("--self_check", switch, 1, "1 = before the first step, prove with one short answer that engine, trainer, "
        "reference, reward and tokenizer agree")
    add("--dry_run", bool, False, "that check and one step with short answers; show time and memory, write nothing")
    add("--check_sync", non_negative_int, 0, "rollout steps between proofs that all ranks hold the same weights; 0 = "
        "at the start only")
    add("--debug_mode", bool, False, "print prompts, answers and rewards while training")
    add("--debug_interval", positive_int, 20, "rollout steps between such prints")
    add("--sample_interval", non_negative_int, 50, "rollout steps between greedy answers to the same few held-out "
        "prompts, in samples.jsonl and on the console; 0 = none, as without --eval_data_path")
    add("--keep_best", switch, 0, "1 = also keep the weights that evaluated best so far, as {save_weight}_best")
    add("--health_stop", switch, 0, "1 = save and stop on a severe health alarm, 0 = warn and go on")
    add("--quiet", bool, False, "no line and no bar for training steps; warnings, evaluations and the end stay")
    add("--use_wandb", bool, False, "also log to swanlab or wandb, whichever is installed")
    add("--wandb_project", str, wandb_project, "its project name")
    add("--use_tensorboard", bool, False, "also log to {run_dir}/tensorboard (pip install tensorboard)")


def is_given(argv, name: str) -> bool:
    """Whether the flag stands on the command line (None = that of this process)."""
    argv = sys.argv[1:] if argv is None else argv
    return any(str(word) == f"--{name}" or str(word).startswith(f"--{name}=") for word in argv)


def refuse_kl_options(parser: "FlagParser", args, argv, weight: str) -> None:
    """Exit in one line where a flag about the KL is given, but its weight is 0."""
    if getattr(args, weight) == 0:
        for name in ("kl_target", "kl_in", "kl_estimator"):
            if is_given(argv, name):
                parser.error(f"argument --{name}: there is no KL to penalise with --{weight} 0; raise one or leave out "
                             "the other")
    answers = args.batch_size * getattr(args, "num_generations", 1) * int(os.environ.get("WORLD_SIZE", "1"))
    if args.kl_target and answers >= 5 * args.kl_horizon:
        parser.error(f"argument --kl_horizon: {args.kl_horizon} is too short for --kl_target with {answers} answers a "
                     f"step, {weight} could fall below 0; make it more than {answers / 5:g}")


def parse_with_starter(parser: FlagParser, argv, starter_defaults: dict) -> argparse.Namespace:
    """Parse `argv`; with --starter in it `starter_defaults` replace the defaults first, so explicit flags still win."""
    argv = sys.argv[1:] if argv is None else argv
    if "--starter" in argv:
        parser.set_defaults(**starter_defaults)
    args = parser.parse_args(argv)
    if args.weight_dir is None:
        args.weight_dir = args.save_dir
    if args.logp_temperature is None:
        args.logp_temperature = args.temperature
    if args.max_seq_len + args.max_gen_len > 32768:
        parser.error(
            f"argument --max_seq_len/--max_gen_len: {args.max_seq_len} + {args.max_gen_len} tokens are more than the "
            "model's 32768 positions; lower one of them"
        )
    return args


def settle_hf_model(parser: FlagParser, args, argv) -> None:
    """With --hf_model, what it brings along replaces defaults; exit in one line where such a thing is given too."""
    if args.hf_model is None:
        return
    for name in ("from_weight", "hidden_size", "num_hidden_layers", "use_moe"):
        if is_given(argv, name):
            parser.error(f"argument --{name}: --hf_model {args.hf_model} has weights and sizes of its own; leave out "
                         "one of them")
    args.from_weight = "none"
    if not is_given(argv, "tokenizer_path"):
        args.tokenizer_path = args.hf_model


def settle_weights(parser: FlagParser, args, argv, *others: str) -> None:
    """Exit in one line where --weights or one of the other flags names no weights; a folder brings its tokenizer."""
    for name in ("weights", *others):
        path = getattr(args, name)
        if path is None or Path(path).is_file() or (Path(path) / "config.json").is_file():
            continue
        found = "is a folder without config.json" if Path(path).is_dir() else "is not there"
        parser.error(f"argument --{name}: {path} {found}; expected a .pth such as out/grpo_128.pth, or the folder of a "
                     "model of transformers such as out/grpo-hf")
    if Path(args.weights).is_dir() and not is_given(argv, "tokenizer_path"):
        args.tokenizer_path = args.weights


def settle_grpo(parser: FlagParser, args, argv) -> None:
    """Defaults that follow from --loss_type and --hf_model, and one line for flags that do not go together."""
    settle_hf_model(parser, args, argv)
    if args.loss_type == "gspo" and not is_given(argv, "epsilon"):
        args.epsilon = 3e-4
    if not is_given(argv, "epsilon_high"):
        args.epsilon_high = {"cispo": 5.0, "grpo": args.epsilon, "gspo": 4e-4, "dapo": 0.28}[args.loss_type]
    if args.loss_type == "dapo" and not is_given(argv, "loss_agg"):
        args.loss_agg = "token"
    refuse_kl_options(parser, args, argv, "beta")
    if args.loss_type == "gspo" and args.loss_agg != "sequence":
        parser.error(f"argument --loss_agg: {args.loss_agg} weighs tokens, --loss_type gspo has one ratio an answer")
    if args.accumulation_steps > 1 and (args.num_iterations > 1 or args.mini_batch_size):
        parser.error("argument --accumulation_steps: --num_iterations and --mini_batch_size make several optimizer "
                     "steps of one rollout, this makes one of several rollouts; leave out one of them")
    if args.overlong_buffer > args.max_gen_len:
        parser.error(f"argument --overlong_buffer: {args.overlong_buffer} is above --max_gen_len {args.max_gen_len}")


def settle_ppo(parser: FlagParser, args, argv) -> None:
    """Defaults that follow from other flags, and one line for flags that do not go together."""
    if not is_given(argv, "clip_epsilon_high"):
        args.clip_epsilon_high = args.clip_epsilon
    if 0 < args.dual_clip <= 1:
        parser.error(f"argument --dual_clip: {args.dual_clip} is not above 1; 0 = no limit")
    refuse_kl_options(parser, args, argv, "kl_coef")
