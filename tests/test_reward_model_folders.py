"""Folders that LMForRewardModel refuses: early, in one line that says what was found."""

import json
import shutil
import time

import pytest
from reward_folders import chats, load
from transformers import AutoTokenizer

from trainer.reward_model import check_reward_model_path


@pytest.mark.parametrize("path", [None, "", "  "])
def test_no_path(path):
    with pytest.raises(ValueError, match="--reward_model_path"):
        check_reward_model_path(path)


def spoil_json(folder):
    (folder / "config.json").write_text("{half")


def spoil_json_kind(folder):
    (folder / "config.json").write_text("[]")


def truncate_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def index_without_shard(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"score.weight": "model-00001-of-00002.safetensors"}}'
    )


def remove_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def change_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        config.update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def replace_weights(content):
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (shutil.rmtree, "does not exist.*--reward_model_path"),
        (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "is a file"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (spoil_json, "cannot read .*config.json"),
        (spoil_json_kind, "config.json holds a JSON list"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights in"),
        (truncate_weights, "bytes and its header says"),
        (replace_weights(b""), "it is empty"),
        (replace_weights(b"garbage that is no header at all"), "no safetensors header"),
        (replace_weights(b"\2\0\0\0\0\0\0\0[]"), "cannot be used"),
        (replace_weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git-lfs pointer"),
        (index_without_shard, "model-00001-of-00002.safetensors is missing"),
        (remove_tokenizer, "no tokenizer in"),
        (change_config(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM.*ForSequenceClassification"),
        (change_config(model_type="unheard_of"), "unheard_of"),
        (change_config(num_labels=2, id2label={"0": "a", "1": "b"}), "with 2 outputs; expected 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_folder_that_cannot_work_is_refused_within_a_second(reward_copy, spoil, found):
    spoil(reward_copy)
    start = time.perf_counter()
    with pytest.raises(RuntimeError, match=found) as caught:
        check_reward_model_path(reward_copy)
    assert time.perf_counter() - start < 1.0
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match=found):
        load(reward_copy)


def test_a_usable_folder_passes_the_check(reward_folder):
    assert check_reward_model_path(reward_folder)["model_type"] == "qwen3"
    assert check_reward_model_path(str(reward_folder))["architectures"] == ["Qwen3ForSequenceClassification"]


def test_a_model_without_its_score_head_is_refused(reward_copy):
    """transformers would start the missing head at random, warn, and every reward would be noise."""
    from safetensors.torch import load_file, save_file

    weights = load_file(reward_copy / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, reward_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="no weights for score.weight"):
        load(reward_copy)


def test_a_tokenizer_larger_than_the_model_is_refused(reward_copy, tokenizer):
    larger = AutoTokenizer.from_pretrained(reward_copy)
    larger.add_tokens(["<one_more>"])
    larger.save_pretrained(reward_copy)
    with pytest.raises(RuntimeError, match=f"{len(tokenizer) + 1} tokens, the model only {len(tokenizer)}"):
        load(reward_copy)


def test_a_tokenizer_without_chat_template_is_refused(reward_copy):
    (reward_copy / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((reward_copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (reward_copy / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(RuntimeError, match="no chat template"):
        load(reward_copy)


def test_a_template_that_refuses_a_conversation_says_so(reward_folder):
    model = load(reward_folder)
    model.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RuntimeError, match="turns user, assistant: roles must alternate"):
        model.get_score(chats(1)[0], "a")


def test_weights_of_another_shape_are_refused(reward_copy):
    change_config(hidden_size=32)(reward_copy)
    with pytest.raises(RuntimeError, match="cannot load"):
        load(reward_copy)
