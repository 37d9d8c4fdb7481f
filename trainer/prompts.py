"""From a conversation to token ids and back: chat encoding, truncation that keeps the end, left-padded batches.

Works with any Hugging Face tokenizer that has a chat template. What is said of ChatML (a message is
`<|im_start|>role\\n … <|im_end|>\\n`) holds for those with these two tokens. Letters: B prompts, P padded prompt width.
"""

import json

import torch
from transformers import BatchEncoding

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
# Tags that an assistant's message writes on purpose; everywhere else they are words that somebody typed.
ASSISTANT_TAGS = frozenset(
    {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
)


def _encode(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def control_strings(tokenizer) -> list[str]:
    """Strings that the tokenizer turns into one control token: its special tokens and its added tags such as `<think>`.

    Added tokens that are plain text (runs of blanks in some vocabularies) are not among them.
    """
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    added.update(dict.fromkeys(tokenizer.all_special_tokens, True))
    bracketed = (("<", ">"), ("[", "]"))
    tags = [text for text in added if any(text.startswith(a) and text.endswith(b) for a, b in bracketed)]
    return [text for text in added if len(text) > 1 and (added[text] or text in tags)]


def _break_up(value, strings: list[str], marker: str):
    """The value with a marker inside each occurrence of the strings, in all texts that it holds (lists, dicts)."""
    if isinstance(value, dict):
        return {_break_up(key, strings, marker): _break_up(item, strings, marker) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_break_up(item, strings, marker) for item in value]
    if not isinstance(value, str):
        return value
    cuts = set()
    for string in strings:
        start = value.find(string)
        while start >= 0:
            cuts.add(start + 1)
            start = value.find(string, start + 1)
    edges = [0, *sorted(cuts), len(value)]
    return marker.join(value[a:b] for a, b in zip(edges, edges[1:]))


def _unused_character(messages: list[dict], tools) -> str:
    """A character of Unicode's private area that stands nowhere in the conversation."""
    used = set(json.dumps([messages, tools], ensure_ascii=False, default=str))
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)


def encode_chat(
    tokenizer, messages: list[dict], *, open_thinking: bool, add_generation_prompt: bool = True, tools=None
) -> tuple[str, list[int]]:
    """(text, ids) of a conversation through the tokenizer's chat template, with what people typed kept as text.

    A control string inside the content of a user, system or tool message, or in `tools` ("what does <|im_end|> do?") is
    encoded as ordinary text; in an assistant's content that holds for all but ASSISTANT_TAGS. Every other token is the
    one that `tokenizer(text, add_special_tokens=False)` gives, and without typed control strings the ids are equal.
    How: each typed control string gets a marker inside before templating, and the rendered text is encoded in pieces
    split at the markers, so no piece holds a whole one. (A SentencePiece tokenizer may add a blank at such a split.)
    Differs from MiniMind: there a typed control string becomes a control token and can forge a turn.
    Args: open_thinking goes to the template (as `open_thinking` and as Qwen3's `enable_thinking`): True ends the prompt
    in an open `<think>` block, False in an empty one. Templates that know neither ignore it.
    Raises: ValueError if the tokenizer has no chat template; jinja2.TemplateError if the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template; expected one in "
            "tokenizer_config.json or chat_template.jinja"
        )
    strings = control_strings(tokenizer)
    of_assistant = [string for string in strings if string not in ASSISTANT_TAGS]
    marker = _unused_character(messages, tools)
    marked = [_break_up(m, of_assistant if m["role"] == "assistant" else strings, marker) for m in messages]
    rendered = tokenizer.apply_chat_template(
        marked,
        tools=_break_up(tools, strings, marker),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        open_thinking=open_thinking,
        enable_thinking=open_thinking,
    )
    pieces = rendered.split(marker)
    return "".join(pieces), [token for piece in pieces for token in _encode(tokenizer, piece)]


def chatml_ids(tokenizer) -> tuple[int, int] | None:
    """(id of <|im_start|>, id of <|im_end|>), or None where the vocabulary lacks one of them."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    return (added[IM_START], added[IM_END]) if IM_START in added and IM_END in added else None


def _segments(ids: list[int], start_id: int) -> list[list[int]]:
    """The ids split before each <|im_start|>; what stands before the first one is left out."""
    starts = [i for i, token in enumerate(ids) if token == start_id]
    return [ids[a:b] for a, b in zip(starts, starts[1:] + [len(ids)])]


def _whole_tail(tokenizer, ids: list[int], room: int) -> list[int]:
    """The longest end of the ids of at most `room` tokens that does not begin inside a character (maybe empty)."""
    whole = _decode(tokenizer, ids)
    for size in range(min(room, len(ids)), 0, -1):
        text = _decode(tokenizer, ids[-size:])
        # A cut inside a character decodes to U+FFFD; a U+FFFD that stood in the text already is one of its characters.
        if not text.startswith("\ufffd") or whole.endswith(text):
            return ids[-size:]
    return []


def _cut_message(tokenizer, segment: list[int], room: int, reserved: int, end_id: int) -> list[int]:
    """One message in at most `room` tokens: its header, the end of its content, its closing tokens.

    `reserved` tokens stand after it and are only counted in the error's minimum.
    """
    end = len(segment) - 1 - segment[::-1].index(end_id) if end_id in segment else len(segment)
    body, closing = segment[1:end], segment[end:]
    role, newline, _ = _decode(tokenizer, body).partition("\n")
    header = _encode(tokenizer, role + newline) if newline else []
    # Where the content begins with newlines, they may share a token with the header's; they go with what is cut off.
    content = body[len(header) :]
    fixed = 1 + len(header) + len(closing)
    tail = _whole_tail(tokenizer, content, room - fixed)
    if not tail:
        smallest = next((k for k in range(1, len(content) + 1) if _whole_tail(tokenizer, content, k)), 0)
        raise ValueError(
            f"a maximum prompt length of {room + reserved} tokens is too small: the last message needs at least "
            f"{fixed + smallest + reserved} with its headers; raise it (--max_seq_len)"
        )
    return [segment[0], *header, *tail, *closing]


def truncate_prompt(tokenizer, ids: list[int], max_length: int) -> list[int]:
    """The prompt's ids in at most `max_length` tokens; one that is too long keeps its end (the assistant header).

    ChatML: whole messages go first, the oldest first; where the last one alone is too long, its header stays
    (`<|im_start|>user\\n`), then the end of its content. The result begins with <|im_start|>, and no character is cut
    in two. Other prompts: the last `max_length` tokens.
    Differs from MiniMind, which cuts the ids wherever max_seq_len falls.
    Raises: ValueError if max_length has no room for the headers and one character; it says the minimum.
    """
    ids = list(ids)
    if max_length < 1:
        raise ValueError(f"a maximum prompt length of {max_length} tokens: expected at least 1 (--max_seq_len)")
    if len(ids) <= max_length:
        return ids
    controls = chatml_ids(tokenizer)
    messages = _segments(ids, controls[0]) if controls else []
    if not messages:
        return _whole_tail(tokenizer, ids, max_length)
    header = messages.pop() if controls[1] not in messages[-1] else []
    room = max_length - len(header)
    kept: list[int] = []
    for message in reversed(messages):
        if len(kept) + len(message) > room:
            break
        kept = message + kept
    if kept or not messages:
        if len(header) > max_length:
            raise ValueError(f"a maximum prompt length of {max_length} tokens: the header alone has {len(header)}")
        return kept + header
    return _cut_message(tokenizer, messages[-1], room, len(header), controls[1]) + header


def messages_from_ids(tokenizer, ids: list[int]) -> list[dict]:
    """Messages [{"role", "content"}, ...] that a prompt's ids hold; the open header at its end is not one.

    Control ids delimit, so a control string that somebody typed (text to `encode_chat`) stays in the content.
    Ids without ChatML headers are one message of the user.
    """
    ids = list(ids)
    controls = chatml_ids(tokenizer)
    segments = _segments(ids, controls[0]) if controls else []
    if not segments:
        return [{"role": "user", "content": tokenizer.decode(ids, skip_special_tokens=True)}]
    messages = []
    for segment in segments:
        if controls[1] in segment:
            role, _, content = _decode(tokenizer, segment[1 : segment.index(controls[1])]).partition("\n")
            messages.append({"role": role, "content": content})
    return messages


def encode_prompts(tokenizer, prompts: list, max_length: int, device="cpu") -> BatchEncoding:
    """`input_ids` long[B, P] and `attention_mask` long[B, P] of prompts, left padded to the longest.

    Args: prompts [B]: token ids, or texts that the chat template rendered already (control strings in a text become
    control tokens; for what people typed encode with `encode_chat` and pass ids). Each is cut by `truncate_prompt`.
    Raises: ValueError for an empty list, an empty prompt, or a tokenizer without a pad token.
    """
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError(f"encode_prompts got {prompts!r}; expected a non-empty list of texts or of token-id lists")
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token (its eos token will do)")
    rows = [_encode(tokenizer, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    for i, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {i} of {len(rows)} is empty; expected at least one token")
    rows = [truncate_prompt(tokenizer, row, max_length) for row in rows]
    width = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        input_ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        attention_mask[i, width - len(row) :] = 1
    return BatchEncoding({"input_ids": input_ids, "attention_mask": attention_mask}).to(device)
