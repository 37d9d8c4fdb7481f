"""From flags and files to models, tokenizer, reward model and batches, with every check that is cheap made first."""

import math
import os
import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dataset.lm_dataset import RLAIFDataset, collate_rows
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM, MOEFeedForward
from trainer.arguments import REPO_ROOT
from trainer.checkpoints import lm_checkpoint, load_weights, missing_weights_message, weights_path
from trainer.distributed import Logger, rank_and_world
from trainer.hf_model import check_training_texts, checkpoint_layers, fit_hf_config, load_hf_model, read_hf_config
from trainer.lora import AdapterOff, add_lora, plain_state
from trainer.reward_plugins import needs_reward_model, reward_settings
from trainer.reward_model import LMForRewardModel, check_reward_model_path

# A resumed run with another of these would not be the same run: prompts would come twice, or sizes not fit.
FIXED_ON_RESUME = ("seed", "hidden_size", "num_hidden_layers", "use_moe", "skip_bad_rows", "lora_rank", "critic_from")
# Where things lie and how they are shown may change freely.
FREE_ON_RESUME = ("from_resume", "device", "run_dir", "save_dir", "checkpoint_dir", "log_interval", "save_interval",
                  "num_workers", "epochs", "max_steps", "use_wandb", "wandb_project", "debug_mode", "debug_interval",
                  "weight_dir", "data_path", "starter", "self_check", "dry_run", "threads", "check_sync",
                  "eval_interval", "eval_prompts", "max_skipped_steps", "sample_interval", "keep_best", "health_stop",
                  "quiet", "use_tensorboard")  # fmt: skip


# ---------------------------------------------------------------------------------------------- data order
class SkipBatchSampler:
    """Batches of `batch_size` indices from `sampler`, without the first `skip_batches` (MiniMind's name)."""

    def __init__(self, sampler, batch_size: int, skip_batches: int = 0):
        self.sampler, self.batch_size, self.skip_batches = list(sampler), batch_size, skip_batches

    def __iter__(self):
        for start in range(self.skip_batches * self.batch_size, len(self.sampler), self.batch_size):
            yield self.sampler[start : start + self.batch_size]

    def __len__(self) -> int:
        return max(0, math.ceil(len(self.sampler) / self.batch_size) - self.skip_batches)


def shard_epoch(size: int, *, seed: int, epoch: int, consumed: int, batch_size: int, rank: int,
                world_size: int) -> list[int]:
    """This rank's dataset indices for what is left of an epoch, in order; every rank gets equally many.

    One permutation per (seed, epoch) is shared by all ranks. Each step takes its next world_size · batch_size entries
    and rank r gets entries r, r + world_size, …, so a step sees the same prompts however many ranks there are, and a
    run resumed with another world or batch size goes on after the `consumed` prompts. A last step that does not divide
    is filled with its own first prompt; `rows_of_rank` says how many rows are real.
    """
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(size)[consumed:]
    mine: list[int] = []
    for start in range(0, len(order), world_size * batch_size):
        block = order[start : start + world_size * batch_size].tolist()
        rows = block[rank::world_size]
        mine += rows + block[:1] * (math.ceil(len(block) / world_size) - len(rows))
    return mine


def ignore_signals_in_worker(_worker_id: int) -> None:
    """DataLoader workers leave Ctrl-C to the main process, and die of SIGTERM as they would without our handler."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def open_loader(dataset: RLAIFDataset, progress, args, *, steps: int) -> DataLoader:
    """This rank's batches for the next `steps` steps of the current epoch; see `shard_epoch` for their order."""
    rank, world = rank_and_world()
    dataset.set_epoch(progress.epoch)
    indices = shard_epoch(len(dataset), seed=args.seed, epoch=progress.epoch, consumed=progress.consumed,
                          batch_size=args.batch_size, rank=rank, world_size=world)
    sampler = SkipBatchSampler(indices[: steps * args.batch_size], args.batch_size)
    workers = min(args.num_workers, os.cpu_count() or 1)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate_rows,
                      worker_init_fn=ignore_signals_in_worker)


