"""The starter's supervised model: learn the chat format and the sums, and stop while there is room for reinforcement.

The learning rate stays high to the last step on purpose. A model annealed to a low rate answers no better when sampled,
but its distribution has hardened, and reinforcement learning then gains little from it. All kinds come equally often,
though comparisons are learnt first: with fewer of them every kind was learnt later, as they teach to copy numbers.
Letters: N rows, P prompt width, R response width, W = P + R.
"""

import math
from random import Random

import torch
import torch.nn.functional as F

from dataset.lm_dataset import SYSTEM_PROMPTS
from dataset.starter_tasks import make_stream, pick
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

HIDDEN, LAYERS = 128, 4
BATCH, STEPS, LEARNING_RATE, WARMUP = 32, 900, 2e-3, 20
SEED = 7
SHARE_DIRECT, SHARE_SYSTEM = 0.1, 0.1  # rows without thinking, rows with a system prompt
IGNORE = -100
MAX_NEW_TOKENS = 64


def new_model(vocab_size, seed=SEED):
    """A MiniMindForCausalLM with matrices drawn from N(0, 0.02²) here, whatever the class's own start is."""
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=vocab_size))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def prompt_text(tokenizer, task, thinking=True, system=None):
    """The chat prompt for a task, ending with the opened (or empty) thinking block."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": task.question})
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, open_thinking=thinking)


def training_rows(tokenizer, count, seed):
    """`count` pairs (prompt ids, response ids, end token included), most with thinking, some without."""
    rng = Random(seed)
    rows = []
    for task in make_stream(count, seed + 1):
        thinking = rng.random() >= SHARE_DIRECT
        system = pick(rng, SYSTEM_PROMPTS) if rng.random() < SHARE_SYSTEM else None
        prompt = prompt_text(tokenizer, task, thinking, system)
        response = task.response if thinking else task.answer_text
        rows.append((tokenizer.encode(prompt, add_special_tokens=False),
                     tokenizer.encode(response, add_special_tokens=False) + [tokenizer.eos_token_id]))
    return rows


def right_pad(sequences, value):
    """Lists of ids as one [N, W] tensor, filled with `value` on the right."""
    width = max(len(ids) for ids in sequences)
    return torch.tensor([ids + [value] * (width - len(ids)) for ids in sequences])


def collate(rows, pad):
    """(input ids, labels), both [N, W] and padded on the right; labels are IGNORE outside the response."""
    ids = right_pad([prompt + response for prompt, response in rows], pad)
    labels = right_pad([[IGNORE] * len(prompt) + response for prompt, response in rows], IGNORE)
    return ids, labels


def learning_rate(step):
    """A short linear warm-up, then constant."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP)


def train(tokenizer, log=print, steps=STEPS, seed=SEED):
    """A model trained for `steps` steps on fresh rows; the loss counts response tokens only.

    No attention mask is needed: rows are padded on the right, and causal attention never looks there.
    """
    model = new_model(len(tokenizer), seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rows = training_rows(tokenizer, steps * BATCH, seed)
    recent = 0.0
    for step in range(steps):
        ids, labels = collate(rows[step * BATCH:(step + 1) * BATCH], tokenizer.pad_token_id)
        counts = labels[:, 1:] != IGNORE
        states, _, _ = model.model(ids[:, :-1])
        loss = F.cross_entropy(model.lm_head(states[counts]), labels[:, 1:][counts])  # no logits for the prompt
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += loss.item()
        if (step + 1) % 50 == 0:
            log(f"  step {step + 1}/{steps}  loss {recent / 50:.4f}")
            recent = 0.0
    return model.eval()


def half_state(model):
    """The weights as MiniMind stores them: a state dict of half-precision CPU tensors, the tied head included."""
    return {name: value.detach().half().cpu().contiguous() for name, value in model.state_dict().items()}


def from_half_state(state):
    """A model in float32 holding exactly the rounded weights of `half_state`, as a training script will load them."""
    vocab_size = state["model.embed_tokens.weight"].shape[0]
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=vocab_size))
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    return model.eval()


@torch.no_grad()
def sample(model, tokenizer, tasks, temperature, seed, thinking=True, batch=360):
    """Responses of the model, as (text without special tokens, tokens with the end) a task.

    Args: temperature, 0 for the most likely token each time; seed, of the global torch generator, set here.
    Left-padded batches in the order given.
    """
    torch.manual_seed(seed)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    results = []
    for start in range(0, len(tasks), batch):
        prompts = [tokenizer.encode(prompt_text(tokenizer, task, thinking), add_special_tokens=False)
                   for task in tasks[start:start + batch]]
        width = max(len(ids) for ids in prompts)
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        choice = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        output = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, top_p=1.0, top_k=0,
                                eos_token_id=eos, pad_token_id=pad, **choice)
        for row in output[:, width:].tolist():
            length = row.index(eos) + 1 if eos in row else len(row)
            results.append((tokenizer.decode(row[:length], skip_special_tokens=True), length))
    return results


def answer_part(response):
    """What follows the closing tag, or the whole response without one: what MiniMind hands to the reward model."""
    return response.split("</think>", 1)[-1].strip()


def is_right(task, response):
    """True when the last number in the answer part is the task's answer, and the thinking was closed."""
    digits = "".join(mark if mark.isdigit() else " " for mark in answer_part(response)).split()
    return "</think>" in response and bool(digits) and digits[-1] == task.answer


def accuracy(model, tokenizer, tasks, temperature, samples=1, seed=1000):
    """Share of right answers with thinking on, its standard error over tasks, and lengths in tokens.

    Returns: a dict with `accuracy`, `standard_error`, `mean_tokens`, `max_tokens`, `by_kind`.
    """
    rounds = [sample(model, tokenizer, tasks, temperature, seed + index) for index in range(samples)]
    shares = [sum(is_right(task, one[place][0]) for one in rounds) / samples for place, task in enumerate(tasks)]
    mean = sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    lengths = [length for one in rounds for _, length in one]
    by_kind = {}
    for task, share in zip(tasks, shares, strict=True):
        by_kind.setdefault(task.kind, []).append(share)
    return {"accuracy": mean, "standard_error": math.sqrt(variance / len(shares)),
            "mean_tokens": sum(lengths) / len(lengths), "max_tokens": max(lengths),
            "by_kind": {kind: sum(values) / len(values) for kind, values in sorted(by_kind.items())}}
