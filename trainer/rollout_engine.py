"""Where tokens and their log-probs come from: the rollout engines, and the one way this project scores tokens.

Letters: B prompts, G answers a prompt, N = B·G rows, P padded prompt width, R response width, W = P + R, V vocabulary.
Row i belongs to prompt i // G. Prompts are left padded, answers right padded, so every answer starts at column P.
"""

import contextlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.decoding import evaluation_mode
from model.model_minimind import MiniMindForCausalLM
from trainer.distributed import unwrap_model
from trainer.prompts import encode_prompts
from trainer.rl_math import mask_until_eos, selective_logps


class RolloutResult(NamedTuple):
    """One batch of sampled answers.

    output_ids [N, W] prompt and answer; completion_ids [N, R] the answer, pad id after its end; per_token_logps [N, R]
    float32 natural logs when sampled, 0 after the end; completions N texts; prompt_lens [N] the padded prompt width P,
    so that answers start at column prompt_lens; completion_mask bool [N, R], True up to and including the first EOS;
    attention_mask bool [N, W] from the prompt's mask and the completion mask, never from the ids; finished bool [N],
    True where the answer ended with EOS, False where it was cut at the limit.
    """

    output_ids: Tensor
    completion_ids: Tensor
    per_token_logps: Tensor
    completions: list[str]
    prompt_lens: Tensor
    completion_mask: Tensor
    attention_mask: Tensor | None = None
    finished: Tensor | None = None


# ---------------------------------------------------------------------------------------------- scoring
def score_tokens(model: nn.Module, input_ids: Tensor, n_keep: int, attention_mask: Tensor | None = None,
                 temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probs of the last `n_keep` tokens float32 [N, n_keep], the MoE load-balancing loss or 0 without experts).

    logp_t = log_softmax(logits_{t-1} / temperature)[token_t] in float32. Grad flows unless the caller forbids it; the
    model is called as given, so a DDP wrapper synchronises. Only n_keep + 1 positions of logits are ever computed.
    """
    output = model(input_ids, attention_mask=attention_mask, logits_to_keep=n_keep + 1)
    logps = selective_logps(output.logits[:, :-1], input_ids[:, input_ids.size(1) - n_keep :], temperature=temperature)
    aux_loss = getattr(output, "aux_loss", None)
    return logps, logps.new_zeros(()) if aux_loss is None else aux_loss


def compute_per_token_logps(model: nn.Module, input_ids: Tensor, n_keep: int, attention_mask: Tensor | None = None,
                            temperature: float = 1.0) -> Tensor:
    """Log-probs float32 [N, n_keep] of the last `n_keep` tokens of input_ids [N, W]; any causal LM of transformers.

    Raises: ValueError if n_keep >= W: the first token of a row has no logits that predict it.
    """
    if n_keep <= 0:
        return input_ids.new_empty((input_ids.size(0), 0), dtype=torch.float32)
    if n_keep >= input_ids.size(1):
        raise ValueError(f"n_keep {n_keep} of input_ids {tuple(input_ids.shape)}: at least one token must come before")
    return score_tokens(model, input_ids, n_keep, attention_mask, temperature)[0]


def score_answers(model: nn.Module, rollout: "RolloutResult", num_generations: int, temperature: float):
    """As `score_tokens` for a whole rollout: (log-probs float32 [N, R], balance loss []).

    A MiniMindForCausalLM reads each prompt once for its answers, with the same value and gradient as reading it again
    for each; any other model gets prompt and answer of every row.
    """
    mask, width = rollout.attention_mask.long(), rollout.completion_ids.size(1)
    if num_generations == 1 or not isinstance(unwrap_model(model), MiniMindForCausalLM):
        return score_tokens(model, rollout.output_ids, width, mask, temperature)
    prompts = (rollout.output_ids[::num_generations, :-width], mask[::num_generations, :-width])
    output = model(rollout.completion_ids, attention_mask=mask[:, -width:], prompts=prompts)
    return selective_logps(output.logits, rollout.completion_ids, temperature=temperature), output.aux_loss


# ---------------------------------------------------------------------------------------------- randomness
def row_uniforms(row_keys: list[tuple[int, ...]], width: int) -> Tensor:
    """float64 [N, width] in [0, 1): row i is a function of row_keys[i] alone, and a longer row only adds to a shorter.

    Counter-based (Philox, Salmon et al. 2011), so neither batch size, nor other rows, nor ranks, nor a resumed run
    change what a row draws.
    """
    rows = [np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(width) for key in row_keys]
    return torch.from_numpy(np.stack(rows))


def answer_keys(prompt_keys: list[tuple[int, ...]], num_generations: int) -> list[tuple[int, ...]]:
    """One key a row from one key a prompt: the prompt's, and the number of the answer within its group."""
    return [(*key, j) for key in prompt_keys for j in range(num_generations)]


