"""Sampling answers from a MiniMindForCausalLM: the decoding loop and the rules that pick a token.

The prompt is read once, its cache is shared out to its answers, and rows that ended leave the batch.
Letters: B prompts, G answers a prompt, N = B·G rows, n <= N rows still running, P prompt width, R answer width,
V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.decode_cache import fill_holes
from model.decode_step import DecodeStep, compiled_step
from model.kv_cache import KVCache, pack_left
from model.sampling import SamplingRules, check_rules, pick_tokens

# Rows that ended stay in the batch until they are this share of it, because dropping them copies the cache.
COMPACT_SHARE = 1 / 8
ROW_UNIT = 8  # more rows than two of these are a multiple of it: each new number of rows costs the kernels preparations


class Decoded(NamedTuple):
    """Answers of N rows; row i belongs to prompt i // num_generations. R is the longest answer produced."""

    completion_ids: Tensor  # long [N, R], pad_token_id after the end
    logps: Tensor  # float32 [N, R], natural logs at logp_temperature, 0 after the end
    mask: Tensor  # bool [N, R], True up to and including the first EOS
    finished: Tensor  # bool [N], True = ended with EOS, False = cut at max_new_tokens


@dataclass
class Running:
    """The rows still in the batch: n of them, of which `alive` have not ended."""

    read: DecodeStep
    rows: Tensor  # long [n], their place among the N answers
    logits: Tensor  # [n, V] of the next token
    alive: Tensor  # bool [n]
    seen: Tensor | None  # bool [n, V], tokens in prompt and answer; None without a repetition penalty


def prefill(model, input_ids: Tensor, real: Tensor, *, copies: int, max_new: int, track_seen: bool, step) -> Running:
    """Read each of the B prompts once and share the result out to its `copies` answers; step: what to decode with,
    DecodeStep or compiled_step."""
    lengths = real.sum(dim=1)
    longest = int(lengths.max())
    packed_ids, packed, _ = pack_left(input_ids, real)
    packed_ids, packed = packed_ids[:, :longest], packed[:, :longest]
    cache = KVCache(model.config.num_hidden_layers, longest)
    # no mask: causal attention cannot see the padding, which is behind every row's last real token
    hidden = model.model(packed_ids, past_key_values=cache)[0]
    cache.lengths = lengths
    cache.aligned = bool((lengths == longest).all())
    last = hidden[torch.arange(len(lengths), device=lengths.device), lengths - 1]
    seen = None
    if track_seen:
        # counted, not set: padding was given id 0 and must not mark that token
        counts = torch.zeros(len(lengths), model.config.vocab_size, dtype=torch.int32, device=real.device)
        seen = (counts.scatter_add_(1, packed_ids, packed.int()) > 0).repeat_interleave(copies, dim=0)
    rows = torch.arange(len(lengths) * copies, device=real.device)
    return Running(
        read=step(model, cache, copies, max_new),
        rows=rows,
        logits=model.lm_head(last).repeat_interleave(copies, dim=0),
        alive=torch.ones_like(rows, dtype=torch.bool),
        seen=seen,
    )


