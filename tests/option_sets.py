"""Sets of options in which every two values of two options stand together: what ranks and resumed runs are compared on.

Most faults that an option brings show beside one other option, whatever the rest is (pairwise testing). Choices count
with each of their values, except the default estimator k3 and the default advantage group, which stand in all other
tests; switches and numbers count as off and on. test_options.py finds out which pair is missing, if one is.
"""

import itertools
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainer import train_grpo, train_ppo
from trainer.checkpoints import read_torch_file

SCORER = "scorer"  # the reward model of --critic_from, a folder beside the weights
_KL = {"kl_estimator": ("k1", "k2", "k3_unbiased"), "kl_in": ("loss", "reward")}
CHOICES = {
    train_grpo: {"loss_type": ("cispo", "grpo", "gspo", "dapo"), "loss_agg": ("sequence", "token", "constant"),
                 "advantage": ("group_nostd", "batch_std", "rloo"), **_KL},
    train_ppo: _KL,
}  # fmt: skip
# Their values when on. A minibatch of GRPO is two groups of three, one a rank, so that it holds the same rows on any
# number of ranks.
SWITCHES = {
    train_grpo: {"kl_target": 0.01, "entropy_coef": 0.01, "num_iterations": 2, "mini_batch_size": 6,
                 "accumulation_steps": 2, "drop_flat_groups": 1, "dynamic_sampling": 1, "mask_truncated": 1,
                 "overlong_buffer": 4, "shuffle_rewards": 1, "lora_rank": 2},
    train_ppo: {"kl_target": 0.01, "entropy_coef": 0.01, "whiten_rewards": 1, "critic_warmup_steps": 1,
                "critic_from": SCORER, "dual_clip": 3.0, "clip_epsilon_high": 0.4, "missing_eos_penalty": 1.0,
                "accumulation_steps": 2, "lora_rank": 2},
}  # fmt: skip
# A set a line: the choices in their order, then what is on. No smaller number of sets holds 4 x 3 values of two choices
# of GRPO; for PPO none with 7 was found. Made by simulated annealing on the number of missing pairs.
SETS = {
    train_grpo: (
        "cispo constant group_nostd k1 reward: accumulation_steps drop_flat_groups dynamic_sampling mask_truncated "
        "overlong_buffer lora_rank",
        "cispo sequence rloo k3_unbiased reward: kl_target drop_flat_groups mask_truncated shuffle_rewards",
        "cispo token batch_std k2 loss: entropy_coef num_iterations mini_batch_size overlong_buffer lora_rank",
        "dapo constant rloo k2 loss: kl_target entropy_coef num_iterations mini_batch_size overlong_buffer "
        "shuffle_rewards lora_rank",
        "dapo sequence batch_std k1 loss: kl_target num_iterations dynamic_sampling mask_truncated lora_rank",
        "dapo token group_nostd k3_unbiased reward: accumulation_steps drop_flat_groups dynamic_sampling "
        "mask_truncated shuffle_rewards",
        "grpo constant batch_std k3_unbiased reward: num_iterations mini_batch_size mask_truncated",
        "grpo sequence group_nostd k2 reward: num_iterations mini_batch_size drop_flat_groups dynamic_sampling "
        "lora_rank",
        "grpo token rloo k1 loss: kl_target entropy_coef accumulation_steps overlong_buffer shuffle_rewards",
        "gspo sequence batch_std k2 loss: kl_target accumulation_steps drop_flat_groups dynamic_sampling "
        "mask_truncated shuffle_rewards",
        "gspo sequence group_nostd k3_unbiased loss: kl_target entropy_coef mini_batch_size overlong_buffer "
        "shuffle_rewards lora_rank",
        "gspo sequence rloo k1 reward: entropy_coef num_iterations mini_batch_size drop_flat_groups dynamic_sampling "
        "mask_truncated lora_rank",
    ),
    train_ppo: (
        "k1 loss: kl_target entropy_coef critic_warmup_steps clip_epsilon_high missing_eos_penalty lora_rank",
        "k1 loss: kl_target entropy_coef whiten_rewards critic_from dual_clip accumulation_steps",
        "k1 reward: critic_warmup_steps dual_clip clip_epsilon_high accumulation_steps lora_rank",
        "k2 loss: whiten_rewards critic_from missing_eos_penalty accumulation_steps lora_rank",
        "k2 reward: critic_from clip_epsilon_high",
        "k2 reward: kl_target entropy_coef whiten_rewards critic_warmup_steps dual_clip missing_eos_penalty",
        "k3_unbiased loss: entropy_coef critic_warmup_steps critic_from",
        "k3_unbiased reward: kl_target whiten_rewards dual_clip clip_epsilon_high missing_eos_penalty "
        "accumulation_steps lora_rank",
    ),
}


def flags_in(script, line: str) -> dict:
    """The flags that a set's line turns on, by name."""
    values, _, switches = line.partition(":")
    chosen = dict(zip(CHOICES[script], values.split(), strict=True))
    return chosen | {name: SWITCHES[script][name] for name in switches.split()}


OPTIONS = {f"{script.__name__.removeprefix('trainer.train_')} options {number + 1}": (script, flags_in(script, line))
           for script, lines in SETS.items() for number, line in enumerate(lines)}  # fmt: skip


def with_scorer(flags: dict, folder: Path) -> dict:
    """The flags with the folder of the reward model in them, where they name it; it is in `folder`."""
    return {**flags, "critic_from": folder / SCORER} if flags.get("critic_from") == SCORER else flags


def write_scorer(weights: Path) -> None:
    """A reward model with the body of these weights (a .pth) and a random head, as a folder beside them."""
    state = read_torch_file(weights)
    del state["lm_head.weight"]
    head = torch.randn(1, state["model.norm.weight"].numel(), generator=torch.Generator().manual_seed(8))
    (weights.parent / SCORER).mkdir()
    save_file({**state, "score.weight": 0.1 * head}, weights.parent / SCORER / "model.safetensors")


def missing_pairs(script) -> list[tuple]:
    """((option, value), (option, value)) that stand together in no set; None is a switch that is off."""
    values = {**CHOICES[script], **{name: (None, value) for name, value in SWITCHES[script].items()}}
    sets = [flags_in(script, line) for line in SETS[script]]
    held = {((a, flags.get(a)), (b, flags.get(b))) for flags in sets for a, b in itertools.combinations(values, 2)}
    return [pair for a, b in itertools.combinations(values, 2)
            for pair in itertools.product([(a, x) for x in values[a]], [(b, y) for y in values[b]]) if pair not in held]
