"""Weights and resume files: where they lie, how they are read, and written so that no moment of death loses one.

Weights: `{weight}_{hidden}[_moe].pth`, MiniMind's fp16 state dict, or of another model the folder `{weight}-hf`.
Resume: `{weight}_{hidden}[_moe]_resume.pth` with float32 weights, optimizers, schedules and counters, and
`…_resume_previous.pth`, the one before it.
"""

import contextlib
import hashlib
import math
import os
import sys
from pathlib import Path

import torch
from torch import nn

from trainer.distributed import rank_and_world, unwrap_model
from trainer.hf_model import write_hf_folder
from trainer.lora import has_adapters, lora_state, plain_state


def _suffix(lm_config) -> str:
    return f"_{lm_config.hidden_size}{'_moe' if getattr(lm_config, 'use_moe', False) else ''}"


def weights_path(folder, weight: str, lm_config) -> Path:
    """`{folder}/{weight}_{hidden}[_moe].pth`, MiniMind's naming; `{folder}/{weight}-hf` for another model's config."""
    if not hasattr(lm_config, "use_moe"):
        return Path(folder) / f"{weight}-hf"
    return Path(folder) / f"{weight}{_suffix(lm_config)}.pth"


def resume_paths(folder, weight: str, lm_config) -> tuple[Path, Path]:
    """(the newest resume file, the one before it)."""
    stem = f"{weight}{_suffix(lm_config)}_resume"
    return Path(folder) / f"{stem}.pth", Path(folder) / f"{stem}_previous.pth"


def bare_state_dict(model: nn.Module) -> dict:
    """State dict under MiniMind's names, whatever DDP and torch.compile wrapped around the model."""
    return unwrap_model(model).state_dict()


# ---------------------------------------------------------------------------------------------- writing
def atomic_save(content, path: Path) -> None:
    """torch.save to a temporary name, flushed to the disk, then renamed: `path` is the old file or the new, never half.

    Raises: RuntimeError when it cannot be written (full disk, no permission); what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"cannot write {path}: {error}; free some space or choose another folder "
                           "(nothing that was saved before is lost)") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; a file system without directory handles keeps its own promises."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files that killed runs left beside `path`."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def save_weights(model: nn.Module, path: Path) -> Path:
    """Write the fp16 state dict MiniMind reads, LoRA adapters merged in; these alone lie beside it as …_adapters.pth.

    A model that came from a folder of transformers is written as one.

    Raises: RuntimeError if a weight is not finite, in fp32 or as fp16.
    """
    if hasattr(unwrap_model(model), "folder_files"):
        write_hf_folder(model, path)
    else:
        atomic_save(half_state(model, path), path)
    if has_adapters(model):
        atomic_save(lora_state(model), path.with_name(f"{path.stem}_adapters.pth"))
    return path


def half_state(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """MiniMind's fp16 state dict. Raises RuntimeError, naming the path not written, if a weight is not finite."""
    half = {}
    for name, tensor in plain_state(model).items():
        half[name] = tensor.detach().to("cpu", torch.float16)
        if not torch.isfinite(half[name]).all():
            raise RuntimeError(f"{name} is not finite as float16 (largest value {tensor.abs().max().item():.3g}, limit "
                               f"65504): {path} is not overwritten; lower the learning rate")
    return half


def state_digest(content) -> str:
    """SHA-256 over everything in a nest of dicts, lists, tensors and plain values; equal content, equal digest."""
    digest = hashlib.sha256()

    def feed(item) -> None:
        if isinstance(item, dict):
            for key in sorted(item, key=str):
                digest.update(f"{key}:".encode())
                feed(item[key])
        elif isinstance(item, (list, tuple)):
            digest.update(f"[{len(item)}]".encode())
            for entry in item:
                feed(entry)
        elif isinstance(item, torch.Tensor):
            digest.update(f"{item.dtype}{tuple(item.shape)}".encode())
            digest.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(item).encode())

    feed(content)
    return digest.hexdigest()


def lm_checkpoint(lm_config, weight="full_sft", model=None, optimizer=None, epoch=0, step=0, wandb=None,
                  save_dir="checkpoints", **extra):
    """MiniMind's resume file: written when `model` is given, else read.

    Writing: model (fp32 state dict), optimizer, epoch, step, world_size, wandb_id and every entry of `extra` (objects
    with a state_dict are stored by it), with a digest over all of it. The file there becomes the previous one.
    Reading: the newest file whose digest is right, or the previous one with a warning; None if there is neither.
    Raises: RuntimeError if it cannot be written, holds a non-finite weight, or if files are there but none is whole.
    """
    newest, previous = resume_paths(save_dir, weight, lm_config)
    if model is None:
        return _read_resume(newest, previous)
    content = {"epoch": epoch, "step": step, "world_size": rank_and_world()[1],
               "wandb_id": getattr(wandb, "id", None), "model": bare_state_dict(model)}
    for name, value in {"optimizer": optimizer, **extra}.items():
        content[name] = bare_state_dict(value) if isinstance(value, nn.Module) else _plain(value)
    for name in [key for key, value in extra.items() if isinstance(value, nn.Module)] + ["model"]:
        require_finite(content[name], name)
    content["digest"] = state_digest(content)
    fresh = newest.with_name(f"{newest.stem}_new.pth")
    atomic_save(content, fresh)
    # Killed between the two renames, the newest is missing and the previous is whole: reading copes with that.
    if newest.exists():
        os.replace(newest, previous)
    os.replace(fresh, newest)
    _sync_folder(newest.parent)
    return newest


