"""The health monitor: each alarm on made-up numbers that must and must not raise it, and on recorded runs."""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.arguments import REPO_ROOT
from trainer.health import Alarm, HealthMonitor, alarm_entries
from trainer.health_checks import CHECKS, Past, Settings, finite, mean_and_error

DATA = Path(__file__).parent / "data"
SOUND = {"reward": 1.0, "kl": 0.01, "lr": 1e-4, "grad_norm": 1.0, "policy_loss": 0.0, "skipped_steps": 0.0}


def alarms(steps: int, settings: Settings | None = None, **series) -> list[Alarm]:
    """What `steps` logged steps raise; each series is a value or a function of the step (1, 2, …)."""
    monitor, found = HealthMonitor(settings), []
    for step in range(1, steps + 1):
        row = {name: value(step) if callable(value) else value for name, value in series.items()}
        found += monitor.observe({"step": step, **SOUND, **{name.replace("__", "/"): v for name, v in row.items()}})
    return found


def names(found: list[Alarm]) -> set[str]:
    return {alarm.name for alarm in found}


def test_sound_numbers_raise_nothing():
    assert alarms(100) == []


def from_21(first: float, then: float):
    """A series that changes after the first 20 steps, the block that is kept as the start."""
    return lambda i: first if i <= 20 else then


