"""RLAIFDataset: conversations from a JSONL file to prompts, with errors that name file, line and field.

A row is `{"conversations": [{"role": "user", "content": …}, …], "answer": …}` (MiniMind's format, `answer` optional),
the same under `messages` (OpenAI), or with `from` / `value` turns (ShareGPT). No `datasets` package.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import TemplateError
from torch.utils.data import Dataset

from trainer.prompts import chatml_ids, encode_chat, messages_from_ids, truncate_prompt

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# MiniMind adds a system prompt of this kind to a fifth of the rows that have none; these are our own.
SYSTEM_PROMPTS = (
    "You are a helpful assistant. Answer clearly and correctly.",
    "You are a careful assistant. Say so when you are not sure.",
    "You are a friendly assistant who keeps answers short.",
    "Answer the question as well as you can, in the language it is asked in.",
    "You are a patient teacher. Explain your answer in plain words.",
    "你是一个乐于助人的助手，请给出清楚、正确的回答。",
    "你是一个认真的助手，不确定的内容请直接说明。",
    "你是一个友好的助手，回答尽量简短。",
    "请用提问所用的语言，尽可能好地回答问题。",
    "你是一位耐心的老师，请用通俗的话解释答案。",
)
_DRAW_STREAM = 0x5A17  # keeps these draws apart from others made of the same seed


@dataclass(frozen=True)
class Row:
    """One conversation up to its last question: what the policy is to answer, and where it was read."""

    messages: list
    tools: list | None
    answer: str
    metadata: dict | None
    line: int


class _BadRow(ValueError):
    """What is wrong with a row; the reader adds file and line."""


def _kind(value) -> str:
    """What a JSON value is, in the words of an error."""
    if value is None:
        return "null"
    if isinstance(value, (str, list, dict)) and not value:
        return {str: "an empty string", list: "an empty list", dict: "an empty object"}[type(value)]
    return {str: "a string", list: "a list", dict: "an object", bool: "true or false"}.get(type(value), "a number")


def _text(value, field: str) -> str:
    """The value, if it is a text that can be encoded."""
    if not isinstance(value, str):
        raise _BadRow(f"{field} is {_kind(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow(f"{field} holds half of a surrogate pair (\\ud800-\\udfff), expected valid Unicode") from error
    return value


def _json_list(value, field: str) -> list:
    """A list given as JSON or, as MiniMind's tool rows do, as a string of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _BadRow(f"{field} is a string that is not JSON ({error})") from error
    if not isinstance(value, list):
        raise _BadRow(f"{field} is {_kind(value)}, expected a list")
    return value


def _parse_turn(turn, field: str) -> dict:
    """{"role", "content"} (and "tool_calls") of a turn in either spelling."""
    if not isinstance(turn, dict):
        raise _BadRow(f"{field} is {_kind(turn)}, expected an object with role and content")
    role_key, content_key = ("from", "value") if "role" not in turn and "from" in turn else ("role", "content")
    for key in (role_key, content_key):
        if key not in turn and not (key == "content" and turn.get("tool_calls")):
            raise _BadRow(f"{field} has no {key!r} (its keys: {', '.join(map(str, turn)) or 'none'})")
    role = turn[role_key]
    if role_key == "from" and isinstance(role, str):
        role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        expected = ", ".join(ROLES if role_key == "role" else ("human", "gpt", "system"))
        raise _BadRow(f"{field}.{role_key} is {role!r}, expected one of {expected}")
    content = turn.get(content_key)
    calls = turn.get("tool_calls") if role == "assistant" else None
    if calls and content is None:
        content = ""
    parsed = {"role": role, "content": _text(content, f"{field}.{content_key}")}
    if role == "user" and not content.strip():
        raise _BadRow(f"{field}.{content_key} is blank, expected the user's words")
    if calls:
        parsed["tool_calls"] = _json_list(calls, f"{field}.tool_calls")
    return parsed


def _parse_answer(value) -> str:
    """The expected answer as text; "" where the row has none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value, "answer")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _BadRow(f"answer is {value!r}, expected a string or a finite number")
    return str(value)


def _parse_row(line: str, number: int, cut_off: bool) -> Row:
    """The row that a line of JSON holds. Raises _BadRow."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; it is the last line and has no line end, so the file may be cut off" if cut_off else ""
        raise _BadRow(f"not JSON ({error}){hint}") from error
    if not isinstance(data, dict):
        raise _BadRow(f"the row is {_kind(data)}, expected an object with a 'conversations' list")
    key = "conversations" if "conversations" in data or "messages" not in data else "messages"
    if key not in data:
        raise _BadRow(
            f"no 'conversations' (keys found: {', '.join(data) or 'none'}), expected a list of turns under that name"
        )
    turns = data[key]
    if not isinstance(turns, list) or not turns:
        raise _BadRow(f"{key} is {_kind(turns)}, expected a non-empty list of turns")
    messages = [_parse_turn(turn, f"{key}[{i}]") for i, turn in enumerate(turns)]
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise _BadRow(f"{key} has no turn of the user, expected at least one")
    if messages[-1]["role"] not in ("user", "tool"):
        raise _BadRow(
            f"{key}[{len(messages) - 1}] is a turn of role {messages[-1]['role']!r}, expected the conversation to end "
            "with the user's turn (or the assistant's answer to it, which is left out)"
        )
    tools = next((turn["tools"] for turn in turns if turn.get("tools")), data.get("tools"))
    metadata = data.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise _BadRow(f"metadata is {_kind(metadata)}, expected an object")
    tools = _json_list(tools, "tools") if tools else None
    return Row(messages, tools, _parse_answer(data.get("answer")), metadata, number)


