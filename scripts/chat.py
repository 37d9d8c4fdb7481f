"""Talk to trained weights in the terminal.

    python scripts/chat.py --weights out/grpo_128.pth --open_thinking 1        a conversation
    python scripts/chat.py --weights out/grpo_128.pth --prompt "12 + 30 = ?"   one answer
    printf '12 + 30 = ?\\n7 + 5 = ?\\n' | python scripts/chat.py --weights out/grpo_128.pth

The answer appears as it is written; on a terminal its thinking is dimmed. Ctrl-C stops an answer, Ctrl-D leaves, /new
forgets what was said. From a pipe, each line is a turn. Sizes are read off the weights.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))

from trainer.arguments import (  # noqa: E402
    FlagParser, device_name, non_negative_float, non_negative_int, positive_fraction, positive_int, seed_number,
    settle_weights, switch,
)  # fmt: skip


def parse_args(argv=None) -> argparse.Namespace:
    """The flags. Exits with status 2 on a wrong one, or without weights."""
    parser = FlagParser("Talk to trained weights. Ctrl-C stops an answer, Ctrl-D leaves, /new forgets what was said.")
    add = parser.group("who answers")
    add("--weights", str, None, "what to talk to: a .pth such as out/grpo_128.pth, whose sizes are read off it, or "
        "a folder of transformers such as out/grpo-hf")
    add("--tokenizer_path", str, str(REPO_ROOT / "model"), "folder of the tokenizer the weights were trained with; "
        "that of --weights, where this is a folder, unless given")
    add("--trust_remote_code", switch, 0, "1 = run Python code that the tokenizer's folder brings along")
    add("--device", device_name, "auto", "auto (CUDA where there is one), cpu, cuda or cuda:K")
    add("--threads", non_negative_int, 0, "CPU threads; 0 = torch's choice, one a core")

    add = parser.group("the conversation")
    add("--prompt", str, None, "answer this and leave; - reads it from the standard input, to its end")
    add("--system", str, None, "the system's words at the start of every conversation")
    add("--open_thinking", switch, 0, "1 = the model thinks first: the answer starts in an open <think> block")
    add("--history", non_negative_int, 100, "earlier questions that are remembered with their answers; 0 = each "
        "stands alone, as the starter was trained")
    add("--max_seq_len", positive_int, 2048, "longest conversation in tokens; of a longer one the oldest turns are "
        "left out, never the system's words")

    add = parser.group("how it answers")
    add("--max_new_tokens", positive_int, 512, "longest answer in tokens")
    add("--temperature", non_negative_float, 0.8, "sampling temperature; 0 = always the likeliest token")
    add("--top_p", positive_fraction, 1.0, "sample from the smallest set of tokens that holds this much probability; 1 "
        "= all")
    add("--seed", seed_number, 42, "fixes the answers to the same turns")
    args = parser.parse_args(argv)
    if args.weights is None:
        parser.error("argument --weights: name a .pth, such as out/grpo_128.pth or model/starter/starter_sft_128.pth")
    settle_weights(parser, args, argv)
    if args.prompt is not None and not args.prompt.strip():
        parser.error("argument --prompt: it is blank, expected some words")
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag or --help is answered here, before the seconds that importing torch takes

import torch  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from model.model_minimind import MiniMindForCausalLM  # noqa: E402
from trainer.evaluation import load_for_inference  # noqa: E402
from trainer.loading import load_tokenizer  # noqa: E402
from trainer.prompts import encode_chat, truncate_prompt  # noqa: E402
from trainer.rewards import THINK_CLOSE, THINK_OPEN, answer_part  # noqa: E402
from trainer.rollout_engine import answer_ends  # noqa: E402
from trainer.trainer_utils import run_main, start_process  # noqa: E402

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
LONGEST_CHARACTER = 16  # tokens that are held back at most while they may be the beginning of a character


class Screen:
    """Writes an answer, token by token, to `out`; `colour`: dim what lies between <think> and </think>.

    `text` is the answer so far. A token may hold part of a character: it is shown once the character is whole.
    """

    def __init__(self, tokenizer, out, *, colour: bool, end_ids: list[int]):
        self.tokenizer, self.out, self.colour, self.end_ids = tokenizer, out, colour, end_ids
        self.tags = {tokenizer.convert_tokens_to_ids(tag): tag for tag in (THINK_OPEN, THINK_CLOSE)}
        self.begin(thinking=False)

    def begin(self, *, thinking: bool) -> None:
        """Start an answer; thinking: the prompt has opened the think block."""
        self.held, self.text = [], ""
        if thinking:
            self._colour(DIM)
            self._write(f"{THINK_OPEN}\n")

    def on_token(self, ids) -> None:
        """Show the next token, ids long [1], if it is not the end."""
        token = int(ids[0])
        if token in self.end_ids:
            return
        if self.tags.get(token) == THINK_OPEN:
            self._colour(DIM)
        self.held.append(token)
        piece = self._decode()
        if piece.endswith("\ufffd") and len(self.held) < LONGEST_CHARACTER:
            return
        self._show(piece)
        if self.tags.get(token) == THINK_CLOSE:
            self._colour(PLAIN)

    def end(self) -> None:
        """Show what was held back, and end the line."""
        self._show(self._decode())
        self._colour(PLAIN)
        self._write("\n")

    def _decode(self) -> str:
        return self.tokenizer.decode(self.held, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _show(self, piece: str) -> None:
        self.held = []
        self.text += piece
        self._write(piece)

    def _colour(self, code: str) -> None:
        if self.colour:
            self._write(code)

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


def conversation_ids(tokenizer, system: str | None, turns: list[dict], limit: int, open_thinking: bool) -> list[int]:
    """The prompt's ids, at most `limit`: the oldest question and its answer go first; a last question keeps its end."""
    first = [{"role": "system", "content": system}] if system else []
    while True:
        _, ids = encode_chat(tokenizer, first + turns, open_thinking=open_thinking)
        if len(ids) <= limit or len(turns) == 1:
            return truncate_prompt(tokenizer, ids, limit)
        turns = turns[2:]


