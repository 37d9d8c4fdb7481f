"""A MiniMind model as a plain Qwen3 folder, and back: config.json, one model.safetensors, written whole or not at all.

MiniMind's state dict already has Qwen3's names, so nothing is renamed; what differs is the config, and that
`lm_head.weight` is always written out: SGLang's Qwen3-MoE ignores tied embeddings and answers noise without it.
`scripts/convert_model.py` and the weight sync of the SGLang engine both go through here.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.configuration import YARN, MiniMindConfig
from model.model_minimind import MiniMindForCausalLM

WEIGHTS_FILE = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What a Qwen3 config may say that MiniMind's model cannot do, with the only value it can have here.
FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1,
         "mlp_only_layers": []}  # fmt: skip


# ---------------------------------------------------------------------------------------------- config
def transformers_config(config: MiniMindConfig, dtype: str) -> dict:
    """config.json of the model as Qwen3ForCausalLM or Qwen3MoeForCausalLM, for transformers 4.51 up to 5.x.

    Rotary settings stand in it twice: `rope_theta` and `rope_scaling` are what transformers 4, SGLang and llama.cpp
    read, `rope_parameters` is what transformers 5 reads. `dtype` names the dtype of the weights beside it.
    """
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = None
    if config.inference_rope_scaling and config.max_position_embeddings > YARN["original_max_position_embeddings"]:
        # transformers takes the factor on cos and sin as it is; SGLang and vLLM multiply their own 0.1·ln(s) + 1 by
        # `attn_factor`. MiniMind has no such factor, so theirs must come out as 1.
        own_factor = YARN["attention_factor"] / (0.1 * math.log(YARN["factor"]) + 1.0)
        scaling = {"rope_type": "yarn", **YARN, "attn_factor": own_factor}
        rope = {**scaling, "rope_theta": config.rope_theta}
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "initializer_range",
            "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")  # fmt: skip
    content = {
        "architectures": ["Qwen3MoeForCausalLM" if config.use_moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if config.use_moe else "qwen3",
        **{name: getattr(config, name) for name in same},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.use_moe:
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
                   "router_aux_loss_coef")  # fmt: skip
        content |= {name: getattr(config, name) for name in experts}
        content |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False}
    else:
        content["layer_types"] = ["full_attention"] * config.num_hidden_layers
    return content


def generation_config(config: MiniMindConfig) -> dict:
    """generation_config.json: the ids that start and end an answer, and no opinion on sampling."""
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": False,
    }


def minimind_config(content: dict, source) -> MiniMindConfig:
    """The MiniMindConfig that a config.json of a Qwen3, Qwen3-MoE or MiniMind folder describes.

    Raises: ValueError naming `source` and the setting that MiniMind's model does not have.
    """
    kind = content.get("model_type")
    if kind == "minimind":
        return MiniMindConfig(**content)
    if kind not in ("qwen3", "qwen3_moe"):
        raise ValueError(f"{source}: model_type is {kind!r}; expected qwen3, qwen3_moe or minimind")
    for name, value in FIXED.items():
        if content.get(name, value) != value:
            raise ValueError(f"{source}: {name} is {content[name]!r}; MiniMind's model can only have {value!r}")
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    different = [name for name in YARN if scaling == "yarn" and rope.get(name, YARN[name]) != YARN[name]]
    if scaling not in ("default", "yarn") or different:
        raise ValueError(f"{source}: rotary scaling {rope} is not one MiniMind has (none, or yarn with {YARN})")
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
             "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings",
             "rms_norm_eps", "tie_word_embeddings", "initializer_range", "num_experts", "num_experts_per_tok",
             "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef")  # fmt: skip
    settings = {name: content[name] for name in names if content.get(name) is not None}
    theta = content.get("rope_theta") or (content.get("rope_parameters") or {}).get("rope_theta", 1e6)
    return MiniMindConfig(use_moe=kind == "qwen3_moe", rope_theta=theta, inference_rope_scaling=scaling == "yarn",
                          **settings)  # fmt: skip


def config_from_state(state: dict[str, Tensor], source, **settings) -> MiniMindConfig:
    """The sizes of a model read off the shapes of its weights; `settings` for what shapes do not tell.

    Raises: ValueError naming `source` if it is not a MiniMind state dict.
    """
    state, first = with_both_tied(state), "model.layers.0."
    needed = [EMBEDDING, *(f"{first}self_attn.{part}.weight" for part in ("q_proj", "k_proj", "q_norm"))]
    experts = 1 + max((int(name.split(".")[5]) for name in state if name.startswith(f"{first}mlp.experts.")),
                      default=-1)  # fmt: skip
    needed.append(f"{first}mlp.{'experts.0.' if experts else ''}gate_proj.weight")
    missing = [name for name in needed if name not in state]
    if missing:
        raise ValueError(f"{source}: {missing[0]} is missing; expected a MiniMind state dict ({EMBEDDING}, …)")
    embedding, q, k, q_norm, gate = (state[name].shape for name in needed)
    head_dim = q_norm[0]
    if experts:
        settings |= {"use_moe": True, "num_experts": experts, "moe_intermediate_size": gate[0]}
    else:
        settings["intermediate_size"] = gate[0]
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("model.layers."))
    return MiniMindConfig(
        embedding[1],
        layers,
        vocab_size=embedding[0],
        num_attention_heads=q[0] // head_dim,
        num_key_value_heads=k[0] // head_dim,
        head_dim=head_dim,
        **settings,
    )


# ---------------------------------------------------------------------------------------------- weights
def expected_shapes(config: MiniMindConfig) -> dict[str, torch.Size]:
    """Name and shape of every weight of the model; built on the meta device, so it costs no memory."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in MiniMindForCausalLM(config).state_dict().items()}


