"""The same runs on any number of processes: started by torchrun from test_ranks_agree.py, and imported by it.

    torchrun --nproc_per_node 2 tests/ranks_driver.py FOLDER      (FOLDER holds weights and prompts)

Every configuration names what all processes do together; a process takes its part of batch and minibatch.
"""

import sys
from datetime import timedelta
from pathlib import Path

import hf_folders
import small_runs as small
import torch
import torch.distributed as dist
from option_sets import OPTIONS, with_scorer, write_scorer

from trainer import train_grpo, train_ppo
from trainer.distributed import rank_and_world, unwrap_model

# A sampled token changes where rounding (1e-7) moves the bound between two tokens past the drawn number; among 1800
# tokens of almost equal probability that happens once in some thousand tokens. With 20 tokens there are few bounds.
GRPO = {"batch_size": 4, "num_generations": 3, "top_k": 20}
PPO = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-5, "critic_learning_rate": 1e-5, "top_k": 20,
       "early_stop_kl": 1e9}  # fmt: skip
SIZES = {train_grpo: GRPO, train_ppo: PPO}
# 19 prompts in steps of 4 make 5 steps, of which the last has 3: on two ranks one of them fills up with a copy. The
# many sets of options have 3 steps, of which the last is such a one too.
CONFIGS = {
    "cispo": (train_grpo, {**GRPO, "loss_type": "cispo"}),
    "cispo, accumulation 3": (train_grpo, {**GRPO, "loss_type": "cispo", "accumulation_steps": 3}),
    "grpo": (train_grpo, {**GRPO, "loss_type": "grpo"}),
    "grpo, accumulation 3": (train_grpo, {**GRPO, "loss_type": "grpo", "accumulation_steps": 3}),
    "grpo, rewards missing": (train_grpo, {**GRPO, "max_steps": 3}),
    "ppo": (train_ppo, PPO),
    "ppo, accumulation 3": (train_ppo, {**PPO, "accumulation_steps": 3}),
    "ppo, early stop": (train_ppo, {**PPO, "early_stop_kl": 3e-3}),
    "ppo, early stop, accumulation 3": (train_ppo, {**PPO, "early_stop_kl": 3e-3, "accumulation_steps": 3}),
    "ppo, rewards missing": (train_ppo, {**PPO, "max_steps": 3}),
    **{name: (script, {**SIZES[script], "learning_rate": 1e-5, "data": "few.jsonl", **flags})
       for name, (script, flags) in OPTIONS.items()},
}
# These need two ranks to mean something, or their loss is not a sum over rows (experts share the load of a batch),
# or its answers are not, row by row (those of another model come from one generator).
ONLY_RANKS = {
    "grpo, one prompt": (train_grpo, {**GRPO, "data": "one.jsonl"}),
    "ppo, one prompt": (train_ppo, {**PPO, "data": "one.jsonl"}),
    "grpo, same prompts": (train_grpo, {**GRPO, "batch_size": 2, "data": "same.jsonl"}),
    "ppo, same prompts": (train_ppo, {**PPO, "batch_size": 2, "data": "same.jsonl"}),
    "grpo, another model": (train_grpo, {**GRPO, **hf_folders.NO_SIZES, "hf_model": "qwen", "max_seq_len": 96,
                                         "learning_rate": 1e-3, "max_steps": 2}),
    "grpo, experts": (train_grpo, {**GRPO, "use_moe": 1, "max_steps": 2}),
    "ppo, experts": (train_ppo, {**PPO, "use_moe": 1, "max_steps": 2}),
    "grpo, one loss is NaN": (train_grpo, {**GRPO, "max_steps": 3}),
    "ppo, one loss is NaN": (train_ppo, {**PPO, "max_steps": 3}),
    "grpo, to be ended by one": (train_grpo, {**GRPO, "max_steps": 2}),
    "ppo, begun by one": (train_ppo, {**PPO, "from_resume": 1}),
}
LOSSES = {train_grpo: "cispo_token_loss", train_ppo: "ppo_value_loss"}
MISSING = ("(3)", "(4)", "(9)", "(12)", "(17)")  # prompts whose answers get no finite reward where rewards are missing


