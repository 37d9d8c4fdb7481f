"""The files of a run that can be read and written without importing torch: metrics.jsonl, and whole files at once."""

import json
import os
import tempfile
from pathlib import Path


def read_metrics_lines(path: Path) -> list[tuple[str, int]]:
    """(line, its step) for every whole line of a metrics file; [] if there is none. A half-written line is left out."""
    if not path.is_file():
        return []
    pairs = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            pairs.append((line, int(json.loads(line)["step"])))
        except (ValueError, KeyError, TypeError):
            continue
    return pairs


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it: whoever reads meanwhile finds the old file or the new one.

    Raises: OSError if the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Make the folder and prove that files can be made in it. Raises OSError if not, before any step is spent."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
