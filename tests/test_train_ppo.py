"""The PPO script as a whole: files, numbers of each minibatch against a plain recomputation, what must not happen."""

import json
import math
from pathlib import Path

import pytest
import small_runs as small
import torch
from safetensors.torch import load_file
from small_runs import argv, metrics_lines, plain_logps, plain_rows, resume_content, run_script, same_state
from test_train_grpo import hand_made_rollout

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_ppo
from trainer.checkpoints import read_torch_file

DATA = Path(__file__).resolve().parent / "data"
METRICS = {
    "step", "epoch", "consumed", "lr", "critic/lr", "reward", "kl", "approx_kl", "policy_loss", "aux_loss",
    "critic/vf_loss", "clip_ratio/region_mean", "early_stop", "grad_norm", "critic/grad_norm", "skipped_steps",
    "critic/explained_var", "sampling/logp_difference/mean", "rewards/nonfinite", "completions/mean_length",
    "completions/min_length", "completions/max_length", "completions/clipped_ratio", "sampling/logp_difference/max",
    "entropy", "kl_k1", "clip_ratio/low_mean", "clip_ratio/high_mean", "critic/vf_clipfrac", "num_tokens",
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

    def build(prompts=6, **changes):
        data = small.write_prompts(tmp_path / f"prompts_{prompts}.jsonl", prompts)
        return argv(**{"weight_dir": weights, "data_path": data, "save_dir": tmp_path / "out",
                       "checkpoint_dir": tmp_path / "checkpoints", "run_dir": tmp_path / "run", "batch_size": 3,
                       "critic_learning_rate": 1e-4, "early_stop_kl": 1e9, **changes})  # fmt: skip

    return build


class RolloutSpy:
    """Takes the place of gather_experience: keeps what each rollout was learnt from, and the weights at that time."""

    def __init__(self):
        self.function, self.calls = train_ppo.gather_experience, []

    def __call__(self, run, args, rollout, rewards, real):
        self.calls.append({"actor": small.state_of(run.actor), "critic": small.state_of(run.critic),
                           "rollout": rollout, "rewards": rewards})  # fmt: skip
        return self.function(run, args, rollout, rewards, real)


def spied(flags, rewards=small.text_rewards, **replaced):
    """(run, calls of optimizer_step, rollouts, first rows of the minibatches of each rollout) of a run."""
    steps, rollouts = small.StepSpy(train_ppo.optimizer_step), RolloutSpy()
    orders = small.CallSpy(train_ppo.minibatch_order)
    status, run = run_script(train_ppo, flags, rewards, optimizer_step=steps, gather_experience=rollouts,
                             minibatch_order=orders, **replaced)
    assert status == 0
    return run, steps.calls, rollouts.calls, [order for _, order in orders.calls]


# ---------------------------------------------------------------------------------------------- plain recomputation
def plain_values(critic, ids, length):
    """The critic's values before each of a row's last `length` tokens: the final norm is applied twice."""
    hidden = critic.model(input_ids=torch.tensor([ids]))[0]
    values = critic.value_head(critic.model.norm(hidden).double())[0, :, 0]
    return values[len(ids) - length - 1 : len(ids) - 1]


def plain_experience(config, seen, reference, *, temperature, gamma, lam):
    """What each row of a rollout is learnt from, from the definitions; None for a row without a finite reward."""
    actor = small.float64_model(MiniMindForCausalLM, config, seen["actor"])
    frozen = small.float64_model(MiniMindForCausalLM, config, reference)
    critic = small.float64_model(train_ppo.CriticModel, config, seen["critic"])
    rows = []
    for (ids, length), reward in zip(plain_rows(seen["rollout"]), seen["rewards"].tolist(), strict=True):
        if not math.isfinite(reward):
            rows.append(None)
            continue
        with torch.no_grad():
            values = plain_values(critic, ids, length)
            row = {"ids": ids, "length": length, "values": values,
                   "old": plain_logps(actor, ids, length, temperature),
                   "ref": plain_logps(frozen, ids, length, temperature)}
        # GAE as the sum it is: A_t = sum over l of (gamma·lam)^l · delta_{t+l}, the reward on the last token
        nexts = [*values[1:].tolist(), 0.0]
        deltas = [gamma * nexts[t] - values[t].item() + (reward if t == length - 1 else 0.0) for t in range(length)]
        raw = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length)) for t in range(length)]
        row["raw"] = torch.tensor(raw, dtype=torch.float64)
        row["returns"] = row["raw"] + values
        rows.append(row)
    every = torch.cat([row["raw"] for row in rows if row is not None])
    for row in rows:
        if row is not None:
            row["advantages"] = (row["raw"] - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt()
    return rows


def plain_minibatch(config, weights, rows, *, temperature, kl_coef=0.02, vf_coef=0.5, clip=0.2, value_clip=0.2):
    """(gradients of actor and critic, share of clipped tokens) for these rows of an experience."""
    actor = small.float64_model(MiniMindForCausalLM, config, weights[0])
    critic = small.float64_model(train_ppo.CriticModel, config, weights[1])
    policy, kl, value, clipped = [], [], [], []
    for row in rows:
        logps = plain_logps(actor, row["ids"], row["length"], temperature)
        ratio = (logps - row["old"]).exp()
        clamped = ratio.clamp(1 - clip, 1 + clip)
        policy.append(-torch.minimum(ratio * row["advantages"], clamped * row["advantages"]))
        kl.append((row["ref"] - logps).exp() - (row["ref"] - logps) - 1)
        values = plain_values(critic, row["ids"], row["length"])
        near = row["values"] + (values - row["values"]).clamp(-value_clip, value_clip)
        value.append(0.5 * torch.maximum((values - row["returns"]) ** 2, (near - row["returns"]) ** 2))
        clipped.append((ratio - clamped).abs() > 0)
    loss = torch.cat(policy).mean() + kl_coef * torch.cat(kl).mean() + vf_coef * torch.cat(value).mean()
    actor.zero_grad(set_to_none=True)
    critic_gradient = small.gradients_of(loss, critic)
    actor_gradient = {name: p.grad.clone() for name, p in actor.named_parameters()}
    return actor_gradient, critic_gradient, torch.cat(clipped).double().mean().item()


# ---------------------------------------------------------------------------------------------- files and metrics
def test_files_metrics_and_resume_file(flags, tmp_path):
    run, calls, _, _ = spied(flags(save_interval=1))
    actor, critic = calls[-1]["after"]
    assert same_state(read_torch_file(tmp_path / "out" / "ppo_actor_64.pth"), {n: t.half() for n, t in actor.items()})
    saved = resume_content(tmp_path / "checkpoints", "ppo_actor")
    assert same_state(saved["model"], actor)
    assert same_state(saved["critic_model"], critic)
    assert {"optimizer", "critic_optimizer", "scheduler", "critic_scheduler", "scaler"} <= set(saved)
    assert saved["critic_optimizer"]["state"][0]["exp_avg_sq"].dtype == torch.float32
    # 2 steps of 2 passes over minibatches of 2 and 1 rows
    assert saved["progress"] == {**saved["progress"], "epoch": 1, "consumed": 0, "step": 2, "optimizer_steps": 8}
    lines = metrics_lines(tmp_path / "run", timing=True)
    assert [(line["step"], line["consumed"]) for line in lines] == [(1, 3), (2, 6)]
    for line in lines:
        assert {name for name in line if not name.startswith(("timing_s/", "perf/"))} == METRICS
    assert not list(tmp_path.rglob("*.tmp"))
    assert run.progress.step == 2


# ---------------------------------------------------------------------------------------------- the update
@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulation_steps": 3}, {"temperature": 1.2, "gamma": 0.9, "lam": 0.8}, {"logp_temperature": 1.0}],
)
def test_updates_equal_plain_recomputation(flags, tmp_path, changes):
    """Every optimizer step of the second rollout, the gradients of actor and critic alike, clipped tokens included.

    With accumulation 3 the 4 minibatches fall into a window of 3 and one of 1, which has its own gradient undivided.
    """
    small_clips = {"clip_epsilon": 0.05, "cliprange_value": 0.02}
    run, calls, rollouts, orders = spied(flags(learning_rate=5e-4, critic_learning_rate=5e-4, **small_clips, **changes))
    temperature = changes.get("logp_temperature", changes.get("temperature", 0.8))
    experience = plain_experience(run.config, rollouts[1], rollouts[0]["actor"], temperature=temperature,
                                  gamma=changes.get("gamma", 1.0), lam=changes.get("lam", 0.95))
    places = [3, 1] if "accumulation_steps" in changes else [1, 1, 1, 1]
    calls, order, clipped = calls[len(places) :], list(orders[1]), []
    assert sorted(order) == [0, 0, 2, 2], "each pass takes every minibatch once"
    for call, size in zip(calls, places, strict=True):
        parts = [plain_minibatch(run.config, call["weights"], experience[start : start + 2], temperature=temperature,
                                 clip=0.05, value_clip=0.02)
                 for start in order[:size]]
        for k in range(2):
            mean = {name: sum(part[k][name] for part in parts) / size for name in parts[0][k]}
            assert small.relative_error(call["gradients"][k], mean) < 2e-5
        clipped += [part[2] for part in parts]
        del order[:size]
    assert max(clipped) > 0, "the test is to see clipping at work"
    assert metrics_lines(tmp_path / "run")[1]["kl"] > 0


