"""Weights and resume files: no moment of death loses one, no damaged one is believed, every misfit is named."""

import errno
import math
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import checkpoints
from trainer.checkpoints import (
    atomic_save, finite_or_none, lm_checkpoint, load_weights, read_torch_file, resume_paths, save_weights, state_digest,
    weights_path,
)  # fmt: skip

CONFIG = SimpleNamespace(hidden_size=8, use_moe=False)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def write_step(folder, step, **extra):
    """A resume file of a small model whose weights are the step's number."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float(step))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    nn.init.constant_(model.weight, float(step))
    return lm_checkpoint(CONFIG, "w", model=model, optimizer=optimizer, epoch=1, step=step, save_dir=folder, **extra)


def read_step(folder):
    content = lm_checkpoint(CONFIG, "w", save_dir=folder)
    return content and content["step"]


# ---------------------------------------------------------------------------------------------- writing
def test_names_are_minimind_s(tmp_path):
    moe = SimpleNamespace(hidden_size=640, use_moe=True)
    assert weights_path("out", "grpo", CONFIG).as_posix() == "out/grpo_8.pth"
    assert weights_path("out", "grpo", moe).as_posix() == "out/grpo_640_moe.pth"
    assert [path.name for path in resume_paths("c", "grpo", moe)] == [
        "grpo_640_moe_resume.pth", "grpo_640_moe_resume_previous.pth"
    ]  # fmt: skip


def test_atomic_save_makes_the_folder_and_leaves_one_file(tmp_path):
    atomic_save({"a": torch.ones(2)}, tmp_path / "new" / "deep" / "x.pth")
    assert files(tmp_path / "new" / "deep") == ["x.pth"]
    assert read_torch_file(tmp_path / "new" / "deep" / "x.pth")["a"].tolist() == [1, 1]


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:595]"),
])  # fmt: skip
def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch, error):
    path = tmp_path / "x.pth"
    atomic_save({"a": 1}, path)

    def save_half(content, file):
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(torch, "save", save_half)
    with pytest.raises(RuntimeError, match=r"cannot write .*x\.pth: .*free some space.*nothing.*lost") as caught:
        atomic_save({"a": 2}, path)
    assert caught.value.__cause__ is error
    assert read_torch_file(path) == {"a": 1} and files(tmp_path) == ["x.pth"]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match="cannot write .*file/x.pth.*another folder"):
        atomic_save({}, tmp_path / "file" / "x.pth")


def test_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("flush"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    atomic_save({}, tmp_path / "x.pth")
    assert order == ["flush", "rename", "flush"]  # the file, its name, the folder


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    """Under the very name that a process killed while it writes leaves behind."""
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda content, file: written.append(os.path.basename(file.name)))
        write_step(tmp_path, 1)
        save_weights(nn.Linear(1, 1), tmp_path / "w_8.pth")
    leftovers = [name.replace(str(os.getpid()), "4711") for name in written]
    for name in [*leftovers, ".other_8.pth.4711.tmp"]:
        (tmp_path / name).write_bytes(b"half")
    write_step(tmp_path, 2)
    save_weights(nn.Linear(1, 1), tmp_path / "w_8.pth")
    assert len(leftovers) == 2
    assert [name for name in files(tmp_path) if name.endswith(".tmp")] == [".other_8.pth.4711.tmp"]


# ---------------------------------------------------------------------------------------------- resume file
def test_resume_file_gives_back_what_was_put_in(tmp_path):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0 + 3e-6, 1e-30], [-2.5, 3.0]]))  # fp16 would give 1.0 and 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lm_checkpoint(CONFIG, "w", model=model, optimizer=optimizer, epoch=2, step=7, save_dir=tmp_path,
                  critic_model=nn.Linear(1, 1), scheduler=torch.amp.GradScaler("cpu", enabled=False), rows=12,
                  wandb=SimpleNamespace(id="run-1"), progress={"step": 7}, before=None, args={"lam": 0.95, "x": None})
    content = lm_checkpoint(CONFIG, "w", save_dir=tmp_path)
    assert (content["epoch"], content["step"], content["world_size"], content["wandb_id"]) == (2, 7, 1, "run-1")
    assert (content["rows"], content["progress"], content["before"]) == (12, {"step": 7}, None)
    assert content["args"] == {"lam": 0.95, "x": None}
    assert sorted(content["critic_model"]) == ["bias", "weight"] and content["scheduler"] == {}
    for name, tensor in weights.items():
        assert content["model"][name].dtype == torch.float32 and torch.equal(content["model"][name], tensor)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.9)
    fresh.load_state_dict(content["optimizer"])
    assert torch.equal(fresh.state[model.weight]["exp_avg_sq"], optimizer.state[model.weight]["exp_avg_sq"])


def test_small_updates_survive_in_the_resume_file(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0 + 3e-6)
    lm_checkpoint(CONFIG, "w", model=model, save_dir=tmp_path)
    assert lm_checkpoint(CONFIG, "w", save_dir=tmp_path)["model"]["weight"].item() == model.weight.item() != 1.0


def test_no_file_is_none_and_the_last_two_are_kept(tmp_path):
    assert read_step(tmp_path) is None
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    assert files(tmp_path) == ["w_8_resume.pth", "w_8_resume_previous.pth"]
    newest, previous = resume_paths(tmp_path, "w", CONFIG)
    assert read_torch_file(newest)["step"] == 3 and read_torch_file(previous)["step"] == 2
    assert read_step(tmp_path) == 3


def damage_truncate(share):
    def damage(path):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    return damage


def damage_flip(share):
    """Turn one bit around within the tensors' bytes or the pickle, whatever lies there."""

    def damage(path):
        data = bytearray(path.read_bytes())
        data[int(len(data) * share)] ^= 4
        path.write_bytes(data)

    return damage


