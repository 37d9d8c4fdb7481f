"""Folders of small random models of transformers for `--hf_model`, and runs on them."""

import shutil
from pathlib import Path

import small_runs as small
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trainer import hf_model, train_grpo
from trainer.arguments import REPO_ROOT
from trainer.loading import load_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}  # fmt: skip
PLAIN_TEMPLATE = ("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}[end]"
                  "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
# What the folder brings along is not given.
NO_SIZES = dict.fromkeys(("hidden_size", "num_hidden_layers", "from_weight"))


def byte_tokenizer(folder, **special):
    """A tokenizer of single bytes and three roles; no pad token, no thinking."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **{"eos_token": "[end]", **special})
    tokenizer.add_special_tokens({"additional_special_tokens": ["[system]", "[user]", "[assistant]"]})
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def lively(model, end: int, pull: float):
    """The model, now one that ends an answer of 8 tokens in most cases."""
    with torch.no_grad():
        shared = torch.nn.functional.normalize(torch.randn(SIZES["hidden_size"]), dim=0)
        model.get_input_embeddings().weight.add_(3 * shared)
        seen = model.model(torch.randint(0, 250, (4, 40))).last_hidden_state.mean(dim=(0, 1))
        model.get_output_embeddings().weight[end] += pull * torch.nn.functional.normalize(seen, dim=0)
    return model


def write_qwen(folder: Path, tokenizer) -> Path:
    """A Qwen3 with tied embeddings and this project's tokenizer, in float32."""
    qwen = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, vocab_size=len(tokenizer), tie_word_embeddings=True))
    lively(qwen, tokenizer.eos_token_id, 2).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPO_ROOT / "model" / name, folder)
    return folder


def write_llama(folder: Path) -> Path:
    """A Llama of single bytes in bfloat16, whose generation config and attention have opinions of their own."""
    bytes_only = byte_tokenizer(folder)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=len(bytes_only) + 5, attention_dropout=0.3,
                                         eos_token_id=bytes_only.eos_token_id))  # fmt: skip
    lively(llama, bytes_only.eos_token_id, 2).to(torch.bfloat16)
    llama.generation_config.update(temperature=0.1, top_k=1, do_sample=True, repetition_penalty=3.0)
    llama.save_pretrained(folder)
    return folder


def run(flags, **replaced):
    """The state of a run to its end."""
    status, state = small.run_script(train_grpo, flags, **replaced)
    assert status == 0
    return state


def weights_of(folder) -> dict:
    """What the folder's file holds, as float32."""
    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def opened(folder):
    """(model, tokenizer) as a run loads them."""
    config = hf_model.read_hf_config(str(folder), False)
    tokenizer = load_tokenizer(str(folder), pad_with_eos=True)
    hf_model.fit_hf_config(config, tokenizer, str(folder))
    return hf_model.load_hf_model(config, tokenizer, str(folder), "cpu"), tokenizer
