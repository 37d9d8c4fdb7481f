"""What the update makes of the rollout engine's own log-probs: old ones, importance weights, a difference to log."""

import math

import pytest
import small_runs as small
import torch
from small_runs import argv, metrics_lines

from trainer import train_grpo, train_ppo
from trainer.rollout_engine import TorchRolloutEngine

SCRIPTS = {"grpo": (train_grpo, {"num_generations": 3, "batch_size": 2}),
           "ppo": (train_ppo, {"batch_size": 4, "mini_batch_size": 4, "ppo_update_iters": 1, "early_stop_kl": 1e9})}
BOTH = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    return small.write_weights(tmp_path_factory.mktemp("lively"), len(tokenizer))


class Shifted(TorchRolloutEngine):
    """An engine that finds every token `shift` nats less likely than the trainer, and says at which temperature."""

    runs_trainers_modules = False
    shift, at = math.log(2), 0.8

    def rollout(self, *args, **kwargs):
        result = super().rollout(*args, **kwargs)
        return result._replace(per_token_logps=result.per_token_logps - self.shift * result.completion_mask)

    def logps_temperature(self, temperature, logp_temperature):
        return self.at

    def must_recompute(self, temperature, logp_temperature):
        return self.at != logp_temperature


def first_gradient(name, weights, folder, engine, **changes):
    """(policy's gradient at the first optimizer step, the first line of metrics) with an engine of this class."""
    script, sizes = SCRIPTS[name]
    data = small.write_prompts(folder / "prompts.jsonl", 4)
    run_dir = folder / f"{engine.__name__}{changes}"
    flags = {"weight_dir": weights, "data_path": data, "save_dir": folder / "out", "run_dir": run_dir,
             "checkpoint_dir": folder / "checkpoints", "max_steps": 1, "recompute_logps": "1", **sizes, **changes}
    steps = small.StepSpy(script.optimizer_step)

    def opened(args, policy, tokenizer, device):
        return engine(policy, tokenizer, device)

    status, _ = small.run_script(script, argv(**flags), optimizer_step=steps, open_engine=opened)
    assert status == 0
    return steps.calls[0]["gradients"][0], metrics_lines(run_dir)[0]


@BOTH
def test_a_likelier_token_weighs_more_up_to_the_cap(name, weights, tmp_path):
    """Without KL the gradient is linear in the weights, which are min(2, cap) at every token here."""
    alone = {"beta": 0.0} if name == "grpo" else {"kl_coef": 0.0}
    plain, _ = first_gradient(name, weights, tmp_path, TorchRolloutEngine, **alone)
    twice, line = first_gradient(name, weights, tmp_path, Shifted, tis_cap=4, **alone)
    capped, _ = first_gradient(name, weights, tmp_path, Shifted, tis_cap=1.5, **alone)
    unweighted, _ = first_gradient(name, weights, tmp_path, Shifted, tis_cap=0, **alone)
    for factor, found in ((2, twice), (1.5, capped), (1, unweighted)):
        assert small.relative_error(found, {key: factor * g for key, g in plain.items()}) < 1e-4
    assert line["sampling/logp_difference/mean"] == pytest.approx(math.log(2), abs=1e-4)
    assert line["sampling/logp_difference/max"] == pytest.approx(math.log(2), abs=1e-4)


@BOTH
def test_log_probs_of_another_temperature_are_compared_at_that_temperature(name, weights, tmp_path):
    class Plain(Shifted):
        """Reports what servers report that leave the temperature out."""

        shift, at = 0.0, 1.0

        def rollout(self, *args, **kwargs):
            return super().rollout(*args, **{**kwargs, "logp_temperature": 1.0})

    plain, _ = first_gradient(name, weights, tmp_path, TorchRolloutEngine)
    found, line = first_gradient(name, weights, tmp_path, Plain)
    assert small.relative_error(found, plain) < 1e-4
    assert line["sampling/logp_difference/max"] < 1e-4


@BOTH
def test_unknown_temperature_is_neither_compared_nor_weighted(name, weights, tmp_path):
    class Unknown(Shifted):
        at = None

    plain, _ = first_gradient(name, weights, tmp_path, TorchRolloutEngine)
    found, line = first_gradient(name, weights, tmp_path, Unknown)
    assert small.relative_error(found, plain) < 1e-6
    assert line["sampling/logp_difference/mean"] is None and line["sampling/logp_difference/max"] is None


@BOTH
def test_the_engines_log_probs_can_be_the_old_ones(name, weights, tmp_path):
    """Ratio 2 at every token: CISPO weighs by it, PPO clips where the advantage is positive."""
    alone = {"beta": 0.0} if name == "grpo" else {"kl_coef": 0.0}
    plain, _ = first_gradient(name, weights, tmp_path, TorchRolloutEngine, **alone)
    found, line = first_gradient(name, weights, tmp_path, Shifted, recompute_logps="0", **alone)
    if name == "grpo":
        assert small.relative_error(found, {key: 2 * g for key, g in plain.items()}) < 1e-4
    else:
        assert line["approx_kl"] == pytest.approx(0.5 * math.log(2) ** 2, abs=1e-4)
        assert 0 < line["clip_ratio/high_mean"] < 1 and line["clip_ratio/low_mean"] == 0


@BOTH
def test_an_evaluation_asks_for_withheld_weights_first(name, weights, tmp_path):
    order = []

    class Withholding(TorchRolloutEngine):
        def sync(self):
            order.append("sync")

        def rollout(self, *args, **kwargs):
            order.append("rollout")
            return super().rollout(*args, **kwargs)

    heldout = small.write_prompts(tmp_path / "heldout.jsonl", 2)
    first_gradient(name, weights, tmp_path, Withholding, eval_data_path=heldout, sample_interval=0)
    answers = (len(order) - 3) // 2
    assert answers > 0 and order == ["sync", *["rollout"] * (answers + 1), "sync", *["rollout"] * answers]


def test_torch_is_its_own_engine():
    assert TorchRolloutEngine.runs_trainers_modules
    engine = TorchRolloutEngine(torch.nn.Linear(1, 1), None)
    assert engine.logps_temperature(0.8, 1.0) == 1.0 and not engine.must_recompute(0.8, 1.0)