def flip_weight(path):
    """The subtle one: the file is whole, but one weight's lowest bit is another."""
    content = torch.load(path, weights_only=True)
    content["model"]["weight"].view(torch.int32)[0, 0] ^= 1
    torch.save(content, path)


DAMAGES = [pytest.param(damage_truncate(share), id=f"cut at {share}") for share in (0.0, 0.2, 0.5, 0.9, 0.99)]
DAMAGES.append(pytest.param(flip_weight, id="one weight's last bit"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_file_gives_way_to_the_one_before(tmp_path, capsys, damage):
    write_step(tmp_path, 1)
    newest = write_step(tmp_path, 2)
    damage(newest)
    assert read_step(tmp_path) == 1
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and str(newest) in warning and "(step 1)" in warning


def test_a_flipped_bit_anywhere_is_found_or_harmless(tmp_path, capsys):
    """Flips in the tensors or the pickle are found; in zip's own padding they change nothing that is read."""
    write_step(tmp_path, 1)
    newest = write_step(tmp_path, 2)
    whole, expected = newest.read_bytes(), state_digest(lm_checkpoint(CONFIG, "w", save_dir=tmp_path))
    found = 0
    for k in range(40):
        damage_flip((k + 0.5) / 40)(newest)
        content = lm_checkpoint(CONFIG, "w", save_dir=tmp_path)
        assert content["step"] == 1 or state_digest(content) == expected
        found += content["step"] == 1
        newest.write_bytes(whole)
    assert found > 5


def test_a_missing_newest_file_is_the_moment_between_two_renames(tmp_path):
    write_step(tmp_path, 1)
    write_step(tmp_path, 2).unlink()
    assert read_step(tmp_path) == 1


def test_both_files_damaged_is_an_error_that_names_them(tmp_path):
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    for path in resume_paths(tmp_path, "w", CONFIG):
        damage_truncate(0.5)(path)
    with pytest.raises(RuntimeError, match="no usable resume file: .*resume.pth.*previous.pth.*delete them"):
        read_step(tmp_path)


class Killed(BaseException):
    """Stands for the death of the process: no handler runs."""


@pytest.mark.parametrize("moment", range(4))
def test_killed_at_any_rename_a_whole_file_is_found_and_saving_goes_on(tmp_path, monkeypatch, moment):
    """Whatever rename is the last one before death, the newest whole file is read, and the next save works."""
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    replace, done = os.replace, []

    def dying(source, target):
        if len(done) == moment:
            raise Killed
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(checkpoints.os, "replace", dying)
    if moment < 3:
        with pytest.raises(Killed):
            write_step(tmp_path, 3)
    else:
        write_step(tmp_path, 3)
    monkeypatch.setattr(checkpoints.os, "replace", replace)
    assert read_step(tmp_path) == (2 if moment == 0 else 3)
    write_step(tmp_path, 4)
    assert read_step(tmp_path) == 4 and files(tmp_path) == ["w_8_resume.pth", "w_8_resume_previous.pth"]


def test_a_file_that_would_run_code_is_refused(tmp_path):
    newest, _ = resume_paths(tmp_path, "w", CONFIG)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model": Evil()}, newest)
    with pytest.raises(RuntimeError, match="no usable resume file.*plain tensors"):
        read_step(tmp_path)
    newest.write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(ValueError, match="plain tensors"):
        read_torch_file(newest)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["model", "critic_model"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weights_are_never_written(tmp_path, where, bad):
    write_step(tmp_path, 1)
    broken = nn.Linear(2, 2)
    with torch.no_grad():
        broken.bias[1] = bad
    models = {"model": nn.Linear(2, 2), "critic_model": nn.Linear(2, 2)} | {where: broken}
    with pytest.raises(RuntimeError, match=f"{where}: bias holds a NaN or infinity.*not overwritten"):
        lm_checkpoint(CONFIG, "w", step=2, save_dir=tmp_path, **models)
    assert read_step(tmp_path) == 1 and files(tmp_path) == ["w_8_resume.pth"]


def test_digest_sees_every_kind_of_change():
    base = {"a": [1, 2.5, None, "x"], "t": torch.tensor([1.0, 2.0]), "d": {0: True}}
    digest = state_digest(base)
    assert digest == state_digest({"d": {0: True}, "t": torch.tensor([1.0, 2.0]), "a": [1, 2.5, None, "x"]})
    for change in ({"a": [1, 2.5, None, "y"]}, {"a": [1, 2.5, "None", "x"]}, {"t": torch.tensor([1.0, 2.0 + 2e-7])},
                   {"t": torch.tensor([[1.0, 2.0]])}, {"t": torch.tensor([1.0, 2.0], dtype=torch.float64)},
                   {"d": {1: True}}, {"e": 0}, {"a": [[1, 2.5], None, "x"]}):
        assert state_digest({**base, **change}) != digest, change
    assert state_digest({"t": torch.arange(6).view(2, 3).T}) == state_digest(
        {"t": torch.arange(6).view(2, 3).T.contiguous()}
    )


def test_finite_or_none():
    assert (finite_or_none(1.5), finite_or_none(math.nan), finite_or_none(-math.inf)) == (1.5, None, None)


# ---------------------------------------------------------------------------------------------- weights
def config(width=64, layers=2, **changes):
    return MiniMindConfig(width, layers, vocab_size=40, **changes)


def saved(tmp_path, *, spoil=None, **sizes):
    """A MiniMind weights file (fp16, with lm_head.weight), after `spoil(state)`."""
    torch.manual_seed(0)
    state = {name: tensor.half() for name, tensor in MiniMindForCausalLM(config(**sizes)).state_dict().items()}
    path = tmp_path / "full_sft_64.pth"
    torch.save(spoil(state) if spoil else state, path)
    return path


def without(name):
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def test_a_minimind_file_loads_strictly_in_float32(tmp_path):
    path = saved(tmp_path)
    state, on_disk = load_weights(path, config()), torch.load(path, weights_only=True)
    assert set(state) == set(on_disk) and "lm_head.weight" in state
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, on_disk[name].float())
               for name, tensor in state.items())
    MiniMindForCausalLM(config()).load_state_dict(state, strict=True)
    assert torch.equal(load_weights(saved(tmp_path, spoil=without("lm_head.weight")), config())["lm_head.weight"],
                       state["model.embed_tokens.weight"])


@pytest.mark.parametrize("use_moe", [False, True])
def test_ours_has_minimind_s_names_and_loads_strictly(tmp_path, use_moe):
    model = MiniMindForCausalLM(config(use_moe=use_moe))
    path = save_weights(model, weights_path(tmp_path, "grpo", model.config))
    assert path.name == ("grpo_64_moe.pth" if use_moe else "grpo_64.pth")
    state = torch.load(path, weights_only=True)
    layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    layer += [f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts = ("gate_proj", "up_proj", "down_proj")
    if use_moe:
        layer += ["mlp.gate.weight"] + [f"mlp.experts.{e}.{part}.weight" for e in range(4) for part in parts]
    else:
        layer += [f"mlp.{part}.weight" for part in parts]
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {f"model.layers.{i}.{name}" for i in range(2) for name in layer}
    assert set(state) == expected
    assert all(tensor.dtype == torch.float16 for tensor in state.values())
    load_weights(path, config(use_moe=use_moe))


@pytest.mark.parametrize(("sizes", "file", "words"), [
    ({"width": 64, "layers": 3}, {}, r"model\.layers\.2\.\S+ is missing \(--num_hidden_layers 3, .*has 2 layers"),
    ({"width": 64, "layers": 1}, {}, r"model\.layers\.1\.\S+ is not part of this model.*has 2 layers"),
    ({"width": 128}, {}, "weights are 64 wide, --hidden_size is 128"),
    ({"use_moe": True}, {}, r"model\.layers\.0\.mlp\.\S+ is missing .*--use_moe 1"),
    ({}, {"use_moe": True}, r"model\.layers\.0\.mlp\.\S+ is missing .*--use_moe 0"),
    ({"intermediate_size": 96}, {}, r"mlp\.gate_proj\.weight is \(256, 64\), this model expects \(96, 64\)"),
])  # fmt: skip
def test_weights_of_another_model_are_named(tmp_path, sizes, file, words):
    with pytest.raises(ValueError, match=words):
        load_weights(saved(tmp_path, **file), config(**sizes))


@pytest.mark.parametrize(("spoil", "words"), [
    (without("model.layers.1.self_attn.q_norm.weight"), r"model\.layers\.1\.self_attn\.q_norm\.weight is missing"),
    (without("model.embed_tokens.weight"), "no model.embed_tokens.weight in it; expected a MiniMind state dict"),
    (lambda state: {"model": state, "step": 3}, "expected a MiniMind state dict"),
    (lambda state: [1, 2], "expected a MiniMind state dict"),
    (lambda state: {**state, "epoch": 3}, "epoch is int.*expected a MiniMind state dict"),
    (lambda state: {**state, "model.norm.bias": state["model.norm.weight"]}, "model.norm.bias is not part"),
])  # fmt: skip
def test_files_that_hold_something_else(tmp_path, spoil, words):
    with pytest.raises(ValueError, match=words):
        load_weights(saved(tmp_path, spoil=spoil), config())


def test_missing_and_unreadable_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent_64\.pth not found.*put .*absent_64\.pth there.*--starter"):
        load_weights(tmp_path / "absent_64.pth", config())
    (tmp_path / "text_64.pth").write_text("<html>not found</html>")
    with pytest.raises(ValueError, match="text_64.pth: cannot be read as a torch file"):
        load_weights(tmp_path / "text_64.pth", config())
    nan = saved(tmp_path, spoil=lambda state: {**state, "model.norm.weight": torch.full((64,), math.nan)})
    with pytest.raises(RuntimeError, match="model.norm.weight holds a NaN"):
        load_weights(nan, config())


@pytest.mark.parametrize("value", [math.nan, math.inf, 70000.0, -70000.0])  # float16 ends at 65504
def test_weights_that_float16_cannot_hold_are_not_saved(tmp_path, value):
    model = nn.Linear(2, 2)
    path = save_weights(model, tmp_path / "x.pth")
    before = path.read_bytes()
    with torch.no_grad():
        model.bias[0] = value
    with pytest.raises(RuntimeError, match="bias is not finite as float16 .*is not overwritten"):
        save_weights(model, path)
    assert path.read_bytes() == before and files(tmp_path) == ["x.pth"]
