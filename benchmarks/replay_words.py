"""Words and tables of the page of a replay's results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from replay_verdicts import JSON, NEVER, figure

from autofit.units import format_bytes


def name_of(problem: JSON) -> str:
    """The problem's name, with the limit if it is below the table's own."""
    limit = problem["memory_limit_bytes"]
    return problem["name"] + ("" if limit == problem["table_limit_bytes"] else f" under {format_bytes(limit)}")


def table(title: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [title, ["---"] * len(title), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def span(values: Iterable[float | None], noun: str) -> str:
    """From the least to the most; never reached counts as more than any number."""
    every = list(values)
    known = sorted(value for value in every if value is not None)
    ends = (
        [figure(value) for value in known[:1] + known[-1:]] if None not in every else [*map(figure, known[:1]), NEVER]
    )
    text = " to ".join(dict.fromkeys(ends))
    return text if text == NEVER else f"{text} {noun}{'' if text == '1' else 's'}"


def percents(spread: JSON) -> str:
    """Median and 90th percentile of a share."""
    return " / ".join(percent(spread[of]) for of in ("median", "p90"))


def percent(share: float | None) -> str:
    """A share, or a word for one that was never reached."""
    return NEVER if share is None else f"{share:.1%}"


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Names as a sentence lists them."""
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
