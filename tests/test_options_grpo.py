"""The options of GRPO in small runs: gradients against the definitions, and what each option must and must not do."""

import math

import pytest
import small_runs as small
import torch
from option_runs import clipped, plain_entropy, plain_kl, see
from small_runs import plain_logps, plain_rows

from model.model_minimind import MiniMindForCausalLM
from trainer import train_grpo


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    return small.write_weights(tmp_path_factory.mktemp("lively"), len(tokenizer))


@pytest.fixture
def seen(weights, tmp_path):
    """Function of options giving all that is seen of a run with them; see `see`."""

    def run(**options):
        return see(train_grpo, weights, tmp_path, **options)

    return run


def flat_for(*texts):
    """`text_rewards`, but the same reward for all answers to a prompt that holds one of these texts."""

    def rewards_of(prompts, responses, reward_model, **settings):
        rewards, parts = small.text_rewards(prompts, responses, reward_model, return_parts=True)
        group = len(responses) // len(prompts)
        for i, prompt in enumerate(prompts):
            if any(text in prompt for text in texts):
                rewards[i * group : (i + 1) * group] = 0.25
        return rewards, parts

    return rewards_of


# ---------------------------------------------------------------------------------------------- the definitions
def plain_advantages(args, rewards):
    groups = rewards.view(-1, args.num_generations)
    centred = groups - groups.mean(1, keepdim=True)
    g = args.num_generations
    scale = {"group": 1 / (groups.std(1, unbiased=False, keepdim=True) + 1e-4), "group_nostd": 1.0,
             "batch_std": 1 / (rewards.std(unbiased=False) + 1e-4), "rloo": g / (g - 1)}[args.advantage]
    return (centred * scale).flatten()


def plain_gradient(config, args, rollout, rewards, now, old, ref):
    """The gradient of the whole loss at weights `now`, of answers sampled by `old`, in float64, a row at a time."""
    t, rows = args.logp_temperature, plain_rows(rollout)
    with torch.no_grad():
        olds, refs = ([plain_logps(small.float64_model(MiniMindForCausalLM, config, state), *row, t) for row in rows]
                      for state in (old, ref))
    rewards = rewards.double()
    lengths = torch.tensor([length for _, length in rows])
    if args.kl_in == "reward":
        rewards = rewards - args.beta * torch.stack(
            [plain_kl(o, o, r, args.kl_estimator).sum() for o, r in zip(olds, refs, strict=True)]
        )
    if args.overlong_buffer:  # 0 up to the buffer, -1 at the limit
        rewards = rewards - ((lengths - args.max_gen_len + args.overlong_buffer) / args.overlong_buffer).clamp(0, 1)
    model, totals, tokens = small.float64_model(MiniMindForCausalLM, config, now), [], 0
    for i, advantage in enumerate(plain_advantages(args, rewards).tolist()):
        if args.mask_truncated and rows[i][0][-1] != 2:
            continue
        logps = plain_logps(model, *rows[i], t)
        log_ratio = logps - olds[i]
        if args.loss_type == "cispo":
            each = -log_ratio.exp().clamp(max=args.epsilon_high).detach() * advantage * logps
        else:
            ratio = (log_ratio.mean().expand(len(logps)) if args.loss_type == "gspo" else log_ratio).exp()
            each = -clipped(ratio, advantage, args.epsilon, args.epsilon_high)
        if args.kl_in == "loss":
            each = each + args.beta * plain_kl(logps, olds[i], refs[i], args.kl_estimator)
        each = each - args.entropy_coef * plain_entropy(model, *rows[i], t)
        totals.append(each.mean() if args.loss_agg == "sequence" else each.sum())
        tokens += len(each)
    divisor = {"sequence": len(totals), "token": tokens, "constant": len(totals) * args.max_gen_len}[args.loss_agg]
    return small.gradients_of(sum(totals) / divisor, model)


