"""The newcomer's path: every command of the README, in its order and as printed, in a folder that looks like a clone.

Flags that make a run tiny are appended, nothing else is changed. Most commands run in this process, the very first as
one of its own. What cannot run here is listed below with the reason; of that, what is ours is at least parsed.
"""

import contextlib
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_examples import installed, math_verify_stand_in, reasoning_gym_stand_in
from test_readme import commands, inline_commands

from trainer.arguments import REPO_ROOT, STARTER_DIR

TEXT = (REPO_ROOT / "README.md").read_text(encoding="utf-8")

TRAIN = ("--max_steps 2 --batch_size 2 --max_gen_len 8 --eval_prompts 2 --sample_interval 1 --save_dir out "
         "--checkpoint_dir checkpoints")  # fmt: skip
TINY = {
    "train_grpo.py": f"{TRAIN} --num_generations 2",
    "train_ppo.py": f"{TRAIN} --mini_batch_size 2",
    "eval_rlhf.py": "--max_prompts 2 --samples 2 --max_gen_len 8",
    "chat.py": "--max_new_tokens 8",
    "reasoning_gym_tasks.py": "--size 2 --heldout 2",
}  # fmt: skip

# Commands that hold these words are not run, for the reason given.
NOT_OURS = {
    "pip install": ".ci/run installs requirements.txt; the other packages are optional",
    "python -m pytest": ".ci/run runs it",
    "python -m sglang.launch_server": "needs SGLang; scripts/sglang_smoke.sh launches it",
}
PARSED_ONLY = {
    "/path/to/minimind/model": "needs MiniMind's weights, a reward model to download and four GPUs",
    "--nnodes 2": "needs two machines; test_launch.py trains on two nodes of one",
    "torchrun --nproc_per_node 2": "test_launch.py runs it, on two processes",
    "--rollout_engine sglang": "needs a server; test_scripts_on_sglang.py runs both scripts on a stand-in",
    "scripts/ablate.py": "starts six runs, a process each; test_ablate.py runs it",
    "scripts/benchmark.py": "measures the machine for seconds; test_benchmark.py runs it",
    "scripts/make_starter.py": "takes minutes and rewrites the starter; test_starter.py makes it in parts",
    "scripts/train_tokenizer.py": "rewrites model/tokenizer.json; test_starter.py trains one elsewhere",
}


def listed(words: list[str], table: dict[str, str]) -> str | None:
    """The entry of the table that is about this command."""
    return next((key for key in table if key in " ".join(words)), None)


def module_and_flags(words: list[str]):
    """(the module of the script that a command starts, the words behind it)."""
    place, script = next((i, word) for i, word in enumerate(words) if word.endswith(".py"))
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")), words[place + 1 :]


def tiny(words: list[str]) -> list[str]:
    """The flags that make a command small; a resumed run gets one step more than it has."""
    added = TINY.get(next(word for word in words if word.endswith(".py")).split("/")[-1], "").split()
    return added + ["--max_steps", "3"] * ("--from_resume" in words)


def with_globs(words: list[str]) -> list[str]:
    """The words as a shell gives them to the script."""
    expanded = []
    for word in words:
        found = sorted(str(path) for path in Path().glob(word)) if "*" in word else [word]
        assert found, f"nothing here is called {word}"
        expanded += found
    return expanded


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The working folder: the repository's folders, the files that the README lets one write, and stand-ins of what is
    not installed. `out/full_sft_768.pth`, which users bring along, is the starter's."""
    for name in ("trainer", "scripts", "model", "dataset"):
        (tmp_path / name).symlink_to(REPO_ROOT / name)
    (tmp_path / "out").mkdir()
    shutil.copy(STARTER_DIR / "starter_sft_128.pth", tmp_path / "out" / "full_sft_768.pth")
    (tmp_path / "my_reward.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "my_prompts.jsonl").write_text(block("json"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a reward file's folder is added to it
    if not installed("math_verify"):
        monkeypatch.setitem(sys.modules, "math_verify", math_verify_stand_in())
    if not installed("reasoning_gym"):
        monkeypatch.setitem(sys.modules, "reasoning_gym", gym_stand_in())
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("_reward_file_")]:
        del sys.modules[name]


