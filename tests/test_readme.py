"""The README tells the truth: every flag with its default, every metric and alarm; both languages say the same."""

import json
import re
import shlex

import pytest

from trainer import train_grpo, train_ppo
from trainer.arguments import REPO_ROOT
from trainer.health_checks import CHECKS

READMES = [REPO_ROOT / "README.md", REPO_ROOT / "README_zh.md"]


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


def inline_commands(text: str) -> list[list[str]]:
    """The commands that stand inside sentences."""
    return [shlex.split(words) for words in re.findall(r"`((?:python|torchrun) [^`]+)`", text)]


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every block; of those without a language the content is for people, and left out."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [(language, content if language else "") for language, content in blocks]


def outline(text: str) -> list:
    """Headings by their depth, and of every table row what stands as code in its first cell."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = []
    for line in text.splitlines():
        if heading := re.match(r"(#+) ", line):
            found.append(len(heading[1]))
        elif line.startswith("|"):
            found.append(re.findall(r"`([^`]*)`", line.split("|")[1]))
    return found


def test_both_readmes_show_the_same_commands():
    english, chinese = (path.read_text(encoding="utf-8") for path in READMES)
    assert commands(english) == commands(chinese) and len(commands(english)) > 20
    assert inline_commands(english) == inline_commands(chinese)


def test_both_readmes_have_the_same_blocks_headings_and_rows():
    english, chinese = (path.read_text(encoding="utf-8") for path in READMES)
    assert code_blocks(english) == code_blocks(chinese)
    assert outline(english) == outline(chinese) and len(outline(english)) > 150


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_every_health_alarm_is_in_the_table_in_the_order_of_the_checks(path):
    text = path.read_text(encoding="utf-8")
    table = re.search(r"(?:^\|.*\n)*^\| `nonfinite`.*\n(?:^\|.*\n)*", text, flags=re.MULTILINE)[0]
    assert re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE) == [check.__name__ for check in CHECKS]


def anchor(heading: str) -> str:
    """How GitHub names a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "README_zh.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere_and_files_that_are_named_exist(name):
    text = (REPO_ROOT / name).read_text(encoding="utf-8")
    anchors = {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, place = target.partition("#")
        assert (REPO_ROOT / path).is_file() if path else place in anchors, target
    for path in re.findall(r"`((?:trainer|scripts|model|dataset|tests|benchmarks)/[\w/]+\.\w+)`", text):
        assert (REPO_ROOT / path).is_file(), path


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_every_metric_of_a_run_is_defined(module, tmp_path):
    module.main(["--starter", "--max_steps", "1", "--batch_size", "2", "--eval_prompts", "2", "--max_gen_len", "8",
                 "--save_dir", str(tmp_path), "--checkpoint_dir", str(tmp_path), "--run_dir", str(tmp_path / "run")])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    text = READMES[0].read_text(encoding="utf-8")
    table = text[text.index("## Metrics") : text.index("## Health")]
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
