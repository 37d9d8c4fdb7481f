"""The rules that pick a token, worked by hand; refused arguments; MiniMind's generate."""

import math

import pytest
import torch
from tiny_models import answers, prompts, tiny, uniforms

from model.sampling import BLOCK, SamplingRules, draw, first_above, keep_likeliest, penalize_repeats, pick_tokens

INF = math.inf
LIST = torch.tensor


# ---- the rules, by hand ----


def test_draw_by_hand():
    # probabilities 0.1, 0, 0.4, 0.5, 0: steps at 0.1, 0.5 and 1
    logits = LIST([0.1, 0.0, 0.4, 0.5, 0.0], dtype=torch.float64).log().float()
    cases = [(0.0, 0), (0.0999, 0), (0.1001, 2), (0.4999, 2), (0.5001, 3), (0.999999, 3), (1 - 2**-53, 3), (1.0, 3)]
    points = LIST([u for u, _ in cases], dtype=torch.float64)
    tokens, shares = draw(logits.softmax(-1).expand(len(cases), -1), points)
    assert tokens.tolist() == [token for _, token in cases]
    # exactly on a step the next token is due (strictly above), and a leading token of probability 0 stays out at 0
    exact = LIST([[-INF, 0.0, 0.0, -INF]])
    assert draw(exact.softmax(-1), LIST([0.5], dtype=torch.float64))[0].tolist() == [2]
    assert draw(exact.softmax(-1), LIST([0.0], dtype=torch.float64))[0].tolist() == [1]


def test_draw_has_the_right_frequencies():
    logits = LIST([[0.3, -1.0, 1.2, 0.0]])
    points = (torch.arange(10000, dtype=torch.float64) + 0.5) / 10000
    counts = torch.bincount(draw(logits.softmax(-1).expand(10000, -1), points)[0], minlength=4)
    torch.testing.assert_close(counts / 10000, logits[0].softmax(-1), atol=2e-4, rtol=0)


def test_first_above_by_hand():
    weights = LIST([[0.0, 2.0, 0.0, 1.0, 3.0, 0.0]], dtype=torch.float64)  # running sums 0, 2, 2, 3, 6, 6
    cases = [(0.0, 1, 0), (1.9, 1, 0), (2.0, 3, 2), (2.9, 3, 2), (3.0, 4, 3), (6.0, 4, 3), (-1.0, 1, 0)]
    for target, index, before in cases:
        found = first_above(weights, LIST([[target]], dtype=torch.float64))
        assert (found[0].item(), found[1].item()) == (index, before), target


@pytest.mark.parametrize("vocabulary", [3 * BLOCK, 2 * BLOCK + 5, BLOCK, 7])
def test_draw_in_blocks_equals_a_walk_over_the_tokens(vocabulary):
    """Half of the tokens, the first and last ones too, have probability 0, and a whole block of them."""
    generator = torch.Generator().manual_seed(8)
    probs = torch.rand(1, vocabulary, generator=generator) * torch.rand(1, vocabulary, generator=generator).gt(0.5)
    probs[:, 0] = probs[:, -1] = 0
    probs[:, BLOCK : 2 * BLOCK] = 0
    probs[:, 3] = 0.7
    ends = probs[0].double().cumsum(0)
    steps = ends / ends[-1]
    anywhere = torch.rand(200, dtype=torch.float64, generator=generator)
    points = torch.cat([anywhere, steps - 1e-9, steps + 1e-9, LIST([0, 1])]).clamp(0, 1)
    tokens, shares = draw(probs.expand(len(points), -1), points)
    for point, token, share in zip(points.tolist(), tokens.tolist(), shares.tolist()):
        want = next((i for i, end in enumerate(ends.tolist()) if end > point * ends[-1].item()), None)
        if want is None:
            want = int(probs[0].nonzero().max())
        assert token == want and share == pytest.approx(probs[0, token].item() / ends[-1].item(), rel=1e-12)


