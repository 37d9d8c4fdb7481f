"""A batch read in pieces: what a piece holds, and that neither pieces nor checkpointing change a gradient."""

import pytest
import small_runs as small
import torch
from small_runs import argv

from trainer import train_grpo, train_ppo
from trainer.rollout_engine import RolloutResult, micro_batches, scoring_pieces


def rollout_of(answer_lengths, prompt_lengths):
    """A rollout of answers of these lengths to prompts of these lengths, G = rows / prompts; ids do not matter."""
    group = len(answer_lengths) // len(prompt_lengths)
    p, r = max(prompt_lengths), max(answer_lengths)
    prompts = torch.arange(p) >= p - torch.tensor(prompt_lengths)[:, None]
    answers = torch.arange(r) < torch.tensor(answer_lengths)[:, None]
    mask = torch.cat([prompts.repeat_interleave(group, 0), answers], dim=1)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return RolloutResult(ids, ids[:, p:], torch.zeros(answers.shape), [""] * len(mask), torch.full((len(mask),), p),
                         answers, mask, answers[:, -1])  # fmt: skip


def lists(pieces):
    return [piece.tolist() for piece in pieces]


def test_pieces_by_hand():
    rollout = rollout_of([5, 2, 3, 4, 4, 1], [4, 2])
    # group 0: rows 1, 2, 0 of 2, 3, 5 tokens behind a prompt of 4; group 1: rows 5, 3, 4 of 1, 4, 4 behind 2
    assert lists(micro_batches(rollout, 3, 0)) == [[0, 1, 2, 3, 4, 5]]
    assert lists(micro_batches(rollout, 3, 25)) == [[1, 2, 0, 5, 3, 4]]  # 4 + 10 + 2 + 9 tokens
    assert lists(micro_batches(rollout, 3, 24)) == [[1, 2, 0, 5, 3], [4]]
    assert lists(micro_batches(rollout, 3, 9)) == [[1, 2], [0], [5, 3], [4]]  # the prompt again in each piece
    assert lists(micro_batches(rollout, 3, 1)) == [[1], [2], [0], [5], [3], [4]]  # a row alone is never split


def test_pieces_of_some_rows():
    rollout = rollout_of([5, 2, 3, 4], [3, 3, 1, 2])
    assert lists(micro_batches(rollout, 1, 0, torch.tensor([2, 3]))) == [[2, 3]]
    assert lists(micro_batches(rollout, 1, 9, torch.tensor([2, 3]))) == [[2], [3]]
    assert lists(micro_batches(rollout, 1, 10, torch.tensor([2, 3]))) == [[2, 3]]


def test_scoring_reads_more_at_once_but_not_in_half_precision():
    rollout = rollout_of([5, 2, 3, 4, 4, 1], [4, 2])
    args = train_grpo.parse_args(argv(micro_batch_tokens=9))
    pieces = micro_batches(rollout, 3, 9)
    assert lists(scoring_pieces(rollout, 3, args, pieces)) == [[1, 2, 0, 5, 3, 4]]
    args.dtype = "bfloat16"
    assert scoring_pieces(rollout, 3, args, pieces) is pieces


# ---------------------------------------------------------------------------------------------- whole updates
@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lively")
    small.write_weights(folder, len(tokenizer), use_moe=True)
    return small.write_weights(folder, len(tokenizer))


SCRIPTS = {"grpo": (train_grpo, {"num_generations": 3, "batch_size": 2}),
           "ppo": (train_ppo, {"batch_size": 4, "mini_batch_size": 3, "early_stop_kl": 1e9}),
           "ppo_at_once": (train_ppo, {"batch_size": 4, "mini_batch_size": 4, "early_stop_kl": 1e9})}  # fmt: skip


def first_gradients(name, weights, folder, **changes):
    """Gradients of every model at the first optimizer step of a run, and how many pieces were read until then."""
    script, sizes = SCRIPTS[name]
    data = small.write_prompts(folder / "prompts.jsonl", 4)
    flags = {"weight_dir": weights, "data_path": data, "save_dir": folder / "out", "run_dir": folder / str(changes),
             "checkpoint_dir": folder / "checkpoints", "max_steps": 2, **sizes, **changes}  # fmt: skip
    steps, pieces = small.StepSpy(script.optimizer_step), small.CallSpy(script.piece_loss)
    status, _ = small.run_script(script, argv(**flags), optimizer_step=steps, piece_loss=pieces)
    assert status == 0
    return steps.calls[0]["gradients"], len(pieces.calls)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_gradients_do_not_depend_on_the_pieces(name, accumulation, weights, tmp_path):
    """Uneven pieces: rows of 1 to 8 tokens behind prompts of about 20, at most 40 tokens together."""
    whole, pieces = first_gradients(name, weights, tmp_path, accumulation_steps=accumulation, micro_batch_tokens=0)
    parts, more_pieces = first_gradients(name, weights, tmp_path, accumulation_steps=accumulation,
                                         micro_batch_tokens=40)
    assert more_pieces > pieces
    for expected, found in zip(whole, parts, strict=True):
        assert small.furthest(found, expected) < 1e-6


@pytest.mark.parametrize("use_moe", [0, 1])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_checkpointing_changes_no_gradient(name, use_moe, weights, tmp_path):
    kept, _ = first_gradients(name, weights, tmp_path, use_moe=use_moe, gradient_checkpointing=0)
    again, _ = first_gradients(name, weights, tmp_path, use_moe=use_moe, gradient_checkpointing=1)
    for expected, found in zip(kept, again, strict=True):
        assert small.relative_error(found, expected) < 1e-6


@pytest.mark.parametrize(("dtype", "forwards"), [("float32", 2), ("bfloat16", 2)])
def test_the_first_pass_is_not_computed_twice(dtype, forwards, weights, tmp_path):
    """Values, and in half precision old log-probs, come from the forward that the first minibatch learns from."""
    calls = small.CallSpy(train_ppo.values_of)
    data = small.write_prompts(tmp_path / "prompts.jsonl", 4)
    flags = argv(weight_dir=weights, data_path=data, save_dir=tmp_path / "out", run_dir=tmp_path / "run", dtype=dtype,
                 checkpoint_dir=tmp_path / "checkpoints", ppo_update_iters=2, **SCRIPTS["ppo_at_once"][1])
    looks = small.CallSpy(train_ppo.approx_policy_kl)
    assert small.run_script(train_ppo, flags, values_of=calls, approx_policy_kl=looks)[0] == 0
    assert len(calls.calls) == forwards
    logps, old_logps, mask = looks.calls[0][0]
    assert (logps - old_logps)[mask].abs().max() <= (0 if dtype == "bfloat16" else 1e-4)


def test_an_early_stop_in_pieces_leaves_every_bit(weights, tmp_path):
    script, sizes = SCRIPTS["ppo"]
    data = small.write_prompts(tmp_path / "prompts.jsonl", 4)
    flags = argv(weight_dir=weights, data_path=data, save_dir=tmp_path / "out", run_dir=tmp_path / "run",
                 checkpoint_dir=tmp_path / "checkpoints", micro_batch_tokens=1, **{**sizes, "early_stop_kl": -1})
    steps = small.StepSpy(script.optimizer_step)
    status, run = small.run_script(script, flags, optimizer_step=steps)
    assert (status, steps.calls) == (0, [])
    assert all(p.grad is None for model in (run.actor, run.critic) for p in model.parameters())
