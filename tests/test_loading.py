"""The order of the data on any number of ranks, and what is checked between files and models."""

import argparse
import copy
import math

import pytest
import torch

from model.model_minimind import MiniMindConfig
from trainer import loading
from trainer.arguments import REPO_ROOT
from trainer.checkpoints import weights_path
from trainer.loading import (
    FIXED_ON_RESUME, FREE_ON_RESUME, SkipBatchSampler, check_resumed_flags, fit_vocabulary, get_model_params,
    init_model, load_resumed_model, load_tokenizer, open_loader, shard_epoch,
)  # fmt: skip
from trainer.run_state import Progress


# ---------------------------------------------------------------------------------------------- data order
def test_skip_batch_sampler():
    sampler = SkipBatchSampler(range(7), 3)
    assert list(sampler) == [[0, 1, 2], [3, 4, 5], [6]] and len(sampler) == 3
    sampler = SkipBatchSampler(iter(range(7)), 3, skip_batches=2)
    assert list(sampler) == [[6]] and len(sampler) == 1
    assert list(sampler) == [[6]]  # a second pass gives the same
    assert list(SkipBatchSampler(range(7), 3, 4)) == [] and len(SkipBatchSampler(range(7), 3, 4)) == 0


def steps(size, batch_size, world, *, consumed=0, seed=1, epoch=0):
    """For each step, what each rank gets: [[rank 0's indices, rank 1's, …], …]."""
    shards = [shard_epoch(size, seed=seed, epoch=epoch, consumed=consumed, batch_size=batch_size, rank=rank,
                          world_size=world) for rank in range(world)]  # fmt: skip
    assert len({len(shard) for shard in shards}) == 1, "every rank must take equally many steps"
    return [list(ranks) for ranks in zip(*(SkipBatchSampler(shard, batch_size) for shard in shards), strict=True)]


def real_prompts(size, batch_size, world, **keywords):
    """The prompts of each step without the copies that fill up the last one: as `row_is_real` marks them."""
    left, found = size - keywords.get("consumed", 0), []
    for ranks in steps(size, batch_size, world, **keywords):
        rows = min(batch_size * world, left)
        held = [row[: len(range(rank, rows, world))] for rank, row in enumerate(ranks)]
        assert all(len(row) == math.ceil(rows / world) for row in ranks)
        found.append([index for row in held for index in row])
        left -= rows
    return found


@pytest.mark.parametrize(("size", "batch_size", "world"), [
    (12, 2, 1), (12, 2, 3), (13, 2, 3), (5, 8, 1), (5, 8, 2), (1, 2, 1), (1, 2, 4), (3, 1, 4), (100, 7, 3),
])  # fmt: skip
def test_an_epoch_holds_every_prompt_once(size, batch_size, world):
    """Also where the data is smaller than the batch or than the number of ranks."""
    used = [index for step in real_prompts(size, batch_size, world) for index in step]
    assert sorted(used) == list(range(size))


def test_copies_that_fill_up_a_step_are_of_that_step():
    for ranks in steps(13, 2, 3):
        real = {index for row in ranks for index in row}
        assert len(real) in (6, 1)  # 13 = 6 + 6 + 1: the last step is one prompt on three ranks


