"""The start-up check finds each thing that would make a run's numbers wrong, and says which."""

import copy
import dataclasses

import pytest
import torch

from trainer import self_check, train_grpo, train_ppo
from trainer.train_grpo import build_run, parse_args


@pytest.fixture
def run_and_args(tiny_flags):
    args = parse_args(tiny_flags())
    return build_run(args, "cpu"), args


def test_a_sound_run_passes_and_says_what_was_checked(run_and_args, capsys):
    self_check.self_check(*run_and_args)
    line = capsys.readouterr().out.strip().splitlines()[-1]
    for words in ("weights equal on all ranks", "EOS 2 and pad 0 agree", "log-probs differ by at most",
                  "KL(policy || reference) is 0", "reward of a probe answer is"):
        assert words in line


def test_an_engine_with_other_weights_is_found(run_and_args):
    run, args = run_and_args
    stale = train_grpo.build_run(parse_args_like(args, from_weight="none"), "cpu").policy
    run.engine.update_policy(stale)
    with pytest.raises(RuntimeError, match="rollout engine and trainer differ by .* nats"):
        self_check.self_check(run, args)


def test_an_engine_that_scores_at_another_temperature_is_found(run_and_args, monkeypatch):
    run, args = run_and_args
    original = run.engine.rollout

    def at_temperature_one(*positional, **named):
        return original(*positional, **{**named, "logp_temperature": 0.5})

    monkeypatch.setattr(run.engine, "rollout", at_temperature_one)
    with pytest.raises(RuntimeError, match="differ by"):
        self_check.self_check(run, args)


def test_a_reference_that_is_not_the_policy_is_found_only_at_the_start(run_and_args):
    run, args = run_and_args
    with torch.no_grad():
        run.reference.model.norm.weight.mul_(1.001)
    with pytest.raises(RuntimeError, match="policy and reference start from the same weights"):
        self_check.self_check(run, args)
    run.progress = dataclasses.replace(run.progress, step=3)
    self_check.self_check(run, args)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_found(run_and_args, monkeypatch, score):
    monkeypatch.setattr(self_check, "calculate_rewards", lambda *_, **__: torch.tensor([score]))
    with pytest.raises(RuntimeError, match="expected a finite number"):
        self_check.self_check(*run_and_args)


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
def test_ids_that_tokenizer_and_model_see_differently_are_found(run_and_args, monkeypatch, name):
    run, args = run_and_args
    monkeypatch.setattr(run.config, name, 7)
    with pytest.raises(RuntimeError, match=f"{name} is . in the tokenizer and 7 in the model"):
        self_check.self_check(run, args)


TURNS = "{% for m in messages %}"
HEADER = "{% if add_generation_prompt %}<a>{% endif %}"
TEMPLATES = {
    "header": (TURNS + "<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}" + HEADER, "prompts end where"),
    "a block that thinks": (TURNS + "<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
                            "{% if add_generation_prompt %}<a><think>{% endif %}", "prompts end where"),
    "an empty block before the answer": (
        TURNS + "<{{ m.role[0] }}>{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}</s>{% endfor %}"
        + HEADER, "prompts end where"),
    "an end token after all that is no prompt": (
        TURNS + "<{{ m.role[0] }}>{{ m.content }}{% endfor %}{{ '<a>' if add_generation_prompt else '</s>' }}",
        "prompts end where"),
    "the end of the user's turn": (TURNS + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
                                   "{{ m.content }}</s>{% endif %}{% endfor %}", "prompts end where"),
    "no answers in it": ("{% for m in messages %}{{ '<u>' + m.content if m.role == 'user' else '<a>' }}{% endfor %}",
                         "does not show in this chat template"),
    "none": (TURNS + "{{ m.content }}{% endfor %}", "nothing between a user's words and the assistant's"),
    "none for prompts": (TURNS + "<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}",
                         "puts '</s><a>' between a user's words and the assistant's, but after a prompt .* '</s>'"),
    "another for prompts": (TURNS + "<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
                            "{% if add_generation_prompt %}<b>{% endif %}", "puts '</s><a>' .* '</s><b>'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TEMPLATES)
def test_where_the_assistant_speaks_is_checked_in_all_kinds_of_chat_templates(kind, tokenizer):
    template, words = TEMPLATES[kind]
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    if words.startswith(("prompts", "does")):
        assert words in self_check.check_template(other)
    else:
        with pytest.raises(RuntimeError, match=words):
            self_check.check_template(other)


def test_a_template_without_assistant_header_is_found(run_and_args, monkeypatch):
    run, args = run_and_args
    monkeypatch.setattr(run.tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(RuntimeError, match="nothing between a user's words and the assistant's"):
        self_check.self_check(run, args)


def parse_args_like(args, **changes):
    """The same flags with some changed."""
    return type(args)(**{**vars(args), **changes})


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_a_dry_run_takes_one_step_and_writes_nothing(module, tiny_flags, tmp_path, capsys):
    assert module.main([*tiny_flags(max_gen_len=40), "--dry_run"]) == 0
    out = capsys.readouterr().out
    for words in ("self-check:", "gen ", "reward ", "update ", "peak memory", "nothing was written"):
        assert words in out
    assert not any((tmp_path / name).exists() for name in ("out", "checkpoints", "run"))


@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_the_check_is_on_by_default_and_can_be_turned_off(module, tiny_flags, monkeypatch):
    calls = []
    monkeypatch.setattr("trainer.run_state.self_check", lambda *_: calls.append(None))
    module.main(tiny_flags(max_steps=1))
    assert len(calls) == 1
    module.main(tiny_flags(max_steps=1, self_check=0, run_dir=None))
    assert len(calls) == 1
