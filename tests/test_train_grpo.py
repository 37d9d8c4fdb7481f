"""The GRPO script as a whole: files, numbers of an update against a plain recomputation, and what must not happen."""

import math

import pytest
import small_runs as small
import torch
from small_runs import argv, metrics_lines, plain_logps, plain_rows, resume_content, run_script, same_state

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_grpo
from trainer.checkpoints import read_torch_file
from trainer.rollout_engine import RolloutResult

METRICS = {
    "step", "epoch", "consumed", "lr", "reward", "reward_std", "frac_reward_zero_std", "kl", "policy_loss", "aux_loss",
    "grad_norm", "skipped_steps", "advantages/mean", "advantages/std", "sampling/logp_difference/mean",
    "sampling/logp_difference/max", "rewards/nonfinite", "completions/clipped_ratio", "entropy", "kl_k1",
    "completions/mean_length", "completions/min_length", "completions/max_length", "cispo_clip_ratio", "num_tokens",
    "rewards/length_correlation", "rewards/rm/saturated",
    *(f"rewards/{part}/mean" for part in ("length", "thinking", "tag", "repetition", "rm", "answer")),
}  # fmt: skip


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lively")
    small.write_weights(folder, len(tokenizer), use_moe=True)
    return small.write_weights(folder, len(tokenizer))


@pytest.fixture
def flags(weights, tmp_path):
    """Function of changes giving the command line of a run over `prompts` prompts, written to tmp_path."""

    def build(prompts=4, **changes):
        data = small.write_prompts(tmp_path / f"prompts_{prompts}.jsonl", prompts)
        return argv(**{"weight_dir": weights, "data_path": data, "save_dir": tmp_path / "out",
                       "checkpoint_dir": tmp_path / "checkpoints", "run_dir": tmp_path / "run",
                       "num_generations": 3, **changes})  # fmt: skip

    return build


def spied(flags, rewards=small.text_rewards, **replaced):
    """(run, calls of optimizer_step, [(rollout, rewards)] of each step) of a run that ends well."""
    steps = small.StepSpy(train_grpo.optimizer_step)
    updates = small.CallSpy(train_grpo.update)
    status, run = run_script(train_grpo, flags, rewards, optimizer_step=steps, update=updates, **replaced)
    assert status == 0
    return run, steps.calls, [(args[2], args[3]) for args, _ in updates.calls]


def plain_grpo(config, weights, reference, batch, *, group, loss_type="cispo", beta=0.1, temperature=0.8):
    """(policy loss, gradient of policy loss + beta · KL) of a batch, from the definitions, one row at a time.

    Rows without a finite reward are left out. At the step itself the ratio to the sampling policy is 1.
    """
    model = small.float64_model(MiniMindForCausalLM, config, weights)
    frozen = small.float64_model(MiniMindForCausalLM, config, reference)
    rollout, rewards = batch
    policy_losses, kls = [], []
    for i, (ids, length) in enumerate(plain_rows(rollout)):
        start = i // group * group
        finite = [r for r in rewards[start : start + group].tolist() if math.isfinite(r)]
        if not math.isfinite(rewards[i]):
            continue
        mean = sum(finite) / len(finite)
        std = math.sqrt(sum((r - mean) ** 2 for r in finite) / len(finite))
        advantage = (rewards[i].item() - mean) / (std + 1e-4)
        logps = plain_logps(model, ids, length, temperature)
        with torch.no_grad():
            distance = plain_logps(frozen, ids, length, temperature)
        distance = distance - logps
        ratio = (logps - logps.detach()).exp()
        if loss_type == "cispo":
            surrogate = ratio.clamp(max=5.0).detach() * advantage * logps
        else:
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        policy_losses.append(-surrogate.mean())
        kls.append((distance.exp() - distance - 1).mean())
    policy_loss, kl = torch.stack(policy_losses).mean(), torch.stack(kls).mean()
    return policy_loss.item(), small.gradients_of(policy_loss + beta * kl, model)


