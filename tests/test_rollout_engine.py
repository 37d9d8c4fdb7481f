"""Scoring tokens and sampling answers: one distribution, whichever model, batch, order or rank a row is in."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import prompts, tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainer.rollout_engine import (
    TorchRolloutEngine, answer_keys, compute_per_token_logps, create_rollout_engine, row_uniforms, sample_answers,
    score_tokens,
)  # fmt: skip

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
KEYS = [(1, 42, 0, 5), (1, 42, 0, 3), (1, 42, 0, 8)]  # one a prompt of tiny_models.prompts()


def qwen():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def moe():
    return tiny(use_moe=True)


def pick(rows):
    """The prompts and keys of these rows."""
    ids, mask = prompts()
    return ids[rows], mask[rows], [KEYS[row] for row in rows]


def rollout(model, tokenizer, rows=(0, 1, 2), num_generations=2, max_new_tokens=12, temperature=0.8, **settings):
    ids, mask, keys = pick(list(rows))
    engine = TorchRolloutEngine(model, tokenizer)
    return engine.rollout(ids, mask, num_generations, max_new_tokens, temperature, prompt_keys=keys, **settings)


def plain_logps(model, ids, mask, temperature=1.0):
    """[N, W - 1] by log_softmax over everything."""
    logits = model(ids, attention_mask=mask).logits[:, :-1].float()
    return (logits / temperature).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


# ---------------------------------------------------------------------------------------------- scoring
class FixedLogits(nn.Module):
    """A causal LM whose every position has these logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0):
        self.kept = logits_to_keep
        return CausalLMOutputWithPast(logits=self.logits.expand(input_ids.size(0), logits_to_keep, -1))


def test_scores_divide_the_logits_by_the_temperature():
    # logits [2, 1, 0] / 0.5 = [4, 2, 0]; logsumexp = 4 + ln(1 + e^-2 + e^-4) = 4.1429
    model, ids = FixedLogits([2.0, 1.0, 0.0]), torch.tensor([[0, 0, 1, 2]])
    scored = compute_per_token_logps(model, ids, 3, temperature=0.5)
    torch.testing.assert_close(scored, torch.tensor([[-0.1429, -2.1429, -4.1429]]), atol=5e-5, rtol=0)
    assert scored.dtype == torch.float32 and model.kept == 4  # the prompt's own logits are never computed


@pytest.mark.parametrize("build", [tiny, moe, qwen, llama])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_scores_equal_a_plain_log_softmax(build, temperature):
    model, (ids, mask) = build(), prompts()
    for n_keep in (1, 3, 4):
        scored = compute_per_token_logps(model, ids, n_keep, mask, temperature)
        expected = plain_logps(model, ids, mask, temperature)[:, -n_keep:]
        counts = (mask[:, :-1] & mask[:, 1:]).bool()[:, -n_keep:]  # token and what predicts it are both real
        assert scored.shape == (3, n_keep) and counts.any()
        torch.testing.assert_close(scored[counts], expected[counts], atol=5e-6, rtol=0)


def test_gradient_of_scores_is_that_of_a_plain_log_softmax():
    gradients = []
    for score in (lambda model, ids: compute_per_token_logps(model, ids, 2, temperature=0.8),
                  lambda model, ids: plain_logps(model, ids, None, 0.8)[:, -2:]):
        model, (ids, _) = tiny(), prompts()
        (score(model, ids) * torch.tensor([[1.0, -2.0]])).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_padding_changes_no_score():
    model, (ids, mask) = tiny(), prompts()
    alone = compute_per_token_logps(model, ids[1:2, 3:], 1)
    for garbage in (0, 2, 39):
        padded = ids.masked_fill(mask == 0, garbage)
        torch.testing.assert_close(compute_per_token_logps(model, padded, 1, mask)[1:2], alone, atol=1e-6, rtol=0)


def test_nothing_to_score_and_too_much(tokenizer):
    ids, _ = prompts()
    for n_keep in (0, -3):
        empty = compute_per_token_logps(tiny(), ids, n_keep)
        assert empty.shape == (3, 0) and empty.dtype == torch.float32
    with pytest.raises(ValueError, match=r"n_keep 5 of input_ids \(3, 5\)"):
        compute_per_token_logps(tiny(), ids, 5)


