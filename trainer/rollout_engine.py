"""Where tokens and their log-probs come from: the rollout engines, and the one way this project scores tokens.

Letters: B prompts, G answers a prompt, N = B·G rows, P padded prompt width, R response width, W = P + R, V vocabulary.
Row i belongs to prompt i // G. Prompts are left padded, answers right padded, so every answer starts at column P.
"""

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.decoding import evaluation_mode
from model.model_minimind import MiniMindForCausalLM
from trainer.distributed import unwrap_model
from trainer.prompts import encode_prompts
from trainer.rl_math import logps_and_entropy, mask_until_eos

SCORED_AT_ONCE = 4096  # most tokens whose logits `.generate`'s answers are scored with at a time
NO_GRAD_SHARE = 4  # a scored token keeps no activations, so that this many times the update's fit into its memory


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
class Scores(NamedTuple):
    """What a model says of answer tokens; grad flows unless the caller forbids it."""

    logps: Tensor  # float32 [n, R], natural logs
    entropy: Tensor  # float32 [n, R], nats: how unsure the model was at each token
    aux_loss: Tensor  # [], the experts' balance loss, 0 without experts


def score_tokens(model: nn.Module, input_ids: Tensor, n_keep: int, attention_mask: Tensor | None = None,
                 temperature: float = 1.0) -> Scores:
    """The last `n_keep` tokens of rows [N, W]: logp_t = log_softmax(logits_{t-1} / temperature)[token_t] in float32.

    The model is called as given, so a DDP wrapper synchronises. Only n_keep + 1 positions of logits are ever computed.
    """
    places = {}
    if attention_mask is not None and takes_positions(unwrap_model(model)):
        # As .generate counts them; left to itself, a model counts padding too.
        places["position_ids"] = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids, attention_mask=attention_mask, logits_to_keep=n_keep + 1, **places)
    targets = input_ids[:, input_ids.size(1) - n_keep :]
    logps, entropy = logps_and_entropy(output.logits[:, :-1], targets, temperature=temperature)
    aux_loss = getattr(output, "aux_loss", None)
    return Scores(logps, entropy, logps.new_zeros(()) if aux_loss is None else aux_loss)


def takes_positions(model: nn.Module) -> bool:
    """Whether a model's forward pass can be told each token's position; MiniMind's finds them from the mask."""
    return "position_ids" in inspect.signature(model.forward).parameters


def compute_per_token_logps(model: nn.Module, input_ids: Tensor, n_keep: int, attention_mask: Tensor | None = None,
                            temperature: float = 1.0) -> Tensor:
    """Log-probs float32 [N, n_keep] of the last `n_keep` tokens of input_ids [N, W]; any causal LM of transformers.

    Raises: ValueError if n_keep >= W: the first token of a row has no logits that predict it.
    """
    if n_keep <= 0:
        return input_ids.new_empty((input_ids.size(0), 0), dtype=torch.float32)
    if n_keep >= input_ids.size(1):
        raise ValueError(f"n_keep {n_keep} of input_ids {tuple(input_ids.shape)}: at least one token must come before")
    return score_tokens(model, input_ids, n_keep, attention_mask, temperature).logps