@pytest.mark.parametrize("temperature", [0.8, 0.0])
@pytest.mark.parametrize("rule", [{}, {"top_k": 5}, {"top_p": 0.7}, {"logp_temperature": 1.5}])
def test_log_probabilities_are_those_of_the_plain_distribution(rule, temperature):
    """Also of a large vocabulary, where a float32 softmax is off by 1e-5; by the short way or by the long one."""
    logits = torch.randn(4, 150001, generator=torch.Generator().manual_seed(9)) * 3
    rules = SamplingRules(temperature, 1.0, 0, 1.0, 0.8)._replace(**rule)
    token, logp = pick_tokens(logits, uniforms(4, 1)[:, 0], None, rules)
    want = (logits.double() / rules.logp_temperature).log_softmax(-1).gather(1, token[:, None]).squeeze(1)
    torch.testing.assert_close(logp, want.float(), atol=3e-6, rtol=0)
    assert logp.dtype == torch.float32
    if temperature == 0:
        assert token.equal(logits.argmax(dim=1))
    elif not rule:
        cut = pick_tokens(logits, uniforms(4, 1)[:, 0], None, rules._replace(logp_temperature=0.8 + 1e-12))
        assert cut[0].equal(token), "the two ways draw alike"


def test_top_k_by_hand():
    logits = LIST([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert keep_likeliest(logits, top_k=1, top_p=1.0).tolist() == [[-INF, 3.0, -INF, -INF, -INF]]
    assert keep_likeliest(logits, top_k=2, top_p=1.0).tolist() == [[-INF, 3.0, 2.0, 2.0, -INF]]  # equals stay
    assert keep_likeliest(logits, top_k=4, top_p=1.0).tolist() == [[1.0, 3.0, 2.0, 2.0, -INF]]
    for top_k in (0, 5, 99):
        assert keep_likeliest(logits, top_k=top_k, top_p=1.0).equal(logits)


def test_top_p_by_hand():
    logits = LIST([[0.1, 0.4, 0.2, 0.3]]).log()

    def kept(top_p, top_k=0):
        return torch.isfinite(keep_likeliest(logits, top_k=top_k, top_p=top_p))[0].nonzero().flatten().tolist()

    assert kept(1e-9) == [1]
    assert kept(0.39) == [1]
    assert kept(0.41) == [1, 3]
    assert kept(0.69) == [1, 3]
    assert kept(0.71) == [1, 2, 3]
    assert kept(0.91) == [0, 1, 2, 3]
    # top-k first: of the two left the probabilities are 4/7 and 3/7
    assert kept(0.56, top_k=2) == [1]
    assert kept(0.58, top_k=2) == [1, 3]


def test_repetition_penalty_by_hand():
    logits = LIST([[2.0, -2.0, 3.0, -3.0]])
    seen = LIST([[True, True, False, False]])
    assert penalize_repeats(logits, seen, 4.0).tolist() == [[0.5, -8.0, 3.0, -3.0]]


def test_penalty_counts_prompt_and_answer_but_no_padding():
    """A model that always says the same: with a large penalty it must take the next best each time."""
    model = tiny()
    model.model.norm.weight.data.zero_()
    order = [7, 9, 0, 3]
    ranking = torch.full((40,), 0.1)
    ranking[order] = LIST([4.0, 3.0, 2.5, 2.0])
    model.lm_head = torch.nn.Linear(32, 40)
    model.lm_head.weight.data.zero_()
    model.lm_head.bias.data = ranking
    ids, mask = LIST([[0, 0, 9], [0, 5, 6]]), LIST([[0, 0, 1], [0, 1, 1]])
    settings = {"temperature": 0, "repetition_penalty": 100.0, "eos_token_id": []}
    decoded = model.decode(ids, mask, max_new_tokens=3, num_generations=2, **settings)
    assert answers(decoded) == [[7, 0, 3], [7, 0, 3], [7, 9, 0], [7, 9, 0]]
    # the log-probability is that of the plain distribution
    torch.testing.assert_close(decoded.logps[2], ranking.log_softmax(-1)[LIST([7, 9, 0])])


def test_top_k_one_is_greedy_and_small_top_p_too():
    model = tiny()
    ids, mask = prompts()
    greedy = model.decode(ids, mask, max_new_tokens=8, temperature=0)
    for rule in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        sampled = model.decode(ids, mask, max_new_tokens=8, uniforms=uniforms(3), logp_temperature=1.0, **rule)
        assert sampled.completion_ids.equal(greedy.completion_ids)
        torch.testing.assert_close(sampled.logps, greedy.logps)


# ---- arguments ----


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_generations": 0}, "num_generations"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logp_temperature": 0.0}, "logp_temperature"),
        ({"eos_token_id": 40}, "eos_token_id 40"),
        ({"eos_token_id": [2, -1]}, "eos_token_id -1"),
        ({"uniforms": torch.rand(2, 4)}, "uniforms"),
        ({"uniforms": torch.rand(3, 3)}, "uniforms"),
        ({"uniforms": torch.full((3, 4), 1.5)}, "uniforms"),
        ({"uniforms": torch.full((3, 4), torch.nan)}, "uniforms"),
        ({"attention_mask": torch.ones(3, 4)}, "attention_mask"),
        ({"attention_mask": torch.ones(3, 5) * LIST([[1], [0], [1]])}, "row 1 has no real token"),
        ({"input_ids": torch.full((3, 5), 40)}, "token id 40"),
        ({"input_ids": torch.full((3, 5), -1)}, "token id -1"),
        ({"input_ids": torch.zeros(5, dtype=torch.long)}, "input_ids"),
        ({"input_ids": torch.zeros(3, 0, dtype=torch.long)}, "input_ids"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, name):
    ids, mask = prompts()
    arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4} | changes
    with pytest.raises(ValueError, match=name):
        tiny().decode(**arguments)


