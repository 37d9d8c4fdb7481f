"""Folders of small random reward models, what loads them, and conversations for them to score."""

import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from trainer.reward_model import LMForRewardModel


def build(folder, tokenizer, *, scale=1.0, labels=1, safe=True):
    """A random two-layer reward model, saved as a folder; scale stretches its scores."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, initializer_range=0.3, num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.mul_(scale)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not safe:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def load(path, **arguments):
    return LMForRewardModel(path, "cpu", torch.float32, **arguments)


def chats(count):
    return [[{"role": "user", "content": "word " * (1 + 7 * k % 11)}] for k in range(count)]


def answers(count):
    return ["answer " * (1 + 5 * k % 7) + str(k) for k in range(count)]