# ---------------------------------------------------------------------------------------------- loading
def get_model_params(model: nn.Module, config=None) -> float:
    """Log and return the number of parameters in millions (for MoE also those active for one token)."""
    total = sum(p.numel() for p in model.parameters()) / 1e6
    if config is None or not getattr(config, "use_moe", False):
        Logger(f"Model params: {total:.2f}M")
        return total
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n) / 1e6
    active = total - experts * (1 - config.num_experts_per_tok / config.num_experts)
    Logger(f"Model params: {total:.2f}M, of which {active:.2f}M active for a token")
    return total


def load_tokenizer(tokenizer_path: str, trust_remote_code: bool = False, *, pad_with_eos: bool = False):
    """The tokenizer in a folder, with the ids this project relies on checked.

    pad_with_eos: one without a pad token pads with its end token.
    Raises: FileNotFoundError or ValueError naming the folder and what it lacks.
    """
    from transformers import AutoTokenizer

    folder = Path(tokenizer_path)
    if not (folder / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"--tokenizer_path {folder}: no tokenizer_config.json there; expected a folder with "
                                "tokenizer.json and tokenizer_config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - the library raises many types for an unreadable folder
        raise ValueError(f"--tokenizer_path {folder}: cannot be read as a tokenizer: {error}") from error
    if pad_with_eos and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    for name in ("pad_token_id", "eos_token_id", "chat_template"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"--tokenizer_path {folder}: the tokenizer has no {name}, which chat prompts need")
    return tokenizer


def init_model(lm_config: MiniMindConfig, from_weight: str = "pretrain", tokenizer_path=None, save_dir=None,
               device: str = "cpu", *, tokenizer=None, seed: int | None = None, state: dict | None = None):
    """(model, tokenizer): a MiniMindForCausalLM with the weights `{save_dir}/{from_weight}_{hidden}[_moe].pth`.

    The vocabulary is that of the weights, or of the tokenizer when from_weight is "none" (random weights from `seed`,
    the same for actor and reference). Loading is strict. `lm_config.vocab_size` and the special ids are set to match.
    state: what `read_state` gave, to save reading it again.
    Raises: FileNotFoundError, or ValueError naming missing layers, wrong sizes, or a tokenizer larger than the model.
    """
    tokenizer = tokenizer or load_tokenizer(str(tokenizer_path or REPO_ROOT / "model"))
    if state is None:
        state = read_state(lm_config, from_weight, save_dir or REPO_ROOT / "out", tokenizer)
    if seed is not None:
        torch.manual_seed(seed)
    model = MiniMindForCausalLM(lm_config)
    if state is not None:
        model.load_state_dict(state, strict=True)
    get_model_params(model, lm_config)
    return model.to(device), tokenizer


def read_state(lm_config: MiniMindConfig, from_weight: str, folder, tokenizer) -> dict | None:
    """The checked state dict of `{folder}/{from_weight}_{hidden}[_moe].pth`, None for "none"; sets the vocabulary.

    Raises: as `load_weights` and `fit_vocabulary`.
    """
    state = None
    if from_weight != "none":
        state = load_weights(weights_path(folder, from_weight, lm_config), lm_config)
    fit_vocabulary(lm_config, tokenizer, state)
    return state


def fit_vocabulary(lm_config: MiniMindConfig, tokenizer, state: dict | None) -> None:
    """Set the config's vocabulary and special ids from the weights and the tokenizer.

    Raises: ValueError if the tokenizer has ids that the weights have no row for.
    """
    rows = len(tokenizer) if state is None else state["model.embed_tokens.weight"].shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the weights only {rows}: ids from {rows} on "
                         "would have no embedding; pass the tokenizer they were trained with (--tokenizer_path)")
    if len(tokenizer) < rows:
        Logger(f"warning: the weights have {rows} tokens, the tokenizer {len(tokenizer)}; if they were not trained "
               "with it, pass theirs with --tokenizer_path")
    lm_config.vocab_size = rows
    lm_config.pad_token_id, lm_config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    if tokenizer.bos_token_id is not None:
        lm_config.bos_token_id = tokenizer.bos_token_id


