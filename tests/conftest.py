"""What the tests share: one thread, no network, the project's tokenizer, a tiny model and prompts to train it on."""

import json
import os
import shutil
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for child processes as well; before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from reward_folders import build

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.arguments import REPO_ROOT
from trainer.checkpoints import save_weights, weights_path
from trainer.loading import load_tokenizer

TINY_WIDTH, TINY_LAYERS, TINY_NAME = 64, 2, "tiny"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums in one order, so that numbers are the same on every machine, and no fight for cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def signals_as_they_were():
    """A run in this process takes over Ctrl-C and SIGTERM; pytest gets them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tokenizer():
    """The committed tokenizer."""
    return load_tokenizer(str(REPO_ROOT / "model"))


@pytest.fixture(scope="session")
def tiny_config(tokenizer) -> MiniMindConfig:
    """64 wide, 2 layers, the vocabulary of the committed tokenizer."""
    return MiniMindConfig(TINY_WIDTH, TINY_LAYERS, vocab_size=len(tokenizer))


@pytest.fixture(scope="session")
def tiny_weights(tiny_config, tmp_path_factory):
    """Folder with `tiny_64.pth`, a random model as MiniMind saves one."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(7)
    save_weights(MiniMindForCausalLM(tiny_config), weights_path(folder, TINY_NAME, tiny_config))
    return folder


@pytest.fixture(scope="session")
def reward_folder(tokenizer, tmp_path_factory):
    """Folder of a tiny reward model, to be read."""
    return build(tmp_path_factory.mktemp("reward"), tokenizer)


@pytest.fixture
def reward_copy(reward_folder, tmp_path):
    """A copy of it, to be spoiled."""
    return shutil.copytree(reward_folder, tmp_path / "copy")


@pytest.fixture(scope="session")
def prompts_of(tmp_path_factory):
    """Function of a count giving a JSONL file with that many one-digit additions and their answers."""

    def write(count: int):
        rows = [{"conversations": [{"role": "user", "content": f"{1 + i % 4}+{i}=?"}], "answer": str(1 + i % 4 + i)}
                for i in range(count)]
        path = tmp_path_factory.mktemp("data") / f"prompts_{count}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def prompts_file(prompts_of):
    """8 prompts with answers."""
    return prompts_of(8)


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer):
    """Small random models of transformers by name, qwen and llama; see hf_folders.py."""
    import hf_folders

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    return {"qwen": hf_folders.write_qwen(root / "qwen", tokenizer), "llama": hf_folders.write_llama(root / "llama")}


@pytest.fixture
def flags_of(folders, tmp_path):
    """Function of such a model's name (or a folder) and flags giving the command line of a small run with it."""
    import hf_folders
    import small_runs as small

    data = small.write_prompts(tmp_path / "prompts.jsonl", 12)

    def build(name, **changes):
        where = {"save_dir": tmp_path / "out", "checkpoint_dir": tmp_path / "checkpoints", "run_dir": tmp_path / "run",
                 "data_path": data, "hf_model": folders.get(name, name)}  # fmt: skip
        return small.argv(**{**hf_folders.NO_SIZES, **where, "batch_size": 2, "num_generations": 3, "max_steps": 2,
                             "max_seq_len": 96, "learning_rate": 1e-3, "self_check": 1, **changes})  # fmt: skip

    return build


@pytest.fixture
def tiny_flags(tiny_weights, prompts_file, tmp_path):
    """Function of flags by name giving the argv of a tiny run, for either script; what it writes goes to tmp_path.

    tiny_flags(max_steps=3, batch_size=4) overrides or adds flags; None leaves one out.
    """

    def build(**changes) -> list[str]:
        flags = {
            "hidden_size": TINY_WIDTH, "num_hidden_layers": TINY_LAYERS, "from_weight": TINY_NAME,
            "weight_dir": tiny_weights, "data_path": prompts_file, "reward_model_path": "none", "device": "cpu",
            "dtype": "float32", "num_workers": 0, "max_seq_len": 64, "max_gen_len": 8, "batch_size": 2,
            "answer_reward": 1, "save_dir": tmp_path / "out", "checkpoint_dir": tmp_path / "checkpoints",
            "run_dir": tmp_path / "run", **changes,
        }  # fmt: skip
        return [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]

    return build
