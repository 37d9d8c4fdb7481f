"""LMForRewardModel: a frozen reward model from a local folder, scored in batches.

Two kinds of folder load: any Hugging Face `*ForSequenceClassification` with one output, natively; and models that bring
their own code with `get_score(tokenizer, messages)` (InternLM2-1.8B-reward), only with trust_remote_code.
Letters: N conversations.
"""

import json
import math
from pathlib import Path

import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from trainer.prompts import encode_chat, truncate_prompt

SCORE_LIMIT = 3.0
FLAG = "--reward_model_path"
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def _read_json(path: Path) -> dict:
    """The JSON object in a file of a model folder. Raises RuntimeError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"reward model: cannot read {path}: {error}; download the folder again") from error
    if not isinstance(content, dict):
        raise RuntimeError(f"reward model: {path} holds a JSON {type(content).__name__}, expected an object")
    return content


def _safetensors_size(path: Path, size: int) -> int:
    """The size in bytes that a safetensors file should have by its own header. Raises ValueError if it has none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError("it has no safetensors header, or only a part")
        entries = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _check_weight_file(path: Path) -> None:
    """Raises RuntimeError where a weight file is missing, unreadable, a git-lfs pointer or cut off. Reads its head."""
    if not path.is_file():
        raise RuntimeError(f"reward model: the weight file {path} is missing; download the folder again")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            is_pointer = file.read(64).startswith(b"version https://git-lfs")
        if is_pointer:
            raise ValueError("it is a git-lfs pointer, run `git lfs pull` in its folder")
        if size == 0:
            raise ValueError("it is empty")
        if path.suffix == ".safetensors":
            expected = _safetensors_size(path, size)
            if size != expected:
                raise ValueError(f"it has {size} bytes and its header says {expected}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"reward model: {path} cannot be used: {error}; or download it again") from error


def _check_weights(folder: Path) -> None:
    """Raises RuntimeError unless the folder holds one weight file or an index with all its shards."""
    for name in _WEIGHT_FILES:
        if (folder / name).exists():
            return _check_weight_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise RuntimeError(f"reward model: {index} has no weight_map; download it again")
            for shard in sorted(set(weight_map.values())):
                _check_weight_file(folder / shard)
            return None
    raise RuntimeError(
        f"reward model: no weights in {folder}; expected {' or '.join(_WEIGHT_FILES)} (or an index with shards)"
    )


def _is_native(config: dict) -> bool:
    """True for a sequence classifier whose architecture transformers has itself."""
    classifier = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    return classifier and config.get("model_type") in CONFIG_MAPPING


def _label_count(config: dict) -> int:
    """The number of outputs a config file asks for; 2 where it says nothing (transformers' default)."""
    if config.get("num_labels") is not None:
        return config["num_labels"]
    return len(config.get("id2label") or (0, 1))


def check_reward_model_path(model_path, *, trust_remote_code: bool | None = None) -> dict:
    """The parsed config of a usable reward-model folder. Takes milliseconds and loads no weights: call it first.

    Args: trust_remote_code: the flag's value; None leaves it to the loading to ask for it.
    Raises: ValueError if no path is given or the flag for remote code is missing; RuntimeError for what is wrong on
    disk. Each says what was found, what was expected and what to do.
    """
    if model_path is None or not str(model_path).strip():
        raise ValueError(f"no reward model: give the folder of one with {FLAG}")
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise RuntimeError(
            f"reward model: {folder} {found}; expected the folder of a reward model (download one of the Hub first: "
            f"`hf download NAME --local-dir FOLDER`). Give it with {FLAG}"
        )
    if not (folder / "config.json").is_file():
        raise RuntimeError(f"reward model: no config.json in {folder}; expected the folder of a Hugging Face model")
    config = _read_json(folder / "config.json")
    _check_weights(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise RuntimeError(f"reward model: no tokenizer in {folder}; expected tokenizer.json or tokenizer.model")
    if _is_native(config):
        labels = _label_count(config)
        if labels != 1:
            raise RuntimeError(f"reward model: {folder} is a classifier with {labels} outputs; expected 1 (a score)")
    elif not config.get("auto_map"):
        raise RuntimeError(
            f"reward model: {folder} holds {config.get('architectures')} of type {config.get('model_type')!r}; "
            "expected a ...ForSequenceClassification that transformers knows, or a model with its own code (auto_map)"
        )
    elif trust_remote_code is not None and not trust_remote_code:
        raise ValueError(
            f"reward model: {folder} brings its own Python code ({config['auto_map']}), which is not run by default; "
            "read it, then pass --trust_remote_code 1"
        )
    return config


class LMForRewardModel:
    """A frozen reward model: `get_score(messages, response)` in [-3, 3], or NaN where the model's output is not finite.

    `nonfinite_scores` counts the NaNs given so far; a NaN or infinity is never clipped into a number. No grad.
    Differs from MiniMind, which joins the history into one user message: the model sees the turns as they are.
    """

    def __init__(
        self, model_path, device="cpu", dtype=torch.float16, *, trust_remote_code=False, max_length=4096, batch_size=16
    ):
        """Load the model in `model_path` to `device` in `dtype`.

        Args: max_length: tokens of a conversation, cut from the front by `truncate_prompt` (native models only);
        batch_size: conversations a forward pass.
        Raises: as `check_reward_model_path`; RuntimeError if loading fails, a weight is missing from the files (a score
        head left at its random start would give noise for rewards), or the tokenizer does not fit.
        """
        config = check_reward_model_path(model_path, trust_remote_code=bool(trust_remote_code))
        self.path = Path(model_path).expanduser()
        self.native = _is_native(config)
        self.device, self.batch_size, self.nonfinite_scores = torch.device(device), batch_size, 0
        self.tokenizer, self.model = self._load(dtype, trust_remote_code and not self.native)
        self.model.to(self.device).eval().requires_grad_(False)
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = min(max_length, positions or max_length)

    def _load(self, dtype, remote: bool):
        """(tokenizer, model) from the folder; raises RuntimeError with the cause."""
        loader = AutoModelForSequenceClassification if self.native else AutoModel
        logging.disable_progress_bar()
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=remote, local_files_only=True)
            model_config = AutoConfig.from_pretrained(self.path, trust_remote_code=remote, local_files_only=True)
            if self.native:
                self._check_tokenizer(tokenizer, model_config)
            model, report = loader.from_pretrained(
                self.path, config=model_config, dtype=dtype, trust_remote_code=remote, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError, TypeError) as error:
            raise RuntimeError(f"reward model: cannot load {self.path}: {error}") from error
        missing = sorted(str(key) for key in report["missing_keys"])
        if missing:
            raise RuntimeError(
                f"reward model: {self.path} has no weights for {', '.join(missing[:5])}{' …' if missing[5:] else ''}; "
                "they would start at random and score noise. Expected a trained reward model with its score head"
            )
        if not self.native and not hasattr(model, "get_score"):
            raise RuntimeError(
                f"reward model: {type(model).__name__} of {self.path} has no get_score(tokenizer, messages)"
            )
        return tokenizer, model

    def _check_tokenizer(self, tokenizer, model_config) -> None:
        """Make pad ids of tokenizer and config agree: the model finds a row's last token by them."""
        if not tokenizer.chat_template:
            raise ValueError(
                "its tokenizer has no chat template; expected one in tokenizer_config.json or chat_template.jinja"
            )
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise ValueError("its tokenizer has neither a pad nor an eos token")
            tokenizer.pad_token = tokenizer.eos_token
        text_config = model_config.get_text_config()
        model_config.pad_token_id = text_config.pad_token_id = tokenizer.pad_token_id
        vocab_size = text_config.vocab_size
        if len(tokenizer) > vocab_size:
            raise ValueError(f"its tokenizer has {len(tokenizer)} tokens, the model only {vocab_size}")

    def get_score(self, messages: list[dict], response: str) -> float:
        """Score of the response to the conversation, in [-3, 3]; NaN where the model's output is not finite."""
        return self.get_scores([messages], [response])[0]

    @torch.no_grad()
    def get_scores(self, messages: list[list[dict]], responses: list[str]) -> list[float]:
        """Scores of N responses, responses[i] answering messages[i]; what `get_score` gives, to 1e-4 in fp32.

        Equal conversations are scored once, and batches hold conversations of similar length.
        Raises: ValueError if the two lists differ in length.
        """
        if len(messages) != len(responses):
            raise ValueError(
                f"get_scores got {len(messages)} conversations and {len(responses)} responses; expected one each"
            )
        chats = [[*turns, {"role": "assistant", "content": text}] for turns, text in zip(messages, responses)]
        if self.native:
            keys = [tuple(self._encode(chat)) for chat in chats]
            score_batch = self._score_ids
        else:
            keys = [json.dumps(chat, ensure_ascii=False, sort_keys=True) for chat in chats]
            score_batch = self._score_remote
        ordered = sorted(set(keys), key=lambda key: (len(key), key))
        scored: dict = {}
        for start in range(0, len(ordered), self.batch_size):
            batch = ordered[start : start + self.batch_size]
            scored.update(zip(batch, score_batch(batch), strict=True))
        return [self._clip(scored[key]) for key in keys]

    def _clip(self, score: float) -> float:
        if not math.isfinite(score):
            self.nonfinite_scores += 1
            return math.nan
        return max(-SCORE_LIMIT, min(SCORE_LIMIT, score))

    def _encode(self, chat: list[dict]) -> list[int]:
        try:
            _, ids = encode_chat(self.tokenizer, chat, open_thinking=False, add_generation_prompt=False)
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in chat)
            raise RuntimeError(
                f"reward model: the chat template of {self.path} refuses a conversation with the turns {roles}: {error}"
            ) from error
        return truncate_prompt(self.tokenizer, ids, self.max_length)

    def _score_ids(self, batch: list[tuple]) -> list[float]:
        """Raw scores logits[:, 0] of token-id rows. Padding is on the right: positions stay those of the row alone."""
        width = max(len(ids) for ids in batch)
        pad = self.tokenizer.pad_token_id
        input_ids = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in batch], device=self.device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in batch], device=self.device)
        return self.model(input_ids=input_ids, attention_mask=mask).logits[:, 0].float().tolist()

    def _score_remote(self, batch: list[str]) -> list[float]:
        """Raw scores of JSON-encoded conversations through the model's own code."""
        chats = [json.loads(chat) for chat in batch]
        if hasattr(self.model, "get_scores"):
            scores = self.model.get_scores(self.tokenizer, chats)
        else:
            scores = [self.model.get_score(self.tokenizer, chat) for chat in chats]
        return [float(score) for score in scores]
