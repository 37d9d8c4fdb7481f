"""One PPO step and one GRPO / CISPO step against the recorded ones in tests/data: values and gradients to 1e-6."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer.rl_math import (
    approx_policy_kl,
    cispo_policy_loss,
    clip_fraction,
    compute_gae,
    group_relative_advantages,
    grpo_policy_loss,
    mask_until_eos,
    normalize_advantages,
    ppo_policy_loss,
    ppo_value_loss,
    reference_kl_penalty,
    sequence_mean,
    terminal_rewards,
    token_kl_penalty,
)

DATA = Path(__file__).resolve().parent / "data"
SETTINGS = json.loads((DATA / "steps.json").read_text())


def assert_equal_to_1e6(actual, expected):
    torch.testing.assert_close(actual, expected.reshape(actual.shape), atol=1e-6, rtol=1e-6)


@pytest.fixture
def ppo():
    return load_file(DATA / "ppo_step.safetensors")


@pytest.fixture
def grpo():
    return load_file(DATA / "grpo_step.safetensors")


def test_ppo_advantages_and_returns(ppo):
    settings = SETTINGS["ppo"]
    mask = mask_until_eos(ppo["completion_ids"], ppo["completion_mask"].bool(), settings["eos_token_id"])
    assert torch.equal(mask, ppo["response_mask"].bool())

    token_rewards = terminal_rewards(ppo["rewards"], mask)
    assert_equal_to_1e6(token_rewards, ppo["token_rewards"])

    advantages, returns = compute_gae(
        token_rewards, ppo["old_values"], mask, gamma=settings["gamma"], lam=settings["lam"]
    )
    assert_equal_to_1e6(advantages[mask], ppo["raw_advantages"][mask])
    assert_equal_to_1e6(returns[mask], ppo["returns"][mask])
    assert_equal_to_1e6(normalize_advantages(advantages, mask)[mask], ppo["advantages"][mask])


def test_ppo_losses_and_gradients(ppo):
    settings = SETTINGS["ppo"]
    mask = ppo["response_mask"].bool()
    logps, values = ppo["new_logps"].requires_grad_(), ppo["new_values"].requires_grad_()

    policy = ppo_policy_loss(
        logps, ppo["old_logps"], ppo["advantages"], mask, clip_epsilon=settings["clip_epsilon"]
    )
    value = ppo_value_loss(
        values, ppo["old_values"], ppo["returns"], mask, cliprange_value=settings["cliprange_value"]
    )
    kl = reference_kl_penalty(logps, ppo["ref_logps"], mask)
    total = policy + settings["kl_coef"] * kl + settings["vf_coef"] * value
    total.backward()

    assert_equal_to_1e6(policy, ppo["policy_loss"])
    assert_equal_to_1e6(value, ppo["value_loss"])
    assert_equal_to_1e6(kl, ppo["reference_kl"])
    assert_equal_to_1e6(total, ppo["total_loss"])
    assert_equal_to_1e6(logps.grad, ppo["grad_new_logps"])
    assert_equal_to_1e6(values.grad, ppo["grad_new_values"])


def test_ppo_metrics(ppo):
    mask = ppo["response_mask"].bool()
    fraction = clip_fraction(
        ppo["new_logps"], ppo["old_logps"], mask, clip_epsilon=SETTINGS["ppo"]["clip_epsilon"]
    )
    assert_equal_to_1e6(fraction, ppo["clip_fraction"])
    assert_equal_to_1e6(approx_policy_kl(ppo["new_logps"], ppo["old_logps"], mask), ppo["approx_kl"])


def test_grpo_advantages_with_one_flat_group(grpo):
    advantages = group_relative_advantages(grpo["rewards"], SETTINGS["grpo"]["num_generations"])
    assert_equal_to_1e6(advantages, grpo["advantages"])
    assert (advantages[4:8] == 0).all()  # four rewards of 1.5


@pytest.mark.parametrize("loss_type", ["cispo", "grpo"])
def test_grpo_losses_and_gradients(grpo, loss_type):
    settings = SETTINGS["grpo"]
    mask = grpo["response_mask"].bool()
    logps = grpo["new_logps"].requires_grad_()
    inputs = (logps, grpo["old_logps"], grpo["advantages"], mask)

    losses = {
        "cispo": cispo_policy_loss(*inputs, epsilon_high=settings["epsilon_high"]),
        "grpo": grpo_policy_loss(*inputs, epsilon=settings["epsilon"]),
    }
    kl = sequence_mean(token_kl_penalty(logps, grpo["ref_logps"]), mask)
    total = losses[loss_type] + settings["beta"] * kl
    total.backward()

    assert_equal_to_1e6(total, grpo[f"{loss_type}_loss_with_kl"])
    assert_equal_to_1e6(logps.grad, grpo[f"{loss_type}_grad_new_logps"])