def test_load_balancing_loss_comes_with_the_scores_in_training_only():
    ids, mask = prompts()
    assert score_tokens(tiny(), ids, 2, mask).aux_loss == 0
    assert score_tokens(qwen(), ids, 2, mask).aux_loss == 0
    model = moe()
    assert score_tokens(model, ids, 2, mask).aux_loss == 0
    loss = score_tokens(model.train(), ids, 2, mask).aux_loss
    assert loss > 0 and loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_float32(dtype):
    model, (ids, mask) = tiny(), prompts()
    with torch.autocast("cpu", dtype), torch.no_grad():
        half = compute_per_token_logps(model, ids, 1, mask)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, compute_per_token_logps(model, ids, 1, mask), atol=0.1, rtol=0)


# ---------------------------------------------------------------------------------------------- randomness
def test_uniforms_are_a_function_of_the_row_s_key():
    keys = answer_keys([(1, 42, 0, 7), (1, 42, 0, 8)], 3)
    assert keys[:4] == [(1, 42, 0, 7, 0), (1, 42, 0, 7, 1), (1, 42, 0, 7, 2), (1, 42, 0, 8, 0)]
    drawn = row_uniforms(keys, 5)
    assert drawn.shape == (6, 5) and drawn.dtype == torch.float64
    assert bool(((drawn >= 0) & (drawn < 1)).all()) and len(set(drawn.flatten().tolist())) == 30
    assert torch.equal(row_uniforms(keys[4:5], 5), drawn[4:5])
    assert torch.equal(row_uniforms(keys, 9)[:, :5], drawn)  # a longer answer only adds
    state = torch.get_rng_state()
    row_uniforms(keys, 2)
    assert torch.equal(torch.get_rng_state(), state)


def answers_of(result):
    """Each row's tokens up to its end."""
    return [ids[keep].tolist() for ids, keep in zip(result.completion_ids, result.completion_mask, strict=True)]


@pytest.mark.parametrize("build", [tiny, moe])
def test_an_answer_depends_on_its_prompt_and_key_alone(build, tokenizer):
    """Not on batch size, order, padding, how many answers others get, or how far others run."""
    model = build()
    together = rollout(model, tokenizer, num_generations=3)
    answers = answers_of(together)
    assert len({str(answer) for answer in answers}) == 9  # no two answers are alike

    def check(result, rows, length=12):
        assert answers_of(result) == [answers[i][:length] for i in rows]
        width = result.per_token_logps.size(1)
        torch.testing.assert_close(result.per_token_logps, together.per_token_logps[rows, :width], atol=1e-5, rtol=0)

    for row in range(3):
        check(rollout(model, tokenizer, rows=[row], num_generations=3), [3 * row, 3 * row + 1, 3 * row + 2])
    check(rollout(model, tokenizer, rows=[2, 0, 1], num_generations=3), [6, 7, 8, 0, 1, 2, 3, 4, 5])
    check(rollout(model, tokenizer, num_generations=2), [0, 1, 3, 4, 6, 7])
    check(rollout(model, tokenizer, num_generations=3, max_new_tokens=4), list(range(9)), length=4)


def test_another_key_gives_another_answer_and_no_key_asks_torch(tokenizer):
    model, (ids, mask) = tiny(), prompts()
    engine = TorchRolloutEngine(model, tokenizer)

    def answers(keys):
        return answers_of(engine.rollout(ids, mask, 2, 12, prompt_keys=keys))

    assert answers(KEYS) == answers(KEYS) != answers([(*key, 1) for key in KEYS])
    torch.manual_seed(1)
    first = answers(None)
    assert answers(None) != first
    torch.manual_seed(1)
    assert answers(None) == first


