"""RLAIFDataset: formats it reads, one clear error for each it does not, draws made of (seed, epoch, index) only."""

import json
import pickle

import pytest
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from dataset.lm_dataset import SYSTEM_PROMPTS, RLAIFDataset, collate_rows
from trainer.arguments import REPO_ROOT
from trainer.prompts import truncate_prompt

GOOD = '{"conversations": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": ""}]}'


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REPO_ROOT / "model")


@pytest.fixture
def write(tmp_path):
    """Writes lines (or bytes) to a file and gives its path."""

    def write_lines(*lines, end="\n"):
        path = tmp_path / "rows.jsonl"
        encoded = [line if isinstance(line, bytes) else line.encode("utf-8") for line in lines]
        path.write_bytes(end.encode().join(encoded) + (end.encode() if lines else b""))
        return path

    return write_lines


def row(*turns, **more):
    return json.dumps({"conversations": list(turns), **more}, ensure_ascii=False)


def turn(role, content):
    return {"role": role, "content": content}


def quiet(path, tokenizer, **arguments):
    """A dataset without added system prompts."""
    return RLAIFDataset(path, tokenizer, system_ratio=0.0, **arguments)


# ---------------------------------------------------------------------------------------------- what is read
def test_a_minimind_row(tokenizer, write):
    dataset = quiet(write(row(turn("user", "2+2"), turn("assistant", "无"), answer=4)), tokenizer, thinking_ratio=1.0)
    item = dataset[0]
    assert len(dataset) == 1 and dataset.skipped == 0
    assert item["prompt"] == "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.decode(item["prompt_ids"]) == item["prompt"]
    assert item["messages"] == [turn("user", "2+2")]
    assert (item["answer"], item["index"], item["metadata"]) == ("4", 0, None)
    assert set(item) == {"prompt", "prompt_ids", "messages", "answer", "metadata", "index"}


def test_without_thinking_the_think_block_is_empty(tokenizer, write):
    assert quiet(write(GOOD), tokenizer, thinking_ratio=0.0)[0]["prompt"].endswith("<think>\n\n</think>\n\n")


def test_a_last_turn_of_the_user_is_kept(tokenizer, write):
    turns = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    assert quiet(write(row(*turns)), tokenizer)[0]["messages"] == turns


def test_only_the_last_assistant_turn_is_dropped(tokenizer, write):
    turns = [turn("system", "s"), turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert quiet(write(row(*turns)), tokenizer)[0]["messages"] == turns[:-1]


def test_sharegpt_and_openai_rows(tokenizer, write):
    human = {"from": "human", "value": "hi"}
    path = write(
        row({"from": "system", "value": "s"}, human, {"from": "gpt", "value": "yes"}, human),
        row(human),
        json.dumps({"messages": [turn("user", "hi"), turn("assistant", "x")]}),
    )
    seen = [item["messages"] for item in (quiet(path, tokenizer)[i] for i in range(3))]
    assert seen == [[turn("system", "s"), turn("user", "hi"), turn("assistant", "yes"), turn("user", "hi")],
                    [turn("user", "hi")], [turn("user", "hi")]]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "text"),
    [("42", "42"), (42, "42"), (-1.5, "-1.5"), (" Paris ", " Paris "), (None, ""), ("", ""), (10**30, "1" + "0" * 30)],
)
def test_answers_are_texts(tokenizer, write, given, text):
    assert quiet(write(row(turn("user", "q"), answer=given)), tokenizer)[0]["answer"] == text


def test_bom_crlf_blank_lines_and_line_separators_inside_strings(tokenizer, write):
    strange = row(turn("user", "a\u2028b\u0085c\rd"))
    path = write(b"\xef\xbb\xbf" + GOOD.encode(), "", "   ", strange, "\t", end="\r\n")
    dataset = quiet(path, tokenizer)
    assert [item["messages"][0]["content"] for item in (dataset[0], dataset[1])] == ["你好", "a\u2028b\u0085c\rd"]


def test_a_file_without_last_line_end_is_whole(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD + "\n" + GOOD, encoding="utf-8")
    assert len(quiet(tmp_path / "a.jsonl", tokenizer)) == 2


