"""How commands answer: with one JSON document, text for people, or a file that is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.core.errors import EnvironmentLacks, Interrupted, Shortfall, UsageError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers for running out of room to write: disk full, quota exceeded, file too large."""
STDOUT = "-"
"""The file name that stands for standard input or output."""
PLOTLY = "plotly.min.js"
"""The name by which plotly's pages refer to its script."""


def print_json(document: Any) -> None:
    """Print `document` on standard output; nothing else is printed there with --json."""
    print(json.dumps(document, indent=2, allow_nan=False))


def warn(message: str) -> None:
    print(f"autofit: {message}", file=sys.stderr)


def tell_written(path: Path) -> None:
    """Say on standard error that a file is there now; nothing of what went to standard output."""
    if str(path) != STDOUT:
        warn(f"{path} is written")


def warn_of_contradictions(contradictory: int) -> None:
    """Print a line on standard error if so many configs have contradictory results."""
    from autofit.core.verdict import in_words

    if contradictory:
        warn(in_words(contradictory))


@contextmanager
def nothing_fits_as_json(wanted: bool) -> Iterator[None]:
    """If `wanted`, also print a JSON document that says why nothing fits and what came closest."""
    try:
        yield
    except Shortfall as shortfall:
        if wanted:
            print_json(shortfall.to_json())
        raise


@contextmanager
def resumable(consequence: str) -> Iterator[None]:
    """Say of what is interrupted what becomes of it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {consequence}") from None


def write(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file whole or not at all, or standard output for `-`. Raises `EnvironmentLacks`, `UsageError`."""
    try:
        if str(path) == STDOUT:
            _write_all(sys.stdout.buffer, chunks)
        elif path.exists() and not path.is_file():
            with path.open("wb") as device:  # a pipe or device file cannot be replaced
                _write_all(device, chunks)
        else:
            _replace(Path(os.path.realpath(path)), chunks)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise EnvironmentLacks(
                f"{path} cannot be written: {error.strerror}", remedy="free some space, or write elsewhere"
            ) from error
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def write_page(path: Path, figure: Figure) -> None:
    """Write a figure as an HTML page that opens without a network, and say so; raises as `write` does. Plotly's script,
    5 MB, is written beside it; what goes to standard output or a pipe holds it."""
    from plotly.offline import get_plotlyjs

    has_a_folder = str(path) != STDOUT and (path.is_file() or not path.exists())
    write(path, [figure.to_html(include_plotlyjs="directory" if has_a_folder else True).encode()])
    if has_a_folder:
        write(path.with_name(PLOTLY), [get_plotlyjs().encode()])
    tell_written(path)


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("xb") as file:
            _write_all(file, chunks)
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _write_all(file: Any, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        file.write(chunk)
    file.flush()


def columns(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> str:
    """`rows`, the first of which is the heading, as aligned columns, those in `right` to the right. A column that is
    empty below its heading is left out. On a terminal its width wraps texts; elsewhere each row is one line."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2), pad_edge=False)
    filled = [number for number in range(len(rows[0])) if len(rows) == 1 or any(row[number] for row in rows[1:])]
    for number in filled:
        table.add_column(justify="right" if number in right else "left", no_wrap=number in right)
    for row in rows:
        table.add_row(*(row[number] for number in filled))
    width = shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 100_000
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