def test_masks_alone_say_what_counts(flags, tokenizer, tmp_path):
    """A pad id in an answer counts, an EOS in the padding does not, and no id of the padding changes a gradient."""
    rollout = hand_made_rollout(tokenizer, len(tokenizer))
    exact = torch.where(rollout.completion_mask, 0.0, math.nan)
    run, calls, [seen], [order] = spied(
        flags(4, batch_size=4, mini_batch_size=4, ppo_update_iters=1, dtype="bfloat16"),
        sample_answers=lambda *_, **__: rollout._replace(per_token_logps=exact),
        autocast_context=train_ppo_float32,
    )  # fmt: skip
    experience = plain_experience(run.config, seen, seen["actor"], temperature=0.8, gamma=1.0, lam=0.95)
    expected = plain_minibatch(run.config, calls[0]["weights"], experience, temperature=0.8)
    for k in range(2):
        assert small.relative_error(calls[0]["gradients"][k], expected[k]) < 2e-5
    assert metrics_lines(tmp_path / "run")[0]["completions/mean_length"] == (5 + 1 + 7 + 4) / 4


def train_ppo_float32(device, dtype):
    """No autocast: with --dtype bfloat16 old log-probs are recomputed, not taken from the hand-made rollout."""
    return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 1e-6)])