# ---------------------------------------------------------------------------------------------- engines
class RolloutEngine(ABC):
    """Samples answers from the current policy."""

    @abstractmethod
    def rollout(self, prompt_ids: Tensor, attention_mask: Tensor, num_generations: int, max_new_tokens: int,
                temperature: float = 0.8, *, top_p: float = 1.0, top_k: int = 0, logp_temperature: float | None = None,
                prompt_keys: list[tuple[int, ...]] | None = None) -> RolloutResult:
        """Sample `num_generations` answers to each left-padded prompt.

        Args: prompt_ids, attention_mask [B, P]; temperature 0 = greedy; top_p 1 and top_k 0 = off; logp_temperature:
            what the logits are divided by for the returned log-probs (default: the sampling temperature, 1 if greedy);
            prompt_keys: B tuples of non-negative ints that fix each prompt's randomness (default: torch's generator).
        """

    @abstractmethod
    def update_policy(self, model: nn.Module) -> None:
        """Sample from these weights from now on."""

    def must_recompute(self, temperature: float, logp_temperature: float) -> bool:
        """Whether its log-probs are not at `logp_temperature`, so that the trainer has to score the answers itself."""
        return False


class TorchRolloutEngine(RolloutEngine):
    """Decodes in this process: a MiniMindForCausalLM its own way, any other causal LM through its `.generate(...)`."""

    def __init__(self, policy_model: nn.Module, tokenizer, device="cpu", autocast_ctx=None):
        self.policy_model, self.tokenizer, self.device = policy_model, tokenizer, device
        self.autocast_ctx = autocast_ctx or contextlib.nullcontext()

    def update_policy(self, model: nn.Module) -> None:
        self.policy_model = model

    @torch.no_grad()
    def rollout(self, prompt_ids, attention_mask, num_generations, max_new_tokens, temperature=0.8, *, top_p=1.0,
                top_k=0, logp_temperature=None, prompt_keys=None) -> RolloutResult:
        model = unwrap_model(self.policy_model)
        prompt_ids, attention_mask = prompt_ids.to(self.device), attention_mask.to(self.device).bool()
        if prompt_keys is None:
            prompt_keys = [(key,) for key in torch.randint(2**62, (prompt_ids.size(0),)).tolist()]
        keys = answer_keys(prompt_keys, num_generations)
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        logp_temperature = logp_temperature or temperature or 1.0
        sample = self._decode if isinstance(model, MiniMindForCausalLM) else self._generate
        with self.autocast_ctx:
            completion_ids, logps, mask, finished = sample(
                model, prompt_ids, attention_mask, num_generations, keys, sampling, logp_temperature
            )
        output_ids = torch.cat([prompt_ids.repeat_interleave(num_generations, 0), completion_ids], dim=1)
        return RolloutResult(
            output_ids=output_ids,
            completion_ids=completion_ids,
            per_token_logps=logps,
            completions=decode_texts(self.tokenizer, completion_ids, mask),
            prompt_lens=torch.full((output_ids.size(0),), prompt_ids.size(1), device=output_ids.device),
            completion_mask=mask,
            attention_mask=torch.cat([attention_mask.repeat_interleave(num_generations, 0), mask], dim=1),
            finished=finished,
        )

    def _decode(self, model, prompt_ids, attention_mask, num_generations, keys, sampling, logp_temperature):
        uniforms = row_uniforms(keys, sampling["max_new_tokens"]).to(self.device)
        return model.decode(
            prompt_ids, attention_mask, num_generations=num_generations, uniforms=uniforms,
            eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id,
            logp_temperature=logp_temperature, **sampling,
        )  # fmt: skip

    def _generate(self, model, prompt_ids, attention_mask, num_generations, keys, sampling, logp_temperature):
        """Any causal LM of transformers: `.generate` to sample, one forward to score."""
        eos = self.tokenizer.eos_token_id
        settings = {"max_new_tokens": sampling["max_new_tokens"], "do_sample": sampling["temperature"] > 0,
                    "num_return_sequences": num_generations, "eos_token_id": eos,
                    "pad_token_id": self.tokenizer.pad_token_id, "repetition_penalty": 1.0}
        if settings["do_sample"]:
            settings.update(temperature=sampling["temperature"], top_p=sampling["top_p"], top_k=sampling["top_k"])
        elif num_generations > 1:
            settings["num_return_sequences"] = 1
        devices = [self.device] if str(self.device).startswith("cuda") else []
        with evaluation_mode(model), torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(row_uniforms(keys, 1).sum().item() * 2**40))
            output_ids = model.generate(prompt_ids, attention_mask=attention_mask.long(), **settings)
        if settings["num_return_sequences"] != num_generations:
            output_ids = output_ids.repeat_interleave(num_generations, 0)
        completion_ids = output_ids[:, prompt_ids.size(1) :]
        mask = mask_until_eos(completion_ids, torch.ones_like(completion_ids, dtype=torch.bool), eos)
        full_mask = torch.cat([attention_mask.repeat_interleave(num_generations, 0), mask], dim=1)
        width = completion_ids.size(1)
        with evaluation_mode(model):
            logps = compute_per_token_logps(model, output_ids, width, full_mask.long(), logp_temperature)
        finished = ((completion_ids == eos) & mask).any(dim=1)
        return completion_ids, logps.masked_fill(~mask, 0.0), mask, finished