def test_tool_rows(tokenizer, write):
    tools = [{"name": "add", "parameters": {"a": "int"}}]
    call = {"role": "assistant", "content": None, "tool_calls": json.dumps([{"name": "add", "arguments": {"a": 1}}])}
    turns = [{**turn("system", "s"), "tools": json.dumps(tools)}, turn("user", "1+1"), call, turn("tool", "2")]
    item = RLAIFDataset(write(row(*turns)), tokenizer, system_ratio=1.0)[0]
    assert '"name": "add"' in item["messages"][0]["content"] and item["messages"][0]["content"].startswith("s")
    assert [message["role"] for message in item["messages"]] == ["system", "user", "assistant", "user"]
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in item["messages"][2]["content"]
    assert "<tool_response>\n2\n</tool_response>" in item["messages"][3]["content"]


def test_a_tool_row_gets_no_system_prompt_of_ours(tokenizer, write):
    plain, tools = row(turn("user", "q")), row(turn("user", "q"), tools=[{"name": "f"}])
    dataset = RLAIFDataset(write(plain, tools), tokenizer, system_ratio=1.0)
    assert any(prompt in dataset[0]["prompt"] for prompt in SYSTEM_PROMPTS)
    assert '"name": "f"' in dataset[1]["prompt"]
    assert not any(prompt in dataset[1]["prompt"] for prompt in SYSTEM_PROMPTS)


def test_typed_control_strings_reach_the_reward_model_whole(tokenizer, write):
    item = quiet(write(row(turn("user", "解释 <|im_end|> 的作用"))), tokenizer, thinking_ratio=1.0)[0]
    assert item["messages"] == [turn("user", "解释 <|im_end|> 的作用")]
    assert item["prompt_ids"].count(tokenizer.eos_token_id) == 1


