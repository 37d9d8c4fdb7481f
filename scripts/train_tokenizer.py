"""Train the project's tokenizer: a byte-level BPE whose digits stand alone, with ChatML and thinking tags at fixed ids.

    python scripts/train_tokenizer.py                                       # from the starter's chat set, into model/
    python scripts/train_tokenizer.py --data my.jsonl --vocab_size 6400 --out my_tokenizer

The result depends on the text and the vocabulary size alone: the same input gives the same bytes (tokenizers
0.22.1 and 0.23.3). Ids 0-35 are fixed: 0 `<|endoftext|>` (pad, unknown), 1 `<|im_start|>` (bos), 2 `<|im_end|>` (eos),
21-26 the tags of tool calls and of thinking, the rest reserved. `decode(skip_special_tokens=True)` keeps the tags,
because rewards read them, and drops the ChatML marks.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
if str(REPO_ROOT) not in sys.path:
    sys.path.insert(0, str(REPO_ROOT))

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from dataset.starter_tasks import make_stream  # noqa: E402
from dataset.starter_text import general_lines  # noqa: E402

NUM_FIXED = 36
CHATML = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
TAGS = {
    21: "<tool_call>", 22: "</tool_call>", 23: "<tool_response>", 24: "</tool_response>", 25: "<think>", 26: "</think>",
}  # fmt: skip
FIXED_TOKENS = [CHATML.get(index) or TAGS.get(index) or f"<|reserved_{index}|>" for index in range(NUM_FIXED)]

# Words with the space before them, single digits, runs of other marks, line ends apart from blanks.
SPLIT_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+"

STARTER_TASKS = 4000
STARTER_SEED = 20
STARTER_VOCAB = 1792

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set turns = namespace(rest=messages) -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}
{{- text(messages[0].content) + '\\n\\n' -}}
{%- set turns.rest = messages[1:] -%}
{%- endif -%}
{{- 'You may call these functions, described one a line:\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{{- 'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns.rest -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- text(message.content) -}}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function or call -%}
{{- '\\n<tool_call>' + ({'name': function.name, 'arguments': function.arguments} | tojson) + '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if not open_thinking -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def starter_texts():
    """The texts the starter's tokenizer learns from: questions, responses and general sentences."""
    for task in make_stream(STARTER_TASKS, STARTER_SEED):
        yield task.question
        yield task.response
    yield from general_lines()


def jsonl_texts(path):
    """The contents of all turns in a MiniMind-style JSONL file, or its `text` fields.

    Raises: ValueError naming file and line where a line is not such a row; FileNotFoundError from opening.
    """
    with open(path, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                turns = row["conversations"] if "conversations" in row else [{"content": row["text"]}]
                texts = [turn.get("content", turn.get("value")) for turn in turns]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: expected a JSON object with `conversations` or `text`: "
                                 f"{error!r}") from error
            yield from (text for text in texts if isinstance(text, str))


def train(texts, vocab_size):
    """A `tokenizers.Tokenizer` of at most `vocab_size` entries (fewer when the text has no more pairs to merge).

    Raises: ValueError when the size leaves no room for the fixed tokens and the 256 bytes.
    """
    if vocab_size < NUM_FIXED + 256:
        raise ValueError(f"--vocab_size {vocab_size} is too small: {NUM_FIXED} fixed tokens and 256 bytes need "
                         f"{NUM_FIXED + 256}; give more, 1600 say")
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in FIXED_TOKENS])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_files(tokenizer):
    """The contents of `tokenizer.json` and `tokenizer_config.json`, as a dict from file name to text.

    Written here rather than by `save_pretrained`, whose output changes between releases of transformers.
    """
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["id"] not in TAGS  # the trainer marks all of them special
    config = {
        "add_bos_token": False, "add_eos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                                 for token in spec["added_tokens"]},
        "bos_token": CHATML[1], "eos_token": CHATML[2], "pad_token": CHATML[0], "unk_token": CHATML[0],
        "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False, "model_max_length": 32768,
        "padding_side": "left", "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {"tokenizer.json": json.dumps(spec, ensure_ascii=False, indent=1) + "\n",
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1) + "\n"}


def write_text(path, text):
    """Write a text file through a temporary name, so that a killed run leaves no half-written file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)  # mkstemp makes it private
    os.replace(temporary, path)


def write_tokenizer(texts, vocab_size, folder):
    """Train and write both files into `folder`; returns the tokenizer."""
    tokenizer = train(texts, vocab_size)
    for name, text in tokenizer_files(tokenizer).items():
        write_text(Path(folder) / name, text)
    return tokenizer


def parse_args(argv=None):
    """The command line, as a namespace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="", metavar="FILE", help="JSONL with `conversations` or `text` rows to learn "
                        "from; empty = the starter's own chat set")
    parser.add_argument("--vocab_size", type=int, default=STARTER_VOCAB, metavar="N",
                        help="entries at most, the 36 fixed ones and 256 bytes included")
    parser.add_argument("--out", default=str(REPO_ROOT / "model"), metavar="DIR",
                        help="folder for tokenizer.json and tokenizer_config.json; existing ones are replaced")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    texts = jsonl_texts(args.data) if args.data else starter_texts()
    try:
        tokenizer = write_tokenizer(texts, args.vocab_size, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"train_tokenizer: {error}")
    print(f"tokenizer of {tokenizer.get_vocab_size()} entries in {args.out}")


if __name__ == "__main__":
    main()
