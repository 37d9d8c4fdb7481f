"""Tasks of the package reasoning-gym as rows to train on, and the reward function that scores answers to them.

    pip install reasoning-gym
    python scripts/examples/reasoning_gym_tasks.py tasks.jsonl --tasks chain_sum,leg_counting --heldout 100
    python trainer/train_grpo.py --starter --data_path tasks.jsonl --eval_data_path tasks_heldout.jsonl \\
        --max_seq_len 256 --reward_fn scripts/examples/reasoning_gym_tasks.py:task_score:4

A row is {"conversations": [the question], "answer": …, "metadata": the task as reasoning-gym made it}, so that its own
`score_answer` can judge answers of which there is more than one right. The same flags give the same file.
"""

import argparse
import json
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))

from trainer.arguments import FlagParser, non_negative_int, positive_int, seed_number, switch  # noqa: E402
from trainer.run_files import write_whole  # noqa: E402


def library():
    """The package. Raises RuntimeError that says how to get it."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise RuntimeError("reasoning_gym_tasks.py needs the package: pip install reasoning-gym") from error
    return reasoning_gym


# ---------------------------------------------------------------------------------------------- the reward function
if __name__ != "__main__":
    library()  # a trainer that loads this file hears of a missing package before it loads a model


def task_score(prompts: list[str], responses: list[str], metadata: list[dict | None]) -> list[float | None]:
    """What reasoning-gym's `score_answer` gives each answer, from 0 to 1; None for rows that are none of its tasks.

    It is given the whole answer, and the last number or word of it, and the better of the two counts: "The answer is
    42." is as right as "42". An answer inside unfinished thinking scores 0.
    """
    from trainer.rewards import given_answer

    scores: list[float | None] = []
    for prompt, response, task in zip(prompts, responses, metadata, strict=True):
        name = ((task or {}).get("metadata") or {}).get("source_dataset")
        given = given_answer(prompt, response)
        if name is None:
            scores.append(None)
        elif given is None or not given.strip():
            scores.append(0.0)
        else:
            score_answer = library().get_score_answer_fn(name)
            words = given.strip().split()
            scores.append(max(float(score_answer(text, task)) for text in {given.strip(), words[-1].rstrip(".!。！")}))
    return scores


# ---------------------------------------------------------------------------------------------- the tasks
def settings_of(texts: list[str], tasks: list[str]) -> dict[str, dict]:
    """{task: {setting: value}} from texts such as chain_sum.max_terms=3. Raises ValueError for another form."""
    settings: dict[str, dict] = {task: {} for task in tasks}
    for text in texts:
        left, equals, value = text.partition("=")
        task, dot, name = left.partition(".")
        if not (equals and dot) or task not in settings:
            raise ValueError(f"--set {text}: expected TASK.SETTING=VALUE with a task of --tasks ({', '.join(tasks)})")
        try:
            settings[task][name] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"--set {text}: {value!r} is not JSON (a number, true, \"text\", [1, 2])") from error
    return settings


def make_rows(name: str, count: int, seed: int, settings: dict) -> list[dict]:
    """`count` rows of a task. Raises ValueError for a task that is not known, or that JSON does not carry whole."""
    gym = library()
    try:
        tasks = gym.create_dataset(name, size=count, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym cannot make {name} with {settings or 'its defaults'}: {error}") from error
    rows, score_answer = [], gym.get_score_answer_fn(name)
    for task in tasks:
        row = {"conversations": [{"role": "user", "content": task["question"].strip()}], "answer": task["answer"],
               "metadata": task}  # fmt: skip
        try:
            read_back = json.loads(json.dumps(row))["metadata"]
        except TypeError as error:
            raise ValueError(f"tasks of {name} cannot be written as JSON: {error}") from error
        if score_answer(task["answer"], read_back) != tasks.score_answer(task["answer"], task):
            raise ValueError(f"tasks of {name} score otherwise once they were written as JSON; leave this task out")
        rows.append(row)
    return rows


def interleave(rows_of_tasks: list[list[dict]]) -> list[dict]:
    """One row of each task in turn."""
    return [row for rows in zip(*rows_of_tasks, strict=True) for row in rows]


def parse_args(argv=None) -> argparse.Namespace:
    """The flags. Exits with status 2 on a wrong one."""
    parser = FlagParser("Write tasks of the package reasoning-gym as rows to train on (pip install reasoning-gym).")
    parser.add_argument("output", help="the JSONL file to write; held-out tasks go to NAME_heldout.jsonl beside it")
    parser.add_argument("--set", action="append", default=[], metavar="TASK.SETTING=VALUE",
                        help="a setting of a task, such as chain_sum.max_terms=3; may be given several times")
    add = parser.group("what is written")
    add("--tasks", str, "chain_sum,leg_counting", "names of reasoning-gym's tasks, with commas between")
    add("--size", positive_int, 500, "rows of each task to train on")
    add("--heldout", non_negative_int, 0, "rows of each task to evaluate on; none of their questions is trained on")
    add("--seed", seed_number, 42, "fixes the tasks")
    add("--overwrite", switch, 0, "1 = replace files that exist")
    args = parser.parse_args(argv)
    args.tasks = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not args.tasks or len(set(args.tasks)) < len(args.tasks):
        parser.error("argument --tasks: expected different names with commas between")
    return args


def main(argv=None) -> int:
    """Write the files; gives the process's exit status."""
    args = parse_args(argv)
    output = Path(args.output)
    heldout = output.with_name(f"{output.stem}_heldout{output.suffix}")
    targets = [output, *([heldout] if args.heldout else [])]
    for path in targets:
        if path.exists() and not args.overwrite:
            raise ValueError(f"{path} exists already; choose another name, or pass --overwrite 1")
    settings = settings_of(args.set, args.tasks)
    # One sequence of tasks a name, held-out tasks behind the others: task i is drawn from seed + i, so that a second
    # seed close by would draw the same tasks again.
    rows = {name: make_rows(name, args.size + args.heldout, args.seed, settings[name]) for name in args.tasks}
    training = interleave([rows[name][: args.size] for name in args.tasks])
    known = {row["conversations"][0]["content"] for row in training}
    fresh = [row for row in interleave([rows[name][args.size :] for name in args.tasks])
             if row["conversations"][0]["content"] not in known]  # fmt: skip
    for path, content in zip(targets, (training, fresh)):
        if not content:
            raise ValueError(f"{path}: every held-out question occurs in training; ask for fewer rows or harder tasks")
        write_whole(path, "".join(json.dumps(row) + "\n" for row in content))
        print(f"wrote {len(content)} rows of {', '.join(args.tasks)} to {path}")
    return 0


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

    from trainer.trainer_utils import run_main

    run_main(main)