# ---- MiniMind's generate ----


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.pieces.append("end")


def test_generate_gives_prompts_with_answers():
    model = tiny()
    ids, mask = prompts()
    greedy = model.decode(ids, mask, max_new_tokens=30, temperature=0, eos_token_id=[2, 20])
    out = model.generate(ids, mask, max_new_tokens=30, do_sample=False, eos_token_id=[2, 20], num_return_sequences=2)
    assert out[:, :5].equal(ids.repeat_interleave(2, 0))
    for i in range(6):
        keep = greedy.mask[i // 2]
        assert out[i, 5:][keep].equal(greedy.completion_ids[i // 2][keep])
        assert out[i, 5:][~keep].eq(2).all(), "MiniMind fills with the EOS"
    padded = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, eos_token_id=list(range(30)), pad_token_id=39
    )
    assert padded.shape[1] > 5


def test_generate_samples_with_minimind_s_defaults():
    model = tiny(max_position_embeddings=16)
    ids, mask = prompts()
    torch.manual_seed(4)
    out = model.generate(ids, mask)
    assert out.shape[1] <= 16, "8192 new tokens are cut to what the context leaves"
    torch.manual_seed(4)
    decoded = model.decode(ids, mask, max_new_tokens=11, temperature=0.85, top_p=0.85, top_k=50)
    assert out[:, 5:][decoded.mask].equal(decoded.completion_ids[decoded.mask])
    with pytest.raises(ValueError, match="leaves no room"):
        model.generate(torch.full((1, 16), 5))


def test_generate_feeds_a_streamer():
    model = tiny()
    streamer = Recorder()
    out = model.generate(LIST([[5, 6, 7]]), max_new_tokens=4, streamer=streamer, do_sample=False, eos_token_id=[])
    assert streamer.pieces == [[[5, 6, 7]], *[[token] for token in out[0, 3:].tolist()], "end"]


def test_generate_refuses_what_it_does_not_know():
    model = tiny()
    with pytest.raises(TypeError, match="num_beams"):
        model.generate(LIST([[5]]), num_beams=4)
    with pytest.raises(ValueError, match="inputs or as input_ids"):
        model.generate(LIST([[5]]), input_ids=LIST([[5]]))
    with pytest.raises(ValueError, match="temperature"):
        model.generate(LIST([[5]]), temperature=-1.0)