@pytest.mark.parametrize(
    "options",
    [{"loss_agg": "token", "kl_estimator": "k2", "epsilon": 0.02},
     {"loss_agg": "constant", "kl_estimator": "k1", "entropy_coef": 0.5, "advantage": "group_nostd"},
     {"kl_in": "reward", "kl_estimator": "k1", "beta": 0.7, "advantage": "rloo", "micro_batch_tokens": 60},
     {"kl_in": "reward", "kl_estimator": "k3", "beta": 0.7, "loss_type": "cispo", "epsilon_high": 1.02},
     {"loss_type": "dapo", "overlong_buffer": 4, "mask_truncated": 1, "kl_estimator": "k3_unbiased", "epsilon": 0.01},
     {"loss_type": "gspo", "advantage": "batch_std", "entropy_coef": 0.5, "logp_temperature": 1.0},
     {"overlong_buffer": 8, "advantage": "batch_std", "loss_agg": "token", "temperature": 1.2}],
)
def test_the_gradient_is_that_of_the_definitions(seen, options):
    """In the second pass over the second rollout, where policy, old policy and reference are three models."""
    found = seen(num_iterations=2, learning_rate=1e-3, **options)
    (run, args, rollout, rewards, _), _ = found.experiences[1]
    assert len(found.steps) == 4
    start, _, old, now = (step["weights"][0] for step in found.steps)
    expected = plain_gradient(run.config, args, rollout, rewards, now, old, start)
    assert small.relative_error(found.gradient(3), expected) < 2e-5
    if "epsilon" in options or "epsilon_high" in options:
        line = found.lines[1]
        share = line.get("clip_ratio/region_mean", line.get("cispo_clip_ratio"))
        assert 0 < share < 1, "the test is to see clipping at work"


# ---------------------------------------------------------------------------------------------- aggregation
@pytest.mark.parametrize("how", ["token", "constant"])
def test_a_window_of_two_rollouts_is_one_of_both(seen, how):
    options = {"loss_agg": how, "entropy_coef": 0.1, "max_steps": 2}
    whole = seen(batch_size=4, micro_batch_tokens=0, **options).gradient()
    for changes in ({"accumulation_steps": 2}, {"accumulation_steps": 2, "micro_batch_tokens": 40},
                    {"batch_size": 4, "micro_batch_tokens": 1}):
        assert small.furthest(seen(**options, **changes).gradient(), whole) < 1e-6
    sequence = seen(batch_size=4, **{**options, "loss_agg": "sequence"}).gradient()
    assert small.relative_error(sequence, whole) > 0.05


@pytest.mark.parametrize("how", ["token", "constant"])
def test_a_window_whose_last_rollout_is_smaller(seen, how):
    whole = seen(prompts=3, batch_size=3, loss_agg=how).gradient()
    assert small.furthest(seen(prompts=3, accumulation_steps=2, loss_agg=how).gradient(), whole) < 1e-6


@pytest.mark.parametrize("how", ["sequence", "token", "constant"])
def test_float16_with_its_scaler(seen, how):
    found = seen(loss_agg=how, max_steps=1, dtype="float16", micro_batch_tokens=60)
    assert found.steps[0]["taken"] and found.lines[0]["skipped_steps"] == 0
    scale = found.run.scaler.get_scale()
    gradient = {name: g / scale for name, g in found.gradient().items()}
    (run, args, rollout, rewards, _), _ = found.experiences[0]
    expected = plain_gradient(run.config, args, rollout, rewards, *[found.steps[0]["weights"][0]] * 3)
    assert small.relative_error(gradient, expected) < 0.02, "but for rounding to half precision"


# ---------------------------------------------------------------------------------------------- several updates
@pytest.mark.parametrize(
    ("options", "steps"),
    [({"num_iterations": 3}, 9), ({"mini_batch_size": 2}, 8), ({"num_iterations": 2, "mini_batch_size": 4}, 10),
     ({"mini_batch_size": 6}, 3), ({"mini_batch_size": 50, "num_iterations": 2}, 6), ({"accumulation_steps": 2}, 2)],
)
def test_optimizer_steps_are_those_planned(seen, options, steps):
    """5 prompts in steps of 2, 2 and 1, hence of 6, 6 and 3 answers."""
    found = seen(prompts=5, **options)
    assert len(found.steps) == steps == found.run.progress.optimizer_steps == found.run.progress.planned_steps
    assert found.lines[-1]["lr"] == pytest.approx(1e-5) and found.run.schedule.total_steps == steps