# ---------------------------------------------------------------------------------------------- files and metrics
def test_files_metrics_and_resume_file(flags, tmp_path):
    run, calls, _ = spied(flags(save_interval=1))
    (_, last) = calls
    memory = last["after"][0]
    written = read_torch_file(tmp_path / "out" / "grpo_64.pth")
    assert same_state(written, {name: tensor.half() for name, tensor in memory.items()})
    saved = resume_content(tmp_path / "checkpoints", "grpo")
    assert same_state(saved["model"], memory), "float32 weights, bit for bit"
    assert saved["progress"] == {**saved["progress"], "epoch": 1, "consumed": 0, "step": 2, "optimizer_steps": 2}
    assert saved["args"]["num_generations"] == 3
    assert saved["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32
    assert {"scheduler", "scaler", "run_dir", "world_size"} <= set(saved)
    lines = metrics_lines(tmp_path / "run", timing=True)
    assert [(line["step"], line["consumed"]) for line in lines] == [(1, 2), (2, 4)]
    for line in lines:
        timing = {name for name in line if name.startswith(("timing_s/", "perf/"))}
        parts = ("gen", "reward", "ref", "update", "step")
        assert timing == {"perf/tokens_per_s", *(f"timing_s/{part}" for part in parts)}
        assert set(line) - timing == METRICS
    assert (tmp_path / "run" / "config.json").is_file()
    assert not list(tmp_path.rglob("*.tmp"))
    assert run.schedule.total_steps == run.schedule.steps_done == 2


def test_metrics_are_those_of_the_answers(flags, tmp_path):
    _, calls, [(rollout, rewards), _] = spied(flags())
    line = metrics_lines(tmp_path / "run")[0]
    lengths = rollout.completion_mask.sum(1).tolist()
    assert len(set(lengths)) > 1, "the model is to give answers of several lengths"
    groups = rewards.double().view(-1, 3)
    assert line["reward"] == pytest.approx(rewards.mean().item(), abs=1e-6)
    assert line["reward_std"] == pytest.approx(groups.std(dim=1, unbiased=False).mean().item(), abs=1e-6)
    assert line["completions/mean_length"] == pytest.approx(sum(lengths) / 6)
    ended = (rollout.completion_ids == 2).any(1)
    for ids, length, end in zip(rollout.completion_ids.tolist(), lengths, ended.tolist()):
        assert (ids.index(2) + 1 if end else 8) == length, "up to and including the first EOS"
    assert line["completions/clipped_ratio"] == pytest.approx(1 - ended.double().mean().item())
    assert line["advantages/mean"] == pytest.approx(0, abs=1e-6)
    assert line["advantages/std"] == pytest.approx(1, abs=1e-2)
    assert line["grad_norm"] == pytest.approx(calls[0]["norms"][0])
    assert line["sampling/logp_difference/mean"] < 1e-5
    assert line["kl"] == 0.0
    # a cosine from 1e-4 to 1e-5: half way it is their mean
    assert [line["lr"] for line in metrics_lines(tmp_path / "run")] == pytest.approx([5.5e-5, 1e-5])


# ---------------------------------------------------------------------------------------------- one update
@pytest.mark.parametrize(
    ("loss_type", "changes"),
    [("cispo", {}), ("grpo", {}), ("cispo", {"temperature": 1.3}), ("grpo", {"logp_temperature": 1.0, "beta": 0})],
)
def test_update_equals_plain_recomputation(flags, tmp_path, loss_type, changes):
    """The second step, where policy and reference differ: loss and gradient from unpadded rows and full softmaxes."""
    run, calls, batches = spied(flags(loss_type=loss_type, learning_rate=2e-3, **changes))
    temperature = changes.get("logp_temperature", changes.get("temperature", 0.8))
    loss, gradient = plain_grpo(
        run.config, calls[1]["weights"][0], calls[0]["weights"][0], batches[1], group=3, loss_type=loss_type,
        beta=changes.get("beta", 0.1), temperature=temperature,
    )  # fmt: skip
    line = metrics_lines(tmp_path / "run")[1]
    assert line["policy_loss"] == pytest.approx(loss, abs=1e-5)
    assert small.relative_error(calls[1]["gradients"][0], gradient) < 1e-5
    assert line["kl"] > 1e-4 or changes.get("beta") == 0


def test_weights_after_the_first_step_are_those_of_clipped_adamw(flags):
    _, [call, *_], _ = spied(flags(learning_rate=1e-3, grad_clip=0.5))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in call["gradients"][0].values()))
    assert norm > 0.5
    assert call["norms"][0] == pytest.approx(norm, rel=1e-5)
    for name, gradient in call["gradients"][0].items():
        clipped = gradient.double() * 0.5 / (norm + 1e-6)
        # AdamW's first step: both moments, corrected, are the gradient and its square; weight decay 0.01
        expected = call["weights"][0][name].double() * (1 - 1e-3 * 0.01) - 1e-3 * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(call["after"][0][name].double(), expected, atol=2e-6, rtol=0)


