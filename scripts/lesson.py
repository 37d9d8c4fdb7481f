"""What the two numeric walk-throughs share: two languages, tables that line up with Chinese text, checks on the spot.

A `Lesson` prints as it goes and remembers every number it checked. Standard library, torch and numpy only.
"""

import argparse
import sys
import unicodedata

import numpy as np
import torch


def display_width(text: str) -> int:
    """How many terminal columns the text takes: 2 for wide (CJK, full-width) characters, 0 for combining ones."""
    width = 0
    for character in text:
        if unicodedata.category(character) in ("Mn", "Me", "Cf"):
            continue
        width += 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
    return width


def pad(text: str, width: int, *, right: bool) -> str:
    """The text filled with spaces to `width` columns, moved to the right edge where `right` is True."""
    spaces = " " * (width - display_width(text))
    return spaces + text if right else text + spaces


def number(value, digits: int = 4) -> str:
    """A number with a fixed count of decimals; -0.0000 is written 0.0000."""
    text = f"{float(value.detach() if isinstance(value, torch.Tensor) else value):.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def format_table(headers: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a bordered table; the first column is flush left, columns of numbers flush right."""
    columns = list(zip(headers, *rows))
    widths = [max(display_width(cell) for cell in column) for column in columns]
    flush_right = [index > 0 and all(_is_numeric(cell) for cell in column[1:]) for index, column in enumerate(columns)]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"

    def line(cells):
        padded = [pad(cell, width, right=right) for cell, width, right in zip(cells, widths, flush_right)]
        return "| " + " | ".join(padded) + " |"

    return [border, line(headers), border, *(line(row) for row in rows), border]


def _is_numeric(cell: str) -> bool:
    """Whether a cell holds one number, a word for none (`-`, NaN), or nothing."""
    try:
        float(cell)
    except ValueError:
        return cell in ("", "-")
    return True


class Lesson:
    """One run of a walk-through in one language ("en" or "zh").

    Texts come in pairs (English, Chinese); numbers do not depend on the language. `numbers` maps the name of each
    check to what was found (a float or nested lists), `failures` lists the names of the checks that did not hold.
    """

    def __init__(self, language: str):
        self.chinese = language == "zh"
        self.numbers: dict[str, object] = {}
        self.failures: list[str] = []

    def text(self, english: str, chinese: str) -> str:
        """The one of the two texts that this run speaks."""
        return chinese if self.chinese else english

    def title(self, english: str, chinese: str) -> None:
        """Prints a section's heading."""
        heading = self.text(english, chinese)
        print(f"\n{heading}\n{'=' * display_width(heading)}")

    def say(self, english: str, chinese: str) -> None:
        """Prints a paragraph."""
        print(self.text(english, chinese))

    def table(self, headers: list, rows: list[list]) -> None:
        """Prints a table. A header or cell may be a text, a pair of texts, a number or a tensor holding one."""
        print("\n".join(format_table([self._cell(h) for h in headers], [[self._cell(c) for c in r] for r in rows])))

    def _cell(self, cell) -> str:
        if isinstance(cell, tuple):
            return self.text(*cell)
        if isinstance(cell, (float, np.floating)) or (isinstance(cell, torch.Tensor) and cell.is_floating_point()):
            return number(cell)
        if isinstance(cell, torch.Tensor):
            return str(int(cell))
        return str(cell)

    def check(self, name: str, found, expected, tolerance: float = 1e-5) -> None:
        """Compares what `rl_math` gave with a number worked out another way; prints and remembers the outcome.

        Shapes must agree too. NaN equals nothing, so a NaN found is a failure.
        """
        found = torch.as_tensor(found).detach().double().numpy()
        expected = np.asarray(expected, dtype=np.float64)
        holds = found.shape == expected.shape and bool(np.all(np.abs(found - expected) <= tolerance))
        self.numbers[name] = found.tolist()
        if holds:
            print(f"  [ok] {name}")
            return
        self.failures.append(name)
        print(f"  [FAILED] {name}: found {found.tolist()}, expected {expected.tolist()}")

    def finish(self) -> int:
        """Prints the verdict. Returns the exit status: 0 when every check held, 1 otherwise."""
        count, failed = len(self.numbers), ", ".join(self.failures)
        if self.failures:
            self.say(
                f"\n{len(self.failures)} of {count} checks FAILED: {failed}",
                f"\n{count} 项检查中有 {len(self.failures)} 项未通过: {failed}",
            )
            return 1
        self.say(f"\nAll {count} checks passed.", f"\n全部 {count} 项检查通过。")
        return 0


def lesson_from_flags(description: str, argv: list[str] | None) -> Lesson:
    """Reads --lang and returns a fresh Lesson; a console that cannot show a character gets an escape, not a crash."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the text: English or Chinese")
    language = parser.parse_args(argv).lang
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Lesson(language)