def make_inputs(folder: Path, tokenizer) -> None:
    """Weights, a reward model, a Qwen3, and files of prompts: 19 and 11 different, one, and four times the same."""
    small.write_weights(folder, len(tokenizer), use_moe=True)
    write_scorer(small.write_weights(folder, len(tokenizer)) / f"{small.WEIGHTS}_{small.WIDTH}.pth")
    hf_folders.write_qwen(folder / "qwen", tokenizer)
    small.write_prompts(folder / "prompts.jsonl", 19)
    small.write_prompts(folder / "few.jsonl", 11)
    line = small.write_prompts(folder / "one.jsonl", 1).read_text(encoding="utf-8")
    (folder / "same.jsonl").write_text(4 * line, encoding="utf-8")


def flags_of(name: str, folder: Path, out: Path, **changes) -> list[str]:
    """This process's command line of a configuration."""
    flags = with_scorer({**(CONFIGS | ONLY_RANKS)[name][1], **changes}, folder)
    if "hf_model" in flags:
        flags["hf_model"] = folder / flags["hf_model"]
    world = rank_and_world()[1]
    for size in ("batch_size", "mini_batch_size"):
        if size in flags:
            flags[size] //= world
    return small.argv(weight_dir=folder, data_path=folder / flags.pop("data", "prompts.jsonl"), save_dir=out / "out",
                      checkpoint_dir=out / "checkpoints", run_dir=out, **flags)  # fmt: skip


def all_ranks_equal(models) -> bool:
    """Whether every rank holds the same bits in every parameter; compares the weights themselves."""
    flat = torch.cat([p.detach().flatten() for model in models for p in unwrap_model(model).parameters()])
    bits = flat.view(torch.int32)
    theirs = [torch.empty_like(bits) for _ in range(rank_and_world()[1])]
    dist.all_gather(theirs, bits)
    return all(torch.equal(other, bits) for other in theirs)


def sign_rewards(*args, return_parts=False, **settings):
    """`text_rewards`, but -1 or 1: every fourth group of three is flat."""
    rewards, parts = small.text_rewards(*args, return_parts=True, **settings)
    return rewards.sign(), {**parts, "rm": rewards.sign()}


def nan_at_second_call(loss):
    """`loss`, which is NaN at its second call on the last rank; on the others it is what it is."""
    calls = []

    def broken(*args, **kwargs):
        rank, world = rank_and_world()
        calls.append(None)
        return loss(*args, **kwargs) * (torch.nan if len(calls) == 2 and rank == world - 1 else 1.0)

    return broken


def run_config(name: str, folder: Path, out: Path, **changes) -> dict:
    """What this process found.

    {"models", "optimizer_steps", "prompts": indices answered, "answers" to them, "equal": whether ranks agreed after
    each optimizer step, "rates" before each}
    """
    script = (CONFIGS | ONLY_RANKS)[name][0]
    seen = {"prompts": [], "answers": [], "equal": [], "rates": []}
    step, sample = script.optimizer_step, script.sample_answers

    def step_and_compare(models, optimizers, schedules, **settings):
        seen["rates"].append([schedule.lr for schedule in schedules])
        result = step(models, optimizers, schedules, **settings)
        if dist.is_initialized():
            seen["equal"].append(all_ranks_equal(models))
        return result

    def sample_and_keep(engine, tokenizer, prompt_ids, keys, *args, **kwargs):
        rollout = sample(engine, tokenizer, prompt_ids, keys, *args, **kwargs)
        seen["prompts"] += [key[-1] for key in keys]
        seen["answers"] += [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]
        return rollout

    replaced = {LOSSES[script]: nan_at_second_call(getattr(script, LOSSES[script]))} if "NaN" in name else {}
    rewards = small.nan_rewards_for(*MISSING) if "missing" in name else small.text_rewards
    if name in OPTIONS:
        rewards = sign_rewards
    status, run = small.run_script(script, flags_of(name, folder, out, **changes), rewards,
                                   optimizer_step=step_and_compare, sample_answers=sample_and_keep, **replaced)
    assert status == 0
    models = {key: small.state_of(unwrap_model(model)) for key, model in run.models.items()}
    return {"models": models, "optimizer_steps": run.progress.optimizer_steps, **seen}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Ranks that decide differently wait for each other for ever; then the test is to fail, not to hang.
    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    for name in CONFIGS | ONLY_RANKS:
        result = run_config(name, folder, folder / name)
        torch.save(result, folder / name / f"rank{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
