"""Small runs with some options, and all that can be seen of them; the definitions that losses are compared with."""

import math
from pathlib import Path
from typing import NamedTuple

import small_runs as small
import torch

from trainer import train_grpo, train_ppo
from trainer.rollout_engine import TorchRolloutEngine

SIZES = {train_grpo: {"num_generations": 3, "batch_size": 2, "loss_type": "grpo"},
         train_ppo: {"batch_size": 3, "mini_batch_size": 3, "critic_learning_rate": 1e-4, "early_stop_kl": 1e9}}
OFF = {train_grpo: {"beta": 0.0}, train_ppo: {"kl_coef": 0.0}}  # no KL at all


class Seen(NamedTuple):
    """Of one run: its state, calls of optimizer_step, gather_experience and sample_answers, and its metrics."""

    run: object
    steps: list[dict]
    experiences: list[tuple]  # ((run, args, rollout, rewards, real), what it gave)
    samples: list[tuple]
    lines: list[dict]
    folder: Path

    def gradient(self, step: int = 0, model: int = 0) -> dict:
        return self.steps[step]["gradients"][model]


class Shifted(TorchRolloutEngine):
    """An engine that finds every token half as likely as the trainer does, so that the first ratio is 2."""

    runs_trainers_modules = False

    def rollout(self, *args, **kwargs):
        result = super().rollout(*args, **kwargs)
        return result._replace(per_token_logps=result.per_token_logps - math.log(2) * result.completion_mask)


def see(script, weights: Path, folder: Path, *, prompts=4, rewards=small.text_rewards, engine=None, **changes) -> Seen:
    """Run to the end over `prompts` prompts, in a new folder of `folder` unless `save_dir` says where."""
    out = Path(changes.pop("save_dir", folder / f"run{len(list(folder.iterdir()))}"))
    data = small.write_prompts(folder / f"prompts_{prompts}.jsonl", prompts)
    flags = {"weight_dir": weights, "data_path": data, "save_dir": out, "checkpoint_dir": out / "checkpoints",
             "run_dir": out / "run", **SIZES[script], **changes}  # fmt: skip
    steps, experiences = small.StepSpy(script.optimizer_step), small.CallSpy(script.gather_experience)
    samples, replaced = small.CallSpy(script.sample_answers), {}
    if engine is not None:
        replaced["open_engine"] = lambda args, policy, tokenizer, device: engine(policy, tokenizer, device)
    status, run = small.run_script(script, small.argv(**flags), rewards, optimizer_step=steps, sample_answers=samples,
                                   gather_experience=experiences, **replaced)
    assert status == 0
    return Seen(run, steps.calls, experiences.calls, samples.calls, small.metrics_lines(out / "run"), out)


# ---------------------------------------------------------------------------------------------- definitions
def plain_kl(logps, old, ref, estimator: str):
    """Each token's estimate; autograd gives the gradient of k3_unbiased as well, where nothing is capped."""
    d = ref - logps
    k3 = d.exp() - d - 1
    return {"k1": -d, "k2": d.square() / 2, "k3": k3, "k3_unbiased": (logps - old).exp() * k3}[estimator]


def plain_entropy(model, ids: list[int], length: int, temperature: float) -> torch.Tensor:
    """[length], of the distributions that a row's last tokens were drawn from."""
    logits = model(torch.tensor([ids])).logits[0, -length - 1 : -1].double() / temperature
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def clipped(ratio, advantage, low: float, high: float):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
