"""Own reward functions and weights of the built-in parts, as the command line names them.

    --reward_fn path/to/file.py:function[:weight]          a function of yours, loaded from a file
    --reward_weights length=0.5,rm=2,repetition=0          how much each built-in part counts

Imports neither torch nor transformers: a wrong flag is refused before they are. Letters: N responses.
"""

import argparse
import hashlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

RULE_PARTS = ("length", "thinking", "tag", "repetition")
REWARD_PARTS = RULE_PARTS + ("rm", "answer")
# What a function may ask for by name; lists of one length N, entry i belongs to response i.
COLUMNS = ("prompts", "messages", "responses", "answers", "finished", "metadata")

_SPEC = re.compile(r"(?P<path>.+\.py):(?P<function>[^:]+)(?::(?P<weight>[^:]*))?")


# ---------------------------------------------------------------------------------------------- flags
def _finite(text: str) -> float:
    """The finite number that a text is. Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def parse_reward_fn(text: str) -> tuple[Path, str, float]:
    """(file, name of the function, weight) that `file.py:function[:weight]` names. Raises ValueError in one line."""
    found = _SPEC.fullmatch(text)
    if not found or not found["function"].isidentifier():
        raise ValueError(f"expected path/to/file.py:function[:weight], got {text!r}")
    path = Path(found["path"]).expanduser()
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected path/to/file.py:function[:weight]")
    try:
        weight = 1.0 if found["weight"] is None else _finite(found["weight"])
    except ValueError:
        raise ValueError(f"the weight of {text!r} is {found['weight']!r}, expected a finite number") from None
    return path, found["function"], weight


def parse_reward_weights(text: str | None) -> dict[str, float]:
    """Weight of every built-in part from `name=number,…`; 1 for those not named. Raises ValueError in one line."""
    weights = dict.fromkeys(REWARD_PARTS, 1.0)
    named = set()
    for item in text.split(",") if text else ():
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in weights or name in named:
            problem = "twice the part" if name in named else "no part"
            raise ValueError(f"{problem} {name!r} in {text!r}; the parts are {', '.join(REWARD_PARTS)}")
        try:
            weights[name] = _finite(number)
        except ValueError:
            raise ValueError(f"{item.strip()!r} in {text!r}: expected {name}=NUMBER, a finite number") from None
        named.add(name)
    return weights


def _checked_text(parse: Callable) -> Callable[[str], str]:
    """An argparse `type` that gives the text itself once `parse` accepts it: a resume file can hold a text."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


reward_fn_spec = _checked_text(parse_reward_fn)
reward_weights_spec = _checked_text(parse_reward_weights)


def add_reward_flags(parser: argparse.ArgumentParser) -> None:
    """Declare --reward_fn and --reward_weights."""
    group = parser.add_argument_group("reward: own functions and weights")
    group.add_argument("--reward_fn", type=reward_fn_spec, action="append", metavar="FILE.py:FUNCTION[:WEIGHT]",
                       help="a reward function of yours; its numbers, times the weight (1 if left out), are added to "
                            "the reward. May be given several times")
    group.add_argument("--reward_weights", type=reward_weights_spec, metavar="PART=WEIGHT,...",
                       help=f"how much the built-in parts count, such as length=0.5,rm=2; 1 where not named, and with "
                            f"rm=0 no reward model is loaded. The parts: {', '.join(REWARD_PARTS)}")


def needs_reward_model(args) -> bool:
    """Whether the reward model's score counts: its weight in --reward_weights is not 0."""
    return parse_reward_weights(vars(args).get("reward_weights"))["rm"] != 0


def reward_settings(args) -> dict:
    """What the reward flags say, as keyword arguments of `calculate_rewards`; a file is run only the first time.

    Raises: ValueError for flags that do not fit, RuntimeError for a file that cannot be loaded.
    """
    flags = vars(args)
    return {"answer_reward": flags["answer_reward"],
            "reward_functions": load_reward_functions(flags.get("reward_fn") or ()),
            "reward_weights": parse_reward_weights(flags.get("reward_weights"))}