# name, steps, numbers that must raise it, numbers close by that must not
HALF, FP16 = Settings(exact=False), Settings(exact=False, scaled=True)
CASES = [
    ("nonfinite", 1, {"reward": None}, {"reward": 0.0}),
    ("nonfinite", 1, {"policy_loss": math.nan}, {"policy_loss": -9.0}),
    ("nonfinite", 1, {"critic__vf_loss": math.inf}, {"critic__vf_loss": 1e6}),
    ("nonfinite", 1, {"rewards__nonfinite": 0.25}, {"rewards__nonfinite": 0.0}),
    ("nonfinite", 1, {"skipped_steps": 1.0}, {"skipped_steps": 0.0, "critic__explained_var": None}),
    ("logp_mismatch", 1, {"sampling__logp_difference__mean": 1.1e-3}, {"sampling__logp_difference__mean": 9e-4}),
    ("logp_mismatch", 1, {"sampling__logp_difference__max": 0.06}, {"sampling__logp_difference__max": 0.04}),
    ("kl_runaway", 3, {"kl": 0.51}, {"kl": 0.49}),
    ("kl_runaway", 15, {"kl": lambda i: 0.04 * i}, {"kl": lambda i: 9.0 if i % 4 == 0 else 0.1}),  # no single spikes
    ("kl_stuck", 11, {"kl": 0.0}, {"kl": 1e-6}),  # 10 steps at 1e-4 before it, and the last shows them
    ("kl_stuck", 11, {"kl": 0.0}, {"kl": 0.0, "lr": 3e-7}),  # MiniMind's rate moves too little to be seen
    ("kl_stuck", 11, {"kl": 0.0}, {"kl": 0.0, "grad_norm": None}),  # accumulating: no step taken yet
    ("entropy_collapse", 30, {"entropy": from_21(1.0, 0.09)},
     {"entropy": from_21(1.0, 0.11)}),
    ("entropy_collapse", 10, {"entropy": 9e-4}, {"entropy": 2e-3}),
    ("clip_fraction", 3, {"clip_ratio__region_mean": 0.41}, {"clip_ratio__region_mean": 0.39}),
    ("clip_fraction", 3, {"cispo_clip_ratio": 0.41}, {"cispo_clip_ratio": 0.39}),
    ("early_stop", 10, {"early_stop": 1.0}, {"early_stop": lambda i: float(i != 5)}),
    ("grad_spike", 21, {"grad_norm": lambda i: 5.1 if i == 21 else 1.0},
     {"grad_norm": lambda i: 4.9 if i == 21 else 1.0}),
    ("critic_useless", 50, {"critic__explained_var": -0.01},
     {"critic__explained_var": lambda i: 0.0 if i == 25 else -9.0}),
    ("flat_groups", 5, {"frac_reward_zero_std": 0.81}, {"frac_reward_zero_std": 0.8}),
    ("reward_saturated", 5, {"rewards__rm__saturated": 0.81}, {"rewards__rm__saturated": 0.8}),
    ("reward_saturated", 5, {"rewards__rm__mean": -3.0}, {"rewards__rm__mean": 2.9}),
    ("length_bias", 20, {"rewards__length_correlation": 0.95, "completions__mean_length": 50.0},
     {"rewards__length_correlation": lambda i: (-1.0) ** i, "completions__mean_length": 50.0}),  # two rows a step
    ("length_bias", 20, {"rewards__length_correlation": -0.95, "completions__mean_length": 50.0},
     {"rewards__length_correlation": -0.85, "completions__mean_length": 50.0}),
    ("length_bias", 25, {"rewards__length_correlation": 0.6, "completions__mean_length": from_21(50.0, 58.0)},
     {"rewards__length_correlation": 0.6, "completions__mean_length": from_21(50.0, 57.0)}),
    ("length_bias", 25, {"rewards__length_correlation": -0.6, "completions__mean_length": from_21(50.0, 42.0)},
     {"rewards__length_correlation": -0.6, "completions__mean_length": from_21(50.0, 58.0)}),
    ("length_limit", 5, {"completions__clipped_ratio": 0.51}, {"completions__clipped_ratio": 0.5}),
    ("repetition", 30, {"rewards__repetition__mean": from_21(0.0, -0.11)},
     {"rewards__repetition__mean": -0.3}),  # as much as at the start
    # means of steps 1 to 20 and 21 to 40: 20 / 50 = 0.4 apart
    ("reward_hacking", 40, {"rewards__rm__mean": lambda i: -i / 50, "rewards__length__mean": lambda i: i / 50},
     {"rewards__rm__mean": lambda i: i / 50, "rewards__length__mean": lambda i: i / 50}),
    ("reward_hacking", 40, {"rewards__rm__mean": lambda i: i / 50, "rewards__tag__mean": lambda i: -i / 50},
     {"rewards__rm__mean": lambda i: i / 50 if i > 20 else 0.4, "rewards__tag__mean": 0.0}),
    # the same fall of 0.21 in little and in much noise: four standard errors decide
    ("reward_hacking", 41,
     {"rewards__rm__mean": lambda i: -i / 100 + 0.1 * (-1) ** i, "rewards__tag__mean": lambda i: i / 50},
     {"rewards__rm__mean": lambda i: -i / 100 + 2.0 * (-1) ** i, "rewards__tag__mean": lambda i: i / 50}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "steps", "must", "must_not"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_alarm(name, steps, must, must_not):
    assert names(alarms(steps, **must)) == {name}
    assert names(alarms(steps, **must_not)) == set()
    assert names(alarms(steps - 1, **must)) == set()  # and not before it can be told


def test_every_check_has_a_series_that_must_and_one_that_must_not():
    assert {check.__name__ for check in CHECKS} == {name for name, *_ in CASES}


@pytest.mark.parametrize(("settings", "series", "expected"), [
    # half precision and other engines round differently
    (HALF, {"sampling__logp_difference__mean": 0.04, "sampling__logp_difference__max": 2.0}, set()),
    (HALF, {"sampling__logp_difference__mean": 0.06}, {"logp_mismatch"}),
    # float16's loss scaler skips steps until it has found its scale
    (FP16, {"skipped_steps": lambda i: float(i < 9)}, set()),
    (FP16, {"skipped_steps": 1.0}, {"nonfinite"}),
    (Settings(), {"skipped_steps": lambda i: float(i == 2)}, {"nonfinite"}),
    # no weight, no reference: KL is 0 as it should be
    (Settings(kl_weight=0.0), {"kl": 0.0}, set()),
])  # fmt: skip
def test_what_the_flags_change(settings, series, expected):
    assert names(alarms(30, settings, **series)) == expected


@pytest.mark.parametrize(("series", "severe"), [
    ({"kl": 1.9}, False), ({"kl": 2.1}, True),
    ({"sampling__logp_difference__mean": 0.1}, False), ({"sampling__logp_difference__mean": 0.3}, True),
    ({"skipped_steps": lambda i: float(i % 3 == 0)}, False), ({"skipped_steps": lambda i: float(i % 2)}, True),
    ({"frac_reward_zero_std": 0.97}, False), ({"frac_reward_zero_std": 1.0}, True),
    ({"completions__clipped_ratio": 0.9}, False), ({"completions__clipped_ratio": 1.0}, True),
    ({"rewards__rm__saturated": 0.9}, False), ({"rewards__rm__saturated": 1.0}, True),
    ({"entropy": from_21(1.0, 0.05)}, False), ({"entropy": from_21(1.0, 0.01)}, True),
    ({"rewards__repetition__mean": from_21(0.0, -0.3)}, False),
    ({"rewards__repetition__mean": from_21(0.0, -0.5)}, True),
    ({"rewards__rm__mean": lambda i: -i / 50, "rewards__tag__mean": lambda i: i / 50}, False),  # falls by 0.9
    ({"rewards__rm__mean": lambda i: -i / 30, "rewards__tag__mean": lambda i: i / 50}, True),  # by 1.5
])  # fmt: skip
def test_severe_is_where_going_on_is_a_waste(series, severe):
    found = alarms(65, **series)
    assert found and any(alarm.severity == "severe" for alarm in found) == severe


def test_reward_hacking_is_measured_from_the_best_block():
    """The rules rose before they fell: at the end they are where they began, and only their best tells."""
    rules = {"rewards__tag__mean": lambda i: 1 - abs(i - 40) / 40, "rewards__rm__mean": lambda i: i / 40}
    (alarm, *_) = alarms(80, **rules)
    assert alarm.name == "reward_hacking" and "since step" in alarm.message and "the rules' part" in alarm.message
    assert names(alarms(40, **rules)) == set()


# ---------------------------------------------------------------------------------------------- saying it
def test_an_alarm_is_said_again_after_fifty_steps_or_when_it_got_worse():
    def steps(found):
        return [(alarm.step, alarm.severity) for alarm in found]

    assert steps(alarms(110, kl=0.6)) == [(3, "warning"), (53, "warning"), (103, "warning")]
    # twice 0.6 is said at once; the median of 5 needs 3 of them
    assert steps(alarms(30, kl=lambda i: 0.6 if i < 10 else 1.3)) == [(3, "warning"), (12, "warning")]
    assert steps(alarms(30, kl=lambda i: 1.3 if i < 10 else 2.1)) == [(3, "warning"), (12, "severe")]
    # from severe back to a warning is not worse
    assert steps(alarms(30, kl=lambda i: 2.1 if i < 10 else 1.9)) == [(3, "severe")]


def test_two_alarms_do_not_hold_each_other_back():
    found = alarms(10, kl=0.6, frac_reward_zero_std=1.0)
    assert [(alarm.name, alarm.step) for alarm in found] == [("kl_runaway", 3), ("flat_groups", 5)]


def test_words_and_entries():
    alarm = alarms(3, Settings(kl_weight=0.02, kl_flag="--kl_coef"), kl=0.6)[0]
    assert alarm.line().startswith("[health] step 3, warning, kl_runaway: KL to the reference is 0.6 nats a token ")
    assert "--learning_rate (now 0.0001)" in alarm.message and "--kl_coef (now 0.02)" in alarm.message
    severe = Alarm("nonfinite", "severe", 3, "words")
    assert alarm_entries([alarm, severe]) == {
        "health/kl_runaway": 1.0, "health/nonfinite": 2.0, "health/messages": [alarm.message, "words"],
    }  # fmt: skip
    assert alarm_entries([]) == {}


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_every_message_is_one_line_with_a_number_and_something_to_try(case):
    _, steps, must, _ = case
    for alarm in alarms(steps, **must):
        assert "\n" not in alarm.line() and " Try " in alarm.message or "try " in alarm.message
        assert any(letter.isdigit() for letter in alarm.message) and len(alarm.message) < 400


def test_lines_of_an_evaluation_and_strange_values_are_passed_over():
    monitor = HealthMonitor()
    assert monitor.observe({"step": 1, "eval/reward": None, "kl": None}) == [] and monitor.past.count == 0
    for step in range(1, 120):  # nothing but a reward, and values of every kind
        row = {"step": step, "reward": 1.0, "note": "x", "entropy": "high", "grad_norm": None, "rewards/x/mean": None}
        assert monitor.observe(row) == []
    assert (finite("1"), finite(None), finite(math.inf), finite(2)) == (None, None, None, 2.0)
    assert mean_and_error([1.0]) == (None, math.inf) and mean_and_error([1.0, 3.0]) == (2.0, pytest.approx(1.0))


def test_the_settings_of_both_scripts():
    grpo = argparse.Namespace(beta=0.01, dtype="float32", rollout_engine="torch")
    assert HealthMonitor.for_run(grpo).settings == Settings(0.01, "--beta", True, False)
    ppo = argparse.Namespace(kl_coef=0.02, dtype="float16", rollout_engine="torch")
    assert HealthMonitor.for_run(ppo).settings == Settings(0.02, "--kl_coef", False, True)
    grpo.rollout_engine = "sglang"
    assert HealthMonitor.for_run(grpo).settings.exact is False


def test_what_was_seen_is_kept_within_bounds():
    past = Past()
    for step in range(1, 1001):
        past.add({"step": step, "reward": 1.0, "kl": float(step), "entropy": float(step)})
    assert len(past.rows) == 60 and len(past.blocks) == 50 and past.largest_kl == 1000.0
    assert past.last("kl", 2) == [999.0, 1000.0] and past.start("entropy") == 10.5
    assert past.mean("kl", 4, least=4) == 998.5 and past.mean("absent", 4, least=1) is None


# ---------------------------------------------------------------------------------------------- recorded runs
def recorded(name: str) -> list[dict]:
    """Every logged step of a real run, as its metrics.jsonl had them; the file's `command` says how it was made."""
    columns = json.loads((DATA / f"health_{name}.json").read_text())["metrics"]
    return [{"step": step, **{metric: values[step - 1] for metric, values in columns.items()}}
            for step in range(1, len(columns["reward"]) + 1)]  # fmt: skip


def raised_by(rows: list[dict], **flags) -> list[Alarm]:
    monitor = HealthMonitor.for_run(argparse.Namespace(**flags))
    return [alarm for row in rows for alarm in monitor.observe(row)]


@pytest.mark.parametrize("name", ["grpo", "grpo_loss", "grpo_minimind", "ppo"])
def test_sound_runs_raise_nothing(name):
    assert raised_by(recorded(name), **{"kl_coef" if "ppo" in name else "beta": 0.02}) == []


@pytest.mark.parametrize(("name", "expected"), [
    ("high_rate", {"kl_runaway": "severe", "length_limit": "severe"}), ("cold", {"flat_groups": "warning"}),
    ("length_only", {"length_bias": "warning", "kl_runaway": "severe"}), ("always_3", {"reward_saturated": "severe"}),
    ("ppo_high_rate", {"kl_runaway": "severe", "early_stop": "warning"}),
    ("ppo_minimind", {"critic_useless": "warning"}),  # a fresh critic at 5e-7 and two answers a step
])  # fmt: skip
def test_broken_runs_raise_theirs(name, expected):
    found = raised_by(recorded(name), beta=0.01)
    assert expected.items() <= {alarm.name: alarm.severity for alarm in found}.items()


@pytest.mark.parametrize("stopped", [1, 4, 20, 29])
def test_a_resumed_monitor_alarms_as_one_that_never_stopped(stopped):
    rows = recorded("high_rate")
    straight, resumed = HealthMonitor(), HealthMonitor()
    expected = [alarm for row in rows for alarm in straight.observe(row) if alarm.step > stopped]
    written = [json.dumps(row) for row in rows[:stopped]]
    resumed.restore(json.loads(line) for line in written)
    assert [alarm for row in rows[stopped:] for alarm in resumed.observe(row)] == expected


def test_neither_torch_nor_numpy_is_imported():
    probe = "import sys, trainer.health; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=REPO_ROOT, timeout=60)
    assert run.stdout == "[]\n", run.stderr
