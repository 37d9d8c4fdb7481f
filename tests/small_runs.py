"""Small whole runs of the two scripts in this process, for the tests of the scripts: what they need and leave behind.

The model is random but lively: tokens differ in probability, and about a tenth of them is EOS, so answers have every
length from 1 to the limit. Rewards are a function of the answer's text alone, so that they differ within a group.
"""

import contextlib
import copy
import json
import zlib
from pathlib import Path
from unittest import mock

import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.checkpoints import lm_checkpoint, save_weights, weights_path
from trainer.rewards import REWARD_PARTS

WIDTH, LAYERS, WEIGHTS = 64, 2, "lively"
QUESTIONS = ("1+1=?", "你好，请问今天的天气怎么样？", "What is the capital of a country that lies by the sea?", "Hi",
             "Count from one to five, then stop.")  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL in one process: nothing of the scripts catches it, so no file is written after it."""


def write_prompts(path: Path, count: int) -> Path:
    """A JSONL file of `count` prompts of different lengths; every text occurs once."""
    rows = [{"conversations": [{"role": "user", "content": f"{QUESTIONS[i % len(QUESTIONS)]} ({i})"}]}
            for i in range(count)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_weights(folder: Path, vocab_size: int, use_moe: bool = False) -> Path:
    """Save the lively model as `lively_64[_moe].pth`; all embeddings share a direction, and EOS (id 2) has more of it.

    Scales found by trial: one answer of 8 tokens in two ends early, the likeliest other token has probability 0.03.
    """
    torch.manual_seed(7)
    config = MiniMindConfig(WIDTH, LAYERS, use_moe, vocab_size=vocab_size)
    model = MiniMindForCausalLM(config)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter is not embedding:
                parameter.mul_(4)
        shared = torch.nn.functional.normalize(torch.randn(WIDTH), dim=0)
        embedding.copy_(0.15 * torch.randn_like(embedding) + shared)
        embedding[2] += 2.3 * shared
    save_weights(model, weights_path(folder, WEIGHTS, config))
    return folder


def argv(**flags) -> list[str]:
    """Command line of a small run; flags by name, None leaves one out."""
    defaults = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "from_weight": WEIGHTS, "reward_model_path": "none",
                "device": "cpu", "dtype": "float32", "num_workers": 0, "max_seq_len": 64, "max_gen_len": 8,
                "learning_rate": 1e-4, "save_interval": 1000, "self_check": 0}  # fmt: skip
    pairs = {**defaults, **flags}
    return [word for name, value in pairs.items() if value is not None for word in (f"--{name}", str(value))]


def text_score(text: str) -> float:
    """A number in [-1, 1] that depends on every character and on nothing else."""
    return zlib.crc32(text.encode()) % 1000 / 500 - 1


def text_rewards(prompts, responses, reward_model, *, return_parts=False, **_):
    """Takes the place of calculate_rewards: `text_score` of each response, called its "rm" part."""
    rewards = torch.tensor([text_score(text) for text in responses])
    parts = {name: torch.zeros(len(responses)) for name in REWARD_PARTS}
    return (rewards, {**parts, "rm": rewards.clone()}) if return_parts else rewards


def nan_rewards_for(*parts_of_prompts: str):
    """`text_rewards`, but NaN for every answer to a prompt that holds one of these texts."""

    def rewards_with_nan(prompts, responses, reward_model, *, return_parts=False, **_):
        rewards, parts = text_rewards(prompts, responses, reward_model, return_parts=True)
        group = len(responses) // len(prompts)
        for i in range(len(responses)):
            if any(part in prompts[i // group] for part in parts_of_prompts):
                rewards[i] = parts["rm"][i] = torch.nan
        return (rewards, parts) if return_parts else rewards

    return rewards_with_nan


def run_script(script, flags: list[str], rewards=text_rewards, **replaced):
    """(exit status, the run's state) of `script.main(flags)`; names of the script may be replaced by others.

    rewards=None scores with the project's own rules. The curve is not drawn: importing matplotlib costs a second.
    """
    caught = []
    until_done = script.train_until_done

    def catch(run, *rest, **settings):
        caught.append(run)
        return until_done(run, *rest, **settings)

    if rewards is not None:
        replaced["calculate_rewards"] = rewards
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("trainer.evaluation.draw_curve", return_value=None))
        stack.enter_context(mock.patch.multiple(script, train_until_done=catch, **replaced))
        status = script.main(flags)
    return status, caught[0]


def dies_at(function, call: int):
    """`function`, which raises Killed instead of starting its `call`-th call (from 1)."""
    calls = []

    def mortal(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            raise Killed
        return function(*args, **kwargs)

    return mortal


class StepSpy:
    """Takes the place of optimizer_step: keeps, for each call, every model's weights and gradients before it."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, models, optimizers, schedules, **settings):
        call = {"weights": [state_of(model) for model in models],
                "gradients": [{name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
                              for model in models],
                "lr": [schedule.lr for schedule in schedules]}  # fmt: skip
        norms, taken = self.function(models, optimizers, schedules, **settings)
        self.calls.append({**call, "norms": norms, "taken": taken, "after": [state_of(model) for model in models]})
        return norms, taken


class CallSpy:
    """Calls `function` and keeps (positional arguments, what it gave) of each call."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        self.calls.append((args, result))
        return result


def state_of(model) -> dict:
    return copy.deepcopy(model.state_dict())


def metrics_lines(run_dir: Path, *, timing: bool = False) -> list[dict]:
    """The lines of a run's metrics.jsonl, without the seconds they took."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines if timing else [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))}
                                for line in lines]


def resume_content(folder: Path, name: str, use_moe: bool = False) -> dict:
    """What a resumed run starts from."""
    return lm_checkpoint(MiniMindConfig(WIDTH, LAYERS, use_moe), name, save_dir=folder)


def same_state(left: dict, right: dict) -> bool:
    """Whether two state dicts have the same names and bitwise equal tensors."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def furthest(left: dict, right: dict) -> float:
    """The largest difference between two state dicts of the same names."""
    assert left.keys() == right.keys()
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


# ---------------------------------------------------------------------------------------------- plain recomputation
def float64_model(kind, config: MiniMindConfig, weights: dict):
    """A model of class `kind` with these weights in double precision, in training mode (the balance loss is on)."""
    model = kind(config)
    model.load_state_dict(weights, strict=True)
    return model.double().train()


def plain_rows(rollout) -> list[tuple[list[int], int]]:
    """(ids of prompt and answer without any padding, answer length) of each row of a rollout."""
    rows = []
    width = rollout.completion_ids.size(1)
    for ids, mask, answer in zip(rollout.output_ids, rollout.attention_mask, rollout.completion_mask, strict=True):
        length = int(answer.sum())
        prompt = ids[:-width][mask[:-width].bool()].tolist()
        rows.append((prompt + ids[-width:][:length].tolist(), length))
    return rows


def plain_logps(model, ids: list[int], length: int, temperature: float) -> torch.Tensor:
    """Log-probs [length] of a row's last `length` tokens: all logits, the whole log_softmax, one row at a time."""
    logits = model(torch.tensor([ids])).logits[0]
    logps = torch.log_softmax(logits.double() / temperature, dim=-1)
    return torch.stack([logps[len(ids) - length + j - 1, ids[len(ids) - length + j]] for j in range(length)])


def gradients_of(loss: torch.Tensor, model) -> dict:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def relative_error(found: dict, expected: dict) -> float:
    """|found - expected| / |expected| over all parameters together; |found| where nothing is expected (all clipped)."""
    difference = sum((found[name].double() - expected[name].double()).square().sum() for name in expected).sqrt().item()
    return difference / (sum(g.double().square().sum() for g in expected.values()).sqrt().item() or 1.0)