def _plain(value):
    return value.state_dict() if hasattr(value, "state_dict") else value


def require_finite(state: dict, name: str) -> None:
    """Raise RuntimeError naming the first non-finite tensor of a state dict."""
    for key, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise RuntimeError(f"{name}: {key} holds a NaN or infinity; the last good checkpoint is not overwritten")


# ---------------------------------------------------------------------------------------------- reading
def read_torch_file(path: Path):
    """torch.load of tensors and plain values only, on the CPU. Raises ValueError if it is damaged or another kind."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a damaged file raises zip, pickle, EOF or runtime errors
        raise ValueError(f"{path}: cannot be read as a torch file of plain tensors ({type(error).__name__}: "
                         f"{str(error).splitlines()[0] if str(error) else 'no message'})") from error


def _read_resume(newest: Path, previous: Path):
    # "_new" is a file whose rename had not come yet; it is whole, since it got that name only once it was.
    candidates = [path for path in (newest.with_name(f"{newest.stem}_new.pth"), newest, previous) if path.exists()]
    problems = []
    for path in candidates:
        try:
            content = read_torch_file(path)
            digest = content.pop("digest", None) if isinstance(content, dict) else None
            if digest != state_digest(content):
                raise ValueError(f"{path}: its digest does not match its content")
        except ValueError as error:
            problems.append(str(error))
            continue
        if problems:
            print(f"warning: {'; '.join(problems)}; going on from {path} (step {content['step']})", file=sys.stderr)
        return content
    if problems:
        raise RuntimeError(f"no usable resume file: {'; '.join(problems)}; delete them to start afresh")
    return None


def load_weights(path: Path, lm_config) -> dict:
    """The float32 state dict in a weights file, checked against the config before any model is built.

    Raises: FileNotFoundError, or ValueError naming what does not fit: the width, missing layers, unexpected layers.
    """
    if not path.is_file():
        raise FileNotFoundError(missing_weights_message(path))
    state = read_torch_file(path)
    if not isinstance(state, dict) or "model.embed_tokens.weight" not in state:
        raise ValueError(f"{path}: no model.embed_tokens.weight in it; expected a MiniMind state dict")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path}: {name} is {type(tensor).__name__}; expected a MiniMind state dict")
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    state = {name: tensor.float() for name, tensor in state.items()}
    rows, width = state["model.embed_tokens.weight"].shape
    if width != lm_config.hidden_size:
        raise ValueError(f"{path}: weights are {width} wide, --hidden_size is {lm_config.hidden_size}; pass the same")
    _check_names(path, state, lm_config, rows)
    require_finite(state, str(path))
    return state


def _check_names(path: Path, state: dict, lm_config, rows: int) -> None:
    """Compare names and shapes with a model built on the meta device, which costs no memory."""
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    with torch.device("meta"):
        sizes = {**lm_config.to_dict(), "vocab_size": rows}
        model = MiniMindForCausalLM(MiniMindConfig(**sizes))
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    flags = f"--num_hidden_layers {lm_config.num_hidden_layers}, --use_moe {int(lm_config.use_moe)}"
    for name in expected:
        if name not in state:
            raise ValueError(f"{path}: {name} is missing ({flags} expects it); the file has "
                             f"{_layers(state)} layers, pass --num_hidden_layers and --use_moe as it was trained")
    for name, tensor in state.items():
        if name not in expected:
            raise ValueError(f"{path}: {name} is not part of this model ({flags}); it has {_layers(state)} layers")
        if tensor.shape != expected[name]:
            raise ValueError(f"{path}: {name} is {tuple(tensor.shape)}, this model expects {tuple(expected[name])}")


def _layers(state: dict) -> int:
    return 1 + max((int(name.split(".")[2]) for name in state if name.startswith("model.layers.")), default=-1)


def missing_weights_message(path: Path) -> str:
    """What to do about weights that are not there."""
    return (f"weights {path} not found: put MiniMind's {path.name} there (or name its folder with --weight_dir), "
            "or run with --starter, which has a small model of its own")


def finite_or_none(value: float):
    """`value`, or None where it is NaN or infinite, which JSON has no word for."""
    return value if math.isfinite(value) else None