def rows_kept(alive: int) -> int:
    """How many rows a batch is made of in which so many have not ended."""
    return alive if alive <= 2 * ROW_UNIT else -(-alive // ROW_UNIT) * ROW_UNIT


def compact(running: Running, token: Tensor, left: int) -> Tensor:
    """Drop rows that ended until `left` stay: the last ones that run take their places. Gives the tokens of those."""
    fillers = running.alive[left:].nonzero().squeeze(1) + left
    holes = (~running.alive[:left]).nonzero().squeeze(1)[: len(fillers)]
    running.read.keep_rows(holes, fillers, left)
    running.rows = fill_holes(running.rows, holes, fillers, left)
    if running.seen is not None:
        running.seen = fill_holes(running.seen, holes, fillers, left)
    running.alive = fill_holes(running.alive, holes, fillers, left)
    return fill_holes(token, holes, fillers, left)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout and balance loss off inside; every module gets its own mode back afterwards, autocast its gradients."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        # torch 2.6 keeps the half-precision copies of the weights made here without gradient, and an update under the
        # same autocast would train nothing
        torch.clear_autocast_cache()


class Answers:
    """The N answers being written, one step a row: what is written at once lies together."""

    def __init__(self, n: int, max_new: int, device: torch.device):
        self.ids = torch.zeros(max_new, n, dtype=torch.long, device=device)
        self.logps = torch.zeros(max_new, n, dtype=torch.float32, device=device)
        self.mask = torch.zeros(max_new, n, dtype=torch.bool, device=device)

    def write(self, step: int, running: Running, token: Tensor, logp: Tensor) -> None:
        """Store one step of the running rows; those that ended before it get a mask of False."""
        self.ids[step].index_copy_(0, running.rows, token)
        self.logps[step].index_copy_(0, running.rows, logp)
        self.mask[step].index_copy_(0, running.rows, running.alive)

    def result(self, steps: int, eos: Tensor, pad_token_id: int) -> Decoded:
        """What was written in `steps` steps; RuntimeError if the model gave log-probabilities that are not numbers."""
        mask = self.mask[:steps].T.contiguous()
        ids = self.ids[:steps].T.masked_fill(~mask, pad_token_id)
        logps = self.logps[:steps].T.masked_fill(~mask, 0.0)
        bad = ~torch.isfinite(logps).all(dim=1)
        if bool(bad.any()):
            raise RuntimeError(
                f"the model gave NaN or infinite log-probabilities in {int(bad.sum())} of {len(bad)} answers: "
                "its weights or activations overflowed; check the loaded weights, or use bfloat16 or float32"
            )
        return Decoded(ids, logps, mask, (torch.isin(ids, eos) & mask).any(dim=1))


def run(running: Running, answers: Answers, rules: SamplingRules, *, eos, pad, uniforms, on_token) -> int:
    """The decoding loop; fills `answers` and gives the number of steps taken. One read back from the device a step."""
    max_new, n = answers.ids.shape
    for step in range(max_new):
        column = None if uniforms is None else uniforms[:, step]
        if uniforms is None and rules.temperature > 0:
            column = torch.rand(n, dtype=torch.float64, device=eos.device)
        token, logp = pick_tokens(running.logits, None if column is None else column[running.rows], running.seen, rules)
        answers.write(step, running, token, logp)
        if on_token is not None:
            on_token(answers.ids[step].masked_fill(~answers.mask[step], pad))
        running.alive = running.alive & (token[:, None] != eos).all(dim=1)
        left = int(running.alive.sum())
        if left == 0 or step + 1 == max_new:
            break
        kept = rows_kept(left)
        if kept <= len(token) * (1 - COMPACT_SHARE) and not running.read.static:
            token = compact(running, token, kept)
        if running.seen is not None:
            running.seen.scatter_(1, token[:, None], True)
        running.logits = running.read(token)
    return step + 1


def check_prompts(config, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The prompt mask as bool [B, P]; ValueError for prompts no answer can follow."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: expected [prompts, width], both at least 1")
    if attention_mask is None:
        real = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        real = attention_mask.bool()
    if real.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(real.shape)} does not fit input_ids {tuple(input_ids.shape)}")
    empty = ~real.any(dim=1)
    if bool(empty.any()):
        raise ValueError(f"attention_mask: prompt row {int(empty.nonzero()[0])} has no real token")
    outside = input_ids[real & ((input_ids < 0) | (input_ids >= config.vocab_size))]
    if len(outside):
        raise ValueError(
            f"input_ids holds token id {int(outside[0])}, outside the vocabulary of {config.vocab_size}: "
            "the tokenizer does not belong to this model"
        )
    return real


def end_ids(config, eos_token_id: int | list[int] | None) -> list[int]:
    """The ids that end an answer, from an id, a list, or None for the config's; ValueError outside the vocabulary."""
    found = config.eos_token_id if eos_token_id is None else eos_token_id
    ids = [int(found)] if isinstance(found, int) else [int(token) for token in found]
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"eos_token_id {token} is outside the vocabulary of {config.vocab_size}")
    return ids


def check_uniforms(uniforms: Tensor | None, n: int, max_new: int, device: torch.device) -> Tensor | None:
    """The uniforms as float64 on the model's device; ValueError for too few or for values outside [0, 1]."""
    if uniforms is None:
        return None
    if uniforms.dim() != 2 or uniforms.shape[0] != n or uniforms.shape[1] < max_new:
        raise ValueError(f"uniforms has shape {tuple(uniforms.shape)}: expected [{n}, {max_new}] or wider")
    uniforms = uniforms[:, :max_new].to(device, torch.float64)
    if not bool(((uniforms >= 0) & (uniforms <= 1)).all()):
        raise ValueError("uniforms holds values outside [0, 1]")
    return uniforms


