"""What is proved before the first step: that engine, trainer, reference, reward and tokenizer mean the same thing."""

import argparse
import resource
import sys

import torch

from trainer.distributed import Logger, check_same_weights, unwrap_model
from trainer.rewards import calculate_rewards
from trainer.rollout_engine import answer_ends, compute_per_token_logps, sample_answers
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
    """EOS and pad ids agree between tokenizer and model, and prompts end where the assistant is to speak.

    Raises: RuntimeError that says what does not.
    """
    tokenizer, config = run.tokenizer, run.config
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(tokenizer, name) != getattr(config, name):
            raise RuntimeError(f"self-check: {name} is {getattr(tokenizer, name)} in the tokenizer and "
                               f"{getattr(config, name)} in the model; pass the tokenizer the weights were trained "
                               "with (--tokenizer_path)")
    policy = next(iter(run.models.values()))
    ends = " or ".join(str(token) for token in answer_ends(policy, tokenizer))
    return f"EOS {ends} and pad {config.pad_token_id} agree; {check_template(tokenizer)}"


def check_template(tokenizer) -> str:
    """Prompts end with what the chat template puts between a user's words and the assistant's in a conversation.

    That may be an assistant header, which the template adds to prompts when asked to, or the end of the user's turn
    ("[/INST]"), which it need not add. Raises: RuntimeError if nothing is there, or prompts lack it.
    """
    question, answer = "QUESTION", "ANSWER"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    plain, prompt = (tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=asked)
                     for asked in (False, True))
    try:
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # noqa: BLE001 - templates raise what they like
        whole = ""
    after, between = (text.rpartition(question)[2] for text in (prompt, whole.partition(answer)[0]))
    if question not in prompt or question not in whole or answer not in whole:
        return "whether prompts end where the assistant is to speak does not show in this chat template"
    if not between.strip():
        raise RuntimeError("self-check: the chat template puts nothing between a user's words and the assistant's, so "
                           "the model would go on with the user's turn; pass another tokenizer (--tokenizer_path)")
    if not after.startswith(between.rstrip()) and (prompt == plain or not between.startswith(after.rstrip())):
        raise RuntimeError(f"self-check: in a conversation the chat template puts {between!r} between a user's words "
                           f"and the assistant's, but after a prompt that is to be answered {after!r}: it has no "
                           "assistant header for prompts (add_generation_prompt), so the model would have to write it; "
                           "pass another tokenizer (--tokenizer_path)")
    return "prompts end where the assistant is to speak"


def _largest(difference: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest |difference| where the mask counts; NaN if one of them is."""
    return float(difference.masked_fill(~mask, 0.0).abs().max())


def peak_memory(device: str) -> str:
    """Peak memory so far, as text: of the GPU, or of the whole process on a CPU."""
    if device.startswith("cuda"):
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB on {device}"
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB of the process"