def score_answers(model: nn.Module, rollout: "RolloutResult", num_generations: int, temperature: float,
                  rows: Tensor | None = None) -> Scores:
    """As `score_tokens` for the answers of a rollout, or of some of its rows.

    A MiniMindForCausalLM reads each prompt once for its answers and no padding, with the same value and gradient as
    reading every row as one sequence; after an answer's end all is 0. Any other model gets whole rows, without the
    columns that are padding in all of them.
    Args: rows long [n]; None = all of them.
    """
    rows = torch.arange(len(rollout.completion_ids), device=rollout.completion_ids.device) if rows is None else rows
    width = rollout.completion_ids.size(1)
    if not isinstance(unwrap_model(model), MiniMindForCausalLM):
        mask = rollout.attention_mask[rows].long()
        used = mask.any(dim=0).nonzero().flatten()
        first, kept = int(used[0]), max(int(used[-1]) + 1 - (mask.size(1) - width), 1)
        span = slice(first, mask.size(1) - width + kept)
        scores = score_tokens(model, rollout.output_ids[rows, span], kept, mask[:, span], temperature)
        logps, entropy = (torch.nn.functional.pad(x, (0, width - kept)) for x in scores[:2])
        return Scores(logps, entropy, scores.aux_loss)
    prompts, prompt_of = (rows // num_generations).unique(return_inverse=True)
    ids = rollout.output_ids[prompts * num_generations, :-width]
    mask = rollout.attention_mask[prompts * num_generations, :-width]
    answers, real = rollout.completion_ids[rows], rollout.attention_mask[rows, -width:]
    output = model(answers, attention_mask=real, prompts=(ids, mask, prompt_of))
    if output.logits.shape[1] == answers.numel():  # no padding, or a compiled model, which gives every column
        real = torch.ones_like(real)
    found = logps_and_entropy(output.logits, answers[real][None], temperature=temperature)
    logps, entropy = (x.new_zeros(answers.shape).masked_scatter(real, x) for x in found)
    return Scores(logps, entropy, output.aux_loss)


def micro_batches(rollout: "RolloutResult", num_generations: int, budget: int,
                  rows: Tensor | None = None) -> list[Tensor]:
    """`rows` (long [n]; None = all) in pieces that can be scored one after another, each of at most `budget` tokens.

    A piece's tokens are those of its answers and of each prompt they belong to, once; a row that is longer alone is a
    piece of its own. Answers to one prompt stay together as far as they fit, shorter ones first, so that a piece's
    rows are of much the same length. budget 0 = one piece.
    """
    if rows is None:
        rows = torch.arange(len(rollout.completion_ids), device=rollout.completion_ids.device)
    if budget == 0:
        return [rows]
    width = rollout.completion_ids.size(1)
    real = rollout.attention_mask[rows]
    answers, prompts = real[:, -width:].sum(1).tolist(), real[:, :-width].sum(1).tolist()
    prompt_of = (rows // num_generations).tolist()
    pieces, used = [[]], 0
    for i in sorted(range(len(rows)), key=lambda i: (prompt_of[i], answers[i])):
        piece = pieces[-1]
        new = answers[i] + (prompts[i] if not piece or prompt_of[piece[-1]] != prompt_of[i] else 0)
        if piece and used + new > budget:
            pieces.append([])
            used, new = 0, answers[i] + prompts[i]
        pieces[-1].append(i)
        used += new
    return [rows[piece] for piece in pieces]


def scoring_pieces(rollout: "RolloutResult", num_generations: int, args, pieces: list[Tensor]) -> list[Tensor]:
    """How to score without gradient what the update will read in these pieces: in larger ones, for nothing is kept.

    In half precision in the very same ones: products round differently in a batch of another shape, and the first ratio
    and the first KL would not be what they are, 1 and 0.
    """
    if args.dtype != "float32":
        return pieces
    return micro_batches(rollout, num_generations, NO_GRAD_SHARE * args.micro_batch_tokens)


@torch.no_grad()
def score_all(model: nn.Module, rollout: "RolloutResult", num_generations: int, temperature: float,
              pieces: list[Tensor]) -> Tensor:
    """Log-probs float32 [N, R] of every row that is in one of the pieces, without gradient."""
    found = torch.zeros(rollout.completion_ids.shape, dtype=torch.float32, device=rollout.completion_ids.device)
    for rows in pieces:
        found[rows] = score_answers(model, rollout, num_generations, temperature, rows).logps
    return found


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

    runs_trainers_modules = False  # True: its log-probs are the trainer's but for the order of sums

    @abstractmethod
    def rollout(self, prompt_ids: Tensor, attention_mask: Tensor, num_generations: int, max_new_tokens: int,
                temperature: float = 0.8, *, top_p: float = 1.0, top_k: int = 0, logp_temperature: float | None = None,
                prompt_keys: list[tuple[int, ...]] | None = None,
                on_progress: Callable[[], None] | None = None) -> RolloutResult:
        """Sample `num_generations` answers to each left-padded prompt.

        Args: prompt_ids, attention_mask [B, P]; temperature 0 = greedy; top_p 1 and top_k 0 = off; logp_temperature:
            what the logits are divided by for the returned log-probs (default: the sampling temperature, 1 if greedy);
            prompt_keys: B tuples of non-negative ints that fix each prompt's randomness (default: torch's generator);
            on_progress is called after each token of all rows, or after each whole answer of a server.
        """

    @abstractmethod
    def update_policy(self, model: nn.Module) -> None:
        """Sample from these weights from now on."""

    def sync(self) -> None:  # noqa: B027  (nothing to do where nothing is withheld)
        """Have the weights last given by `update_policy` sampled from, if they are still withheld."""

    def logps_temperature(self, temperature: float, logp_temperature: float) -> float | None:
        """What logits were divided by in the log-probs of answers sampled at `temperature`; None if not known."""
        return logp_temperature

    def must_recompute(self, temperature: float, logp_temperature: float) -> bool:
        """Whether its log-probs are not at `logp_temperature`, so that the trainer has to score the answers itself."""
        return False


class TorchRolloutEngine(RolloutEngine):
    """Decodes in this process: a MiniMindForCausalLM its own way, any other causal LM through its `.generate(...)`."""

    runs_trainers_modules = True

    def __init__(self, policy_model: nn.Module, tokenizer, device="cpu", autocast_ctx=None, use_compile: bool = False):
        self.policy_model, self.tokenizer, self.device, self.use_compile = policy_model, tokenizer, device, use_compile
        self.autocast_ctx = autocast_ctx or contextlib.nullcontext()

    def update_policy(self, model: nn.Module) -> None:
        self.policy_model = model

    @torch.no_grad()
    def rollout(self, prompt_ids, attention_mask, num_generations, max_new_tokens, temperature=0.8, *, top_p=1.0,
                top_k=0, logp_temperature=None, prompt_keys=None, on_progress=None) -> RolloutResult:
        model = unwrap_model(self.policy_model)
        prompt_ids, attention_mask = prompt_ids.to(self.device), attention_mask.to(self.device).bool()
        if prompt_keys is None:
            prompt_keys = [(key,) for key in torch.randint(2**62, (prompt_ids.size(0),)).tolist()]
        keys = answer_keys(prompt_keys, num_generations)
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        on_token = None if on_progress is None else lambda ids: on_progress()
        logp_temperature = logp_temperature or temperature or 1.0
        sample = self._decode if isinstance(model, MiniMindForCausalLM) else self._generate
        with self.autocast_ctx:
            completion_ids, logps, mask, finished = sample(
                model, prompt_ids, attention_mask, num_generations, keys, sampling, logp_temperature, on_token
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

    def _decode(self, model, prompt_ids, attention_mask, num_generations, keys, sampling, logp_temperature, on_token):
        uniforms = row_uniforms(keys, sampling["max_new_tokens"]).to(self.device)
        return model.decode(
            prompt_ids, attention_mask, num_generations=num_generations, uniforms=uniforms,
            eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id,
            logp_temperature=logp_temperature, on_token=on_token, compile=self.use_compile,
            **sampling,
        )  # fmt: skip

    def _generate(self, model, prompt_ids, attention_mask, num_generations, keys, sampling, logp_temperature, on_token):
        """Any causal LM of transformers: `.generate` to sample, one forward to score. It tells no progress."""
        ends = answer_ends(model, self.tokenizer)
        settings = {"max_new_tokens": sampling["max_new_tokens"], "do_sample": sampling["temperature"] > 0,
                    "num_return_sequences": num_generations, "eos_token_id": ends,
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
        mask = mask_until_eos(completion_ids, torch.ones_like(completion_ids, dtype=torch.bool), ends)
        full_mask = torch.cat([attention_mask.repeat_interleave(num_generations, 0), mask], dim=1)
        width, at_once = completion_ids.size(1), max(1, SCORED_AT_ONCE // output_ids.size(1))
        with evaluation_mode(model):
            logps = torch.cat([compute_per_token_logps(model, ids, width, real.long(), logp_temperature)
                               for ids, real in zip(output_ids.split(at_once), full_mask.split(at_once), strict=True)])
        return completion_ids, logps.masked_fill(~mask, 0.0), mask, has_ended(completion_ids, mask, ends)


def answer_ends(model: nn.Module, tokenizer) -> list[int]:
    """The ids that end an answer: the tokenizer's end token first, then those that a model of transformers names."""
    bare = unwrap_model(model)
    settings = None if isinstance(bare, MiniMindForCausalLM) else getattr(bare, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    if not isinstance(named, list):
        named = [] if named is None else [named]
    return list(dict.fromkeys([tokenizer.eos_token_id, *named]))


def has_ended(completion_ids: Tensor, mask: Tensor, ends: list[int]) -> Tensor:
    """bool [N]: whether one of these ids is among an answer's tokens; False is an answer that was cut at the limit."""
    return (torch.isin(completion_ids, torch.tensor(ends, device=completion_ids.device)) & mask).any(dim=1)


def sample_answers(engine: RolloutEngine, tokenizer, prompt_ids: list[list[int]], keys: list[tuple[int, ...]], args,
                   device: str, *, num_generations: int, temperature: float,
                   on_progress: Callable[[], None] | None = None) -> RolloutResult:
    """Left-pad B prompts (lists of ids) and let the engine answer each `num_generations` times, as the flags say."""
    encoded = encode_prompts(tokenizer, prompt_ids, args.max_seq_len, device)
    return engine.rollout(
        encoded["input_ids"], encoded["attention_mask"], num_generations, args.max_gen_len, temperature,
        top_p=args.top_p, top_k=args.top_k, logp_temperature=args.logp_temperature, prompt_keys=keys,
        on_progress=on_progress,
    )  # fmt: skip


def with_groups(rollout: RolloutResult, again: RolloutResult, prompts: list[int], num_generations: int,
                pad_token_id: int) -> RolloutResult:
    """`rollout` with the answers to these prompts (numbers within it) replaced by those of `again`, which has them
    alone and in this order."""
    old, new = rollout.completion_ids.size(1), again.completion_ids.size(1)
    rows = torch.tensor(prompts, device=rollout.completion_ids.device)[:, None] * num_generations
    rows = (rows + torch.arange(num_generations, device=rows.device)).flatten()

    def merged(ours: Tensor, theirs: Tensor, fill) -> Tensor:
        wide = torch.nn.functional.pad(ours, (0, max(new - old, 0)), value=fill)
        wide[rows] = torch.nn.functional.pad(theirs, (0, max(old - new, 0)), value=fill)
        return wide

    ids = merged(rollout.completion_ids, again.completion_ids, pad_token_id)
    mask = merged(rollout.completion_mask, again.completion_mask, False)
    finished, texts = rollout.finished.clone(), list(rollout.completions)
    finished[rows] = again.finished
    for row, text in zip(rows.tolist(), again.completions, strict=True):
        texts[row] = text
    return rollout._replace(
        output_ids=torch.cat([rollout.output_ids[:, :-old], ids], dim=1), completion_ids=ids, completion_mask=mask,
        per_token_logps=merged(rollout.per_token_logps, again.per_token_logps, 0.0), completions=texts,
        attention_mask=torch.cat([rollout.attention_mask[:, :-old], mask], dim=1), finished=finished,
    )  # fmt: skip


def decode_texts(tokenizer, completion_ids: Tensor, mask: Tensor) -> list[str]:
    """The N answers as text, control tokens left out; what lies after an answer's end never shows."""
    rows = [ids[keep].tolist() for ids, keep in zip(completion_ids.cpu(), mask.cpu(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def create_rollout_engine(engine_type: str = "torch", policy_model=None, tokenizer=None, device="cpu",
                          autocast_ctx=None, *, sglang_base_url: str = "http://localhost:8998",
                          sglang_model_path: str | None = None, sglang_shared_path: str = "./sglang_ckpt",
                          use_compile: bool = False, **sglang) -> RolloutEngine:
    """The engine that `--rollout_engine` names; an SGLang engine has checked its servers and given them the weights.

    Args: use_compile: compile the Torch engine's decoding step; sglang: keyword arguments of SGLangRolloutEngine
        (timeout, dtype, concurrency, wait, sync_interval, …).
    Raises: ValueError for a name it does not know; what `SGLangRolloutEngine.start` raises.
    """
    if engine_type == "torch":
        return TorchRolloutEngine(policy_model, tokenizer, device, autocast_ctx, use_compile)
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
