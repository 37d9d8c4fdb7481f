"""The command line: MiniMind's defaults frozen, wrong values refused by name before torch is imported, no dead flag."""

import re
import subprocess
import sys

import pytest

from trainer import train_grpo, train_ppo
from trainer.arguments import REPO_ROOT, FlagParser

SCRIPTS = {"grpo": train_grpo, "ppo": train_ppo}
BOTH = pytest.mark.parametrize("script", SCRIPTS)

# MiniMind's flags and defaults. Its paths are relative to its trainer folder; here they hold from any folder.
MINIMIND = {
    "save_dir": str(REPO_ROOT / "out"), "epochs": 1, "batch_size": 2, "learning_rate": 3e-7, "dtype": "bfloat16",
    "num_workers": 8, "accumulation_steps": 1, "grad_clip": 1.0, "log_interval": 1, "save_interval": 10,
    "hidden_size": 768, "num_hidden_layers": 8, "use_moe": 0, "max_seq_len": 768, "max_gen_len": 1024,
    "data_path": str(REPO_ROOT / "dataset" / "rlaif.jsonl"), "thinking_ratio": 0.9, "from_weight": "full_sft",
    "reward_model_path": str(REPO_ROOT.parent / "internlm2-1_8b-reward"), "from_resume": 0, "use_wandb": False,
    "use_compile": 0, "debug_mode": False, "debug_interval": 20, "rollout_engine": "torch",
    "sglang_base_url": "http://localhost:8998",
}  # fmt: skip
MINIMIND_OWN = {
    "grpo": {"num_generations": 6, "beta": 0.1, "loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 5.0,
             "save_weight": "grpo", "wandb_project": "MiniMind-GRPO"},
    "ppo": {"clip_epsilon": 0.2, "vf_coef": 0.5, "kl_coef": 0.02, "gamma": 1.0, "lam": 0.95, "cliprange_value": 0.2,
            "ppo_update_iters": 2, "early_stop_kl": 0.25, "mini_batch_size": 2, "critic_learning_rate": 5e-7,
            "save_weight": "ppo_actor", "wandb_project": "MiniMind-PPO"},
}  # fmt: skip
# Ours; the same in both scripts. MiniMind samples at 0.8 without top-p and top-k, and has no flags for it.
OURS = {
    "starter": False, "max_steps": 0, "seed": 42, "device": "auto", "threads": 0, "temperature": 0.8, "top_p": 1.0,
    "top_k": 0,
    "logp_temperature": 0.8, "tokenizer_path": str(REPO_ROOT / "model"), "weight_dir": str(REPO_ROOT / "out"),
    "checkpoint_dir": str(REPO_ROOT / "checkpoints"), "run_dir": None, "trust_remote_code": 0, "system_ratio": 0.2,
    "skip_bad_rows": 0, "answer_reward": 0.0, "max_skipped_steps": 20, "eval_data_path": None, "eval_prompts": 100,
    "sglang_model_path": None, "sglang_concurrency": 64, "sglang_wait": 300.0, "sync_interval": 1,
    "eval_interval": 0, "self_check": 1, "dry_run": False, "check_sync": 0, "micro_batch_tokens": None,
    "sample_interval": 50, "keep_best": 0, "health_stop": 0, "quiet": False, "use_tensorboard": False,
    "reward_fn": None, "reward_weights": None, "recompute_logps": "auto", "tis_cap": 2.0,
    "gradient_checkpointing": 0, "kl_estimator": "k3", "kl_in": "loss", "kl_target": 0.0, "kl_horizon": 10000.0,
    "entropy_coef": 0.0, "lora_rank": 0, "lora_alpha": 16.0,
}  # fmt: skip
OURS_OWN = {
    "grpo": {"shuffle_rewards": 0, "sglang_shared_path": str(REPO_ROOT / "sglang_ckpt_grpo"), "advantage": "group",
             "loss_agg": "sequence", "drop_flat_groups": 0, "dynamic_sampling": 0, "mask_truncated": 0,
             "overlong_buffer": 0, "num_iterations": 1, "mini_batch_size": 0, "hf_model": None},
    "ppo": {"sglang_shared_path": str(REPO_ROOT / "sglang_ckpt_ppo"), "clip_epsilon_high": 0.2, "dual_clip": 0.0,
            "critic_warmup_steps": 0, "critic_from": "policy", "whiten_rewards": 0, "missing_eos_penalty": 0.0},
}


def actions(script, monkeypatch):
    """The parser's flags, by name, as the script declares them."""
    caught = []
    parse = FlagParser.parse_args
    monkeypatch.setattr(FlagParser, "parse_args", lambda self, argv: caught.append(self) or parse(self, argv))
    SCRIPTS[script].parse_args([])
    return {action.dest: action for action in caught[0]._actions if action.dest != "help"}