def test_every_pass_takes_every_answer_once_and_the_second_has_another_ratio(seen, monkeypatch):
    ratios = small.CallSpy(train_grpo.token_ratios)
    monkeypatch.setattr(train_grpo, "token_ratios", ratios)
    found = seen(num_iterations=2, mini_batch_size=2, max_steps=1, learning_rate=1e-3)
    [(_, experience)] = found.experiences
    distances = [(ratio - 1).abs().max().item() for _, ratio in ratios.calls]
    assert len(distances) == 6 and distances[0] < 1e-5
    assert min(distances[3:]) > 1e-3, "once all minibatches have been learnt from"
    lengths = [int(args[2].sum()) for args, _ in ratios.calls]
    answers = experience.mask.sum(1)
    expected = sorted(int(answers[i : i + 2].sum()) for i in (0, 2, 4))
    assert sorted(lengths[:3]) == sorted(lengths[3:]) == expected


def test_in_half_precision_old_log_probs_are_read_in_the_pieces_of_the_update(seen, monkeypatch):
    """Products round differently in a batch of another shape, and the first ratio would not be 1."""
    scored, losses = small.CallSpy(train_grpo.score_all), small.CallSpy(train_grpo.piece_loss)
    monkeypatch.setattr(train_grpo, "score_all", scored)
    monkeypatch.setattr(train_grpo, "piece_loss", losses)
    seen(mini_batch_size=4, max_steps=1, dtype="bfloat16", micro_batch_tokens=60)
    learnt = sorted(args[3].tolist() for args, _ in losses.calls)
    assert len(learnt) > 2
    for args, _ in scored.calls:
        assert sorted(piece.tolist() for piece in args[4]) == learnt


# ---------------------------------------------------------------------------------------------- groups
def test_dropped_flat_groups_count_in_no_mean(seen):
    """As if the flat group had no reward at all; kept, it halves the other's gradient, with its KL and entropy."""
    options = {"max_steps": 1, "entropy_coef": 0.1, "batch_size": 4, "prompts": 4}
    alone = seen(rewards=small.nan_rewards_for("(1)", "(3)"), **options)
    found = seen(rewards=flat_for("(1)", "(3)"), drop_flat_groups=1, **options)
    kept = seen(rewards=flat_for("(1)", "(3)"), **options)
    assert small.furthest(found.gradient(), alone.gradient()) < 1e-7
    assert small.relative_error(kept.gradient(), alone.gradient()) > 0.3
    assert found.lines[0]["frac_reward_zero_std"] == 0.5
    nothing = seen(rewards=flat_for("("), drop_flat_groups=1, **options)
    assert nothing.steps == [] and nothing.run.progress.optimizer_steps == 0


def test_flat_groups_are_answered_again(seen, tokenizer, monkeypatch):
    asked = []

    def rewards_of(prompts, responses, reward_model, **settings):
        asked.append(prompts)
        flat = {1: ("(1)", "(2)"), 2: ("(2)",)}.get(len(asked), ())
        return flat_for(*flat)(prompts, responses, reward_model, **settings)

    scored = small.CallSpy(train_grpo.sample_and_score)
    monkeypatch.setattr(train_grpo, "sample_and_score", scored)
    found = seen(rewards=rewards_of, dynamic_sampling=3, max_steps=1, batch_size=4)
    keys = [args[3] for args, _ in found.samples]
    again = [key for key, prompt in zip(keys[0], asked[0], strict=True) if "(1)" in prompt or "(2)" in prompt]
    assert keys[1] == [(*key, 1) for key in again]
    assert keys[2] == [(*key, 2) for key, prompt in zip(again, asked[1], strict=True) if "(2)" in prompt]
    assert len(keys) == 3 and len(keys[0]) == 4
    [(_, (rollout, rewards, parts))] = scored.calls
    model = small.float64_model(MiniMindForCausalLM, found.run.config, found.steps[0]["weights"][0])
    for i, (ids, length) in enumerate(plain_rows(rollout)):
        with torch.no_grad():
            expected = plain_logps(model, ids, length, 0.8)
        torch.testing.assert_close(rollout.per_token_logps[i, :length].double(), expected, atol=1e-4, rtol=0)
        assert tokenizer.decode(ids[-length:], skip_special_tokens=True) == rollout.completions[i]
        assert rewards[i].item() == parts["rm"][i].item() == pytest.approx(small.text_score(rollout.completions[i]))
        assert bool(rollout.finished[i]) == (ids[-1] == 2)
        assert torch.equal(rollout.completion_ids[i], rollout.output_ids[i, -rollout.completion_ids.size(1) :])
    first = found.samples[0][1].completions
    changed = [first[i : i + 3] != rollout.completions[i : i + 3] for i in range(0, 12, 3)]
    assert changed == ["(1)" in prompt or "(2)" in prompt for prompt in asked[0]]