def gym_stand_in():
    """The stand-in of test_examples.py, whose one task now goes by every name."""
    module = reasoning_gym_stand_in()
    make = module.create_dataset
    module.create_dataset = lambda name, size, seed, **settings: make("sum", size, seed)
    return module


def block(language: str) -> str:
    """The README's only block in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    return found


def run(words: list[str], monkeypatch) -> None:
    """Run a command's script in this process; a question is typed into a chat, and Ctrl-C ends what would go on."""
    module, flags = module_and_flags(words)

    def interrupted(_seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("12 + 30 = ?\n"))
        if "--watch" in words:
            patch.setattr(time, "sleep", interrupted)
        status = module.main(with_globs(flags) + tiny(words))
    draws_png = module.__name__ == "scripts.plot_metrics" and "--html" not in words
    assert status == (1 if draws_png and not installed("matplotlib") else 0)


def in_a_process_of_its_own(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words[1:], *tiny(words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_command_works_as_printed(clone, monkeypatch, capsys):
    fresh = True
    for words in commands(TEXT) + inline_commands(TEXT):
        if listed(words, NOT_OURS):
            continue
        with contextlib.ExitStack() as told:
            told.callback(lambda words=words: sys.exc_info()[0] and print("README command:", shlex.join(words)))
            if listed(words, PARSED_ONLY):
                module, flags = module_and_flags(words)
                module.parse_args(flags)
            elif fresh:
                in_a_process_of_its_own(words)
                fresh = False
            else:
                run(words, monkeypatch)
    check_what_they_left(clone, capsys.readouterr())


def check_what_they_left(clone: Path, printed) -> None:
    """The files that the README promises, and what its three experiments are to show."""
    promised = re.findall(r"^\| `((?:out|checkpoints)/[^`]+)`", TEXT, flags=re.MULTILINE)
    assert len(promised) > 4
    for name in promised:
        if installed("matplotlib") or not name.endswith(".png"):
            assert list(clone.glob(name.replace("TIME", "*"))), name
    assert {"curves.html", "compared.html", "eval.json"} <= {path.name for path in clone.iterdir()}
    assert printed.out.count("<think>\n") >= 2  # both chats answered
    (own,), (tasks,) = (list(clone.glob(f"out/runs/{name}-*/metrics.jsonl")) for name in ("working", "tasks"))
    steps = [row for row in map(json.loads, own.read_text().splitlines()) if "reward" in row]
    assert all("rewards/working/mean" in row and row["rewards/rm/mean"] == 0 for row in steps) and len(steps) == 2
    steps = [row for row in map(json.loads, tasks.read_text().splitlines()) if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]  # the third after the resume, in the same file
    assert all("rewards/task_score/mean" in row for row in steps)


def test_the_reward_function_does_what_it_says():
    names = {}
    exec(compile(block("python"), "my_reward.py", "exec"), names)
    responses = ["9-1-8=0", "Ones: 2+0=2. Tens: 1+3=5.</think>The answer is 52.", "12=12", "4+4=9", ""]
    assert names["working"](responses) == [1.0, 0.5, None, 0.0, None]


def test_the_lists_of_what_is_not_run_are_up_to_date():
    every = commands(TEXT) + inline_commands(TEXT)
    for table in (NOT_OURS, PARSED_ONLY):
        for key in table:
            assert any(listed(words, {key: ""}) for words in every), f"no command holds {key!r} any more"
    ci = (REPO_ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -q -r requirements.txt && python -m pytest -q" in ci
    text = "".join(map(str, PARSED_ONLY.values()))
    for name in re.findall(r"test_\w+\.py", text):
        assert (REPO_ROOT / "tests" / name).is_file(), name