@pytest.mark.parametrize("mini_batch_size", [4, 1])
def test_the_first_minibatch_begins_at_ratio_one(flags, tmp_path, monkeypatch, dtype, limit, mini_batch_size):
    """Also with dropout in the model's configuration, and where a minibatch is smaller than the batch."""
    monkeypatch.setitem(MiniMindConfig.__init__.__kwdefaults__, "dropout", 0.1)
    looks = small.CallSpy(train_ppo.approx_policy_kl)
    spied(flags(8, batch_size=4, dtype=dtype, mini_batch_size=mini_batch_size, learning_rate=1e-3),
          approx_policy_kl=looks)  # fmt: skip
    a_step = 2 * 4 // mini_batch_size
    for (logps, old_logps, mask), _ in (looks.calls[0], looks.calls[a_step]):
        assert (logps - old_logps)[mask].abs().max() <= limit
    (logps, old_logps, mask), _ = looks.calls[1]
    assert (logps - old_logps)[mask].abs().max() > limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_actor_and_reference_agree_exactly_at_the_first_step(flags, tmp_path, dtype):
    run_script(train_ppo, flags(dtype=dtype, ppo_update_iters=1, mini_batch_size=3, learning_rate=1e-2))
    first, second = metrics_lines(tmp_path / "run")
    assert first["kl"] == 0.0
    assert second["kl"] > 0 or first["skipped_steps"] == 1


# ---------------------------------------------------------------------------------------------- early stop
def test_an_early_stop_before_the_first_update_leaves_every_bit(flags, tmp_path):
    """early_stop_kl -1 from a warm optimizer: weights, moments and learning rates stay."""
    run_script(train_ppo, flags())
    before = resume_content(tmp_path / "checkpoints", "ppo_actor")
    status, run = run_script(train_ppo, flags(epochs=2, from_resume=1, early_stop_kl=-1, accumulation_steps=2))
    assert status == 0
    after = resume_content(tmp_path / "checkpoints", "ppo_actor")
    assert same_state(before["model"], after["model"])
    assert same_state(before["critic_model"], after["critic_model"])
    for name in ("optimizer", "critic_optimizer"):
        for key, state in before[name]["state"].items():
            assert same_state(state, after[name]["state"][key])
    lines = metrics_lines(tmp_path / "run")
    assert [line["early_stop"] for line in lines] == [0, 0, 1, 1]
    assert lines[1]["lr"] == lines[2]["lr"] == lines[3]["lr"]
    assert after["progress"]["step"] == 4
    assert after["progress"]["optimizer_steps"] == before["progress"]["optimizer_steps"] == 8


