"""Options beside MiniMind's on the command line: what follows from what, and what does not go together."""

import subprocess
import sys

import pytest
from option_sets import CHOICES, SWITCHES, missing_pairs

from trainer import train_grpo, train_ppo
from trainer.arguments import (
    REPO_ROOT, add_actor_critic_flags, add_group_flags, add_kl_flags, add_lora_flags,
)  # fmt: skip

REFUSED = [
    (train_grpo, "--loss_type gspo --loss_agg token", ("--loss_type gspo", "--loss_agg")),
    (train_grpo, "--loss_agg constant --loss_type gspo", ("--loss_type gspo", "--loss_agg")),
    (train_grpo, "--beta 0 --kl_target 0.1", ("--beta 0", "--kl_target")),
    (train_grpo, "--beta 0 --kl_in=reward", ("--beta 0", "--kl_in")),
    (train_grpo, "--kl_estimator k2 --beta 0", ("--beta 0", "--kl_estimator")),
    (train_ppo, "--kl_coef 0 --kl_target 0.1", ("--kl_coef 0", "--kl_target")),
    (train_ppo, "--kl_coef=0 --kl_in reward", ("--kl_coef 0", "--kl_in")),
    (train_ppo, "--kl_coef 0 --kl_estimator k1", ("--kl_coef 0", "--kl_estimator")),
    (train_grpo, "--accumulation_steps 2 --num_iterations 2", ("--accumulation_steps", "--num_iterations")),
    (train_grpo, "--accumulation_steps 2 --mini_batch_size 3", ("--accumulation_steps", "--mini_batch_size")),
    (train_grpo, "--overlong_buffer 9 --max_gen_len 8", ("--overlong_buffer", "--max_gen_len 8")),
    (train_ppo, "--dual_clip 0.5", ("--dual_clip", "0.5")),
    (train_ppo, "--dual_clip 1", ("--dual_clip", "above 1")),
    (train_grpo, "--kl_target 0.1 --kl_horizon 1", ("--kl_horizon", "--kl_target")),
    (train_ppo, "--kl_target 0.1 --kl_horizon 0.1", ("--kl_horizon", "--kl_target")),
]


@pytest.mark.parametrize(("script", "flags", "words"), REFUSED)
def test_flags_that_do_not_go_together(script, flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        script.parse_args(flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and all(word in error for word in words), error


@pytest.mark.parametrize(("script", "flags", "words"), [REFUSED[0], REFUSED[5]])
def test_they_are_refused_before_torch_is_imported(script, flags, words):
    command = [sys.executable, "-X", "importtime", script.__file__, *flags.split()]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert not any(line.split("|")[-1].strip() == "torch" for line in lines)
    [error] = [line for line in lines if not line.startswith("import time:")]
    assert all(word in error for word in words)


@pytest.mark.parametrize(
    "flags",
    ["--beta 0", "--loss_type gspo --loss_agg sequence", "--num_iterations 2 --mini_batch_size 3",
     "--overlong_buffer 8 --max_gen_len 8", "--kl_target 0.1 --kl_in reward --kl_estimator k1",
     "--accumulation_steps 2 --num_iterations 1"],
)
def test_flags_that_do(flags):
    train_grpo.parse_args(flags.split())
    train_ppo.parse_args("--dual_clip 1.5 --kl_target 0.1 --kl_in reward --kl_estimator k1".split())


@pytest.mark.parametrize(
    ("flags", "epsilons", "loss_agg"),
    [("", (0.2, 5.0), "sequence"), ("--loss_type cispo --epsilon_high 3", (0.2, 3.0), "sequence"),
     ("--loss_type grpo", (0.2, 0.2), "sequence"), ("--loss_type grpo --epsilon 0.1", (0.1, 0.1), "sequence"),
     ("--loss_type=grpo --epsilon_high=0.3", (0.2, 0.3), "sequence"), ("--loss_type dapo", (0.2, 0.28), "token"),
     ("--loss_type dapo --loss_agg constant --epsilon_high 0.4", (0.2, 0.4), "constant"),
     ("--loss_type gspo", (3e-4, 4e-4), "sequence"), ("--loss_type gspo --epsilon 0.1", (0.1, 4e-4), "sequence"),
     ("--loss_type gspo --epsilon_high 0.1", (3e-4, 0.1), "sequence")],
)
def test_defaults_that_follow_from_the_loss_type(flags, epsilons, loss_agg):
    args = train_grpo.parse_args(flags.split())
    assert ((args.epsilon, args.epsilon_high), args.loss_agg) == (epsilons, loss_agg)


def test_the_upper_clip_follows_the_lower():
    found = [train_ppo.parse_args(flags.split()).clip_epsilon_high
             for flags in ("", "--clip_epsilon 0.1", "--clip_epsilon 0.1 --clip_epsilon_high 0.3")]
    assert found == [0.2, 0.1, 0.3]


# ---------------------------------------------------------------------------------------------- sets of options
def is_refused(script, pair) -> bool:
    """Whether the command line refuses the two options together."""
    words = [word for name, value in pair if value is not None for word in (f"--{name}", str(value))]
    try:
        script.parse_args(words)
    except SystemExit:
        return True
    return False


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_every_pair_of_options_that_go_together_is_in_a_set_that_ranks_and_resumed_runs_are_compared_on(script):
    missing = missing_pairs(script)
    assert [pair for pair in missing if not is_refused(script, pair)] == []
    assert len(missing) == {train_grpo: 4, train_ppo: 0}[script]  # gspo with token and constant; accumulation


@pytest.mark.parametrize(("script", "groups"), [(train_grpo, [add_group_flags]), (train_ppo, [add_actor_critic_flags])])
def test_every_option_has_its_place_in_the_sets(script, groups):
    """But those that only say how strong another one is."""
    names = []
    for add_flags in (*groups, add_lora_flags):
        add_flags(lambda name, *_: names.append(name[2:]))
    add_kl_flags(lambda name, *_: names.append(name[2:]), "weight")
    assert set(names) - {"kl_horizon", "lora_alpha"} <= CHOICES[script].keys() | SWITCHES[script].keys()
    defaults = vars(script.parse_args([]))
    assert all(defaults[name] != value for name, value in SWITCHES[script].items())
