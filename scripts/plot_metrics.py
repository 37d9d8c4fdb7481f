"""Curves of one run, or of several together: a PNG, or one self-contained page that needs nothing installed.

    python scripts/plot_metrics.py out/runs/grpo-20260101-120000              writes metrics.png into that folder
    python scripts/plot_metrics.py RUN RUN RUN --out compared.png             several runs, one colour each
    python scripts/plot_metrics.py RUN --html page.html                       without matplotlib
    python scripts/plot_metrics.py RUN --watch 10                             again every 10 s while the run goes
"""

import argparse
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.plotting.data import build_picture, metrics_path, read_run
from scripts.plotting.page import page_text
from trainer.arguments import FlagParser, non_negative_int, positive_float
from trainer.run_files import write_whole


def parse_args(argv=None) -> argparse.Namespace:
    """The flags; exits with status 2 on a wrong one."""
    parser = FlagParser(__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its metrics.jsonl")
    add = parser.group("what to draw")
    add("--out", str, None, "PNG to write; None = metrics.png in the first run's folder, or none if --html is given")
    add("--html", str, None, "page to write: one file, shown by any browser; needs no matplotlib")
    add("--smooth", non_negative_int, 0, "logged steps that the strong curve averages; 1 = none, 0 = a fifteenth of "
        "the run's")
    add("--watch", positive_float, None, "seconds between looks at the files; draws again when there is more, until "
        "Ctrl-C")
    return parser.parse_args(argv)


def draw(paths: list[Path], args) -> list[str]:
    """Write what was asked for; gives the names of the files. Raises: ValueError, RuntimeError, OSError."""
    picture = build_picture([read_run(path) for path in paths], args.smooth)
    out = args.out or (None if args.html else str(paths[0].parent / "metrics.png"))
    written = []
    if args.html:
        write_whole(Path(args.html), page_text(picture, refresh=args.watch))
        written.append(args.html)
    if out:
        try:
            from scripts.plotting.png import png_bytes
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            raise RuntimeError("a PNG needs matplotlib: pip install -r requirements-extras.txt; or write a page, which "
                               "does not, with --html page.html") from error
        write_whole(Path(out), png_bytes(picture))
        written.append(out)
    return written


def watch(paths: list[Path], args) -> None:
    """Draw whenever a file has grown. A run that has not logged its first step is waited for."""
    seen = None
    while True:
        sizes = [path.stat().st_size for path in paths]
        if sizes != seen and all(sizes):
            print(f"{time.strftime('%H:%M:%S')} wrote {', '.join(draw(paths, args))}", flush=True)
            seen = sizes
        time.sleep(args.watch)


def main(argv=None) -> int:
    """Draw; gives the process's exit status."""
    args = parse_args(argv)
    try:
        paths = [metrics_path(text) for text in args.runs]
        if args.watch:
            watch(paths, args)
        print(f"wrote {', '.join(draw(paths, args))}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