class Streamed(BaseStreamer):
    """Hands on the tokens that `.generate` makes, one by one; it is given the prompt first."""

    def __init__(self, on_token):
        self.on_token, self.prompt_came = on_token, False

    def put(self, value) -> None:
        if self.prompt_came:
            self.on_token(value)
        self.prompt_came = True

    def end(self) -> None:
        """Nothing is held back here."""


def write_answer(model, ids: list[int], args, end_ids: list[int], on_token) -> None:
    """Sample an answer and give `on_token` each token, ids long [1], as it comes; any causal LM of transformers."""
    prompt = torch.tensor([ids], device=model.device)
    if hasattr(model, "decode"):  # MiniMind's
        model.decode(prompt, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p,
                     eos_token_id=end_ids, on_token=on_token)  # fmt: skip
        return
    how = {"do_sample": False}
    if args.temperature:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.max_new_tokens,
                   eos_token_id=end_ids, streamer=Streamed(on_token), **how)  # fmt: skip


class Chat:
    """A conversation with a model: `ask` answers a turn and remembers both."""

    def __init__(self, model, tokenizer, args, screen: Screen):
        self.model, self.tokenizer, self.args, self.screen, self.turns = model, tokenizer, args, screen, []
        positions = getattr(model.config, "max_position_embeddings", None) or 2**62
        room = positions - args.max_new_tokens
        if room < 1:
            raise ValueError(f"--max_new_tokens {args.max_new_tokens} fills the model's {positions} positions; "
                             "lower it")
        self.limit = min(args.max_seq_len, room)

    def ask(self, words: str) -> bool:
        """Show the answer; False if Ctrl-C stopped it. What was said up to then is remembered, its thinking is not."""
        kept = self.turns[len(self.turns) - min(len(self.turns), 2 * self.args.history) :]
        turns = [*kept, {"role": "user", "content": words}]
        ids = conversation_ids(self.tokenizer, self.args.system, turns, self.limit, bool(self.args.open_thinking))
        # The chat template's say: some let the model write the tag itself, or know of no thinking.
        thinking, whole = self.tokenizer.decode(ids[-8:]).rstrip().endswith(THINK_OPEN), True
        try:
            self.screen.begin(thinking=thinking)
            write_answer(self.model, ids, self.args, self.screen.end_ids, self.screen.on_token)
        except KeyboardInterrupt:
            whole = False
        self.screen.end()
        said, thought = self.screen.text, thinking or self.screen.text.lstrip().startswith(THINK_OPEN)
        answer = "" if thought and THINK_CLOSE not in said else answer_part(said)
        self.turns = [*turns, {"role": "assistant", "content": answer}]
        return whole


def talk(chat: Chat, lines) -> None:
    """Answer turn after turn until `lines` ends."""
    for line in lines:
        if line.strip() == "/new":
            chat.turns.clear()
        elif line.strip():
            with contextlib.suppress(KeyboardInterrupt):  # pressed as the answer ended: the talk goes on
                chat.ask(line.strip())


def typed_lines():
    """What a person types, a line at a time, until Ctrl-D; Ctrl-C gives up the line."""
    import readline  # noqa: F401 - gives input() its arrow keys and history

    print("Ctrl-C stops an answer, Ctrl-D leaves, /new forgets what was said.")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def main(argv=None) -> int:
    """Talk; gives the process's exit status."""
    args = parse_args(argv)
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the talk
    device = start_process(args)
    trust = bool(args.trust_remote_code)
    tokenizer = load_tokenizer(args.tokenizer_path, trust, pad_with_eos=Path(args.weights).is_dir())
    model = load_for_inference(args.weights, tokenizer, device, trust)
    end_ids = answer_ends(model, tokenizer)
    if isinstance(model, MiniMindForCausalLM):
        end_ids.append(tokenizer.pad_token_id)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    screen = Screen(tokenizer, sys.stdout, colour=colour, end_ids=end_ids)
    chat = Chat(model, tokenizer, args, screen)
    if args.prompt is not None:
        words = sys.stdin.read() if args.prompt == "-" else args.prompt
        if not words.strip():
            raise ValueError("--prompt -: the standard input is blank, expected some words")
        return 0 if chat.ask(words.strip()) else 130
    talk(chat, typed_lines() if sys.stdin.isatty() else sys.stdin)
    return 0


if __name__ == "__main__":
    run_main(main)
