"""Rows of tokens: one sequence each, or several that are kept apart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from autofit.techniques.technique import IGNORE_INDEX


class Rows:
    """The labels of rows of tokens, and the decoder's arguments for the sequences in them.

    For positions that restart, transformers builds a mask that keeps sequences apart. Flash attention needs none: its
    kernels take one row with the bounds of its sequences. Both are what trl's collator and transformers' own give
    (`DataCollatorForLanguageModeling` of trl 1.16, `DataCollatorWithFlattening` of transformers 5.23).
    """

    def __init__(
        self, sequences: Sequence[int] = (), *, device: torch.device | None = None, joins: bool = False
    ) -> None:
        """`sequences` has the tokens of each sequence in a row, the same for all rows; empty where a row is one
        sequence. `joins` says whether the rows of a micro-batch become one."""
        self._starts = list(accumulate(sequences, initial=0))[:-1] or [0]
        self._joins = joins
        self._positions: torch.Tensor | None = None
        """[1, row], where sequences are kept apart."""
        if sequences:
            self._positions = torch.cat([torch.arange(length, device=device) for length in sequences])[None]

    def targets(self, tokens: torch.Tensor) -> int:
        """The number of targets in `tokens` [rows, row], or in the beginnings of rows: all but the first of each
        sequence."""
        rows, row = tokens.shape
        return rows * (row - bisect_left(self._starts, row))

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """The label at each position of `tokens` [rows, row]: the next token of the same sequence, none at its end."""
        labels = _shifted(tokens)
        if self._positions is not None:
            labels[:, :-1].masked_fill_(self._positions[:, 1 : tokens.shape[1]] == 0, IGNORE_INDEX)
        return labels

    def alone(self, row: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each sequence of `row` [1, tokens] in a row of its own, with its labels: kept apart by nothing else."""
        starts = [start for start in self._starts if start < row.shape[1]]
        for start, end in pairwise([*starts, row.shape[1]]):
            yield row[:, start:end], _shifted(row[:, start:end])

    def decoder_arguments(self, tokens: torch.Tensor) -> dict[str, Any]:
        """The decoder's arguments for `tokens` [rows, row]; joined, hidden states are [1, rows * row, hidden_size]."""
        if self._positions is None:
            return {"input_ids": tokens}
        rows, row = tokens.shape
        positions = self._positions[:, :row].expand(rows, -1)
        if not self._joins:
            return {"input_ids": tokens, "position_ids": positions}
        starts = [at * row + start for at in range(rows) for start in self._starts if start < row]
        longest = max(b - a for a, b in pairwise([*starts, rows * row]))
        bounds = torch.tensor([*starts, rows * row], dtype=torch.int32).to(tokens.device, non_blocking=True)
        return {
            "input_ids": tokens.reshape(1, -1),
            "position_ids": positions.reshape(1, -1),
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
            **dict.fromkeys(("max_length_q", "max_length_k"), longest),
        }


def _shifted(tokens: torch.Tensor) -> torch.Tensor:
    """The label at each position: the next token, none at the last."""
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, :-1] = tokens[:, 1:]
    return labels