def test_order_is_a_function_of_seed_and_epoch():
    first = steps(20, 4, 1)
    assert first == steps(20, 4, 1)
    assert first != steps(20, 4, 1, epoch=1)
    assert first != steps(20, 4, 1, seed=2)
    assert [index for (row,) in first for index in row] != list(range(20))


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_a_step_holds_the_same_prompts_on_any_number_of_ranks(world):
    alone = [set(step) for step in real_prompts(26, 12, 1)]
    assert [set(step) for step in real_prompts(26, 12 // world, world)] == alone


def test_ranks_hold_different_prompts():
    for ranks in steps(24, 3, 4):
        held = [index for row in ranks for index in row]
        assert len(set(held)) == len(held)


@pytest.mark.parametrize(("before", "after"), [
    ((5, 2), (5, 1)), ((5, 1), (5, 2)), ((5, 4), (5, 1)), ((5, 1), (5, 3)), ((5, 1), (7, 1)), ((5, 2), (7, 3)),
    ((3, 2), (1, 4)),
])  # fmt: skip
def test_resume_with_another_world_or_batch_size_sees_each_prompt_left_once(before, after):
    """100 prompts, (batch size, ranks) before and after a stop at step 5: seen and resumed together are all of them."""
    seen = [index for step in real_prompts(100, *before)[:5] for index in step]
    assert len(seen) == 5 * before[0] * before[1]
    resumed = [index for step in real_prompts(100, *after, consumed=len(seen)) for index in step]
    assert sorted(seen + resumed) == list(range(100))


class Rows(torch.utils.data.Dataset):
    """A data set that remembers the epoch it was told."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"index": index, "epoch": self.epoch}

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_goes_on_where_progress_stands(num_workers):
    args = argparse.Namespace(seed=1, batch_size=2, num_workers=num_workers)
    batches = list(open_loader(Rows(), Progress(epoch=3, consumed=2), args, steps=2))
    order = [index for step in real_prompts(7, 2, 1, epoch=3, consumed=2) for index in step]
    assert [batch["index"] for batch in batches] == [order[:2], order[2:4]]
    assert batches[0]["epoch"] == [3, 3]


def test_loader_of_a_last_step_that_does_not_divide():
    args = argparse.Namespace(seed=1, batch_size=2, num_workers=0)
    sizes = [len(batch["index"]) for batch in open_loader(Rows(), Progress(), args, steps=4)]
    assert sizes == [2, 2, 2, 1]


# ---------------------------------------------------------------------------------------------- flags on resume
def flags(**changes):
    return argparse.Namespace(**{"seed": 42, "data_path": "a.jsonl", "hidden_size": 64, "num_hidden_layers": 2,
                                 "use_moe": 0, "skip_bad_rows": 0, "lora_rank": 0, "critic_from": "policy",
                                 "learning_rate": 1e-4, "batch_size": 2,
                                 "save_interval": 10, "epochs": 1, **changes})  # fmt: skip


@pytest.mark.parametrize("name", FIXED_ON_RESUME)
def test_flags_that_make_it_another_run_are_refused(name):
    with pytest.raises(ValueError, match=f"--{name} is 7, but the run being resumed has .*--from_resume 0"):
        check_resumed_flags(vars(flags()), flags(**{name: 7}))


def test_other_changed_flags_are_named_and_honoured(capsys):
    check_resumed_flags(vars(flags()), flags(learning_rate=1e-5, batch_size=3))
    assert "batch_size 2 -> 3, learning_rate 0.0001 -> 1e-05" in capsys.readouterr().out


def test_paths_and_intervals_change_silently(capsys):
    check_resumed_flags(vars(flags()), flags(save_interval=5, epochs=2))
    assert capsys.readouterr().out == ""
    assert {"epochs", "max_steps", "save_interval"} <= set(FREE_ON_RESUME)
    assert not set(FIXED_ON_RESUME) & set(FREE_ON_RESUME)


def test_a_flag_that_the_resumed_run_did_not_have_is_no_error():
    check_resumed_flags({"seed": 42}, flags())


# ---------------------------------------------------------------------------------------------- tokenizer and model
class Vocabulary:
    """A tokenizer reduced to its size and special ids."""

    pad_token_id, eos_token_id, bos_token_id = 3, 5, 4

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size


def test_fit_vocabulary_follows_weights_then_tokenizer(capsys):
    config = MiniMindConfig(64, 2)
    fit_vocabulary(config, Vocabulary(70), None)
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id) == (70, 3, 5, 4)
    fit_vocabulary(config, Vocabulary(70), {"model.embed_tokens.weight": torch.zeros(96, 64)})
    assert config.vocab_size == 96
    assert "the weights have 96 tokens, the tokenizer 70" in capsys.readouterr().out


def test_a_tokenizer_larger_than_the_weights_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer has 97 tokens, the weights only 96.*--tokenizer_path"):
        fit_vocabulary(MiniMindConfig(64, 2), Vocabulary(97), {"model.embed_tokens.weight": torch.zeros(96, 64)})


def test_random_weights_are_the_same_for_actor_and_reference(tokenizer):
    actor, _ = init_model(MiniMindConfig(64, 2), "none", tokenizer=tokenizer, seed=3)
    reference, _ = init_model(MiniMindConfig(64, 2), "none", tokenizer=tokenizer, seed=3)
    other, _ = init_model(MiniMindConfig(64, 2), "none", tokenizer=tokenizer, seed=4)
    for name, weight in actor.state_dict().items():
        assert torch.equal(weight, reference.state_dict()[name])
    assert not torch.equal(actor.lm_head.weight, other.lm_head.weight)
    assert actor.config.vocab_size == len(tokenizer)


def test_init_model_loads_the_weights_in_float32(tiny_weights, tiny_config, tokenizer):
    config = MiniMindConfig(64, 2)
    model, _ = init_model(config, "tiny", tokenizer=tokenizer, save_dir=tiny_weights)
    saved = torch.load(weights_path(tiny_weights, "tiny", tiny_config), weights_only=True)
    assert config.vocab_size == len(tokenizer)
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32 and torch.equal(weight, saved[name].float())
    with pytest.raises(ValueError, match="(?s)resume file holds another model than the flags describe.*layers.2"):
        load_resumed_model(init_model(MiniMindConfig(64, 3), "none", tokenizer=tokenizer)[0], model.state_dict())


def test_get_model_params_counts_active_experts(capsys):
    config = MiniMindConfig(64, 2, use_moe=True, vocab_size=40)
    model = loading.MiniMindForCausalLM(config)
    total = get_model_params(model, config)
    assert total == sum(p.numel() for p in model.parameters()) / 1e6
    # 4 experts of 3 matrices 64 x intermediate in each of 2 layers, one of them active
    expert = 2 * 3 * 64 * config.intermediate_size / 1e6
    assert f"Model params: {total:.2f}M, of which {total - 3 * expert:.2f}M active" in capsys.readouterr().out


def test_load_tokenizer_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="--tokenizer_path .*no tokenizer_config.json.*expected a folder"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="--tokenizer_path .*cannot be read as a tokenizer"):
        load_tokenizer(str(tmp_path))


def test_load_tokenizer_wants_a_chat_template(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.jinja"):
        file.unlink()
    with pytest.raises(ValueError, match="the tokenizer has no chat_template"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(REPO_ROOT / "model")).eos_token_id == 2