class DecodingMixin:
    """`decode` (answers with masks and log-probabilities) and `generate` (MiniMind's), for a MiniMindForCausalLM."""

    @torch.no_grad()
    def decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        num_generations: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int = 0,
        uniforms: Tensor | None = None,
        logp_temperature: float | None = None,
        on_token: Callable[[Tensor], None] | None = None,
        compile: bool = False,
    ) -> Decoded:
        """num_generations answers to each prompt, with the log-probability of every token; no grad.

        Runs as in eval mode whatever the model's mode, under the caller's autocast.
        Args: input_ids long [B, P], padded on any side with anything; attention_mask [B, P], non-zero = real (None =
            all); max_new_tokens: most tokens an answer; temperature 0 = greedy; eos_token_id: None = the config's, an
            empty list = no end; uniforms float64 [N, >= max_new_tokens] in [0, 1]: token t of row i is drawn with
            uniforms[i, t] and so does not depend on other rows (None = torch's global generator); logp_temperature
            divides the logits for logps (None = temperature, 1 when greedy); on_token gets each step's ids long [N];
            compile: each step through torch.compile and, on CUDA, as a CUDA graph; worth its start-up time there alone.
        Raises: ValueError naming a wrong argument; RuntimeError if the model's output is not finite.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        if num_generations < 1:
            raise ValueError(f"num_generations is {num_generations}: it must be at least 1")
        if logp_temperature is None:
            logp_temperature = temperature if temperature > 0 else 1.0
        rules = SamplingRules(temperature, top_p, top_k, repetition_penalty, logp_temperature)
        check_rules(rules)
        eos = torch.tensor(end_ids(self.config, eos_token_id), dtype=torch.long, device=input_ids.device)
        real = check_prompts(self.config, input_ids, attention_mask)
        longest = int(real.sum(dim=1).max())
        if longest + max_new_tokens > self.config.max_position_embeddings:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} exceed max_position_embeddings "
                f"{self.config.max_position_embeddings}: shorten one of them"
            )
        n = len(input_ids) * num_generations
        uniforms = check_uniforms(uniforms, n, max_new_tokens, input_ids.device)
        # inference mode spares each of a step's many small operations its bookkeeping, about a twentieth of the time
        with evaluation_mode(self), nullcontext() if compile else torch.inference_mode():
            running = prefill(
                self, input_ids, real, copies=num_generations, max_new=max_new_tokens,
                track_seen=repetition_penalty != 1.0, step=compiled_step if compile else DecodeStep,
            )  # fmt: skip
            answers = Answers(n, max_new_tokens, input_ids.device)
            steps = run(
                running, answers, rules, eos=eos, pad=pad_token_id, uniforms=uniforms, on_token=on_token
            )
            decoded = answers.result(steps, eos, pad_token_id)
        return Decoded(*(x.clone() for x in decoded))  # a loss may be made of these, of inference tensors none

    def generate(
        self,
        inputs: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 8192,
        temperature: float = 0.85,
        top_p: float = 0.85,
        top_k: int = 50,
        eos_token_id: int | list[int] | None = 2,
        streamer=None,
        use_cache: bool = True,
        num_return_sequences: int = 1,
        do_sample: bool = True,
        repetition_penalty: float = 1.0,
        *,
        input_ids: Tensor | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """Prompts with their answers, long [N, P + R]; MiniMind's signature and defaults, no grad.

        Row i belongs to prompt i // num_return_sequences. After its end a row holds pad_token_id (None: its EOS, as
        in MiniMind). max_new_tokens is cut to what max_position_embeddings leaves after the longest prompt, because
        MiniMind's default of 8192 is meant as "until the end". use_cache is accepted for MiniMind's callers: the
        tokens are the same either way and the cache is always used. `inputs` and `input_ids` are one argument;
        a streamer gets the prompts and each step's tokens as `put` (on the CPU), then `end`.
        Raises: ValueError as decode does; TypeError for an unknown keyword.
        """
        if (inputs is None) == (input_ids is None):
            raise ValueError("give the prompts once, as inputs or as input_ids")
        prompts = input_ids if inputs is None else inputs
        longest = int(check_prompts(self.config, prompts, attention_mask).sum(dim=1).max())
        room = self.config.max_position_embeddings - longest
        if room < 1:
            raise ValueError(f"a prompt of {longest} tokens leaves no room in max_position_embeddings: shorten it")
        eos = end_ids(self.config, eos_token_id)
        if pad_token_id is None:
            pad_token_id = eos[0] if eos else self.config.pad_token_id
        if streamer is not None:
            streamer.put(prompts.cpu())
        decoded = self.decode(
            prompts,
            attention_mask,
            num_generations=num_return_sequences,
            max_new_tokens=min(max_new_tokens, room),
            temperature=temperature if do_sample else 0.0,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            eos_token_id=eos,
            pad_token_id=pad_token_id,
            on_token=None if streamer is None else lambda ids: streamer.put(ids.cpu()),
        )
        if streamer is not None:
            streamer.end()
        return torch.cat([prompts.repeat_interleave(num_return_sequences, dim=0), decoded.completion_ids], dim=1)
