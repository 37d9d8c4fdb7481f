"""LoRA in small runs of both scripts: only adapters learn, the reference is the start, files hold the merged model."""

import pytest
import small_runs as small
import torch
from option_runs import see

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_grpo, train_ppo
from trainer.checkpoints import read_torch_file
from trainer.lora import AdapterOff, load_lora

NAMES = {train_grpo: "grpo", train_ppo: "ppo_actor"}
BOTH = pytest.mark.parametrize("script", NAMES)


@pytest.fixture(scope="module")
def weights(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lively")
    small.write_weights(folder, len(tokenizer), use_moe=True)
    return small.write_weights(folder, len(tokenizer))


@pytest.mark.parametrize("use_moe", [0, 1])
@BOTH
def test_only_adapters_learn_and_files_hold_the_merged_model(script, use_moe, weights, tmp_path):
    found = see(script, weights, tmp_path, prompts=6, lora_rank=2, lora_alpha=6.0, learning_rate=1e-2, use_moe=use_moe)
    before, after = found.steps[0]["weights"][0], found.steps[-1]["after"][0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.endswith((".lora_a", ".lora_b")) for name in moved)
    assert any(name.endswith(".lora_a") for name in moved) and any(name.endswith(".lora_b") for name in moved)
    assert isinstance(found.run.reference, AdapterOff)
    assert found.lines[0]["kl"] == 0 or script is train_ppo
    assert found.lines[-1]["kl"] > 1e-6
    # the files, read without any help of the run
    tail = "_64_moe" if use_moe else "_64"
    start = read_torch_file(weights / f"lively{tail}.pth")
    written = read_torch_file(found.folder / f"{NAMES[script]}{tail}.pth")
    assert written.keys() == start.keys(), "MiniMind's names"
    adapters = read_torch_file(found.folder / f"{NAMES[script]}{tail}_adapters.pth")
    assert (adapters["rank"], adapters["alpha"]) == (2, 6.0)
    for name, tensor in start.items():
        layer, expected = name.removesuffix(".weight"), tensor.float()
        if f"{layer}.lora_a" in adapters["adapters"]:
            a, b = (adapters["adapters"][f"{layer}.{part}"] for part in ("lora_a", "lora_b"))
            expected = expected + 3.0 * b @ a
        torch.testing.assert_close(written[name].float(), expected, atol=1e-3, rtol=2e-3)
    model = MiniMindForCausalLM(MiniMindConfig(small.WIDTH, small.LAYERS, bool(use_moe),
                                               vocab_size=len(start["lm_head.weight"])))
    model.load_state_dict(start)
    load_lora(model, adapters)
    assert small.same_state(small.state_of(model), {name: after[name] for name in small.state_of(model)})


@BOTH
def test_the_reference_is_the_start_at_every_step(script, weights, tmp_path):
    """With adapters that have moved, it scores as the model that was loaded, bit for bit; at first the KL is 0."""
    found = see(script, weights, tmp_path, prompts=6, lora_rank=2, learning_rate=1e-2, dtype="bfloat16",
                micro_batch_tokens=0, **({"ppo_update_iters": 1} if script is train_ppo else {}))
    assert found.lines[0]["kl"] == 0.0 and found.lines[1]["kl"] > 1e-6
    plain = see(script, weights, tmp_path, prompts=6, learning_rate=1e-9, dtype="bfloat16")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(found.run.reference(ids).logits, plain.run.reference(ids).logits)
        assert not torch.equal(next(iter(found.run.models.values()))(ids).logits, plain.run.reference(ids).logits)


@BOTH
def test_another_rank_on_resume_is_refused(script, weights, tmp_path):
    options = {"prompts": 6, "lora_rank": 2, "learning_rate": 1e-2}
    see(script, weights, tmp_path, **options, max_steps=1, save_dir=tmp_path / "resumed")
    with pytest.raises(ValueError, match="--lora_rank is 0, but the run being resumed has 2"):
        see(script, weights, tmp_path, **{**options, "lora_rank": 0}, from_resume=1, save_dir=tmp_path / "resumed")


def test_the_critic_learns_whole(weights, tmp_path):
    found = see(train_ppo, weights, tmp_path, lora_rank=2, max_steps=1)
    assert all(p.requires_grad for p in found.run.critic.parameters())
    before, after = found.steps[0]["weights"][1], found.steps[-1]["after"][1]
    assert not any("lora" in name for name in before)
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