def sample_answers(engine: RolloutEngine, tokenizer, prompt_ids: list[list[int]], keys: list[tuple[int, ...]], args,
                   device: str, *, num_generations: int, temperature: float) -> RolloutResult:
    """Left-pad B prompts (lists of ids) and let the engine answer each `num_generations` times, as the flags say."""
    encoded = encode_prompts(tokenizer, prompt_ids, args.max_seq_len, device)
    return engine.rollout(
        encoded["input_ids"], encoded["attention_mask"], num_generations, args.max_gen_len, temperature,
        top_p=args.top_p, top_k=args.top_k, logp_temperature=args.logp_temperature, prompt_keys=keys,
    )  # fmt: skip


def decode_texts(tokenizer, completion_ids: Tensor, mask: Tensor) -> list[str]:
    """The N answers as text, control tokens left out; what lies after an answer's end never shows."""
    rows = [ids[keep].tolist() for ids, keep in zip(completion_ids.cpu(), mask.cpu(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def create_rollout_engine(engine_type: str = "torch", policy_model=None, tokenizer=None, device="cpu",
                          autocast_ctx=None, *, sglang_base_url: str = "http://localhost:8998",
                          sglang_model_path: str | None = None, sglang_shared_path: str = "./sglang_ckpt",
                          **sglang) -> RolloutEngine:
    """The engine that `--rollout_engine` names; an SGLang engine has checked its servers and given them the weights.

    Args: sglang: keyword arguments of SGLangRolloutEngine (timeout, dtype, concurrency, wait, sync_interval, …).
    Raises: ValueError for a name it does not know; what `SGLangRolloutEngine.start` raises.
    """
    if engine_type == "torch":
        return TorchRolloutEngine(policy_model, tokenizer, device, autocast_ctx)
    if engine_type == "sglang":
        from trainer.sglang_engine import SGLangRolloutEngine

        engine = SGLangRolloutEngine(sglang_base_url, sglang_model_path, sglang_shared_path, tokenizer=tokenizer,
                                     device=device, **sglang)
        engine.start(policy_model)
        return engine
    raise ValueError(f"--rollout_engine {engine_type}: expected torch or sglang")


def __getattr__(name: str):
    """SGLangRolloutEngine from here too; imported when asked for, since its module builds on this one."""
    if name == "SGLangRolloutEngine":
        from trainer.sglang_engine import SGLangRolloutEngine

        return SGLangRolloutEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