def without_dropout(model: nn.Module) -> nn.Module:
    """`model` in evaluation mode, but for the experts' balance loss, which exists in training mode only.

    Differs from MiniMind, which trains in training mode: with dropout, the tokens' log-probs would not be those they
    were sampled with, and the ratio to the sampling policy would not begin at 1.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, MOEFeedForward):
            module.training = True
    return model


def load_resumed_model(model: nn.Module, state: dict) -> None:
    """Strictly load the float32 weights of a resume file. Raises ValueError if they are another model's."""
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"the resume file holds another model than the flags describe: {error}") from error


def check_inputs(args, config: MiniMindConfig) -> None:
    """Find what is missing on disk before anything slow is loaded.

    Raises: FileNotFoundError or ValueError with one line that says what, where it belongs, and about --starter.
    """
    weights = weights_path(args.weight_dir, args.from_weight, config)
    if args.from_weight != "none" and not weights.is_file():
        raise FileNotFoundError(missing_weights_message(weights))
    if not Path(args.data_path).is_file():
        raise FileNotFoundError(f"data {args.data_path} not found: put MiniMind's rlaif.jsonl there or name another "
                                "file with --data_path, or run with --starter, which has prompts of its own")
    if args.eval_data_path and not Path(args.eval_data_path).is_file():
        raise FileNotFoundError(f"held-out data {args.eval_data_path} not found: name a JSONL file with "
                                "--eval_data_path, or leave the flag out")
    reward_settings(args)  # a file of own functions that cannot be used
    if args.keep_best and not (args.eval_data_path and args.eval_prompts):
        raise ValueError("--keep_best 1 keeps what evaluates best, but there is no evaluation: name held-out prompts "
                         "with --eval_data_path and --eval_prompts, or leave it out")
    if args.reward_model_path != "none" and needs_reward_model(args):
        check_reward_model_path(args.reward_model_path, trust_remote_code=bool(args.trust_remote_code))


def check_resumed_flags(saved: dict, args) -> None:
    """Say which flags differ from the run being resumed, and refuse those that would make it another run.

    Raises: ValueError naming the flag, both values and what to do.
    """
    now = vars(args)
    for name in FIXED_ON_RESUME:
        if name in saved and name in now and saved[name] != now[name]:
            raise ValueError(f"--{name} is {now[name]!r}, but the run being resumed has {saved[name]!r}: pass that, "
                             "or start afresh with --from_resume 0")
    changed = [f"{name} {saved[name]!r} -> {now[name]!r}" for name in sorted(set(saved) & set(now))
               if saved[name] != now[name] and name not in FREE_ON_RESUME]
    if changed:
        Logger(f"resumed with changed flags, honoured from here on: {', '.join(changed)}")


def open_datasets(args, tokenizer) -> tuple[RLAIFDataset, RLAIFDataset | None]:
    """(training prompts, held-out prompts or None); every row is checked here, before models are loaded."""
    settings = {"max_length": args.max_seq_len, "thinking_ratio": args.thinking_ratio, "seed": args.seed,
                "skip_bad_rows": bool(args.skip_bad_rows), "system_ratio": args.system_ratio}
    dataset = RLAIFDataset(args.data_path, tokenizer, **settings)
    heldout = None
    if args.eval_data_path and args.eval_prompts:
        heldout = RLAIFDataset(args.eval_data_path, tokenizer, **settings)
    return dataset, heldout


def open_reward_model(args, device: str) -> LMForRewardModel | None:
    """The reward model that --reward_model_path names, in float16 on a GPU and float32 on a CPU."""
    if args.reward_model_path == "none" or not needs_reward_model(args):
        return None
    dtype = torch.float32 if device == "cpu" else torch.float16
    return LMForRewardModel(args.reward_model_path, device=device, dtype=dtype,
                            trust_remote_code=bool(args.trust_remote_code))