# ---------------------------------------------------------------------------------------------- loading
def load_reward_functions(specs) -> list["RewardFunction"]:
    """The functions that --reward_fn names, in order; one named like another or like a built-in part becomes name_2, ….

    Raises: ValueError for a text that does not fit, RuntimeError naming the file or function that cannot be used.
    """
    functions, taken = [], set(REWARD_PARTS)
    for text in specs:
        path, name, weight = parse_reward_fn(text)
        unique = next(n for n in (name, *(f"{name}_{k}" for k in range(2, len(taken) + 3))) if n not in taken)
        taken.add(unique)
        function = _function_of(_load_module(path), name, path)
        functions.append(RewardFunction(unique, weight, function, path, _columns_of(function, name, path)))
    return functions


def _load_module(path: Path) -> ModuleType:
    """The module in a file, run once under a private name, with its folder importable for its helpers."""
    path = path.resolve()
    private = f"_reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if private in sys.modules:
        return sys.modules[private]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(private, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[private]
        raise RuntimeError(f"--reward_fn {path}: cannot be loaded: {_described(error, path)}") from error
    return module


def _function_of(module: ModuleType, name: str, path: Path) -> Callable:
    """The function of that name. Raises RuntimeError naming those that the file has."""
    function = getattr(module, name, None)
    if callable(function):
        return function
    own = [key for key, value in vars(module).items()
           if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")]
    raise RuntimeError(f"--reward_fn {path}: no function {name!r} in it; it has {', '.join(own) or 'none'}")


def _columns_of(function: Callable, name: str, path: Path) -> tuple[str, ...]:
    """The COLUMNS that a function takes. Raises RuntimeError if it asks for something else."""
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                and (p.name not in COLUMNS or p.kind is p.POSITIONAL_ONLY)]
    if required:
        raise RuntimeError(f"--reward_fn {path}:{name} asks for {', '.join(required)}; it is given, by name, any of "
                           f"{', '.join(COLUMNS)}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return COLUMNS
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(column for column in COLUMNS if column in by_name)


def _described(error: Exception, path: Path) -> str:
    """Kind and words of an error, and the last line of the file at `path` that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    line = f" (line {frames[-1].lineno} of {path.name})" if frames else ""
    return f"{type(error).__name__}: {error}{line}"


# ---------------------------------------------------------------------------------------------- scoring
@dataclass(frozen=True)
class RewardFunction:
    """A function of the user's, and how it is used: its unique name, weight, file and the COLUMNS it is given."""

    name: str
    weight: float
    function: Callable
    path: Path
    columns: tuple[str, ...]

    def scores(self, rows: dict[str, list]) -> list[float | None]:
        """One number a response, None where it does not apply, NaN where it is not finite.

        Args: rows: lists of one length N under each of COLUMNS; the function gets copies of those it takes.
        Raises: RuntimeError naming function and row: it raised, or gave the wrong type or number of values.
        """
        try:
            given = self._call(rows)
        except Exception as error:
            raise RuntimeError(f"{self._title}{self._first_failure(rows)}: {_described(error, self.path)}") from error
        if hasattr(given, "tolist"):  # an array or a tensor
            given = given.tolist()
        count = len(rows["responses"])
        if not isinstance(given, (list, tuple)):
            raise RuntimeError(f"{self._title} gave {type(given).__name__}, expected a list of {count} numbers or None")
        if len(given) != count:
            raise RuntimeError(f"{self._title} gave {len(given)} values for {count} responses, expected one each")
        return [self._number(value, i, rows) for i, value in enumerate(given)]

    @property
    def _title(self) -> str:
        return f"reward function {self.name} of {self.path}"

    def _call(self, rows: dict[str, list]):
        return self.function(**{column: list(rows[column]) for column in self.columns})

    def _row(self, i: int, rows: dict[str, list]) -> str:
        text = rows["responses"][i]
        return f", row {i + 1} of {len(rows['responses'])} (response {text if len(text) < 80 else text[:79] + '…'!r})"

    def _first_failure(self, rows: dict[str, list]) -> str:
        """The first row that fails when it comes alone; "" if none does."""
        for i in range(len(rows["responses"])):
            try:
                self._call({column: values[i : i + 1] for column, values in rows.items()})
            except Exception:  # noqa: BLE001 - whatever it raised on all rows, it may raise on this one
                return self._row(i, rows)
        return ""

    def _number(self, value, i: int, rows: dict[str, list]) -> float | None:
        if value is None:
            return None
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise RuntimeError(f"{self._title}{self._row(i, rows)} gave {value!r}, expected a number or None") from None
        return number if math.isfinite(number) else math.nan