# ---------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("build", [tiny, moe, qwen, llama])
def test_rollout_result_fits_together(build, tokenizer):
    ids, mask = prompts()
    result = rollout(build(), tokenizer, num_generations=20, max_new_tokens=12)
    n, width = 60, result.completion_ids.size(1)
    assert result.output_ids.shape == result.attention_mask.shape == (n, 5 + width)
    assert result.completion_mask.shape == result.per_token_logps.shape == (n, width)
    assert result.completion_mask.dtype == result.attention_mask.dtype == result.finished.dtype == torch.bool
    assert result.per_token_logps.dtype == torch.float32 and len(result.completions) == n
    assert result.prompt_lens.tolist() == [5] * n
    for i in range(n):  # row i belongs to prompt i // 20
        assert torch.equal(result.output_ids[i, :5], ids[i // 20])
        assert torch.equal(result.attention_mask[i, :5], mask[i // 20].bool())
    assert torch.equal(result.output_ids[:, 5:], result.completion_ids)
    assert torch.equal(result.attention_mask[:, 5:], result.completion_mask)
    assert result.finished.any() and not result.finished.all()  # both kinds are among them
    for row, keep, logps, finished in zip(result.completion_ids, result.completion_mask, result.per_token_logps,
                                          result.finished, strict=True):
        length = int(keep.sum())
        assert keep.tolist() == [True] * length + [False] * (width - length) and length >= 1
        assert (2 in row[:length].tolist()) == bool(finished) == (row[length - 1] == 2)
        assert finished or length == 12
        assert row[length:].tolist() == [0] * (width - length) and not logps[length:].any()


@pytest.mark.parametrize("build", [tiny, qwen])
def test_a_sampled_pad_id_in_the_middle_counts(build, tokenizer):
    result = rollout(build(), tokenizer, num_generations=40)
    middle = [(i, j) for i, j in (result.completion_ids == 0).nonzero().tolist()
              if j + 1 < int(result.completion_mask[i].sum())]
    assert middle, "no answer of this seed holds the pad id"
    for i, j in middle:
        assert result.completion_mask[i, : j + 2].all() and result.attention_mask[i, 5 + j] == 1
        assert result.per_token_logps[i, j] < 0


@pytest.mark.parametrize("build", [tiny, moe, qwen, llama])
@pytest.mark.parametrize("settings", [
    {}, {"temperature": 1.0}, {"logp_temperature": 1.0}, {"top_p": 0.9, "top_k": 10}, {"temperature": 0.0},
], ids=str)  # fmt: skip
def test_log_probs_of_the_rollout_are_those_of_the_trainer(build, settings, tokenizer):
    model = build()
    result = rollout(model, tokenizer, num_generations=4, **settings)
    temperature = settings.get("logp_temperature") or settings.get("temperature", 0.8) or 1.0
    again = compute_per_token_logps(model, result.output_ids, result.completion_ids.size(1),
                                    result.attention_mask.long(), temperature)
    gap = (again - result.per_token_logps).masked_fill(~result.completion_mask, 0.0).abs().max()
    assert gap <= 1e-4
    assert (result.per_token_logps[result.completion_mask] < 0).all()


@pytest.mark.parametrize("build", [tiny, qwen])
def test_greedy_answers_are_the_likeliest_tokens_whatever_the_key(build, tokenizer):
    model = build()
    result = rollout(model, tokenizer, num_generations=2, max_new_tokens=5, temperature=0)
    assert torch.equal(result.completion_ids[0::2], result.completion_ids[1::2])
    logits = model(result.output_ids, attention_mask=result.attention_mask.long()).logits[:, 4:-1]
    keep = result.completion_mask
    assert torch.equal(logits.argmax(-1)[keep], result.completion_ids[keep])


def test_texts_leave_out_control_tokens_and_what_follows_the_end(tiny_weights, tokenizer):
    ids = tokenizer("one two three", add_special_tokens=False)["input_ids"]
    answers = [[*ids, 2, ids[0], ids[1]], [1, *ids, 0, ids[0]]]
    width = max(map(len, answers))
    completion = torch.tensor([row + [ids[1]] * (width - len(row)) for row in answers])
    mask = torch.arange(width) < torch.tensor([[len(ids) + 1], [len(answers[1])]])

    class Scripted(TorchRolloutEngine):
        def _generate(self, model, *rest):
            return completion, torch.zeros(mask.shape), mask, torch.tensor([True, False])

    result = Scripted(FixedLogits([0.0]), tokenizer).rollout(torch.tensor([[5]]), torch.tensor([[1]]), 2, width)
    assert result.completions == ["one two three", "one two three" + tokenizer.decode(ids[:1])]


# ---------------------------------------------------------------------------------------------- the engine
@pytest.mark.parametrize("build", [tiny, qwen])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_s_mode_is_left_as_it_was_and_dropout_is_off(build, training, tokenizer):
    model = build()
    expected = rollout(model, tokenizer)
    for module in model.modules():
        for name in {"p", "attention_dropout"} & set(vars(module)):
            setattr(module, name, 0.5)
    model.train(training)
    result = rollout(model, tokenizer)
    assert answers_of(result) == answers_of(expected)
    assert torch.equal(result.per_token_logps, expected.per_token_logps)
    assert all(module.training == training for module in model.modules())
    assert not result.per_token_logps.requires_grad


def test_a_part_that_was_frozen_in_eval_mode_stays_so_even_after_an_error(tokenizer, monkeypatch):
    model = qwen().train()
    model.lm_head.eval()
    rollout(model, tokenizer)
    assert model.training and not model.lm_head.training
    monkeypatch.setattr(model, "forward", lambda *positional, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rollout(model, tokenizer)
    assert model.training and model.model.training and not model.lm_head.training


def test_generate_leaves_torch_s_random_state_alone(tokenizer):
    model = qwen()
    state = torch.get_rng_state()
    first = answers_of(rollout(model, tokenizer))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert answers_of(rollout(model, tokenizer)) == first  # its randomness comes from the keys as well


def test_the_engine_samples_from_the_policy_it_was_given_last(tokenizer):
    first, second = tiny(), tiny(initializer_range=0.3)
    ids, mask = prompts()
    engine = TorchRolloutEngine(first, tokenizer)
    expected = answers_of(TorchRolloutEngine(second, tokenizer).rollout(ids, mask, 2, 6, prompt_keys=KEYS))
    assert answers_of(engine.rollout(ids, mask, 2, 6, prompt_keys=KEYS)) != expected
    engine.update_policy(second)
    assert answers_of(engine.rollout(ids, mask, 2, 6, prompt_keys=KEYS)) == expected


def test_policy_and_engine_share_the_autocast(tokenizer):
    model, (ids, mask) = tiny(), prompts()
    autocast = torch.autocast("cpu", torch.bfloat16)
    engine = TorchRolloutEngine(model, tokenizer, autocast_ctx=autocast)
    result = engine.rollout(ids, mask, 2, 6, prompt_keys=KEYS)
    engine.rollout(ids, mask, 2, 6, prompt_keys=KEYS)  # the context is entered more than once
    with autocast, torch.no_grad():
        half = compute_per_token_logps(model, result.output_ids, result.completion_ids.size(1),
                                       result.attention_mask.long(), 0.8)
    full = compute_per_token_logps(model, result.output_ids, result.completion_ids.size(1),
                                   result.attention_mask.long(), 0.8)
    gaps = [(scores - result.per_token_logps)[result.completion_mask].abs().max() for scores in (half, full)]
    assert gaps[0] < 0.2 and gaps[1] > 1e-4  # it did decode in bfloat16


def test_sample_answers_pads_prompts_and_follows_the_flags(tokenizer):
    seen = []

    class Recorder(TorchRolloutEngine):
        def rollout(self, *positional, **named):
            seen.append((positional, named))

    args = SimpleNamespace(max_seq_len=9, max_gen_len=7, top_p=0.9, top_k=4, logp_temperature=1.0)
    sample_answers(Recorder(None, tokenizer), tokenizer, [[5, 6, 7], [8]], KEYS[:2], args, "cpu", num_generations=3,
                   temperature=0.7)
    (ids, mask, *rest), named = seen[0]
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert rest == [3, 7, 0.7]
    assert named == {"top_p": 0.9, "top_k": 4, "logp_temperature": 1.0, "prompt_keys": KEYS[:2],
                     "on_progress": None}


def test_create_rollout_engine(tokenizer):
    model = tiny()
    engine = create_rollout_engine("torch", model, tokenizer, "cpu")
    assert isinstance(engine, TorchRolloutEngine) and engine.policy_model is model
    with pytest.raises(ValueError, match="--rollout_engine vllm: expected torch"):
        create_rollout_engine("vllm", model, tokenizer)
