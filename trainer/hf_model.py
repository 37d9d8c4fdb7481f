"""Any causal language model of transformers in place of MiniMind's: its folder checked, loaded, and written back.

A folder is what `save_pretrained` makes: config.json, weights, a tokenizer with a chat template. The trained model is
written as such a folder again. Training needs no more than what every causal LM has: a forward pass that gives logits,
and `.generate`.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from model.export import read_json, write_whole
from trainer.distributed import Logger, unwrap_model
from trainer.lora import plain_state

# Of a folder, what is copied beside trained weights; of another tokenizer's, all but the first two.
CONFIGS = ("config.json", "generation_config.json")
COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # what names of their classes end with


# ---------------------------------------------------------------------------------------------- reading
def read_hf_config(folder: str, trust_remote_code: bool, flag: str = "--hf_model"):
    """The configuration of the causal language model in a folder, checked before anything slow is loaded.

    flag: what errors call it. Raises: FileNotFoundError for a folder, config.json or weights that are not there;
    ValueError for a model of another kind, or a quantised one, whose weights cannot be trained.
    """
    where, path = f"{flag} {folder}", Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{where}: no such folder; expected one with config.json, weights and a tokenizer, as "
                                "save_pretrained writes it")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{where}: no config.json there; expected a folder as save_pretrained writes it")
    content = read_json(path / "config.json")
    kinds = content.get("architectures") or []
    if content.get("is_encoder_decoder") or not any(kind.endswith(LANGUAGE_MODELS) for kind in kinds):
        raise ValueError(f"{where}: its config.json says architectures {kinds}; expected a causal language model, one "
                         "whose name ends in ForCausalLM")
    if content.get("model_type") == "minimind":
        raise ValueError(f"{where} is a MiniMind model: scripts/convert_model.py makes a .pth of it for --from_weight")
    if content.get("quantization_config"):
        raise ValueError(f"{where}: its weights are quantised and cannot be trained; pass the model in full precision")
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - the library raises many types for a config it does not understand
        raise ValueError(f"{where}: its config.json cannot be used: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not content.get("auto_map"):
        raise ValueError(f"{where}: {content.get('model_type')} is no causal language model of this transformers")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise FileNotFoundError(f"{where}: no weights there; expected model.safetensors")
    return config


def fit_hf_config(config, tokenizer, folder: str, flag: str = "--hf_model") -> None:
    """Give the config of a folder the tokenizer's special ids, as far as the model goes by them.

    Raises: ValueError for a tokenizer larger than the model.
    """
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"{flag} {folder}: the tokenizer has {len(tokenizer)} tokens, the model only "
                         f"{config.vocab_size}; pass the tokenizer it was trained with (--tokenizer_path)")
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id


def check_training_texts(config, tokenizer, args) -> None:
    """Whether the model of --hf_model and its tokenizer can take the prompts and answers that the flags ask for.

    Raises: ValueError for longer texts than it has positions for, or a chat template that refuses the system turns
    --system_ratio asks for.
    """
    where = f"--hf_model {args.hf_model}"
    positions = getattr(config, "max_position_embeddings", None) or 2**62
    if args.max_seq_len + args.max_gen_len > positions:
        raise ValueError(f"--max_seq_len {args.max_seq_len} + --max_gen_len {args.max_gen_len} are more than the "
                         f"{positions} positions of {where}; lower one of them")
    turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    try:
        whole = tokenizer.apply_chat_template(turns if args.system_ratio else turns[1:], tokenize=False)
    except Exception as error:  # noqa: BLE001 - templates raise what they like
        raise ValueError(f"{where}: its chat template refuses {'a system turn' if args.system_ratio else 'a turn'}: "
                         f"{error}; with --system_ratio 0 none is added") from error
    ends = tokenizer.convert_ids_to_tokens(end_ids(args.hf_model, tokenizer, config))
    if not any(end in whole for end in ends):
        Logger(f"warning: the chat template of {where} does not end a turn with {' or '.join(ends)}, but only that "
               "ends an answer here")


def end_ids(folder: str, tokenizer, config) -> list[int]:
    """The ids that end an answer: the tokenizer's end token, then those named in the folder's generation_config.json
    (chat models often end in two ways) and in its config.json. Ids that the model does not have are left out."""
    found = [tokenizer.eos_token_id]
    for path in (Path(folder) / name for name in reversed(CONFIGS)):
        named = read_json(path).get("eos_token_id") if path.is_file() else None
        found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(token for token in found if isinstance(token, int) and 0 <= token < config.vocab_size))


def folder_files(folder: str, tokenizer_path: str) -> dict[str, bytes]:
    """Content by name of the small files that belong to a model: configs, tokenizer, its own code; no weights."""
    found = {}
    for source in (Path(folder), Path(tokenizer_path)):
        found |= {path.name: path.read_bytes() for path in sorted(source.iterdir())
                  if path.suffix in COPIED and not path.name.endswith(".index.json") and path.is_file()
                  and (source == Path(folder) or path.name not in CONFIGS)}  # fmt: skip
    return found


def load_hf_model(config, tokenizer, folder: str, device: str, *, trust_remote_code: bool = False,
                  flag: str = "--hf_model") -> nn.Module:
    """The model in a folder in float32, in evaluation mode; `folder_files` is what its folder held beside weights.

    It samples as it is told to, and not as its generation_config.json would, but ends answers where that says; experts
    have no balance loss.
    Raises: ValueError for weights that cannot be read, or that are not all there: none is filled in at random.
    """
    where = f"{flag} {folder}"
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32,
                                                            output_loading_info=True,
                                                            trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - the library raises many types for an unreadable folder
        raise ValueError(f"{where}: its weights cannot be loaded: {error}") from error
    missing = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if missing:
        raise ValueError(f"{where}: {len(missing)} weights are missing or of another shape, {missing[0]} first")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=end_ids(folder, tokenizer, config),
        pad_token_id=config.pad_token_id, use_cache=True,
    )  # fmt: skip
    model.config.use_cache = False  # in an update, keys and values would only be kept
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False
    model.folder_files = folder_files(folder, tokenizer.name_or_path)
    return model.to(device).eval()


def open_hf_folder(folder: str, tokenizer, device: str, trust_remote_code: bool) -> nn.Module:
    """The model in a folder, to answer with: float32, in evaluation mode, no grad.

    Raises: as `read_hf_config`, `fit_hf_config` and `load_hf_model`.
    """
    config = read_hf_config(folder, trust_remote_code, "model")
    fit_hf_config(config, tokenizer, folder, "model")
    model = load_hf_model(config, tokenizer, folder, device, trust_remote_code=trust_remote_code, flag="model")
    return model.requires_grad_(False)


def checkpoint_layers(model: nn.Module) -> None:
    """Have each layer keep only its input for the backward pass. Without dropout, as all else in evaluation mode."""
    # transformers 5 renames it
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers checkpoints in training mode only
            for name in [name for name, value in vars(module).items() if "dropout" in name and type(value) is float]:
                setattr(module, name, 0.0)


def prompt_share(args) -> int:
    """Answers for which a prompt is read once: a group's by MiniMind's model, one by any other."""
    return 1 if args.hf_model else args.num_generations


# ---------------------------------------------------------------------------------------------- writing
def own_dtype(model: nn.Module) -> str:
    """The dtype of the weights in the folder the model came from; float32 if its config.json does not say."""
    content = json.loads(unwrap_model(model).folder_files["config.json"])
    name = str(content.get("dtype") or content.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def rounded_state(model: nn.Module, dtype: str, path: Path) -> dict[str, Tensor]:
    """The weights on the CPU, adapters merged in, as `dtype`; what is tied stays one tensor under two names.

    Raises: RuntimeError if a weight is not finite in that dtype.
    """
    done: dict[tuple, Tensor] = {}
    state = {}
    for name, tensor in plain_state(model).items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in done or not tensor.numel():
            done[key] = tensor.detach().to("cpu", getattr(torch, dtype) if tensor.is_floating_point() else None)
            if not torch.isfinite(done[key]).all():
                raise RuntimeError(f"{name} is not finite as {dtype}: {path} is not overwritten; lower the learning "
                                   "rate")
        state[name] = done[key]
    return state


def write_hf_folder(model: nn.Module, folder: Path, dtype: str | None = None) -> Path:
    """Write a model that `load_hf_model` gave as a folder of its own kind; what was there is replaced.

    Configs and tokenizer are copies of those it came with, so that whatever read them there reads them here.
    dtype: of the weights; None = as they were. Raises: RuntimeError if it cannot be written, or a weight is not finite;
    what was there before is untouched.
    """
    bare, dtype = unwrap_model(model), dtype or own_dtype(model)
    state = rounded_state(bare, dtype, folder)

    def fill(temporary: Path) -> None:
        bare.save_pretrained(temporary, state_dict=state)
        for name, content in bare.folder_files.items():
            (temporary / name).write_bytes(content)
        settings = json.loads(bare.folder_files["config.json"])
        named = [name for name in ("dtype", "torch_dtype") if name in settings] or ["torch_dtype"]
        if any(settings.get(name) != dtype for name in named):
            text = json.dumps(settings | dict.fromkeys(named, dtype), indent=2, ensure_ascii=False) + "\n"
            (temporary / "config.json").write_text(text, encoding="utf-8")

    return write_whole(folder, fill)