def test_flat_groups_are_answered_again_a_few_times_only(seen):
    found = seen(rewards=flat_for("(1)"), dynamic_sampling=2, max_steps=1, batch_size=4)
    assert [len(args[3]) for args, _ in found.samples] == [4, 1, 1]
    assert len(found.steps) == 1


# ---------------------------------------------------------------------------------------------- weight of the KL
@pytest.mark.parametrize(("target", "up"), [(1e-9, True), (1e3, False)])
def test_the_weight_of_the_kl_is_adapted_and_resumed(seen, tmp_path, target, up):
    """A step's 6 answers of a horizon of 60 move it by at most 2%; the first step has KL 0."""
    options = {"kl_target": target, "kl_horizon": 60, "prompts": 8, "learning_rate": 1e-3}
    whole = seen(**options)
    logged = [line["kl_coef"] for line in whole.lines]
    factors = [0.98, 1.02, 1.02] if up else [0.98, 0.98, 0.98]
    assert logged == pytest.approx([0.1 * math.prod(factors[:i]) for i in range(4)], rel=1e-9)
    seen(**options, max_steps=2, save_dir=tmp_path / "resumed")
    resumed = seen(**options, from_resume=1, save_dir=tmp_path / "resumed")
    assert [line["kl_coef"] for line in resumed.lines] == logged
    assert resumed.run.progress.kl_coef == whole.run.progress.kl_coef


def test_the_weight_of_the_kl_is_what_the_gradient_holds(seen):
    """With k1 in the reward it is not; in the loss, gradient less policy gradient is proportional to it."""
    options = {"kl_target": 1e-9, "kl_horizon": 6 / 4.9, "learning_rate": 1e-3, "max_steps": 3, "prompts": 6}
    found = seen(**options)
    (run, args, rollout, rewards, _), _ = found.experiences[2]
    args.beta = 0.1 * (1 - 0.2 * 4.9) * (1 + 0.2 * 4.9)
    now = found.steps[2]["weights"][0]
    expected = plain_gradient(run.config, args, rollout, rewards, now, now, found.steps[0]["weights"][0])
    assert found.lines[2]["kl_coef"] == pytest.approx(args.beta)
    assert small.relative_error(found.gradient(2), expected) < 2e-5


def test_within_a_window_the_weight_of_the_kl_that_is_logged_is_the_one_used(seen):
    found = seen(kl_target=1e3, kl_horizon=60, prompts=8, accumulation_steps=2)
    logged = [line["kl_coef"] for line in found.lines]
    assert logged == pytest.approx([0.1, 0.1, 0.1 * 0.98**2, 0.1 * 0.98**2])


def test_entropy_is_rewarded(seen):
    """Pushed alone, without differences between rewards, it rises."""
    flat = {"rewards": flat_for("("), "beta": 0.0, "learning_rate": 1e-3, "num_iterations": 3, "max_steps": 2}
    plain, pushed = seen(**flat), seen(**flat, entropy_coef=1.0)
    assert pushed.lines[1]["entropy"] > plain.lines[1]["entropy"] + 0.05
