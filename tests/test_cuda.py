"""On a GPU: what a CPU computes, in every precision. Skipped without one; GPU_CHECK_DEVICE=cpu runs them on a CPU."""

import os

import pytest
import torch

from benchmarks.check import check, gradients_of, norm
from benchmarks.product import Product
from benchmarks.textbook import Textbook
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import benchmark
from trainer.prompts import encode_chat, encode_prompts
from trainer.rollout_engine import compute_per_token_logps
from trainer.trainer_utils import autocast_context

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "batch_size": 2, "prompt_len": 24, "max_gen_len": 24,
         "lengths": "varied", "threads": 1}  # fmt: skip
ALGORITHMS = pytest.mark.parametrize("algo", ["grpo", "ppo"])


def product_on(device: str, folder, **changes) -> tuple[Product, object]:
    """(product, its parsed flags) with the weights, prompts and lengths that any device gets."""
    folder.mkdir(exist_ok=True)
    pairs = {**SIZES, "device": device, **changes}
    args = benchmark.parse_args([word for name, value in pairs.items() for word in (f"--{name}", str(value))])
    return Product(args, folder), args


def moved(rollout, device: str):
    """The rollout with its tensors on `device`."""
    return type(rollout)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in rollout))


def relative_difference(found: list, expected: list) -> float:
    return norm([a.cpu() - b.cpu() for a, b in zip(found, expected, strict=True)]) / norm(expected)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.02)])
def test_decoding_gives_the_log_probs_of_a_forward_pass(dtype, limit):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(256, 4, vocab_size=500, initializer_range=0.06)).to(DEVICE).eval()
    ids = torch.randint(3, 500, (3, 12), device=DEVICE)
    mask = (torch.arange(12) >= torch.tensor([0, 5, 2])[:, None]).to(DEVICE)
    with autocast_context(DEVICE, dtype), torch.no_grad():
        decoded = model.decode(ids, mask, num_generations=2, max_new_tokens=40)
        rows = torch.cat([ids.repeat_interleave(2, 0), decoded.completion_ids], dim=1)
        full = torch.cat([mask.repeat_interleave(2, 0), decoded.mask], dim=1)
        logps = compute_per_token_logps(model, rows, decoded.mask.shape[1], full.long())
    assert (logps - decoded.logps)[decoded.mask].abs().max() <= limit


@ALGORITHMS
@pytest.mark.parametrize("use_moe", [0, 1])
def test_equal_to_the_textbook(tmp_path, algo, use_moe):
    product, args = product_on(DEVICE, tmp_path / "run", algo=algo, use_moe=use_moe)
    _, agreement = check(product, Textbook(product, args.prompt_len + args.max_gen_len), args.max_gen_len)
    assert agreement["gradient_error"] <= 1e-5


@ALGORITHMS
def test_gradients_are_those_of_a_cpu(tmp_path, algo):
    reference, _ = product_on("cpu", tmp_path / "cpu", algo=algo)
    work = reference.work()
    rollout, rewards = reference.decode(work), torch.linspace(-1, 1, len(work.lengths))
    expected_losses, expected = gradients_of(reference, work, rollout, rewards)
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 0.15), ("float16", 0.05)):
        product, _ = product_on(DEVICE, tmp_path / dtype, algo=algo, dtype=dtype)
        scale = product.run.scaler.get_scale()
        losses, steps = gradients_of(product, product.work(), moved(rollout, product.device), rewards.to(DEVICE))
        first = [gradient / scale for gradient in steps[0]]
        assert relative_difference(first, expected[0]) <= limit, dtype
        assert losses["policy_loss"] == pytest.approx(expected_losses["policy_loss"], abs=limit)


def test_float16_rows_with_padding_are_those_without(tokenizer):
    """Reported of MiniMind: two prompts of different lengths under float16 gave NaN in the padded row."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(256, 4, vocab_size=len(tokenizer))).to(DEVICE).eval()
    questions = ("你好", "请你详细介绍一下北京的历史与文化")
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}], open_thinking=True)[1] for text in questions]
    with torch.no_grad(), autocast_context(DEVICE, "float16"):
        batch = encode_prompts(tokenizer, prompts, 64, DEVICE)
        together = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, -1].float()
        alone = [model(torch.tensor([ids], device=DEVICE)).logits[0, -1].float() for ids in prompts]
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-2, rtol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="compiling for a CPU takes a C++ compiler and minutes")
def test_compiled_gradients_are_those_without(tmp_path):
    plain, _ = product_on(DEVICE, tmp_path / "plain")
    work = plain.work()
    rollout, rewards = plain.decode(work), torch.linspace(-1, 1, len(work.lengths), device=plain.device)
    _, expected = gradients_of(plain, work, rollout, rewards)
    compiled, _ = product_on(DEVICE, tmp_path / "compiled", use_compile=1)
    work = compiled.work()
    assert compiled.decode(work).completion_mask.sum(1).tolist() == work.lengths
    _, found = gradients_of(compiled, work, rollout, rewards)
    assert relative_difference(found[0], expected[0]) <= 1e-4
