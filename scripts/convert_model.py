"""MiniMind weights as a transformers folder, and back.

    python scripts/convert_model.py out/full_sft_768.pth minimind-qwen3     .pth -> folder
    python scripts/convert_model.py minimind-qwen3 out/full_sft_768.pth     folder -> .pth

The folder is a plain Qwen3ForCausalLM (Qwen3MoeForCausalLM with experts) with tokenizer and generation config, in one
model.safetensors; transformers, SGLang and vLLM open it without code of ours. Sizes are read off the weights.
"""

import argparse
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))

from trainer.arguments import FlagParser, positive_int, switch  # noqa: E402


def parse_args(argv=None) -> argparse.Namespace:
    """The flags. Exits with status 2 on a wrong one."""
    parser = FlagParser("Turn MiniMind weights (.pth) into a transformers folder, or such a folder into a .pth.")
    parser.add_argument("source", help="a .pth with a MiniMind state dict, or a folder with config.json and weights")
    parser.add_argument("target", help="the folder to write, or the .pth to write")
    add = parser.group("what is written")
    add("--dtype", ["float32", "bfloat16", "float16"], None, "of the weights written; None = float32 for a folder "
        "(every half-precision value fits in it), float16 for a .pth as MiniMind has it")
    add("--overwrite", switch, 0, "1 = replace a target that exists")
    add = parser.group(".pth to folder: what the weights do not tell")
    add("--tokenizer_path", str, str(REPO_ROOT / "model"), "folder of the tokenizer the weights were trained with")
    add("--max_position_embeddings", positive_int, 32768, "longest sequence in tokens that the model is meant for")
    add("--yarn", switch, 0, "1 = MiniMind's inference_rope_scaling (YaRN, factor 16 over 2048 positions)")
    add("--num_experts_per_tok", positive_int, 1, "experts a token goes through (models with experts)")
    args = parser.parse_args(argv)
    if not Path(args.source).exists():
        parser.error(f"source {args.source} not found; expected a .pth or a transformers folder")
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

import torch  # noqa: E402

from model.export import (  # noqa: E402
    checked_state, config_from_state, expected_shapes, read_folder, tokenizer_texts, write_folder,
)  # fmt: skip
from trainer.checkpoints import atomic_save, read_torch_file  # noqa: E402
from trainer.loading import fit_vocabulary, load_tokenizer  # noqa: E402
from trainer.trainer_utils import run_main  # noqa: E402


def pth_to_folder(source: Path, target: Path, args) -> str:
    """Write the folder; gives the line that says what to do with it.

    Raises: ValueError or FileNotFoundError for a source that does not fit, RuntimeError if it cannot be written.
    """
    dtype = args.dtype or "float32"
    state = read_torch_file(source)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{source}: expected a state dict (tensors by name), found something else; a resume file is "
                         "not one, the weights lie in --save_dir")
    config = config_from_state(
        state, source, max_position_embeddings=args.max_position_embeddings, inference_rope_scaling=bool(args.yarn),
        num_experts_per_tok=args.num_experts_per_tok,
    )  # fmt: skip
    fit_vocabulary(config, load_tokenizer(args.tokenizer_path), state)
    weights = checked_state(state, expected_shapes(config), dtype, source)
    if not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        raise ValueError(f"{source}: lm_head.weight differs from model.embed_tokens.weight, but MiniMind ties them")
    texts = tokenizer_texts(Path(args.tokenizer_path))
    write_folder(target, weights, config, dtype, texts=texts, replace=bool(args.overwrite))
    written, _ = read_folder(target)
    if any(not torch.equal(written[name], tensor) for name, tensor in weights.items()):
        raise RuntimeError(f"{target}: what was read back differs from what was written; check the disk")
    # --dtype is part of the command: with float32 in config.json, SGLang's own default would be float16
    served = "bfloat16" if dtype == "float16" else dtype
    return (f"serve it: python -m sglang.launch_server --model-path {target} --host 127.0.0.1 --port 8998 "
            f"--dtype {served}")


def folder_to_pth(source: Path, target: Path, args) -> str:
    """Write the .pth; gives the line that says what to do with it.

    Raises: ValueError or FileNotFoundError for a source that does not fit, RuntimeError if it cannot be written.
    """
    if target.suffix != ".pth":
        raise ValueError(f"target {target}: expected a name that ends in .pth, since {source} is a folder")
    state, config = read_folder(source)
    head, embedding = state.get("lm_head.weight"), state.get("model.embed_tokens.weight")
    if not config.tie_word_embeddings and (head is None or not torch.equal(head, embedding)):
        raise ValueError(f"{source}: it has an lm_head of its own (tie_word_embeddings false); MiniMind's is tied")
    config.tie_word_embeddings = True
    if config.rope_theta != 1e6:
        raise ValueError(f"{source}: rope_theta is {config.rope_theta}; a .pth cannot say so, and MiniMind's is 1e6")
    weights = checked_state(state, expected_shapes(config), args.dtype or "float16", source)
    atomic_save(weights, target)
    flags = f"--hidden_size {config.hidden_size} --num_hidden_layers {config.num_hidden_layers}"
    suffix = f"_{config.hidden_size}{'_moe' if config.use_moe else ''}"
    if not target.stem.endswith(suffix):
        return f"the trainers look for NAME{suffix}.pth: rename it to train on ({flags})"
    name = target.stem.removesuffix(suffix)
    return (f"train on: --weight_dir {target.parent} --from_weight {name} {flags}"
            f"{' --use_moe 1' if config.use_moe else ''}")


def check_target(target: Path, overwrite: int) -> None:
    """Raise ValueError for a target that exists, unless --overwrite 1 is given and it is what would be written."""
    if not target.exists():
        return
    if not overwrite:
        raise ValueError(f"{target} exists already; choose another name, or pass --overwrite 1")
    if target.is_dir() and not (target / "config.json").is_file():
        raise ValueError(f"{target} exists and holds no config.json, so it is no model folder; it is not replaced")


def main(argv=None) -> int:
    """Convert; gives the process's exit status."""
    args = parse_args(argv)
    source, target = Path(args.source), Path(args.target)
    check_target(target, args.overwrite)
    convert = folder_to_pth if source.is_dir() else pth_to_folder
    line = convert(source, target, args)
    print(f"wrote {target}\n{line}")
    return 0


if __name__ == "__main__":
    run_main(main)
