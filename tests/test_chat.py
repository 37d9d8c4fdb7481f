"""scripts/chat.py: what appears on the screen and when, what is remembered, and what it refuses."""

import io
import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from model.model_minimind import MiniMindForCausalLM
from scripts import chat
from scripts.chat import DIM, PLAIN, Chat, Screen, conversation_ids, main, parse_args, talk
from trainer.arguments import REPO_ROOT, STARTER_DIR
from trainer.prompts import messages_from_ids

STARTER = STARTER_DIR / "starter_sft_128.pth"
END = 2


class Terminal(io.StringIO):
    """Keeps what was written, piece by piece."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def screen(tokenizer, colour=False) -> Screen:
    return Screen(tokenizer, Terminal(), colour=colour, end_ids=[END])


def feed(shown: Screen, ids) -> None:
    for token in ids:
        shown.on_token(torch.tensor([token]))


# ---------------------------------------------------------------------------------------------- the screen
def test_text_appears_token_by_token(tokenizer):
    shown = screen(tokenizer)
    shown.begin(thinking=False)
    ids = tokenizer("The answer is 42.", add_special_tokens=False)["input_ids"]
    feed(shown, ids)
    assert shown.out.pieces == [tokenizer.decode([token]) for token in ids]
    feed(shown, [END])
    shown.end()
    assert shown.text == "The answer is 42." and shown.out.getvalue() == "The answer is 42.\n"


def test_a_character_appears_once_all_its_bytes_are_there(tokenizer):
    """Tokens of a byte-level vocabulary may hold a third of a character."""
    text = "𠮷🙂é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)
    shown = screen(tokenizer)
    shown.begin(thinking=False)
    feed(shown, ids)
    assert "".join(shown.out.pieces) == text and "\ufffd" not in shown.out.pieces
    assert [piece for piece in shown.out.pieces if piece] == list(text)


def test_half_a_character_at_the_end_is_shown_as_what_it_is(tokenizer):
    ids = tokenizer("🙂", add_special_tokens=False)["input_ids"]
    shown = screen(tokenizer)
    shown.begin(thinking=False)
    feed(shown, ids[:-1])
    assert shown.out.getvalue() == ""
    shown.end()
    assert shown.text == shown.out.getvalue().rstrip("\n") == "\ufffd"
    # bytes that never make a character are not held back for ever
    shown.begin(thinking=False)
    feed(shown, [ids[-1]] * 40)
    assert len(shown.text) > 16


@pytest.mark.parametrize("colour", [True, False])
def test_thinking_is_dimmed_on_a_terminal_and_plain_elsewhere(tokenizer, colour):
    shown = screen(tokenizer, colour)
    shown.begin(thinking=True)
    feed(shown, tokenizer("2+2</think>\n\n4", add_special_tokens=False)["input_ids"])
    shown.end()
    dim, plain = (DIM, PLAIN) if colour else ("", "")
    assert shown.out.getvalue() == f"{dim}<think>\n2+2</think>{plain}\n\n4{plain}\n"
    assert shown.text == "2+2</think>\n\n4"


def test_a_block_that_the_model_opens_itself_is_dimmed_too(tokenizer):
    shown = screen(tokenizer, colour=True)
    shown.begin(thinking=False)
    feed(shown, tokenizer("a<think>b</think>c", add_special_tokens=False)["input_ids"])
    assert shown.out.getvalue() == f"a{DIM}<think>b</think>{PLAIN}c"


def test_an_answer_stopped_while_thinking_leaves_no_colour_behind(tokenizer):
    shown = screen(tokenizer, colour=True)
    shown.begin(thinking=True)
    feed(shown, tokenizer("2+", add_special_tokens=False)["input_ids"])
    shown.end()
    assert shown.out.getvalue().endswith(f"2+{PLAIN}\n")


# ---------------------------------------------------------------------------------------------- the conversation
def turns_of(count: int) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} {'word ' * 5}"} for i in range(count)]


def test_the_oldest_turns_go_first_and_the_system_stays(tokenizer):
    whole = conversation_ids(tokenizer, "Be kind.", turns_of(7), 10_000, False)
    assert [m["role"] for m in messages_from_ids(tokenizer, whole)] == ["system", *["user", "assistant"] * 3, "user"]
    cut = conversation_ids(tokenizer, "Be kind.", turns_of(7), len(whole) - 1, False)
    seen = messages_from_ids(tokenizer, cut)
    assert [m["role"] for m in seen] == ["system", *["user", "assistant"] * 2, "user"] and len(cut) < len(whole)
    assert seen[0]["content"] == "Be kind." and seen[1]["content"].startswith("turn 2")
    (last,) = messages_from_ids(tokenizer, conversation_ids(tokenizer, None, turns_of(7), 24, True))
    assert last["role"] == "user" and last["content"].endswith("word ") and "turn 6" not in last["content"]


class Model:
    """Says `answers` in turn, and keeps the prompts and settings it was given."""

    device, config = "cpu", SimpleNamespace(max_position_embeddings=600)

    def __init__(self, tokenizer, *answers):
        self.tokenizer, self.answers, self.asked = tokenizer, list(answers), []

    def decode(self, ids, *, on_token, **settings):
        self.asked.append((messages_from_ids(self.tokenizer, ids[0].tolist()), settings))
        answer = self.answers.pop(0)
        for token in self.tokenizer(answer.removesuffix("^C"), add_special_tokens=False)["input_ids"]:
            on_token(torch.tensor([token]))
        if answer.endswith("^C"):
            raise KeyboardInterrupt
        on_token(torch.tensor([END]))


def conversation(tokenizer, *answers, **changes) -> Chat:
    args = SimpleNamespace(**{"system": None, "open_thinking": 0, "max_seq_len": 200, "max_new_tokens": 500,
                              "history": 9, "temperature": 0.5, "top_p": 0.9, **changes})  # fmt: skip
    return Chat(Model(tokenizer, *answers), tokenizer, args, screen(tokenizer))


def test_history_without_the_thinking(tokenizer):
    talked = conversation(tokenizer, "2+2</think>\n\nIt is 4.", "so</think>Yes.", open_thinking=1, system="Short.")
    talk(talked, ["2+2?\n", "\n", "Sure?\n"])
    assert [message["content"] for message in talked.model.asked[1][0]] == ["Short.", "2+2?", "It is 4.", "Sure?"]
    settings = talked.model.asked[0][1]
    assert settings == {"max_new_tokens": 500, "temperature": 0.5, "top_p": 0.9, "eos_token_id": [END]}
    assert talked.limit == 100  # 600 positions leave that beside 500 new tokens


def test_new_forgets_and_history_limits(tokenizer):
    talked = conversation(tokenizer, "a", "b", "c", "d", history=1)
    talk(talked, ["1", "2", "3", "/new", "4"])
    said = [[message["content"] for message in messages] for messages, _ in talked.model.asked]
    assert said == [["1"], ["1", "a", "2"], ["2", "b", "3"], ["4"]]
    alone = conversation(tokenizer, "a", "b", history=0)
    talk(alone, ["1", "2"])
    assert [len(messages) for messages, _ in alone.model.asked] == [1, 1]


def test_ctrl_c_stops_the_answer_and_not_the_talk(tokenizer):
    talked = conversation(tokenizer, "It is^C", "half a th^C", "Fine.", "Good.")
    talked.args.open_thinking = 0
    assert not talked.ask("1?")
    assert talked.turns[-1] == {"role": "assistant", "content": "It is"}
    talked.args.open_thinking = 1
    assert not talked.ask("2?") and talked.turns[-1]["content"] == ""  # only thinking so far, which is not remembered
    talked.args.open_thinking = 0
    assert talked.ask("3?") and talked.screen.out.getvalue().endswith("Fine.\n")


def test_ctrl_c_as_an_answer_ends_leaves_whole_turns(tokenizer, monkeypatch):
    talked = conversation(tokenizer, "a", "b", "c")
    talk(talked, ["1"])
    with monkeypatch.context() as patch:
        patch.setattr(talked.screen, "end", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        talk(talked, ["2"])
    talk(talked, ["3"])
    assert [message["content"] for message in talked.model.asked[-1][0]] == ["1", "a", "3"]


def test_new_tokens_must_leave_room(tokenizer):
    with pytest.raises(ValueError, match="--max_new_tokens 600 fills the model's 600 positions"):
        conversation(tokenizer, max_new_tokens=600)


# ---------------------------------------------------------------------------------------------- the script
def flags(*words: str) -> list[str]:
    return ["--weights", str(STARTER), "--device", "cpu", "--threads", "1", "--temperature", "0", *words]


def test_one_answer(capsys):
    assert main(flags("--prompt", "12 + 30 = ?", "--open_thinking", "1")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("<think>\n") and "</think>" in shown and shown.endswith("\n") and "\x1b" not in shown


def test_the_seed_fixes_the_answer(capsys):
    said = []
    for seed in ("1", "1", "2"):
        main(flags("--prompt", "12 + 30 = ?", "--temperature", "2", "--max_new_tokens", "20", "--seed", seed))
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(("stdin", "words", "answers"), [("12 + 30 = ?\n\n7 + 5 = ?", ("--history", "0"), 2),
                                                         ("12 +\n30 = ?\n", ("--prompt", "-"), 1)])  # fmt: skip
def test_from_a_pipe(monkeypatch, capsys, stdin, words, answers):
    asked = []
    decode = MiniMindForCausalLM.decode
    monkeypatch.setattr(MiniMindForCausalLM, "decode", lambda self, ids, **rest: asked.append(ids) or
                        decode(self, ids, **rest))  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert main(flags(*words)) == 0
    assert len(asked) == answers and "> " not in capsys.readouterr().out


def test_a_blank_pipe_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    with pytest.raises(ValueError, match="--prompt -: the standard input is blank"):
        main(flags("--prompt", "-"))


def test_a_stopped_answer_ends_a_single_question_with_130(monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(MiniMindForCausalLM, "decode", stopped)
    assert main(flags("--prompt", "Hi")) == 130


@pytest.mark.parametrize(
    ("words", "expected"),
    [((), "--weights: name a .pth, such as"), (("--weights", "gone.pth"), "gone.pth is not there; expected a .pth"),
     (("--weights", "scripts"), "scripts is a folder without config.json; expected a .pth"),
     (("--weights", str(STARTER), "--prompt", " "), "--prompt: it is blank"),
     (("--weights", str(STARTER), "--temperature", "-1"), "--temperature")],
)  # fmt: skip
def test_wrong_flags_are_refused_in_one_line(words, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(list(words))
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and expected in shown and shown.count("\n") == 1


def test_a_person_types_until_ctrl_d(monkeypatch, capsys):
    typed = iter(["one", KeyboardInterrupt, "two", EOFError])

    def answer(prompt):
        said = next(typed)
        if not isinstance(said, str):
            raise said
        return said

    monkeypatch.setattr("builtins.input", answer)
    assert list(chat.typed_lines()) == ["one", "two"]
    assert "Ctrl-D leaves" in capsys.readouterr().out


def read_until(terminal: int, mark: bytes) -> bytes:
    """What the terminal shows, up to the mark; fails after a minute without it."""
    shown = b""
    while mark not in shown:
        assert select.select([terminal], [], [], 60)[0], shown
        try:
            shown += os.read(terminal, 4096)
        except OSError as error:
            raise AssertionError(f"the process ended; it showed {shown.decode()}") from error
    return shown


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_real_terminal(tiny_weights):
    """A process on a terminal: dimmed thinking, Ctrl-C stops an endless answer, Ctrl-D leaves with status 0."""
    terminal, other_end = os.openpty()
    command = [sys.executable, "scripts/chat.py", "--weights", str(tiny_weights / "tiny_64.pth"), "--device", "cpu",
               "--open_thinking", "1", "--temperature", "0", "--max_new_tokens", "30000"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, cwd=REPO_ROOT, env=environment, stdin=other_end, stdout=other_end,
                               stderr=other_end, start_new_session=True,
                               # it is ignored, and stays so, where a shell started the tests with `&`
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    try:
        os.close(other_end)
        assert b"Ctrl-D leaves" in read_until(terminal, b"> ")
        os.write(terminal, b"Hi\n")
        read_until(terminal, f"{DIM}<think>".encode())
        assert os.read(terminal, 1)  # it writes
        process.send_signal(signal.SIGINT)
        assert PLAIN.encode() in read_until(terminal, b"\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(terminal)
