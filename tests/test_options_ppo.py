"""The options of PPO in small runs: gradients against the definitions, and what each option must and must not do."""

import math

import pytest
import small_runs as small
import torch
from option_runs import OFF, Shifted, clipped, plain_entropy, plain_kl, see
from small_runs import plain_logps, plain_rows
from test_train_ppo import plain_values
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from model.export import transformers_config
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_ppo


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    return small.write_weights(tmp_path_factory.mktemp("lively"), len(tokenizer))


@pytest.fixture
def seen(weights, tmp_path):
    """Function of options giving all that is seen of a run with them; see `see`."""

    def run(**options):
        return see(train_ppo, weights, tmp_path, **options)

    return run


# ---------------------------------------------------------------------------------------------- the definitions
def plain_rewards(args, score, finished, old, ref):
    """[length]: what each token of an answer earns."""
    rewards = -args.kl_coef * plain_kl(old, old, ref, args.kl_estimator) if args.kl_in == "reward" else 0 * old
    rewards[-1] += score - (0 if finished else args.missing_eos_penalty)
    return rewards


def plain_gae(args, rewards, values):
    nexts = torch.cat([values[1:], values.new_zeros(1)])
    deltas, n = rewards + args.gamma * nexts - values, len(values)
    return torch.stack([sum((args.gamma * args.lam) ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)])


def plain_gradients(found, step, start, old_step, shift=0.0):
    """(actor's, critic's) gradients at an optimizer step on all rows of the last rollout, in float64."""
    (run, args, rollout, rewards, _), _ = found.experiences[-1]
    t, rows, config = args.logp_temperature, plain_rows(rollout), run.config

    def models(weights):
        return [small.float64_model(kind, config, state)
                for kind, state in zip((MiniMindForCausalLM, train_ppo.CriticModel), weights, strict=True)]

    (frozen, _), (before, critic) = models(found.steps[start]["weights"]), models(found.steps[old_step]["weights"])
    with torch.no_grad():
        olds = [plain_logps(before, *row, t) - shift for row in rows]
        refs = [plain_logps(frozen, *row, t) for row in rows]
        values = [plain_values(critic, *row) for row in rows]
    earned = [plain_rewards(args, score, row[0][-1] == 2, old, ref)
              for row, score, old, ref in zip(rows, rewards.tolist(), olds, refs, strict=True)]
    if args.whiten_rewards:
        every = torch.cat(earned)
        scale = (every.var(unbiased=False) + 1e-8).sqrt()
        earned = [(reward - every.mean()) / scale + every.mean() for reward in earned]
    raw = [plain_gae(args, reward, value) for reward, value in zip(earned, values, strict=True)]
    every = torch.cat(raw)
    actor, critic = models(found.steps[step]["weights"])
    losses = []
    for row, old, ref, value, gae in zip(rows, olds, refs, values, raw, strict=True):
        advantage = (gae - every.mean()) / (every.var(unbiased=False) + 1e-8).sqrt()
        logps, now = plain_logps(actor, *row, t), plain_values(critic, *row)
        gain = clipped((logps - old).exp(), advantage, args.clip_epsilon, args.clip_epsilon_high)
        if args.dual_clip:
            gain = torch.where(advantage < 0, gain.maximum(args.dual_clip * advantage), gain)
        near = value + (now - value).clamp(-args.cliprange_value, args.cliprange_value)
        fit = 0.5 * torch.maximum((now - gae - value) ** 2, (near - gae - value) ** 2)
        each = -gain + args.vf_coef * fit - args.entropy_coef * plain_entropy(actor, *row, t)
        if args.kl_in == "loss":
            each = each + args.kl_coef * plain_kl(logps, old, ref, args.kl_estimator)
        losses.append(each)
    critic_gradient = small.gradients_of(torch.cat(losses).mean(), critic)
    return {name: p.grad.clone() for name, p in actor.named_parameters()}, critic_gradient


