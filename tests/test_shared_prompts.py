"""A prompt read once for its answers gives what reading it again for each answer gives, in value and in gradient."""

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.rl_math import selective_logps
from trainer.rollout_engine import score_tokens

B, G, P, R, V = 3, 4, 9, 6, 50


def batch():
    """Left-padded prompts of 9, 5 and 1 tokens; answers of 1 to 6 tokens; the padding holds arbitrary ids."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(V, (B, P), generator=generator)
    answers = torch.randint(V, (B * G, R), generator=generator)
    prompt_mask = torch.arange(P) >= torch.tensor([0, 4, 8])[:, None]
    answer_mask = torch.arange(R) < (torch.arange(B * G) % R + 1)[:, None]
    return prompts, prompt_mask, answers, answer_mask


def gradients(model, logps, mask):
    weights = torch.linspace(-1.0, 2.0, logps.numel()).view_as(logps)
    (logps * weights)[mask].sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def test_values_and_gradients_equal_the_repeated_prompt():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=V)).train()
    prompts, prompt_mask, answers, answer_mask = batch()
    ids = torch.cat([prompts.repeat_interleave(G, 0), answers], dim=1)
    mask = torch.cat([prompt_mask.repeat_interleave(G, 0), answer_mask], dim=1)
    repeated = score_tokens(model, ids, R, mask.long(), 0.8).logps
    expected = gradients(model, repeated, answer_mask)
    output = model(answers, attention_mask=answer_mask, prompts=(prompts, prompt_mask))
    assert output.logits.shape == (1, int(answer_mask.sum()), V)  # none is worked out for padding
    flat = selective_logps(output.logits, answers[answer_mask][None], temperature=0.8)[0]
    shared = torch.zeros(B * G, R).masked_scatter(answer_mask, flat)
    torch.testing.assert_close(shared[answer_mask], repeated[answer_mask], atol=1e-5, rtol=0)
    found = gradients(model, shared, answer_mask)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)


def test_padding_of_prompts_and_answers_does_not_matter():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=V))
    prompts, prompt_mask, answers, answer_mask = batch()
    once = model(answers, attention_mask=answer_mask, prompts=(prompts, prompt_mask)).logits
    other = model(answers.masked_fill(~answer_mask, 7), attention_mask=answer_mask,
                  prompts=(prompts.masked_fill(~prompt_mask, 9), prompt_mask)).logits
    torch.testing.assert_close(once, other, atol=1e-6, rtol=0)


def test_any_rows_of_any_prompts_give_what_all_rows_give():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=V))
    prompts, prompt_mask, answers, answer_mask = batch()
    everything = model(answers, attention_mask=answer_mask, prompts=(prompts, prompt_mask)).logits[0]
    rows = torch.tensor([1, 9, 11])  # of prompts 0, 2 and 2
    some = model(answers[rows], attention_mask=answer_mask[rows],
                 prompts=(prompts[[0, 2]], prompt_mask[[0, 2]], torch.tensor([0, 1, 1]))).logits[0]
    row_of_token = answer_mask.nonzero()[:, 0]
    torch.testing.assert_close(some, everything[torch.isin(row_of_token, rows)], atol=1e-6, rtol=0)


def test_checkpointed_layers_give_the_same_gradients():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=V, use_moe=True)).train()
    prompts, prompt_mask, answers, answer_mask = batch()
    found = []
    for model.model.gradient_checkpointing in (False, True):
        output = model(answers, attention_mask=answer_mask, prompts=(prompts, prompt_mask))
        (output.logits.square().sum() + output.aux_loss).backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for kept, again in zip(*found, strict=True):
        assert kept.equal(again)


def test_experts_balance_counts_a_prompt_once():
    """One balance loss over the tokens that are read, whatever their number."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(
        MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=V, use_moe=True)
    ).train()
    prompts, prompt_mask, answers, answer_mask = batch()
    aux = model(answers, attention_mask=answer_mask, prompts=(prompts, prompt_mask)).aux_loss
    # one layer's loss is at least coefficient · 1 for balanced experts and at most coefficient · E
    assert 2 * 5e-4 * 0.9 < aux.item() < 2 * 5e-4 * 4
    aux.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


def test_answers_must_divide_by_prompts():
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=1, vocab_size=V))
    prompts, prompt_mask, answers, answer_mask = batch()
    with pytest.raises(ValueError, match="11 answers to 3 prompts"):
        model(answers[:11], attention_mask=answer_mask[:11], prompts=(prompts, prompt_mask))


@pytest.mark.parametrize("use_moe", [False, True])
def test_states_nobody_asks_for_change_nothing_else(use_moe):
    """The last layer leaves them out behind its attention; the others, and all gradients, are as with them."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(64, 3, use_moe, vocab_size=V)).train()
    prompts, prompt_mask, answers, answer_mask = batch()
    ids = torch.cat([prompts.repeat_interleave(G, 0), answers], dim=1)
    mask = torch.cat([prompt_mask.repeat_interleave(G, 0), answer_mask], dim=1)
    wanted = torch.arange(P + R).expand(B * G, -1) % 3 > 0  # padding too, which stays 0
    every, _, balance = model.model(ids, mask)
    (every[wanted].sin().sum() + balance).backward()
    expected = {name: p.grad.clone() for name, p in model.model.named_parameters()}
    model.zero_grad()
    some, _, same_balance = model.model(ids, mask, wanted=wanted)
    (some.sin().sum() + same_balance).backward()
    torch.testing.assert_close(some, every * wanted[..., None], atol=1e-5, rtol=0)
    torch.testing.assert_close(same_balance, balance)
    for name, p in model.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-5, rtol=1e-4)
    cached = model.model(ids, mask, use_cache=True, wanted=wanted)[0]
    torch.testing.assert_close(cached * mask[..., None], some, atol=1e-5, rtol=0)


def test_the_last_layer_works_for_wanted_tokens_alone():
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=V))
    prompts, prompt_mask, answers, answer_mask = batch()
    rows = [[], []]
    for layer, seen in zip(model.model.layers, rows):
        layer.mlp.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(len(args[0])))
    model(answers, attention_mask=answer_mask, prompts=(prompts, prompt_mask))
    tokens, predicted = int(prompt_mask.sum() + answer_mask.sum()), int(answer_mask.sum())
    assert rows == [[tokens], [predicted]]
