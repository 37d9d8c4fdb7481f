"""Whatever is wrong with the input ends in one line that says what and what to do, before any model is built."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import loading, train_grpo, train_ppo
from trainer.arguments import REPO_ROOT
from trainer.checkpoints import save_weights, weights_path
from trainer.trainer_utils import run_main

SCRIPTS = {"grpo": train_grpo, "ppo": train_ppo}
BOTH = pytest.mark.parametrize("script", SCRIPTS)
GOOD = '{"conversations": [{"role": "user", "content": "1+1=?"}]}\n'
REWARD = {"reward_model_path": REPO_ROOT / "model" / "starter" / "reward_model"}  # it loads, but not before the check


class ModelLoaded(Exception):
    """Not an error that a script turns into a line: it would end the test."""


@pytest.fixture
def no_models(monkeypatch):
    """Building the policy or loading the reward model fails the test."""

    def build(*args, **kwargs):
        raise ModelLoaded

    monkeypatch.setattr(loading, "MiniMindForCausalLM", build)
    monkeypatch.setattr(loading, "LMForRewardModel", build)


@pytest.fixture
def error_of(capsys):
    """Function that runs a script in this process and gives the one line it ended with."""

    def run(script, argv):
        with pytest.raises(SystemExit) as stop:
            run_main(lambda: SCRIPTS[script].main(argv))
        err = capsys.readouterr().err
        assert stop.value.code == 1 and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
        return err

    return run


def data_file(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ---------------------------------------------------------------------------------------------- weights and tokenizer
@BOTH
@pytest.mark.parametrize(("flags", "words"), [
    ({"from_weight": "absent"}, ["absent_64.pth not found", "--weight_dir", "--starter"]),
    ({"hidden_size": 128}, ["tiny_128.pth not found", "--starter"]),
    ({"use_moe": 1}, ["tiny_64_moe.pth not found"]),
    ({"num_hidden_layers": 3, **REWARD}, ["model.layers.2.", "is missing", "--num_hidden_layers 3"]),
    ({"num_hidden_layers": 1, **REWARD}, ["model.layers.1.", "not part of this model"]),
    ({"data_path": "absent.jsonl"}, ["data absent.jsonl not found", "--data_path", "--starter"]),
    ({"eval_data_path": "absent.jsonl"}, ["held-out data absent.jsonl not found", "--eval_data_path"]),
    ({"reward_model_path": "absent"}, ["absent does not exist", "--reward_model_path"]),
    ({"tokenizer_path": "absent"}, ["--tokenizer_path absent", "no tokenizer_config.json"]),
    ({"max_seq_len": 2}, ["--max_seq_len"]),
], ids=str)  # fmt: skip
def test_what_is_missing_or_does_not_fit(script, flags, words, tiny_flags, error_of, no_models, tmp_path):
    err = error_of(script, tiny_flags(**flags))
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []  # nothing was written


@BOTH
def test_weights_of_another_width_under_the_right_name(script, tiny_flags, tiny_weights, tmp_path, error_of, no_models):
    folder = tmp_path / "w"
    folder.mkdir()
    shutil.copy(tiny_weights / "tiny_64.pth", folder / "tiny_128.pth")
    err = error_of(script, tiny_flags(hidden_size=128, weight_dir=folder, **REWARD))
    assert "weights are 64 wide, --hidden_size is 128" in err


@BOTH
def test_a_tokenizer_larger_than_the_model(script, tiny_flags, tokenizer, tmp_path, error_of, no_models):
    config = MiniMindConfig(64, 2, vocab_size=100)
    save_weights(MiniMindForCausalLM(config), weights_path(tmp_path, "small", config))
    err = error_of(script, tiny_flags(from_weight="small", weight_dir=tmp_path, **REWARD))
    assert f"the tokenizer has {len(tokenizer)} tokens, the weights only 100" in err and "--tokenizer_path" in err


@BOTH
def test_weights_that_are_no_torch_file(script, tiny_flags, tmp_path, error_of, no_models):
    (tmp_path / "page_64.pth").write_text("<html>404</html>")
    err = error_of(script, tiny_flags(from_weight="page", weight_dir=tmp_path))
    assert "page_64.pth: cannot be read as a torch file" in err


# ---------------------------------------------------------------------------------------------- data
@BOTH
@pytest.mark.parametrize(("text", "words"), [
    (GOOD * 2 + '{"conversations": [{"role": "user"\n' + GOOD, ["line 3", "not JSON"]),
    (GOOD * 2 + '{"prompt": "x"}\n', ["line 3", "no 'conversations'", "prompt"]),
    (GOOD * 2 + '{"conversations": [{"role": "system", "content": null}]}\n', ["line 3", "conversations[0].content"]),
    (GOOD * 2 + '{"conversations": []}\n', ["line 3", "empty list"]),
    (GOOD + GOOD[:30], ["line 2", "cut off"]),
    (GOOD.encode() + b"\xff\xfe\n", ["line 2", "not UTF-8"]),
    ("", ["no rows", "empty"]), ("\n \n\n", ["no rows", "blank lines"]),
], ids=range(8))  # fmt: skip
def test_malformed_data_is_named_by_file_and_line(script, text, words, tiny_flags, tmp_path, error_of, no_models):
    path = data_file(tmp_path, text)
    for flags in ({"data_path": path}, {"eval_data_path": path}):
        err = error_of(script, tiny_flags(**flags))
        for word in (str(path), *words):
            assert word in err


@BOTH
def test_bad_rows_can_be_left_out(script, tiny_flags, tmp_path, no_models, capsys):
    path = data_file(tmp_path, GOOD + "garbage\n" + GOOD)
    with pytest.raises(ModelLoaded):  # that far it comes
        SCRIPTS[script].main(tiny_flags(data_path=path, skip_bad_rows=1))
    assert "skipped 1 malformed of 3 rows" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- reward model
@BOTH
@pytest.mark.parametrize(("files", "words"), [
    ({}, ["no config.json"]), ({"config.json": "{"}, ["cannot read", "config.json"]),
    ({"config.json": "{}"}, ["no weights"]),
    ({"config.json": "{}", "model.safetensors": "version https://git-lfs.github.com/spec/v1"}, ["git-lfs pointer"]),
    ({"config.json": json.dumps({"auto_map": {"AutoModel": "x.Y"}}), "pytorch_model.bin": "x", "tokenizer.model": "x"},
     ["brings its own Python code", "--trust_remote_code 1"]),
], ids=range(5))  # fmt: skip
def test_an_unreadable_reward_model(script, files, words, tiny_flags, tmp_path, error_of, no_models):
    folder = tmp_path / "reward"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    err = error_of(script, tiny_flags(reward_model_path=folder))
    for word in ("reward model", str(folder), *words):
        assert word in err


# ---------------------------------------------------------------------------------------------- machine and files
@BOTH
def test_a_device_that_is_not_there(script, tiny_flags, error_of, no_models, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    err = error_of(script, tiny_flags(device="cuda:1"))
    assert "--device cuda:1" in err and "sees no CUDA GPU here; use --device cpu" in err


@BOTH
def test_a_folder_that_cannot_be_written(script, tiny_flags, tmp_path, error_of):
    (tmp_path / "file").write_text("in the way")
    err = error_of(script, tiny_flags(run_dir=tmp_path / "file" / "run"))
    assert "cannot write this run's files" in err and "--run_dir" in err


@BOTH
def test_resume_files_that_are_all_damaged(script, tiny_flags, tmp_path, error_of, no_models):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / f"{'grpo' if script == 'grpo' else 'ppo_actor'}_64_resume.pth").write_bytes(b"half")
    err = error_of(script, tiny_flags(from_resume=1))
    assert "no usable resume file" in err and "start afresh" in err


# ---------------------------------------------------------------------------------------------- from a shell
def shell(command, folder, *flags):
    return subprocess.run([sys.executable, *command, *flags], cwd=folder, capture_output=True, text=True, timeout=120)


def test_without_minimind_s_weights_the_script_points_to_starter(tmp_path):
    """From any folder, by path."""
    run = shell([str(REPO_ROOT / "trainer" / "train_grpo.py")], tmp_path, "--weight_dir", str(tmp_path))
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "Traceback" not in run.stderr
    assert run.stderr.startswith(f"error: weights {tmp_path / 'full_sft_768.pth'} not found")
    assert "--starter" in run.stderr
    assert list(tmp_path.iterdir()) == []


@BOTH
@pytest.mark.parametrize(("command", "folder"), [
    ("{root}/trainer/train_{script}.py", "/"), ("trainer/train_{script}.py", "{root}"),
    ("train_{script}.py", "{root}/trainer"), ("-m trainer.train_{script}", "{root}"),
])  # fmt: skip
def test_every_way_to_start_finds_the_project(script, command, folder):
    """A wrong flag is enough to see it: the packages are found before flags are read."""
    places = {"script": script, "root": REPO_ROOT}
    run = shell(command.format(**places).split(), folder.format(**places), "--save_interval", "0")
    assert run.returncode == 2 and run.stderr.startswith("error: argument --save_interval: expected a whole number")