# ---------------------------------------------------------------------------------------------- masks
def hand_made_rollout(tokenizer, vocab_size):
    """Four rows (two prompts) with every trap: ids in the padding, pad ids in an answer, EOS right away, EOS behind it.

    Pad is 0 and EOS 2. Masks alone say what counts.
    """
    answers = [[7, 0, 0, 9, 2, 2, 5], [2, 9, 9, 9, 9, 9, 9], [0, 30, 31, 32, 33, 34, 35], [40, 41, 42, 2, 0, 2, 2]]
    lengths = torch.tensor([5, 1, 7, 4])
    prompts = torch.tensor([[50, 0, 51, 52, 53]] * 2 + [[2, vocab_size - 1, 2, 60, 61]] * 2)
    prompt_mask = torch.tensor([[True] * 5] * 2 + [[False] * 3 + [True] * 2] * 2)
    mask = torch.arange(7) < lengths[:, None]
    ids = torch.tensor(answers)
    return RolloutResult(
        output_ids=torch.cat([prompts, ids], dim=1), completion_ids=ids,
        per_token_logps=torch.where(mask, -1.0, float("nan")), completions=["one", "two", "three", "four"],
        prompt_lens=torch.full((4,), 5), completion_mask=mask, attention_mask=torch.cat([prompt_mask, mask], dim=1),
        finished=torch.tensor([True, True, False, True]),
    )  # fmt: skip


def test_masks_alone_say_what_counts(flags, tokenizer, tmp_path):
    """A pad id in an answer counts, an EOS in the padding does not, and no id of the padding changes the gradient."""
    rollout = hand_made_rollout(tokenizer, len(tokenizer))
    run, [call], batches = spied(flags(2, num_generations=2), sample_answers=lambda *_, **__: rollout)
    assert [(len(ids), length) for ids, length in plain_rows(rollout)] == [(10, 5), (6, 1), (9, 7), (6, 4)]
    loss, gradient = plain_grpo(run.config, call["weights"][0], call["weights"][0], batches[0], group=2)
    assert small.relative_error(call["gradients"][0], gradient) < 1e-5
    line = metrics_lines(tmp_path / "run")[0]
    assert line["policy_loss"] == pytest.approx(loss, abs=1e-5)
    assert line["completions/mean_length"] == (5 + 1 + 7 + 4) / 4
    assert math.isfinite(line["sampling/logp_difference/mean"])


# ---------------------------------------------------------------------------------------------- rewards
def test_one_nan_in_a_group(flags, tmp_path):
    """Rewards [1, NaN, 3, 2]: mean and deviation are those of {1, 3, 2}, and the NaN row has no gradient."""
    given = torch.tensor([1.0, math.nan, 3.0, 2.0])

    def rewards(*_, **__):
        return given.clone(), small.text_rewards([""], ["a"] * 4, None, return_parts=True)[1]

    run, [call], [batch] = spied(flags(1, num_generations=4), rewards)
    loss, gradient = plain_grpo(run.config, call["weights"][0], call["weights"][0], batch, group=4)
    assert small.relative_error(call["gradients"][0], gradient) < 1e-5
    line = metrics_lines(tmp_path / "run")[0]
    assert line["rewards/nonfinite"] == 0.25
    assert line["reward"] == pytest.approx(2.0)
    assert line["policy_loss"] == pytest.approx(loss, abs=1e-5)


def test_all_nan_rewards_change_nothing(flags, tmp_path):
    """The second of two steps has no finite reward: weights bit-unchanged, though Adam has moments by then."""
    scores = iter([small.text_rewards, small.nan_rewards_for("")])
    _, calls, _ = spied(flags(), lambda *args, **kwargs: next(scores)(*args, **kwargs))
    saved = resume_content(tmp_path / "checkpoints", "grpo")
    assert len(calls) == saved["progress"]["optimizer_steps"] == 1
    assert same_state(saved["model"], calls[0]["after"][0])
    first, second = metrics_lines(tmp_path / "run")
    assert second["rewards/nonfinite"] == 1.0
    assert second["reward"] is None
    assert second["lr"] == first["lr"]