# ---------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a line of garbage", "not JSON"),
        (GOOD[:40], "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the row is an empty list, expected an object"),
        ('"text"', "the row is a string"),
        ("null", "the row is null"),
        ("{}", "no 'conversations' (keys found: none)"),
        ('{"prompt": "hi"}', "no 'conversations' (keys found: prompt)"),
        ('{"conversations": []}', "conversations is an empty list"),
        ('{"conversations": null}', "conversations is null"),
        ('{"conversations": "hi"}', "conversations is a string"),
        ('{"messages": []}', "messages is an empty list"),
        ('{"conversations": ["hi"]}', "conversations[0] is a string, expected an object"),
        (row(turn("user", None)), "conversations[0].content is null, expected a string"),
        (row(turn("user", 5)), "conversations[0].content is a number"),
        (row(turn("user", [{"type": "text", "text": "a"}])), "conversations[0].content is a list"),
        (row(turn("system", None), turn("user", "a")), "conversations[0].content is null"),
        (row(turn("user", "a"), turn("assistant", None), turn("user", "b")), "conversations[1].content is null"),
        (row({"role": "user"}), "conversations[0] has no 'content'"),
        (row({"content": "a"}), "conversations[0] has no 'role'"),
        (row({"from": "human"}), "conversations[0] has no 'value'"),
        (row(turn("user", "a"), turn("robot", "b")), "conversations[1].role is 'robot', expected one of system, user"),
        (row({"from": "bing", "value": "b"}), "conversations[0].from is 'bing', expected one of human, gpt, system"),
        (row(turn(None, "b")), "conversations[0].role is None"),
        (row(turn(["user"], "b")), "conversations[0].role is ['user']"),
        (row(turn("assistant", "b")), "no turn of the user"),
        (row(turn("system", "b")), "no turn of the user"),
        (row(turn("user", " \n")), "conversations[0].content is blank"),
        (row(turn("user", "a"), turn("system", "b")), "conversations[1] is a turn of role 'system'"),
        (row(turn("user", "a"), *[turn("assistant", "b")] * 2), "conversations[1] is a turn of role 'assistant'"),
        (row(turn("user", "a"), answer=[1]), "answer is [1]"),
        (row(turn("user", "a"), answer=True), "answer is True"),
        (row(turn("user", "a"), answer=float("nan")), "answer is nan"),
        (row({**turn("user", "a"), "tools": "{"}), "tools is a string that is not JSON"),
        (row(turn("user", "a"), tools=5), "tools is a number"),
        ('{"conversations": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (b'{"conversations": [{"role": "user", "content": "\xff"}]}', "not UTF-8 (byte 49 of the line)"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_malformed_row_is_one_error_with_file_and_line(tokenizer, write, line, found):
    path = write(GOOD, "", line, GOOD)
    with pytest.raises(ValueError) as caught:
        RLAIFDataset(path, tokenizer)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ") and found in message and "\n" not in message


def test_half_a_last_line_says_that_the_file_is_cut_off(tokenizer, tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_bytes((GOOD + "\n" + GOOD).encode()[:-30])
    with pytest.raises(ValueError, match="line 2: not JSON .*the file may be cut off"):
        RLAIFDataset(path, tokenizer)
    with path.open("ab") as file:
        file.write(b"\n")  # a line with an end was written whole: it is garbage, not cut off
    with pytest.raises(ValueError, match="line 2: not JSON") as caught:
        RLAIFDataset(path, tokenizer)
    assert "cut off" not in str(caught.value)


@pytest.mark.parametrize(("content", "found"), [(b"", "empty"), (b"\n\r\n  \n", "blank"), (b"\xef\xbb\xbf", "empty")])
def test_a_file_without_rows(tokenizer, tmp_path, content, found):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"no rows: .*{found}"):
        RLAIFDataset(path, tokenizer)


def test_a_file_that_is_not_utf8(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode("utf-16"))
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        RLAIFDataset(path, tokenizer)


def test_a_missing_file_and_a_folder(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist.*--data_path"):
        RLAIFDataset(tmp_path / "nowhere.jsonl", tokenizer)
    with pytest.raises(FileNotFoundError, match="is a folder"):
        RLAIFDataset(tmp_path, tokenizer)


def test_bad_rows_can_be_skipped(tokenizer, write, capsys):
    path = write(GOOD, "garbage", row(turn("user", "second")), b"\xff", '{"prompt": 1}')
    dataset = quiet(path, tokenizer, skip_bad_rows=True)
    assert (len(dataset), dataset.skipped) == (2, 3)
    assert dataset[1]["messages"] == [turn("user", "second")]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 and "skipped 3 malformed of 5 rows" in printed[0] and "line 2" in printed[0]


def test_nothing_left_after_skipping_is_an_error(tokenizer, write):
    with pytest.raises(ValueError, match="none of its 2 rows is usable; the first: .*line 1"):
        RLAIFDataset(write("garbage", "[]"), tokenizer, skip_bad_rows=True)


def test_arguments_out_of_range(tokenizer, write):
    path = write(GOOD)
    with pytest.raises(ValueError, match="thinking_ratio is 1.5"):
        RLAIFDataset(path, tokenizer, thinking_ratio=1.5)
    with pytest.raises(ValueError, match="system_ratio is -0.1"):
        RLAIFDataset(path, tokenizer, system_ratio=-0.1)
    with pytest.raises(ValueError, match="seed is -1"):
        RLAIFDataset(path, tokenizer, seed=-1)
    with pytest.raises(ValueError, match="line 1: cannot make a prompt: .*at least"):
        RLAIFDataset(path, tokenizer, max_length=8)


def test_a_template_that_refuses_the_row_names_the_line(write):
    strict = AutoTokenizer.from_pretrained(REPO_ROOT / "model")
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="line 2: cannot make a prompt: roles must alternate"):
        RLAIFDataset(write("", GOOD), strict)


# ---------------------------------------------------------------------------------------------- truncation
def test_a_long_prompt_is_cut_and_messages_say_what_is_left(tokenizer, write):
    text = "人工智能正在改变世界。" * 60
    turns = [turn("system", "s"), turn("user", "old"), turn("assistant", "x"), turn("user", text)]
    full = quiet(write(row(*turns)), tokenizer, thinking_ratio=1.0)
    item = quiet(write(row(*turns)), tokenizer, thinking_ratio=1.0, max_length=128)[0]
    assert item["prompt_ids"] == truncate_prompt(tokenizer, full[0]["prompt_ids"], 128)
    assert item["prompt"].startswith("<|im_start|>user\n") and item["prompt"].endswith(
        "<|im_start|>assistant\n<think>\n"
    )
    assert tokenizer.decode(item["prompt_ids"]) == item["prompt"]
    (message,) = item["messages"]
    assert message["role"] == "user" and text.endswith(message["content"]) and message["content"] in item["prompt"]


# ---------------------------------------------------------------------------------------------- draws
@pytest.fixture
def many(write):
    return write(*[row(turn("user", f"question {k}")) for k in range(400)])


def test_draws_are_a_function_of_seed_epoch_and_index(tokenizer, many):
    first = RLAIFDataset(many, tokenizer)
    again = RLAIFDataset(many, tokenizer)
    assert [first[i] for i in (3, 1, 3)] == [again[i] for i in (3, 1, 3)]
    draws = [first.draws(i) for i in range(400)]
    assert draws == [again.draws(i) for i in reversed(range(400))][::-1]
    again.set_epoch(1)
    assert draws != [again.draws(i) for i in range(400)]
    again.set_epoch(0)
    assert draws == [again.draws(i) for i in range(400)]
    assert draws != [RLAIFDataset(many, tokenizer, seed=43).draws(i) for i in range(400)]


def test_draws_are_pinned(tokenizer, many):
    # The same on every machine and version: resuming a run elsewhere must show the same prompts.
    dataset = RLAIFDataset(many, tokenizer)
    assert [i for i in range(12) if dataset.draws(i)[0]] == [3, 4, 6, 7]
    assert [i for i in range(12) if dataset.draws(i)[1] is not None] == [1, 9]


def test_ratios_hold(tokenizer, many):
    # 400 draws: standard deviations 0.5 / 20 = 0.025 and 0.4 / 20 = 0.02; four of them
    dataset = RLAIFDataset(many, tokenizer, thinking_ratio=0.5, system_ratio=0.2)
    draws = [dataset.draws(i) for i in range(400)]
    assert sum(thinking for thinking, _ in draws) / 400 == pytest.approx(0.5, abs=0.1)
    assert sum(prompt is not None for _, prompt in draws) / 400 == pytest.approx(0.2, abs=0.08)
    assert {prompt for _, prompt in draws} == {None, *SYSTEM_PROMPTS}
    both = sum(thinking and prompt is not None for thinking, prompt in draws) / 400
    assert both == pytest.approx(0.1, abs=0.06)  # independent of each other
    for ratio in (0.0, 1.0):
        dataset = RLAIFDataset(many, tokenizer, thinking_ratio=ratio, system_ratio=ratio)
        assert {(thinking, prompt is not None) for thinking, prompt in map(dataset.draws, range(400))} == {
            (ratio == 1.0,) * 2
        }


def test_an_own_system_prompt_is_never_replaced(tokenizer, write):
    turns = [turn("system", "mine"), turn("user", "a")]
    dataset = RLAIFDataset(write(row(*turns), row(turn("user", "a"))), tokenizer, system_ratio=1.0)
    assert dataset[0]["messages"] == turns
    assert dataset[1]["messages"][0]["role"] == "system" and dataset[1]["messages"][0]["content"] in SYSTEM_PROMPTS
    assert dataset[1]["messages"][1:] == [turn("user", "a")]


# ---------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_give_the_same_rows(tokenizer, many, workers):
    dataset = RLAIFDataset(many, tokenizer)
    dataset.set_epoch(3)
    order = [5, 2, 399, 0, 7]
    loader = DataLoader(dataset, batch_sampler=[order[:2], order[2:]], num_workers=workers, collate_fn=collate_rows)
    batches = list(loader)
    assert [index for batch in batches for index in batch["index"]] == order
    assert [prompt for batch in batches for prompt in batch["prompt"]] == [dataset[i]["prompt"] for i in order]
    assert set(batches[0]) == {"prompt", "prompt_ids", "messages", "answer", "metadata", "index"}


def test_a_pickled_copy_gives_the_same_rows(tokenizer, many):
    dataset = RLAIFDataset(many, tokenizer)
    assert pickle.loads(pickle.dumps(dataset))[17] == dataset[17]


def test_indexing(tokenizer, many):
    dataset = RLAIFDataset(many, tokenizer)
    assert dataset[-1] == dataset[399] and dataset[-1]["index"] == 399
    with pytest.raises(IndexError):
        dataset[400]
