"""What is proved before the first step: that engine, trainer, reference, reward and tokenizer mean the same thing."""

import argparse
import resource
import sys

import torch

from trainer.distributed import Logger, check_same_weights, unwrap_model
from trainer.rewards import calculate_rewards
from trainer.rollout_engine import compute_per_token_logps, sample_answers
from trainer.trainer_utils import autocast_context

PROBE_STREAM = 4  # first word of the random keys of the probe
PROBE_TOKENS = 8
LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}  # nats, engine against trainer


def self_check(run, args) -> None:
    """One answer of PROBE_TOKENS tokens to the first prompt, scored every way; all ranks take part.

    Raises: RuntimeError that says which two things disagree, by how much, and what to try.
    """
    check_same_weights(run.models, "at the start")
    checks = ["weights equal on all ranks"]
    checks.append(check_tokenizer(run))
    row = run.dataset[0]
    few = argparse.Namespace(**{**vars(args), "max_gen_len": min(PROBE_TOKENS, args.max_gen_len)})
    rollout = sample_answers(run.engine, run.tokenizer, [row["prompt_ids"]], [(PROBE_STREAM, args.seed)], few,
                             run.device, num_generations=1, temperature=args.temperature)
    mask = rollout.completion_mask
    inputs = (rollout.output_ids, mask.size(1), rollout.attention_mask.long(), args.logp_temperature)
    policy = unwrap_model(next(iter(run.models.values())))
    with torch.no_grad(), autocast_context(run.device, args.dtype):
        logps = compute_per_token_logps(policy, *inputs)
        ref_logps = compute_per_token_logps(run.reference, *inputs) if run.reference is not None else None
    gap = _largest(logps - rollout.per_token_logps, mask)
    limit = LARGEST_DIFFERENCE[args.dtype]
    comparable = not run.engine.must_recompute(args.temperature, args.logp_temperature)
    if comparable and not gap <= limit:
        raise RuntimeError(f"self-check: log-probs of rollout engine and trainer differ by {gap:.3g} nats on the "
                           f"same {int(mask.sum())} tokens, at most {limit} is expected in {args.dtype}: they run "
                           "different weights, temperatures or masks (--self_check 0 goes on all the same)")
    if comparable:
        checks.append(f"engine and trainer log-probs differ by at most {gap:.1e} nats")
    if ref_logps is not None and run.progress.step == 0:
        gap = _largest(logps - ref_logps, mask)
        if gap != 0:
            raise RuntimeError(f"self-check: policy and reference start from the same weights, but their log-probs "
                               f"differ by {gap:.3g} nats; expected exactly 0 (--self_check 0 goes on all the same)")
        checks.append("KL(policy || reference) is 0")
    reward = calculate_rewards([row["prompt"]], rollout.completions, run.reward_model, messages=[row["messages"]],
                               answers=[row["answer"]], metadata=[row["metadata"]], finished=rollout.finished,
                               **run.rewards)
    if not torch.isfinite(reward).all():
        raise RuntimeError(f"self-check: the reward of a probe answer is {reward.item()}; expected a finite number: "
                           "check --reward_model_path and --reward_fn (--self_check 0 goes on all the same)")
    checks.append(f"reward of a probe answer is {reward.item():.2f}")
    Logger(f"self-check: {'; '.join(checks)}")


def check_tokenizer(run) -> str:
    """EOS and pad ids agree between tokenizer and model, and prompts end where the assistant is to speak."""
    tokenizer, config = run.tokenizer, run.config
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(tokenizer, name) != getattr(config, name):
            raise RuntimeError(f"self-check: {name} is {getattr(tokenizer, name)} in the tokenizer and "
                               f"{getattr(config, name)} in the model; pass the tokenizer the weights were trained "
                               "with (--tokenizer_path)")
    question = [{"role": "user", "content": "?"}]
    plain = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=False)
    opened = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    if not opened.startswith(plain) or opened == plain:
        raise RuntimeError("self-check: the chat template does not end with an assistant header when asked to, so the "
                           "model would go on with the user's turn; pass another tokenizer (--tokenizer_path)")
    return f"EOS {config.eos_token_id} and pad {config.pad_token_id} agree; prompts end with the assistant's header"


def _largest(difference: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest |difference| where the mask counts; NaN if one of them is."""
    return float(difference.masked_fill(~mask, 0.0).abs().max())


def peak_memory(device: str) -> str:
    """Peak memory so far, as text: of the GPU, or of the whole process on a CPU."""
    if device.startswith("cuda"):
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB on {device}"
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB of the process"
