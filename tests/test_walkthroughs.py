"""The two numeric walk-throughs: exit status, pinned numbers, both languages, tables that line up, checks that bite."""

import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch

from scripts import lesson, rl_demo, trace_reward_logprob_kl
from scripts.lesson import Lesson

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"rl_demo": rl_demo, "trace_reward_logprob_kl": trace_reward_logprob_kl}

# Worked by hand or with a pocket calculator, not copied from the output; rounded to the digits given.
DEMO_NUMBERS = {
    "gae.deltas": [1.094, -0.204, 0.095, -0.302, 0.3],
    "gae.advantages": [0.969656, -0.132211, 0.076331, -0.01985, 0.3],
    "gae.returns": [1.469656, 0.467789, 0.476331, 0.48015, 0.5],
    "gae.lambda_1_returns_are_discounted_rewards": [1.480298, 0.48515, 0.49005, 0.495, 0.5],
    "normalise.mean": 0.238785,
    "clip.losses A=+1": [-1.2, -1.105171, -0.740818, -0.22313],
    "clip.slopes A=+1": [0, -1.105171, -0.740818, -0.22313],
    "clip.losses A=-1": [1.648721, 1.105171, 0.8, 0.8],
    "clip.slopes A=-1": [1.648721, 1.105171, 0, 0],
    "clip.mean_loss A=+1": -0.81728,
    "clip.fraction_outside": 0.75,
    "group.advantages": [
        [1.341041, -0.447014, 0.447014, -1.341041], [-1.182816, -0.506921, 1.520764, 0.168974],
        [0, 0, 0, 0], [-1.224595, 0, 1.224595, 0],
    ],
    "cispo.ppo_loss A=+1": [-0.3, -0.9, -1.2, -1.2, -1.2],
    "cispo.ppo_slope A=+1": [-0.3, -0.9, 0, 0, 0],
    "cispo.loss A=+1": [0.3, 0.9, 1.5, 2, 2],
    "cispo.slope A=+1": [-0.3, -0.9, -1.5, -2, -2],
    "cispo.ppo_loss A=-1": [0.8, 0.9, 1.5, 3, 5],
    "cispo.ppo_slope A=-1": [0, 0.9, 1.5, 3, 5],
    "cispo.loss A=-1": [-0.3, -0.9, -1.5, -2, -2],
    "cispo.slope A=-1": [0.3, 0.9, 1.5, 2, 2],
    "kl.k1_mean": 0.025267,
    "kl.k2_mean": 0.024862,
    "kl.k3_mean": 0.025267,
    "kl.k1_variance": 0.049086,
    "kl.k2_variance": 0.000205,
    "kl.k3_variance": 0.000255,
    "kl.gradient k1": [0, 0, 0, 0],
    "kl.gradient k2": [0.098938, -0.093885, -0.003790, -0.001263],
    "kl.gradient k3": [0.1, -0.1, 0, 0],
    "kl.gradient ratio*k1": [0.098938, -0.093885, -0.003790, -0.001263],
    "kl.gradient ratio*k3": [0.098938, -0.093885, -0.003790, -0.001263],
    "table.token_mean": -1.75,
    "table.row_mean": -2.5,
}
TRACE_NUMBERS = {
    "mask.response": [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]],
    "logps.positions": [[1, 2, 3, 4]] * 4,
    "reward.on_last_token": [[0, 0, 1, 0], [0, -0.5, 0, 0], [0, 0, 0, 0.5], [1.5, 0, 0, 0]],
    "reward.gae": [[0.751, 0.58, 0.4, 0], [-0.39, -0.2, 0, 0], [0.370988, 0.28525, 0.195, 0.1], [1, 0, 0, 0]],
    "reward.group_advantages": [0.999867, -0.999867, -0.9998, 0.9998],
    "kl.approx_kl": 0.125162,  # (3·ln²2 + 2·ln²(4/3) + 2·ln²(7/4) + ln²(11/10) + ln²(5/3)) / 20
    "kl.clip_fraction": 0.8,
    "kl.masked_mean": 0.216840,
    "kl.sequence_mean": 0.205806,
    "loss.GRPO_gradient_reaches": [[0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0] * 6],
    "loss.CISPO_gradient_reaches": [[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]],
    "dpo.policy_is_reference": 0.693147,
    "dpo.kl_of_policy_is_reference": 0,
}
PINNED = {"rl_demo": DEMO_NUMBERS, "trace_reward_logprob_kl": TRACE_NUMBERS}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each script prints in each language when started by its path from another directory."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    printed = {}
    for name in SCRIPTS:
        for language in ("en", "zh"):
            command = [sys.executable, "-W", "error", str(ROOT / "scripts" / f"{name}.py"), "--lang", language]
            done = subprocess.run(command, cwd=elsewhere, capture_output=True, encoding="utf-8", timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stderr == ""
            printed[name, language] = done.stdout
    return printed


def without_text(output):
    """Table numbers and checks of an output, line by line, with everything else taken away."""
    lines = [line for line in output.splitlines() if line.startswith("|") or line.startswith("  [ok]")]
    return [re.findall(r"(?<![\w.])-?\d+\.\d+|\[ok\] .*", line) for line in lines]


@pytest.mark.parametrize("name", SCRIPTS)
def test_pinned_numbers(name):
    run = Lesson("en")
    assert SCRIPTS[name].run(run) == 0
    for key, expected in PINNED[name].items():
        torch.testing.assert_close(
            torch.tensor(run.numbers[key], dtype=torch.float64), torch.tensor(expected, dtype=torch.float64),
            atol=2e-6, rtol=0, msg=lambda message, key=key: f"{key}: {message}",
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_languages_tell_the_same_numbers(outputs, name):
    english, chinese = outputs[name, "en"], outputs[name, "zh"]
    assert without_text(english) == without_text(chinese)
    assert not re.search("[\u4e00-\u9fff]", english)
    assert len(re.findall("[\u4e00-\u9fff]", chinese)) > 300
    assert "[FAILED]" not in english


def columns(line):
    """Terminal columns of a line; fails on a character whose width depends on the terminal's settings."""
    classes = [unicodedata.east_asian_width(character) for character in line]
    assert "A" not in classes, f"a character of ambiguous width: {line}"
    return sum(2 if kind in "WF" else 1 for kind in classes)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_line_up(outputs, name, language):
    tables, current = [], []
    for line in [*outputs[name, language].splitlines(), ""]:
        if line.startswith(("|", "+-")):
            current.append(line)
        elif current:
            tables.append(current)
            current = []
    assert len(tables) >= 8
    for table in tables:
        stops = {index for index, character in enumerate(table[0]) if character == "+"}
        for line in table:
            bars = {columns(line[:index]) for index, character in enumerate(line) if character in "|+"}
            assert stops <= bars and columns(line) == max(stops) + 1, "\n".join(table)


def test_width_counts_wide_and_combining_characters():
    assert lesson.display_width("ab") == 2
    assert lesson.display_width("优势A") == 5
    assert lesson.display_width("e\u0301") == 1
    assert lesson.format_table(["值", "x"], [["a", "1.0"]])[1] == "| 值 |   x |"


def test_a_check_fails_on_a_wrong_value_a_wrong_shape_and_nan():
    run = Lesson("en")
    run.check("right", torch.tensor([1.0, 2.0]), [1.0, 2.0])
    run.check("value", 1.001, 1.0)
    run.check("shape", torch.tensor([1.0, 1.0]), 1.0)
    run.check("nan", float("nan"), float("nan"))
    assert run.failures == ["value", "shape", "nan"]
    assert run.finish() == 1


BREAKS = {
    "compute_gae": lambda right: lambda r, v, m, *, gamma, lam: right(r, v, m, gamma=gamma, lam=lam * 0.9),
    "normalize_advantages": lambda right: lambda a, m: right(a, m) * 1.01,
    "ppo_policy_loss": lambda right: lambda x, o, a, m, **k: -right(x, o, -a, m, **k),
    "cispo_policy_loss": lambda right: lambda x, o, a, m, *, epsilon_high: right(x, o, a, m, epsilon_high=1.2),
    "grpo_policy_loss": lambda right: lambda x, o, a, m, **k: -right(x, o, a, m, **k),
    "group_relative_advantages": lambda right: lambda r, g: right(r, g) * (1 - 1 / g) ** 0.5,
    "token_kl_penalty": lambda right: lambda x, r: right(r, x),
    "kl_k1": lambda right: lambda x, r: -right(x, r),
    "kl_k2": lambda right: lambda x, r: 2 * right(x, r),
    "clip_fraction": lambda right: lambda x, o, m, **k: right(x, o, m, clip_epsilon=0.3),
    "selective_logps": lambda right: lambda x, t, *, temperature: right(x, t, temperature=2 * temperature),
    "masked_mean": lambda right: lambda v, m: right(v, torch.ones_like(m)),
    "gather_response_logps": lambda right: lambda x, i, p: right(x, i, p - 1),
    "mask_until_eos": lambda right: lambda i, m, e: m,
    "terminal_rewards": lambda right: lambda s, m: right(s, torch.ones_like(m)),
    "approx_policy_kl": lambda right: lambda x, o, m: 2 * right(x, o, m),
    "reference_kl_penalty": lambda right: lambda x, r, m: right(r, x, m),
    "sequence_mean": lambda right: lambda v, m: v[m].mean(),
    "response_logp_positions": lambda right: lambda p, w: right(p - 1, w),
    "dpo_logratio_loss": lambda right: lambda a, b, c, d, **k: right(b, a, c, d, **k),
}


@pytest.mark.parametrize("name, function", [(name, f) for name in SCRIPTS for f in BREAKS if hasattr(SCRIPTS[name], f)])
def test_a_broken_formula_makes_the_script_fail(monkeypatch, capsys, name, function):
    monkeypatch.setattr(SCRIPTS[name], function, BREAKS[function](getattr(SCRIPTS[name], function)))
    assert SCRIPTS[name].main([]) == 1
    assert "[FAILED]" in capsys.readouterr().out


def test_every_formula_shown_has_its_break():
    for module in SCRIPTS.values():
        shown = {name for name, value in vars(module).items()
                 if (getattr(value, "__module__", None) or "").startswith("trainer.rl_")}
        assert shown and shown <= set(BREAKS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unknown_language_is_refused(name):
    with pytest.raises(SystemExit) as stopped:
        SCRIPTS[name].main(["--lang", "fr"])
    assert stopped.value.code == 2