# ---------------------------------------------------------------------------------------------- defaults
@BOTH
def test_minimind_s_flags_and_defaults_are_frozen(script):
    args = vars(SCRIPTS[script].parse_args([]))
    for name, value in {**MINIMIND, **MINIMIND_OWN[script]}.items():
        assert args[name] == value and type(args[name]) is type(value), name


@BOTH
def test_our_own_flags_are_frozen_and_there_are_no_others(script):
    args = vars(SCRIPTS[script].parse_args([]))
    ours = {**OURS, **OURS_OWN[script]}
    assert {name: args.get(name) for name in ours} == ours
    # a new flag belongs into a table above, and into the README's
    assert set(args) == {*MINIMIND, *MINIMIND_OWN[script], *ours}


@BOTH
def test_defaults_that_follow_other_flags(script):
    args = SCRIPTS[script].parse_args(["--temperature", "0.5", "--save_dir", "elsewhere"])
    assert args.logp_temperature == 0.5 and args.weight_dir == "elsewhere"
    args = SCRIPTS[script].parse_args(["--temperature", "0.5", "--logp_temperature", "1", "--weight_dir", "w"])
    assert args.logp_temperature == 1.0 and args.weight_dir == "w"


@BOTH
def test_flags_are_read_from_the_command_line(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    assert SCRIPTS[script].parse_args().epochs == 3


# ---------------------------------------------------------------------------------------------- --starter
@BOTH
def test_starter_only_sets_defaults(script):
    module = SCRIPTS[script]
    plain, starter = vars(module.parse_args([])), vars(module.parse_args(["--starter"]))
    assert {name for name in plain if plain[name] != starter[name]} <= {*module.STARTER, "starter", "weight_dir"}
    assert {name: starter[name] for name in module.STARTER} == module.STARTER
    assert set(module.STARTER) <= set(plain)
    assert vars(module.parse_args([])) == plain  # and leaves nothing behind for the next call


@BOTH
@pytest.mark.parametrize("first", [True, False], ids=["--starter first", "--starter last"])
def test_explicit_flags_win_over_starter(script, first):
    module = SCRIPTS[script]
    plain = vars(module.parse_args([]))
    explicit = [word for name in module.STARTER for word in (f"--{name}", str(plain[name])) if plain[name] is not None]
    args = vars(module.parse_args(["--starter", *explicit] if first else [*explicit, "--starter"]))
    assert {name: args[name] for name in module.STARTER if plain[name] is not None} == {
        name: plain[name] for name in module.STARTER if plain[name] is not None
    }


@BOTH
def test_starter_values_are_such_as_the_flags_accept(script):
    module = SCRIPTS[script]
    explicit = [word for name, value in module.STARTER.items() for word in (f"--{name}", str(value))]
    assert vars(module.parse_args(explicit)) == {**vars(module.parse_args(["--starter"])), "starter": False}


# ---------------------------------------------------------------------------------------------- wrong values
BAD = [
    ("epochs", "0 -1 1.5 two"), ("batch_size", "0 -2"), ("accumulation_steps", "0 -1"), ("save_interval", "0"),
    ("log_interval", "0"), ("debug_interval", "0"), ("max_gen_len", "0 -5 40000"), ("max_seq_len", "0 40000"),
    ("max_steps", "-1 1.5"), ("max_skipped_steps", "0"), ("eval_prompts", "-1"), ("eval_interval", "-1"),
    ("check_sync", "-1"), ("threads", "-1"), ("sglang_concurrency", "0"), ("sglang_wait", "0"), ("sync_interval", "0"),
    ("num_workers", "-1"), ("seed", "-1 9223372036854775808 " + "9" * 400),
    ("hidden_size", "0 100 24"), ("num_hidden_layers", "0"), ("use_moe", "2 yes"), ("from_resume", "2"),
    ("use_compile", "true"), ("trust_remote_code", "yes"), ("skip_bad_rows", "-1"), ("self_check", "2"),
    ("dtype", "int8 fp16"), ("device", "tpu cuda:x cpu:0"), ("rollout_engine", "vllm"),
    ("learning_rate", "0 -0.1 nan inf x"), ("grad_clip", "-1 nan"), ("temperature", "0 -1 inf"),
    ("logp_temperature", "0"), ("top_p", "0 1.1"), ("top_k", "-1"), ("thinking_ratio", "-0.1 1.5"),
    ("system_ratio", "2"), ("answer_reward", "-1"), ("micro_batch_tokens", "-1 1.5"), ("recompute_logps", "2"),
    ("gradient_checkpointing", "2"), ("tis_cap", "-1 nan"),
    ("kl_estimator", "k4"), ("kl_in", "both"), ("kl_target", "-1 nan"), ("kl_horizon", "0"), ("entropy_coef", "-1"),
    ("lora_rank", "-1 2.5"), ("lora_alpha", "0"), ("sample_interval", "-1"), ("keep_best", "2"), ("health_stop", "x"),
    ("reward_fn", "nowhere.py rewards.txt:f"), ("reward_weights", "speed=1 rm=x rm=1,rm=2"),
]  # fmt: skip
BAD_OWN = {
    "grpo": [("num_generations", "1 0"), ("beta", "-0.1 nan"), ("epsilon", "0 1.5"), ("epsilon_high", "0"),
             ("loss_type", "ppo"), ("shuffle_rewards", "2"), ("advantage", "gae"), ("loss_agg", "mean"),
             ("drop_flat_groups", "2"), ("dynamic_sampling", "-1"), ("mask_truncated", "x"), ("overlong_buffer", "-1"),
             ("num_iterations", "0"), ("mini_batch_size", "-1")],
    "ppo": [("mini_batch_size", "0"), ("ppo_update_iters", "0"), ("clip_epsilon", "0"), ("vf_coef", "-1"),
            ("kl_coef", "-1"), ("gamma", "1.1"), ("lam", "-0.1 nan"), ("cliprange_value", "0"),
            ("early_stop_kl", "nan x"), ("critic_learning_rate", "0"), ("clip_epsilon_high", "0"),
            ("dual_clip", "-1 0.5"), ("critic_warmup_steps", "-1"), ("whiten_rewards", "2"),
            ("missing_eos_penalty", "-1")],
}  # fmt: skip
CASES = [(script, name, value) for script in SCRIPTS for name, values in BAD + BAD_OWN[script]
         for value in values.split()]  # fmt: skip


def refused(script, argv, capsys):
    """The one line on stderr with which the script refuses this command line."""
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[script].parse_args(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


@pytest.mark.parametrize(("script", "name", "value"), CASES, ids=lambda text: text[:20])
def test_a_wrong_value_is_refused_by_the_flag_s_name(script, name, value, capsys):
    err = refused(script, [f"--{name}", value], capsys)
    assert f"--{name}" in err and (value in err or value == "40000")


@BOTH
def test_every_number_and_choice_has_a_wrong_value_above(script, monkeypatch):
    """So that a new flag does not come without one."""
    tested = {name for name, _ in BAD + BAD_OWN[script]}
    checked = {name for name, action in actions(script, monkeypatch).items() if action.choices or
               (action.type not in (None, str))}  # fmt: skip
    assert checked == tested


@BOTH
def test_unknown_and_shortened_flags_are_refused(script, capsys):
    assert "--epoch " in refused(script, ["--epoch", "2"], capsys)
    assert "expected one argument" in refused(script, ["--epochs"], capsys)


PROBE = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    print("\\nstatus", stop.code, "imported", sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""


@BOTH
@pytest.mark.parametrize(("flags", "status"), [("--save_interval 0", 2), ("--help", 0)])
def test_a_wrong_flag_and_help_are_answered_without_importing_torch(script, flags, status):
    """Importing torch and transformers takes seconds, on a slow machine more than a person's patience."""
    path = str(REPO_ROOT / "trainer" / f"train_{script}.py")
    run = subprocess.run([sys.executable, "-c", PROBE, path, *flags.split()], capture_output=True, text=True,
                         timeout=60)  # fmt: skip
    assert run.stdout.endswith(f"status {status} imported []\n"), run.stdout + run.stderr
    assert ("--save_interval" in run.stderr) == (status == 2)


# ---------------------------------------------------------------------------------------------- help
@BOTH
def test_help_groups_every_flag_and_explains_it(script, capsys, monkeypatch):
    for name, action in actions(script, monkeypatch).items():
        assert action.help and len(action.help.split()) >= 2, name
        assert action.option_strings == [f"--{name}"]
    with pytest.raises(SystemExit) as stop:
        SCRIPTS[script].parse_args(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for title in ("start here", "model", "data", "rollout", "reward", "loss", "optimisation", "files and logging"):
        assert f"\n{title}:\n" in shown
    flat = " ".join(shown.split())
    assert "largest gradient norm; 0 = no clipping (default: 1.0)" in flat


@BOTH
def test_no_flag_does_nothing(script, monkeypatch):
    """Each is read somewhere, outside the other script and outside the lists of names; --starter acts while parsing."""
    other = "train_ppo.py" if script == "grpo" else "train_grpo.py"
    sources = [path.read_text(encoding="utf-8") for path in (REPO_ROOT / "trainer").glob("*.py") if path.name != other]
    read = r'\bargs\.(\w+)|(?:vars\((?:self\.)?args\)|flags)\.get\("(\w+)"|\bflags\["(\w+)"\]|getattr\(args, "(\w+)"'
    reads = re.findall(read, " ".join(sources))
    used = {name for names in reads for name in names}
    assert set(actions(script, monkeypatch)) - used == {"starter"}