class Roles(NamedTuple):
    """What both scripts load: the model to train, its frozen copy, and what they work on."""

    config: object  # the model's own: MiniMindConfig, or another of transformers
    tokenizer: object
    dataset: RLAIFDataset
    heldout: RLAIFDataset | None
    resumed: dict | None  # content of the resume file, with --from_resume 1 and where there is one
    model: nn.Module  # MiniMindForCausalLM, or what --hf_model holds; float32
    reference: nn.Module | None
    reward_model: LMForRewardModel | None


def load_roles(args, device: str, *, with_reference: bool) -> Roles:
    """Everything from disk, cheap checks first: a wrong path or a malformed row is found before any model is loaded."""
    foreign = vars(args).get("hf_model") is not None
    if foreign:
        config = read_hf_config(args.hf_model, bool(args.trust_remote_code))
    else:
        config = MiniMindConfig(hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers,
                                use_moe=bool(args.use_moe))
    check_inputs(args, config)
    tokenizer = load_tokenizer(args.tokenizer_path, bool(args.trust_remote_code), pad_with_eos=foreign)
    if foreign:
        fit_hf_config(config, tokenizer, args.hf_model)
        check_training_texts(config, tokenizer, args)
    dataset, heldout = open_datasets(args, tokenizer)
    resumed = lm_checkpoint(config, args.save_weight, save_dir=args.checkpoint_dir) if args.from_resume else None
    if resumed:
        check_resumed_flags(resumed["args"], args)
    state = None if foreign else read_state(config, args.from_weight, args.weight_dir, tokenizer)
    reward_model = open_reward_model(args, device)
    start = {"save_dir": args.weight_dir, "device": device, "tokenizer": tokenizer, "seed": args.seed, "state": state}

    def fresh() -> nn.Module:
        if foreign:
            return load_hf_model(config, tokenizer, args.hf_model, device,
                                 trust_remote_code=bool(args.trust_remote_code))
        return init_model(config, args.from_weight, **start)[0]

    model = without_dropout(fresh())
    if not foreign:
        model.model.gradient_checkpointing = bool(args.gradient_checkpointing)
    elif args.gradient_checkpointing:
        checkpoint_layers(model)
    reference = None
    if args.lora_rank:
        add_lora(model, rank=args.lora_rank, alpha=args.lora_alpha, seed=args.seed)
        reference = AdapterOff(model) if with_reference else None
    elif with_reference:
        reference = fresh().eval().requires_grad_(False)
    return Roles(config, tokenizer, dataset, heldout, resumed, model, reference, reward_model)


def start_critic(critic: nn.Module, actor: nn.Module, resumed: dict | None, source: str) -> nn.Module:
    """The critic with what a resume file holds, or at its start: with the body of `source` under its value head.

    source: "policy" (the head stays random), or the folder of a `…ForSequenceClassification` of the same sizes, whose
    score becomes the value. Raises: ValueError naming what does not fit.
    """
    critic.model.gradient_checkpointing = actor.model.gradient_checkpointing
    if resumed:
        load_resumed_model(critic, resumed["critic_model"])
        return critic
    if source == "policy":
        state, may_miss = plain_state(actor), {"value_head.weight", "value_head.bias"}
    else:
        state, may_miss = reward_model_state(Path(source)), {"value_head.bias", "lm_head.weight"}
        state["value_head.bias"] = torch.zeros(1)
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    try:
        missing, unexpected = critic.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ValueError(f"--critic_from {source}: its sizes are not the policy's: {error}") from None
    if not set(missing) <= may_miss or unexpected:
        raise ValueError(f"--critic_from {source}: missing {missing}, unexpected {unexpected}; expected the policy's "
                         "weights and, of a reward model, score.weight")
    return critic


def reward_model_state(folder: Path) -> dict[str, Tensor]:
    """The weights of a reward model's folder under the critic's names. Raises ValueError for a folder without one."""
    found = folder / "model.safetensors"
    if not found.is_file():
        raise ValueError(f"--critic_from {folder}: expected policy, or a folder with a model.safetensors")
    state = load_file(found)
    if "score.weight" not in state:
        raise ValueError(f"--critic_from {folder}: no score.weight in it, so it is no reward model")
    state["value_head.weight"] = state.pop("score.weight")
    return state