def test_shuffled_rewards_stay_in_their_group(flags):
    _, _, batches = spied(flags(8, shuffle_rewards=1, num_generations=4))
    moved = 0
    for rollout, rewards in batches:
        scores = torch.tensor([small.text_score(text) for text in rollout.completions])
        assert torch.equal(scores.view(-1, 4).sort(dim=1).values, rewards.view(-1, 4).sort(dim=1).values)
        moved += int((scores != rewards).sum())
    assert moved > 8, "of 32"


# ---------------------------------------------------------------------------------------------- non-finite losses
def broken_at(bad_calls, value):
    """cispo_token_loss, multiplied by `value` at these calls (from 1)."""
    calls = []

    def loss(*args, **kwargs):
        calls.append(None)
        return train_grpo_loss(*args, **kwargs) * (value if len(calls) in bad_calls else 1.0)

    train_grpo_loss = train_grpo.cispo_token_loss
    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_is_skipped_and_counted(flags, tmp_path, value):
    run, calls, _ = spied(flags(6), cispo_token_loss=broken_at({2}, value))
    assert [call["taken"] for call in calls] == [True, False, True]
    assert same_state(calls[1]["weights"][0], calls[1]["after"][0])
    assert calls[1]["lr"] == calls[2]["lr"], "the schedule waits"
    assert not same_state(calls[2]["weights"][0], calls[2]["after"][0])
    assert [line["skipped_steps"] for line in metrics_lines(tmp_path / "run")] == [0, 1, 0]
    assert run.progress.optimizer_steps == 2


def test_too_many_skipped_steps_end_the_run_with_the_last_checkpoint_untouched(flags, tmp_path):
    finite_first = flags(8, max_skipped_steps=2, save_interval=2)
    with pytest.raises(RuntimeError, match="2 optimizer steps in a row.*--max_skipped_steps"):
        run_script(train_grpo, finite_first, cispo_token_loss=broken_at({1, 3, 4}, math.nan))
    saved = resume_content(tmp_path / "checkpoints", "grpo")
    assert saved["progress"]["step"] == 2, "1 was alone, then came 2; 3 and 4 were in a row"
    assert all(torch.isfinite(tensor).all() for tensor in saved["model"].values())
    assert all(torch.isfinite(tensor).all() for tensor in read_torch_file(tmp_path / "out" / "grpo_64.pth").values())


# ---------------------------------------------------------------------------------------------- windows and schedule
@pytest.mark.parametrize(("accumulation", "sizes"), [(3, [3, 1]), (8, [4])])
def test_accumulation_windows(flags, tmp_path, accumulation, sizes):
    """4 steps: a window's gradient is the mean of its batches'; the last one has its true size, and is saved."""
    run, calls, batches = spied(flags(8, accumulation_steps=accumulation, learning_rate=1e-3))
    reference, first = calls[0]["weights"][0], 0
    for call, size in zip(calls, sizes, strict=True):
        parts = [plain_grpo(run.config, call["weights"][0], reference, batch, group=3)[1]
                 for batch in batches[first : first + size]]
        mean = {name: sum(part[name] for part in parts) / size for name in parts[0]}
        assert small.relative_error(call["gradients"][0], mean) < 1e-5
        first += size
    assert same_state(small.state_of(run.policy), calls[-1]["after"][0])
    assert same_state(resume_content(tmp_path / "checkpoints", "grpo")["model"], calls[-1]["after"][0])
    halves = {name: tensor.half() for name, tensor in calls[-1]["after"][0].items()}
    assert same_state(read_torch_file(tmp_path / "out" / "grpo_64.pth"), halves)
    assert run.schedule.total_steps == run.schedule.steps_done == len(sizes), "planned = taken"
    rates = [line["lr"] for line in metrics_lines(tmp_path / "run")]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4), "a tenth of where it began"