def with_both_tied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the dict in which a matrix that stands under one of the two tied names stands under both."""
    found = [state[name] for name in (EMBEDDING, HEAD) if name in state]
    return {**state, EMBEDDING: found[0], HEAD: found[-1]} if found else dict(state)


def checked_state(state: dict[str, Tensor], shapes: dict[str, torch.Size], dtype: str, source) -> dict[str, Tensor]:
    """The weights on the CPU in `dtype`, each with memory of its own, `lm_head.weight` among them; no grad.

    Raises: ValueError naming `source` and the first weight that is missing, unknown, of another shape, or not finite
    (as it is, or once rounded to `dtype`). A server that loads such weights dies or answers noise.
    """
    state = with_both_tied(state)
    for name, shape in shapes.items():
        if name not in state:
            raise ValueError(f"{source}: {name} is missing; expected it with shape {tuple(shape)}")
    converted = {}
    for name, tensor in state.items():
        if name not in shapes:
            raise ValueError(f"{source}: {name} is not a weight of this model (of {len(shapes)} weights)")
        if tensor.shape != shapes[name]:
            raise ValueError(f"{source}: {name} is {tuple(tensor.shape)}; expected {tuple(shapes[name])}")
        # a copy even where nothing changes: tied weights share memory, which safetensors refuses
        converted[name] = tensor.detach().to("cpu", DTYPES[dtype], copy=True).contiguous()
        if not torch.isfinite(converted[name]).all():
            raise ValueError(f"{source}: {name} holds a NaN or infinity as {dtype}; it is not written")
    return converted


def read_folder(folder: Path) -> tuple[dict[str, Tensor], MiniMindConfig]:
    """(weights in the dtype they have, config) of a transformers folder; safetensors, sharded or not, or a .bin.

    Raises: FileNotFoundError or ValueError naming the file that is missing, damaged, or not MiniMind's architecture.
    """
    content = read_json(folder / "config.json")
    config = minimind_config(content, folder / "config.json")
    index = folder / f"{WEIGHTS_FILE}.index.json"
    paths = [folder / WEIGHTS_FILE]
    if not paths[0].is_file() and index.is_file():
        paths = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    elif not paths[0].is_file():
        paths = [folder / "pytorch_model.bin"]
    state: dict[str, Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{folder}: no {WEIGHTS_FILE} there, and no {path.name}")
        try:
            loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
            raise ValueError(f"{path}: damaged or not a file of weights: {error}") from error
        state |= loaded
    return state, config


def read_json(path: Path) -> dict:
    """A JSON file's content. Raises FileNotFoundError or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; expected the config of a transformers folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error


# ---------------------------------------------------------------------------------------------- writing
def write_folder(
    folder: Path,
    state: dict[str, Tensor],
    config: MiniMindConfig,
    dtype: str,
    *,
    texts: dict[str, str] | None = None,
    replace: bool = False,
) -> Path:
    """Write weights (as `checked_state` gives them), both configs and `texts` (content by file name) as `folder`.

    Written by `write_whole`. Raises: ValueError if the folder exists and `replace` is false; what `write_whole` raises.
    """
    if folder.exists() and not replace:
        raise ValueError(f"{folder} exists already; choose another folder or remove it")
    configs = {"config.json": transformers_config(config, dtype), "generation_config.json": generation_config(config)}
    plain = {name: json.dumps(content, indent=2) + "\n" for name, content in configs.items()} | (texts or {})

    def fill(temporary: Path) -> None:
        save_file(state, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        for name, text in plain.items():
            (temporary / name).write_text(text, encoding="utf-8")

    return write_whole(folder, fill)


def write_whole(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder`, or replace it, with what `fill(path)` writes into the folder it is given.

    Written as `{folder}.tmp`, flushed to the disk, then renamed: the folder is whole or it is not there.
    Raises: RuntimeError if it cannot be written, with nothing left behind and what was there before untouched.
    """
    temporary, aside = (folder.with_name(f"{folder.name}.{end}") for end in ("tmp", "old"))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        for path in [*temporary.iterdir(), temporary]:
            flush_to_disk(path)
        shutil.rmtree(aside, ignore_errors=True)
        if folder.exists():
            os.rename(folder, aside)
        os.rename(temporary, folder)
        flush_to_disk(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RuntimeError(f"cannot write {folder}: {error}; free some space or choose another folder") from error
    return folder


def flush_to_disk(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """Content by name of the tokenizer's files in `folder`, in a form that transformers 4 and 5 both open.

    Raises: FileNotFoundError if tokenizer.json or tokenizer_config.json is missing.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
             "added_tokens.json", "vocab.json", "merges.txt")  # fmt: skip
    for name in names[:2]:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: no {name} there; expected a tokenizer's folder (--tokenizer_path)")
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in names if (folder / name).is_file()}
    settings = json.loads(texts["tokenizer_config.json"])
    if settings.get("tokenizer_class") in (None, "TokenizersBackend"):
        # transformers 5 writes a class that transformers 4, and servers built on it, do not know
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        texts["tokenizer_config.json"] = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    return texts
