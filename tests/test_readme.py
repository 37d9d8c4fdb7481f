"""The README tells the truth: every flag with its default, every metric, every command."""

import json
import re
import shlex
from pathlib import Path

import pytest

from trainer import train_grpo, train_ppo
from trainer.arguments import REPO_ROOT

READMES = [REPO_ROOT / "README.md", REPO_ROOT / "README_zh.md"]
SCRIPTS = {"train_grpo.py": train_grpo, "train_ppo.py": train_ppo}


def shown(value) -> str:
    """A default as the flags table writes it."""
    if isinstance(value, bool):
        return "off"
    return str(value).replace(f"{REPO_ROOT}/", "").replace(f"{REPO_ROOT.parent}/", "../")


def flag_rows(text: str) -> dict[tuple[str, str], str]:
    """{(flag, "" or "GRPO" or "PPO"): default column}."""
    rows = re.findall(r"^\| `--(\w+)`(?: \((GRPO|PPO)\))? \| ([^|]*) \|", text, flags=re.MULTILINE)
    return {(name, script): default.strip() for name, script, default in rows}


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
@pytest.mark.parametrize("module, script, place", [(train_grpo, "GRPO", 0), (train_ppo, "PPO", -1)])
def test_every_flag_is_listed_with_its_default(path, module, script, place, monkeypatch):
    rows = flag_rows(path.read_text(encoding="utf-8"))
    # parse_args derives these two from others; the table shows what --help shows
    derived = {"weight_dir": None, "logp_temperature": None}
    for name, value in (vars(module.parse_args([])) | derived).items():
        key = (name, script) if (name, script) in rows else (name, "")
        assert key in rows, f"--{name} is not in {path.name}"
        assert rows[key].split(" / ")[place] == shown(value), f"--{name} in {path.name}"


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_no_flag_is_listed_that_does_not_exist(path):
    known = set(vars(train_grpo.parse_args([]))) | set(vars(train_ppo.parse_args([])))
    assert {name for name, _ in flag_rows(path.read_text(encoding="utf-8"))} == known


def commands(text: str) -> list[list[str]]:
    """Every command of the README's shell blocks, as words."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part for line in lines for part in line.split("&&")]
    return [shlex.split(part, comments=True) for part in parts if part.strip() and not part.strip().startswith("#")]


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_every_training_command_is_accepted_and_every_script_exists(path):
    found = commands(path.read_text(encoding="utf-8"))
    assert found
    for words in found:
        script = next((word for word in words if word.endswith(".py")), None)
        if script is None:
            assert words[0] in ("pip", "python", "cd", "git"), words
            continue
        assert (REPO_ROOT / script).is_file(), script
        if Path(script).name in SCRIPTS:
            SCRIPTS[Path(script).name].parse_args(words[words.index(script) + 1 :])


def test_both_readmes_show_the_same_commands():
    english, chinese = (commands(path.read_text(encoding="utf-8")) for path in READMES)
    assert english == chinese


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_every_metric_of_a_run_is_defined(module, tmp_path):
    module.main(["--starter", "--max_steps", "1", "--batch_size", "2", "--eval_prompts", "2", "--max_gen_len", "8",
                 "--save_dir", str(tmp_path), "--checkpoint_dir", str(tmp_path), "--run_dir", str(tmp_path / "run")])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    text = READMES[0].read_text(encoding="utf-8")
    table = text[text.index("## Metrics") : text.index("## Differences")]
    defined = set()
    for cell in re.findall(r"`([a-z0-9_/{},@]+)`", table):
        stem, _, options = cell.partition("{")
        options, _, tail = options.partition("}")
        defined |= {stem + option + tail for option in options.split(",")} if options else {cell}
    plain = {name.removesuffix("_se").removesuffix("_greedy") for name in names}
    assert plain - defined == set()


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_every_guarantee_names_a_test_that_exists(path):
    named = re.findall(r"`(\w+\.py)(?:::(\w+))?`", path.read_text(encoding="utf-8"))
    named = [(file, name) for file, name in named if file.startswith("test_")]
    assert len(named) > 20
    for file, name in named:
        text = (REPO_ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, (file, name)
