"""Sizes as functions of the micro-batch and the adapter rank, read off one trace at prime values of both.

The primes are larger than any dimension of a model. A size divisible by either is proportional to it, so one trace
serves every micro-batch and every rank, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

MICRO_BATCH, RANK = 999_983, 999_979
"""The two largest primes below a million: vocabularies, widths and lengths are smaller."""


@dataclass(frozen=True, slots=True)
class SymbolicSizes:
    """Many sizes, each a constant times the micro-batch, the rank, both or neither."""

    constants: NDArray[np.float64]
    of_micro_batch: NDArray[np.bool_]
    of_rank: NDArray[np.bool_]

    @classmethod
    def of(cls, traced: Iterable[int]) -> SymbolicSizes:
        """From the sizes seen in a trace at the primes."""
        constants, of_micro_batch, of_rank = [], [], []
        for size in traced:
            by_micro_batch, by_rank = size % MICRO_BATCH == 0, size % RANK == 0
            constants.append(size // ((MICRO_BATCH if by_micro_batch else 1) * (RANK if by_rank else 1)))
            of_micro_batch.append(by_micro_batch)
            of_rank.append(by_rank)
        return cls(
            np.array(constants, dtype=np.float64),
            np.array(of_micro_batch, dtype=np.bool_),
            np.array(of_rank, dtype=np.bool_),
        )

    @classmethod
    def constant(cls, sizes: Iterable[float]) -> SymbolicSizes:
        """Sizes that depend on neither."""
        constants = np.array(list(sizes), dtype=np.float64)
        neither = np.zeros(len(constants), dtype=np.bool_)
        return cls(constants, neither, neither)

    def over(self, shares: Sequence[int]) -> SymbolicSizes:
        """Each size divided by its number of shares."""
        return SymbolicSizes(self.constants / np.array(shares, dtype=np.float64), self.of_micro_batch, self.of_rank)

    def at(self, micro_batch: int, rank: int) -> NDArray[np.float64]:
        return np.asarray(
            self.constants * np.where(self.of_micro_batch, micro_batch, 1) * np.where(self.of_rank, rank, 1)
        )


def joined(parts: Sequence[T]) -> T:
    """Dataclasses of parallel arrays, one after the other."""
    columns = ([getattr(part, field.name) for part in parts] for field in fields(parts[0]))
    return type(parts[0])(*(joined(c) if is_dataclass(c[0]) else np.concatenate(c) for c in columns))
