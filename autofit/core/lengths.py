"""The lengths of a data set's sequences and of its micro-batches, which are padded to their longest sequence."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import Any

from autofit.core.errors import UsageError

LARGEST_COUNT = 2**31 - 1
"""Upper bound on tokens, sequences, devices and ranks: more than anyone trains with, and small enough to find all
divisors."""
GROUPS = 200
"""Number of groups of equal size that summarise a data set's sequences."""
TOKENS = ("input_ids", "token_ids", "tokens", "ids")
"""Names that tokenised data sets give to a sequence's tokens."""
COUNTS = ("length", "n_tokens", "num_tokens")
"""Names that they give to the number of tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A summary of the lengths of a data set's sequences."""

    tokens: tuple[int, ...]
    """Mean tokens of each group of equally many sequences, shortest first."""
    longest: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, counts: Iterable[int]) -> Lengths:
        """The lengths of sequences with these numbers of tokens. Raises `UsageError` for none, or invalid ones."""
        try:
            ordered = sorted(map(index, counts))
        except TypeError:
            raise UsageError("lengths must be whole numbers of tokens") from None
        if not ordered:
            raise UsageError("no sequence has a length: give the number of tokens of at least one")
        if not 2 <= ordered[0] <= ordered[-1] <= LARGEST_COUNT:
            invalid = ordered[0] if ordered[0] < 2 else ordered[-1]
            raise UsageError(
                f"a sequence has {invalid} tokens: a next-token loss needs 2, and {LARGEST_COUNT} are enough"
            )
        groups = min(GROUPS, len(ordered))
        bounds = [place * len(ordered) // groups for place in range(groups + 1)]
        means = (sum(ordered[start:end]) / (end - start) for start, end in pairwise(bounds))
        return cls(tuple(map(round, means)), ordered[-1])

    @classmethod
    def given(cls, lengths: str | Path | Iterable[int] | None) -> Lengths | None:
        """The lengths that a user gives as a file, or as the number of tokens of each sequence. Raises `UsageError`."""
        if lengths is None or isinstance(lengths, Lengths):
            return lengths
        return read_lengths(lengths) if isinstance(lengths, str | Path) else cls.of(lengths)

    def cut(self, most: int) -> Lengths:
        """The lengths after cutting sequences to at most `most` tokens."""
        return Lengths(tuple(min(length, most) for length in self.tokens), min(self.longest, most))


def mean(tokens: Sequence[int]) -> float:
    """The mean tokens of a sequence."""
    return math.fsum(tokens) / len(tokens)


def padded(tokens: Sequence[int], sequences: int) -> Batches:
    """Lengths of micro-batches of `sequences` sequences, which are drawn at random and padded to the longest of them.

    `tokens` are `Lengths.tokens` of the groups from which sequences are drawn.
    """
    # The longest of n draws comes from one of the first i of k groups with probability (i / k) ** n.
    reached = [(place / len(tokens)) ** sequences for place in range(len(tokens) + 1)]
    return Batches(tuple((length, b - a) for length, (a, b) in zip(tokens, pairwise(reached), strict=True)))


def grouped(tokens: Sequence[int], sequences: int, micro_batches: int) -> Batches:
    """Lengths of micro-batches where the sequences of `micro_batches` are sorted by length, then cut into these."""
    cuts = min(micro_batches, len(tokens))
    # The longest of n in order lies beyond their middle by half of what n - 1 of them span.
    beyond = (1.0 - 1.0 / sequences) / (2.0 * micro_batches)
    longest = (_quantile(tokens, (cut + 0.5) / cuts + beyond) for cut in range(cuts))
    return Batches(tuple((round(length), 1.0 / cuts) for length in longest))


def _quantile(tokens: Sequence[int], share: float) -> float:
    """The length that `share` of the sequences do not exceed, interpolated between the means of their groups."""
    place = min(max(share * len(tokens) - 0.5, 0.0), len(tokens) - 1.0)
    below = int(place)
    above = min(below + 1, len(tokens) - 1)
    return tokens[below] + (place - below) * (tokens[above] - tokens[below])


@lru_cache(maxsize=16)
def packed(tokens: tuple[int, ...], row: int) -> Batches:
    """Lengths of micro-batches where sequences share rows of `row` tokens.

    The longest comes first, each in the row with the least room that takes it (best-fit decreasing, trl's `bfd`). No
    sequence is cut: trainers that cut them fill rows at least as well.
    """
    rows: list[tuple[int, tuple[int, ...]]] = []  # the room that is left, and what is in the row
    lengths = sorted(tokens * -(-1000 // len(tokens)), reverse=True)  # a thousand show how well they fill rows
    for length in lengths:
        place = bisect_left(rows, (length,))
        room, contents = rows.pop(place) if place < len(rows) else (row, ())
        insort(rows, (room - length, (*contents, length)))
    filled = len(rows) - rows[-1][0] / row  # more data would fill the emptiest
    # The shortest first, so that a beginning of the row has several.
    full_rows = [tuple(sorted((*contents, room) if room else contents)) for room, contents in rows]
    squares = {full: sum(length**2 for length in full) for full in full_rows}
    attended = math.fsum(squares[full] for full in full_rows) / len(full_rows)

    def typical(candidates: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return min(candidates, key=lambda full: abs(squares[full] - attended))

    return Batches(
        ((row, 1.0),),
        rows=filled / len(lengths),
        row=typical(full_rows),
        shared_row=typical([full for full in full_rows if len(full) > 1] or full_rows),
        attended=attended / row**2,
        most_in_row=max(map(len, full_rows)),
    )


@dataclass(frozen=True, slots=True)
class Batches:
    """The lengths of micro-batches."""

    shares: tuple[tuple[int, float], ...]
    """(tokens of each row, probability), shortest first."""
    rows: float = 1.0
    """Rows for each sequence: fewer than one where sequences share them."""
    row: tuple[int, ...] = ()
    """Tokens of each sequence in a representative row where sequences share rows; the row's empty rest counts as one
    more. The sum of the squared lengths, to which attention is proportional, is about the mean over all rows."""
    shared_row: tuple[int, ...] = ()
    """A representative of the rows with several sequences, if any: a mask is built for these alone."""
    attended: float = 1.0
    """Attention's work within the sequences of all rows, over its work in rows of one sequence."""
    most_in_row: int = 1
    """The most sequences that share a row."""

    @property
    def tokens(self) -> float:
        """Tokens that are computed for each sequence, padding included."""
        return self.rows * self.moment(1)

    def moment(self, power: int) -> float:
        """The mean of the length raised to `power`."""
        return math.fsum(share * length**power for length, share in self.shares)

    @property
    def nodes(self) -> tuple[tuple[int, float], ...]:
        """One or two lengths with their weights that stand for all of them.

        The two-point Gauss quadrature of the distribution (Golub and Welsch 1969, "Calculation of Gauss quadrature
        rules"): exact for polynomials of the length up to the third degree, as a micro-step's time nearly is. Rounding
        to whole tokens keeps the mean.
        """
        mean = self.moment(1)
        variance = math.fsum(share * (length - mean) ** 2 for length, share in self.shares)
        if variance < 1.0:
            return ((max(2, round(mean)), 1.0),)
        skewness = math.fsum(share * (length - mean) ** 3 for length, share in self.shares) / variance**1.5
        # In units of the standard deviation the nodes are the roots of x**2 - skewness * x - 1.
        middle, apart = skewness / 2, math.sqrt(1.0 + skewness**2 / 4)
        short = max(2, math.floor(mean + math.sqrt(variance) * (middle - apart)))
        long = math.ceil(mean + math.sqrt(variance) * (middle + apart))
        of_long = (mean - short) / (long - short)
        return ((short, 1.0 - of_long), (long, of_long))

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """The weight of each of n `lengths`, with which the sum of a function's values there is its mean over
        micro-batches: exact for a polynomial of the length of a degree below n."""
        weights = []
        for length in lengths:
            others = [other for other in lengths if other != length]
            # Lagrange's polynomial, 1 at `length` and 0 at the others, as coefficients from the lowest power on.
            polynomial = [1.0]
            for other in others:
                scaled = [c / (length - other) for c in polynomial]
                polynomial = [a - other * b for a, b in zip([0.0, *scaled], [*scaled, 0.0], strict=True)]
            weights.append(math.fsum(c * self.moment(power) for power, c in enumerate(polynomial)))
        return weights


def read_lengths(file: str | Path) -> Lengths:
    """The lengths in a file that has one number of tokens a line, or JSON lines with the tokens of each sequence.

    Raises `UsageError` that names the first line with anything else.
    """
    path = Path(file).expanduser()
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return Lengths.of(list(_counts(lines, path)))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: --lengths takes a number of tokens a line, or JSON lines") from error
    except OSError as error:
        raise UsageError(f"the lengths in {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # the path has a character that no path may have
        raise UsageError(f"the lengths in {str(path)!r} cannot be read: {error}") from error


def _counts(lines: Iterator[str], path: Path) -> Iterator[int]:
    filled, last = 0, ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        filled, last = filled + 1, line
        count = _count(line)
        if count is None:
            raise UsageError(
                f"line {number} of {path} has neither a number of tokens nor tokens: {line.strip()[:40]!r}; write one "
                f"number a line, or JSON lines with {', '.join(TOKENS)} or {', '.join(COUNTS)}"
            )
        if count < 2:
            raise UsageError(f"line {number} of {path} has {count} tokens: a next-token loss needs at least 2")
        yield count
    if filled == 1 and last.lstrip().startswith("["):
        raise UsageError(
            f"{path} has one list in a single line: if it holds lengths, write one number a line; if it holds the "
            f"tokens of a sequence, write JSON lines with {', '.join(TOKENS)}"
        )


def _count(line: str) -> int | None:
    """The tokens of the sequence in one line; None if it does not say."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(row, dict):
        tokens = next((row[name] for name in TOKENS if isinstance(row.get(name), list)), None)
        row = tokens if tokens is not None else next((row[name] for name in COUNTS if name in row), None)
    if isinstance(row, list):
        return len(row) if all(isinstance(token, int) for token in row) else None
    return row if isinstance(row, int) and not isinstance(row, bool) else None