@pytest.mark.parametrize(
    "options",
    [{"kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.7},
     {"kl_in": "reward", "kl_estimator": "k2", "kl_coef": 0.7, "whiten_rewards": 1, "missing_eos_penalty": 2.0},
     {"kl_estimator": "k2", "kl_coef": 0.5, "entropy_coef": 0.5, "gamma": 0.9},
     {"kl_estimator": "k3_unbiased", "kl_coef": 0.5, "clip_epsilon": 0.01, "clip_epsilon_high": 0.05},
     {"kl_estimator": "k1", "missing_eos_penalty": 1.0, "micro_batch_tokens": 40},
     {"whiten_rewards": 1, "lam": 0.8, "micro_batch_tokens": 40}],
)
def test_the_gradients_are_those_of_the_definitions(seen, options):
    """In the second pass over the second rollout, where policy, old policy and reference are three models."""
    found = seen(prompts=6, learning_rate=5e-4, critic_learning_rate=5e-4, **options)
    assert len(found.steps) == 4
    for k, expected in enumerate(plain_gradients(found, step=3, start=0, old_step=2)):
        assert small.relative_error(found.gradient(3, k), expected) < 5e-5


# ---------------------------------------------------------------------------------------------- clipping
@pytest.mark.parametrize("options", [{}, {"dual_clip": 1.5}, {"clip_epsilon_high": 1.5}, {"dual_clip": 3.0},
                                     {"dual_clip": 1.5, "clip_epsilon_high": 1.5}])
def test_clips_at_ratio_2(seen, options):
    """--clip_epsilon_high takes it from tokens with a positive advantage, --dual_clip from the others, or neither."""
    found = seen(engine=Shifted, recompute_logps="0", ppo_update_iters=1, max_steps=1, **OFF[train_ppo], **options)
    expected, _ = plain_gradients(found, step=0, start=0, old_step=0, shift=math.log(2))
    assert small.relative_error(found.gradient(), expected) < 5e-5
    both = options.get("dual_clip") == 1.5 and "clip_epsilon_high" not in options
    assert all((gradient == 0).all() for gradient in expected.values()) == both
    assert (found.lines[0]["clip_ratio/high_mean"] > 0) == ("clip_epsilon_high" not in options)


# ---------------------------------------------------------------------------------------------- weights and rates
def test_while_the_critic_warms_up_every_bit_of_the_actor_stays(seen):
    found = seen(prompts=9, critic_warmup_steps=2, learning_rate=1e-3)
    plain = seen(prompts=9, learning_rate=1e-3)
    assert len(found.steps) == len(plain.steps) == 6 == found.run.progress.optimizer_steps
    first, start = found.run.actor, plain.steps[0]["weights"][0]
    # during the warm-up optimizer_step is given the critic alone
    assert [len(step["weights"]) for step in found.steps] == [1, 1, 1, 1, 2, 2]
    assert small.same_state(found.steps[4]["weights"][0], start) and not small.same_state(small.state_of(first), start)
    assert not small.same_state(found.steps[1]["weights"][0], found.steps[0]["weights"][0]), "the critic learns"
    for name in ("lr", "critic/lr"):
        assert [line[name] for line in found.lines] == [line[name] for line in plain.lines]
    assert [line["grad_norm"] > 0 for line in found.lines] == [False, False, True]
    assert found.lines[1]["kl"] == found.lines[2]["kl"] * 0 == 0


@pytest.mark.parametrize(("target", "up"), [(1e-9, True), (1e3, False)])
def test_the_weight_of_the_kl_is_adapted_and_resumed(seen, tmp_path, target, up):
    """A step's 3 answers of a horizon of 30 move it by at most 2%."""
    options = {"kl_target": target, "kl_horizon": 30, "prompts": 12, "learning_rate": 1e-3, "kl_in": "reward"}
    whole = seen(**options)
    logged = [line["kl_coef"] for line in whole.lines]
    assert logged == pytest.approx([0.02 * (1.02 if up else 0.98) ** i for i in range(4)], rel=1e-9)
    seen(**options, max_steps=2, save_dir=tmp_path / "resumed")
    resumed = seen(**options, from_resume=1, save_dir=tmp_path / "resumed")
    assert [line["kl_coef"] for line in resumed.lines] == logged
    assert resumed.run.progress.kl_coef == whole.run.progress.kl_coef


def test_entropy_is_rewarded(seen):
    options = {"ppo_update_iters": 4, "learning_rate": 1e-3, "prompts": 6, **OFF[train_ppo]}
    assert seen(**options, entropy_coef=3.0).lines[1]["entropy"] > seen(**options).lines[1]["entropy"] + 0.05


# ---------------------------------------------------------------------------------------------- the critic's start
@pytest.fixture(scope="module")
def reward_model(tokenizer, tmp_path_factory):
    """Function of changes to the sizes giving a folder with a random reward model as transformers saves one."""

    def build(kind=Qwen3ForSequenceClassification, **changes):
        sizes = transformers_config(MiniMindConfig(small.WIDTH, small.LAYERS, vocab_size=len(tokenizer)), "float32")
        torch.manual_seed(5)
        model = kind(Qwen3Config(**{**sizes, **changes}, num_labels=1))
        with torch.no_grad():
            model.model.norm.weight.uniform_(0.2, 3)
        folder = tmp_path_factory.mktemp("reward_model")
        model.save_pretrained(folder)
        return folder, model

    return build


def test_a_critic_from_a_reward_model_values_what_it_scores(seen, reward_model, tmp_path):
    folder, model = reward_model()
    options = {"critic_from": folder, "prompts": 6, "learning_rate": 1e-3}
    found = seen(**options)
    (_, _, rollout, _, _), experience = found.experiences[0]
    for i, (ids, length) in enumerate(plain_rows(rollout)):
        prompt = ids[: len(ids) - length]
        with torch.no_grad():
            score = model(torch.tensor([prompt])).logits[0, 0]
        torch.testing.assert_close(experience.old_values[i, 0], score, atol=1e-5, rtol=0)
    assert found.steps[0]["weights"][1]["value_head.bias"].item() == 0
    seen(**options, max_steps=1, save_dir=tmp_path / "resumed")
    resumed = seen(**options, from_resume=1, save_dir=tmp_path / "resumed")
    assert resumed.steps[0]["weights"][1]["value_head.bias"].item() != 0, "what was learnt, not the folder again"
    with pytest.raises(ValueError, match="--critic_from is 'policy'"):
        seen(prompts=6, learning_rate=1e-3, from_resume=1, epochs=2, save_dir=tmp_path / "resumed")


def test_folders_that_no_critic_can_start_from(seen, reward_model, tmp_path):
    with pytest.raises(ValueError, match=r"--critic_from .*nowhere: expected policy, or a folder with"):
        seen(critic_from=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--critic_from .*no score.weight in it, so it is no reward model"):
        seen(critic_from=reward_model(Qwen3ForCausalLM)[0])
    with pytest.raises(ValueError, match=r"--critic_from .*its sizes are not the policy's"):
        seen(critic_from=reward_model(hidden_size=32)[0])
    with pytest.raises(ValueError, match=r"--critic_from .*unexpected \['model.layers.2.*expected the policy's"):
        seen(critic_from=reward_model(num_hidden_layers=3, layer_types=3 * ["full_attention"])[0])