def test_an_early_stop_half_way_drops_the_open_window(flags, tmp_path):
    """8 minibatches of one row in windows of 3: it stops at the 5th, so the 4th's gradient is never applied."""
    looks = iter([0.0] * 4 + [1.0])
    _, calls, _, _ = spied(
        flags(4, batch_size=4, mini_batch_size=1, accumulation_steps=3, early_stop_kl=0.5),
        approx_policy_kl=lambda *_: torch.tensor(next(looks)),
    )  # fmt: skip
    assert len(calls) == 1
    assert same_state(resume_content(tmp_path / "checkpoints", "ppo_actor")["model"], calls[0]["after"][0])
    assert metrics_lines(tmp_path / "run")[0]["early_stop"] == 1


# ---------------------------------------------------------------------------------------------- schedule
def test_planned_steps_are_the_steps_taken(flags, tmp_path):
    """Batch 2, minibatch 1, 4 rollouts, accumulation 3: 2 windows a rollout, 8 in all, and the rate never rises."""
    run, calls, _, _ = spied(flags(8, batch_size=2, mini_batch_size=1, accumulation_steps=3))
    assert [schedule.total_steps for schedule in run.schedules] == [8, 8]
    assert len(calls) == run.progress.optimizer_steps == 8
    for k in range(2):
        rates = [call["lr"][k] for call in calls]
        assert rates == sorted(rates, reverse=True)
    assert run.schedules[0].lr == pytest.approx(1e-5)