def test_a_second_epoch_after_a_finished_run_and_then_nothing_to_do(flags, tmp_path, capsys):
    assert run_script(train_grpo, flags())[0] == 0
    status, run = run_script(train_grpo, flags(epochs=2, from_resume=1))
    assert status == 0
    assert run.progress.epoch == 2
    lines = metrics_lines(tmp_path / "run")
    assert [(line["epoch"], line["step"], line["consumed"]) for line in lines] == [(0, 1, 2), (0, 2, 4), (1, 3, 2),
                                                                                   (1, 4, 4)]
    rates = [line["lr"] for line in lines]
    assert rates == sorted(rates, reverse=True), "never up again after the end of the first cosine"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run_script(train_grpo, flags(epochs=2, from_resume=1))[0] == 0
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("prompts", "batch_size", "consumed"), [(3, 8, [3]), (1, 2, [1]), (5, 2, [2, 4, 5])])
def test_data_that_the_batch_does_not_divide(flags, tmp_path, prompts, batch_size, consumed):
    _, _, batches = spied(flags(prompts, batch_size=batch_size, accumulation_steps=4))
    assert [line["consumed"] for line in metrics_lines(tmp_path / "run")] == consumed
    assert sum(len(rewards) for _, rewards in batches) == 3 * prompts


# ---------------------------------------------------------------------------------------------- precision and models
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_policy_and_reference_agree_exactly_at_the_first_step(flags, tmp_path, dtype):
    run_script(train_grpo, flags(dtype=dtype, learning_rate=1e-2, self_check=1))
    first, second = metrics_lines(tmp_path / "run")
    assert first["kl"] == 0.0
    assert second["kl"] > 0 or first["skipped_steps"] == 1


def test_float16_gradients_are_unscaled_before_clipping(flags, tmp_path):
    """Under float16 autocast on a CPU the scaler finds its scale, and a step it takes has a gradient of float32's size:
    other answers are sampled in float16, so not the same, but nowhere near 65536 times as large."""
    _, exact, _ = spied(flags(8, checkpoint_dir=tmp_path / "exact", run_dir=tmp_path / "exact"))
    _, calls, _ = spied(flags(8, dtype="float16"))
    taken = [call for call in calls if call["taken"]]
    assert len(taken) >= 2
    if calls[0]["taken"]:
        assert 1 / 3 < calls[0]["norms"][0] / exact[0]["norms"][0] < 3
    assert all(0.1 < call["norms"][0] < 100 for call in taken)
    saved = resume_content(tmp_path / "checkpoints", "grpo")
    assert saved["scaler"]["scale"] == 65536 / 2 ** (len(calls) - len(taken))
    assert all(tensor.dtype == torch.float32 for tensor in saved["model"].values())


def test_dropout_is_off(flags, tmp_path, monkeypatch):
    """A model configured with dropout samples and learns without it, so that a ratio of 1 is 1."""
    monkeypatch.setitem(MiniMindConfig.__init__.__kwdefaults__, "dropout", 0.5)
    run, _, _ = spied(flags())
    assert run.config.dropout == 0.5
    first, second = metrics_lines(tmp_path / "run")
    assert first["kl"] == 0.0
    assert max(line["sampling/logp_difference/mean"] for line in (first, second)) < 1e-5


def test_experts_learn_to_share_the_load(flags, tmp_path):
    """The balance loss is in the gradient, once for the batch and not per row, a prompt's tokens once and not once an
    answer; with equal rewards it is all of the gradient."""
    run, [call, *_], [batch, *_] = spied(flags(use_moe=1, beta=0), lambda *args, **kwargs: constant(*args, **kwargs))
    model = small.float64_model(MiniMindForCausalLM, run.config, call["weights"][0])
    rollout, width = batch[0], batch[0].completion_ids.size(1)
    prompts = (rollout.output_ids[::3, :-width], rollout.attention_mask[::3, :-width])
    balance = model(rollout.completion_ids, rollout.attention_mask[:, -width:], prompts=prompts).aux_loss
    expected = small.gradients_of(balance, model)
    assert small.relative_error(call["gradients"][0], expected) < 1e-4
    line = metrics_lines(tmp_path / "run")[0]
    assert line["aux_loss"] == pytest.approx(balance.item(), rel=1e-4)
    assert (tmp_path / "out" / "grpo_64_moe.pth").is_file()


def constant(prompts, responses, reward_model, **_):
    return torch.ones(len(responses)), small.text_rewards(prompts, responses, None, return_parts=True)[1]