def read_rows(jsonl_path, *, skip_bad_rows: bool = False) -> tuple[list[Row], list[str]]:
    """(rows, what was wrong with each skipped line) of a UTF-8 JSONL file; BOM, CRLF and blank lines are fine.

    Raises: FileNotFoundError if there is no such file; ValueError naming file, line and field for the first bad row
    (unless they are skipped), and for a file without a single row.
    """
    path = Path(jsonl_path).expanduser()
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"data file {path} {found}; expected a JSONL file (--data_path)")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise RuntimeError(f"data file {path} cannot be read: {error}") from error
    rows, bad = [], []
    # Split at line feeds only: str.splitlines would also cut at U+2028, which may stand inside a JSON string.
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        try:
            rows.append(_parse_row(raw.decode("utf-8"), number, cut_off=number == len(lines)))
        except UnicodeDecodeError as error:
            bad.append(f"{path}, line {number}: not UTF-8 (byte {error.start + 1} of the line), expected a UTF-8 file")
        except _BadRow as error:
            bad.append(f"{path}, line {number}: {error}")
        if bad and not skip_bad_rows:
            raise ValueError(bad[0])
    if not rows:
        reason = (
            f"none of its {len(bad)} rows is usable; the first: {bad[0]}"
            if bad
            else "it is empty or has only blank lines"
        )
        raise ValueError(f"data file {path} has no rows: {reason}; expected one conversation a line")
    return rows, bad


class RLAIFDataset(Dataset):
    """Prompts for the policy to answer, one a row of a JSONL file; all rows are checked on construction.

    Which rows think (`thinking_ratio`) and which get a system prompt (`system_ratio`, only rows without one and without
    tools) is a pure function of (seed, epoch, index): the same in any worker, order, batch size or resumed run.
    """

    def __init__(
        self,
        jsonl_path,
        tokenizer,
        max_length=1024,
        thinking_ratio=0.5,
        *,
        system_ratio=0.2,
        seed=42,
        skip_bad_rows=False,
    ):
        """Read and check the file, then try its first row.

        Args: max_length: tokens of a prompt, headers included; a longer one keeps its end (`truncate_prompt`).
        thinking_ratio, system_ratio: chances from 0 to 1. skip_bad_rows: leave malformed rows out (`skipped` counts
        them, one line says which) instead of stopping at the first.
        Raises: FileNotFoundError, ValueError: one message with file, line and field.
        """
        for name, ratio in (("thinking_ratio", thinking_ratio), ("system_ratio", system_ratio)):
            if not 0 <= ratio <= 1:
                raise ValueError(f"{name} is {ratio}, expected a chance from 0 to 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected a whole number of at least 0")
        self.path = Path(jsonl_path).expanduser()
        self.tokenizer, self.max_length, self.seed, self.epoch = tokenizer, max_length, seed, 0
        self.thinking_ratio, self.system_ratio = thinking_ratio, system_ratio
        self.rows, bad = read_rows(jsonl_path, skip_bad_rows=skip_bad_rows)
        self.skipped = len(bad)
        if bad and os.environ.get("RANK", "0") == "0":
            print(f"skipped {len(bad)} malformed of {len(bad) + len(self.rows)} rows; the first: {bad[0]}", flush=True)
        # A template that refuses the rows, or a max_length without room for the headers, shows before models load.
        for thinking in (False, True):
            self._build(0, thinking, None)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the draws. Call it before iterating: workers take a copy when they start."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def draws(self, index: int) -> tuple[bool, str | None]:
        """(whether the row thinks, the system prompt it would be given or None): a function of (seed, epoch, index)."""
        entropy = np.random.SeedSequence([_DRAW_STREAM, self.seed, self.epoch, index])
        thinking, system, choice = np.random.Generator(np.random.Philox(entropy)).random(3)
        prompt = SYSTEM_PROMPTS[int(choice * len(SYSTEM_PROMPTS))] if system < self.system_ratio else None
        return bool(thinking < self.thinking_ratio), prompt

    def __getitem__(self, index: int) -> dict:
        """The prompt of a row.

        Returns: "prompt" text and "prompt_ids" (use the ids: in the text a typed control string looks like a real one),
        "messages" [{"role", "content"}] as the policy sees them after truncation, "answer" ("" = none),
        "metadata" (the row's own object for reward functions, or None), "index".
        """
        index = range(len(self.rows))[index]
        return self._build(index, *self.draws(index))

    def _build(self, index: int, thinking: bool, system_prompt: str | None) -> dict:
        row = self.rows[index]
        messages = row.messages
        if system_prompt is not None and row.tools is None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        try:
            text, ids = encode_chat(self.tokenizer, messages, open_thinking=thinking, tools=row.tools)
            kept = truncate_prompt(self.tokenizer, ids, self.max_length)
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise ValueError(f"{self.path}, line {row.line}: cannot make a prompt: {error}") from error
        if len(kept) < len(ids):
            text = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if chatml_ids(self.tokenizer) is not None or len(kept) < len(ids):
            seen = messages_from_ids(self.tokenizer, kept)
        else:
            seen = [{"role": message["role"], "content": message["content"]} for message in messages]
        return {"prompt": text, "prompt_ids": kept, "messages": seen, "answer": row.answer,
                "metadata": row.metadata, "index": index}


def collate_rows(rows: list[dict]) -> dict[str, list]:
    """The rows of a batch as one dict of lists, in order; a `collate_fn` for DataLoader."""
    return {key: [row[key] for row in rows] for key in rows[0]}