@pytest.mark.parametrize("accumulation", [3, 8])
def test_what_is_saved_is_what_is_in_memory(flags, tmp_path, accumulation):
    run, calls, _, _ = spied(flags(8, batch_size=2, mini_batch_size=1, accumulation_steps=accumulation))
    saved = resume_content(tmp_path / "checkpoints", "ppo_actor")
    assert same_state(saved["model"], small.state_of(run.actor))
    assert same_state(saved["critic_model"], small.state_of(run.critic))
    assert len(calls) == 4 * -(-4 // accumulation)


def test_a_second_epoch_after_a_finished_run_and_then_nothing_to_do(flags, tmp_path, capsys):
    assert run_script(train_ppo, flags())[0] == 0
    assert run_script(train_ppo, flags(epochs=2, from_resume=1))[0] == 0
    lines = metrics_lines(tmp_path / "run")
    assert [(line["epoch"], line["step"], line["consumed"]) for line in lines] == [(0, 1, 3), (0, 2, 6), (1, 3, 3),
                                                                                   (1, 4, 6)]
    for name in ("lr", "critic/lr"):
        rates = [line[name] for line in lines]
        assert rates == sorted(rates, reverse=True)
    capsys.readouterr()
    assert run_script(train_ppo, flags(epochs=2, from_resume=1))[0] == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(("prompts", "batch_size", "consumed"), [(1, 8, [1]), (5, 2, [2, 4, 5])])
def test_data_that_the_batch_does_not_divide(flags, tmp_path, prompts, batch_size, consumed):
    _, _, rollouts, _ = spied(flags(prompts, batch_size=batch_size, mini_batch_size=2))
    assert [line["consumed"] for line in metrics_lines(tmp_path / "run")] == consumed
    assert sum(len(seen["rewards"]) for seen in rollouts) == prompts


# ---------------------------------------------------------------------------------------------- rewards and losses
def test_a_row_without_a_finite_reward_is_left_out(flags, tmp_path):
    """It is in neither whitening nor losses, and a minibatch of nothing else makes no step."""
    run, calls, rollouts, orders = spied(flags(3, ppo_update_iters=1, mini_batch_size=1),
                                         small.nan_rewards_for("(1)"))
    experience = plain_experience(run.config, rollouts[0], rollouts[0]["actor"], temperature=0.8, gamma=1.0, lam=0.95)
    assert experience.count(None) == 1
    kept = [start for start in orders[0] if experience[start] is not None]
    assert len(calls) == 2
    for call, start in zip(calls, kept, strict=True):
        expected = plain_minibatch(run.config, call["weights"], experience[start : start + 1], temperature=0.8)
        for k in range(2):
            assert small.relative_error(call["gradients"][k], expected[k]) < 2e-5
    assert metrics_lines(tmp_path / "run")[0]["rewards/nonfinite"] == pytest.approx(1 / 3)


def test_all_nan_rewards_change_nothing(flags, tmp_path):
    """The second of two rollouts has no finite reward: both models bit-unchanged, though Adam has moments by then."""
    scores = iter([small.text_rewards, small.nan_rewards_for("")])
    _, calls, _, _ = spied(flags(), lambda *args, **kwargs: next(scores)(*args, **kwargs))
    saved = resume_content(tmp_path / "checkpoints", "ppo_actor")
    assert len(calls) == saved["progress"]["optimizer_steps"] == 4
    assert same_state(saved["model"], calls[-1]["after"][0])
    assert same_state(saved["critic_model"], calls[-1]["after"][1])
    first, second = metrics_lines(tmp_path / "run")
    assert second["rewards/nonfinite"] == 1.0
    assert second["lr"] == first["lr"]


def test_a_non_finite_critic_stops_the_actor_too(flags, tmp_path):
    losses = []

    def value_loss(*args, **kwargs):
        losses.append(None)
        return original(*args, **kwargs) * (math.nan if len(losses) in (2, 5, 6) else 1.0)

    original = train_ppo.ppo_value_loss
    _, calls, _, _ = spied(flags(), ppo_value_loss=value_loss)
    assert [call["taken"] for call in calls] == [True, False, True, True, False, False, True, True]
    for k in range(2):
        assert same_state(calls[1]["weights"][k], calls[1]["after"][k])
    assert [line["skipped_steps"] for line in metrics_lines(tmp_path / "run")] == [0.25, 0.5]
    losses.clear()
    with pytest.raises(RuntimeError, match="2 optimizer steps in a row"):
        run_script(train_ppo, flags(max_skipped_steps=2, save_interval=1, run_dir=tmp_path / "stopped"),
                   ppo_value_loss=value_loss)
    saved = resume_content(tmp_path / "checkpoints", "ppo_actor")
    assert saved["progress"]["step"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in [*saved["model"].values(), *saved["critic_model"].values()])


# ---------------------------------------------------------------------------------------------- models and precision
def test_critic_reproduces_minimind():
    want = load_file(DATA / "model_dense.safetensors")
    config = MiniMindConfig(**json.loads((DATA / "model_dense.json").read_text(encoding="utf-8"))["config"])
    state = {name.removeprefix("weights."): tensor for name, tensor in want.items() if name.startswith("weights.")}
    critic = train_ppo.CriticModel(config).eval()
    missing, unexpected = critic.load_state_dict(state, strict=False)
    assert set(missing) <= {"value_head.weight", "value_head.bias"} and not unexpected
    with torch.no_grad():
        critic.value_head.weight.copy_(want["value_head.weight"])
        critic.value_head.bias.copy_(want["value_head.bias"])
        values = critic(want["input_ids"], want["attention_mask"])
    real = want["attention_mask"].bool()
    torch.testing.assert_close(values[real], want["critic_values"][real], atol=1e-5, rtol=0)


def test_the_critic_begins_as_the_actor_under_a_fresh_head(flags):
    _, calls, _, _ = spied(flags(3))
    actor, critic = calls[0]["weights"]
    assert same_state(actor, {name: tensor for name, tensor in critic.items() if not name.startswith("value_head.")})
    assert set(critic) - set(actor) == {"value_head.weight", "value_head.bias"}


def test_experts_learn_to_share_the_load(flags, tmp_path):
    run_script(train_ppo, flags(use_moe=1, self_check=1))
    for line in metrics_lines(tmp_path / "run"):
        assert line["aux_loss"] > 0
        assert line["sampling/logp_difference/mean"] < 1e-4
    assert (tmp_path / "out" / "ppo_actor_64_moe.pth").is_file()


def test_float16_gradients_are_unscaled_before_clipping(flags, tmp_path):
    _, exact, _, _ = spied(flags(3, checkpoint_dir=tmp_path / "exact", run_dir=tmp_path / "exact"))
    _, calls, _, _ = spied(flags(6, dtype="float16"))
    taken = [call for call in calls if call["taken"]]
    assert len(taken) >= 4
    if calls[0]["taken"]:
        # other answers are sampled in float16, so not the same norms, but nowhere near 65536 times as large
        assert all(1 / 20 < half / full < 20 for half, full in zip(calls[0]["norms"], exact[0]["norms"], strict=True))
    assert all(norm < 1000 for call in taken for norm in call["norms"])
    assert all(tensor.dtype == torch.float32
               for tensor in resume_content(tmp_path / "checkpoints", "ppo_actor")["critic_model"].values())
