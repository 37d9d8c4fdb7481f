"""A tiny random model and small prompts for the tests of the model and of decoding."""

import torch

from model.decoding import Decoded
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM


def tiny(**changes) -> MiniMindForCausalLM:
    """A random model with a lively distribution: hidden 32, 2 layers, 4 heads, 2 key/value heads, 40 tokens, EOS 2."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25} | changes
    return MiniMindForCausalLM(MiniMindConfig(32, 2, **sizes)).eval()


def prompts():
    """Three left-padded prompts of 5, 2 and 4 tokens; the padding holds an id that no row contains."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [39, 39, 39, 10, 11], [39, 12, 13, 14, 15]])
    return ids, torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])


def uniforms(rows: int, steps: int = 24, seed: int = 3) -> torch.Tensor:
    return torch.rand(rows, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def answers(decoded: Decoded) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(decoded.completion_ids, decoded.mask, strict=True)]
