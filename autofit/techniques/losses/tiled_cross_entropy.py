"""Cross-entropy as trl 1.16 computes it: logits exist one tile at a time, and once more in the backward pass.

The sizes, the formats and what is kept between the passes are those of `ChunkedLogProbFunction` in
trl/kernels/chunked_logprob.py, which is what counts for memory and time. On a card that works on whole tiles within one
kernel; here a few rows at a time, whose temporaries are small beside a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autofit.techniques.technique import IGNORE_INDEX

if TYPE_CHECKING:
    from autofit.techniques.technique import Head

TILE_TOKENS, TILE_WORDS = 4096, 32_768
"""`TOKEN_CHUNK_SIZE` of that file, and `_CHUNKED_LOGPROB_CHUNK_SIZE` of trl/trainer/utils.py."""
STRIPE = 64
"""Rows that a card works on at a time: 8 MiB in fp32."""


def tiled_cross_entropy(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, *, on_card: bool | None = None
) -> torch.Tensor:
    """Sum of the cross-entropy in nats, fp32 scalar. hidden [tokens, hidden_size], labels [tokens].

    `on_card` says whether to compute as on a card where the tensors, which are an estimate's, are on none.
    """
    card = hidden.is_cuda if on_card is None else on_card
    kept = labels != IGNORE_INDEX
    tiles = _Tiles(card=card, traced=card and not hidden.is_cuda, softcap=head.softcap, scale=head.scale)
    logprobs: torch.Tensor = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, labels.clamp(min=0), tiles
    )
    return -(logprobs * kept).sum()


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How logits become log-probabilities, tile by tile."""

    card: bool
    traced: bool
    softcap: float | None
    scale: float

    def stripes(self, rows: int) -> Iterator[slice]:
        """The rows that are worked on together. An estimate needs the first alone: the others take the same memory
        after it, and trl's kernel does the work of all in one pass over the tile."""
        step = STRIPE if self.card else rows
        starts = range(0, step if self.traced else rows, step)
        yield from (slice(start, min(start + step, rows)) for start in starts)

    def transformed(self, tile: torch.Tensor) -> torch.Tensor:
        logits = tile.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def gradient(
        self, tile: torch.Tensor, log_sum: torch.Tensor, local: torch.Tensor, upstream: torch.Tensor
    ) -> torch.Tensor:
        """That of the log-probabilities by the tile, times `upstream`; `local` are the labels within the tile. All
        steps are held until the end, as trl holds them on a processor: seven times the tile in fp32."""
        scaled = tile.float() * self.scale
        logits = scaled * 1.0 if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)
        logprobs = logits - log_sum
        shares = torch.exp(logprobs)
        gradient = torch.zeros_like(logits)
        is_label = torch.arange(tile.shape[1], device=tile.device) == local
        gradient += upstream * (is_label.float() - shares)
        return gradient * self.slope(scaled)

    def slope(self, scaled: torch.Tensor) -> torch.Tensor | float:
        """The derivative of `transformed` by the tile, which is given after scaling."""
        return self.scale if self.softcap is None else (1 - torch.tanh(scaled / self.softcap) ** 2) * self.scale

    def add_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """`total` (fp32) += left @ right, which a card does without fp32 copies of either."""
        if not self.card or left.dtype is torch.float32:
            total.addmm_(left.float(), right.float())
        elif self.traced:  # no CPU has such a product; the same one into 16 bits takes as long and allocates nothing
            total.view(left.dtype)[:, : total.shape[1]].addmm_(left, right)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class _TiledLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        tiles: _Tiles,
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        tokens = hidden.shape[0]
        largest = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)
        total, own = (hidden.new_zeros(tokens, dtype=torch.float32) for _ in range(2))
        for rows, words, tile, _, _ in _tiles(hidden, weight, bias, dtype):
            for stripe in tiles.stripes(tile.shape[0]):
                logits, at = tiles.transformed(tile[stripe]), slice(rows.start + stripe.start, rows.start + stripe.stop)
                higher = torch.maximum(largest[at], logits.amax(-1))
                total[at] = total[at] * torch.exp(largest[at] - higher) + torch.exp(logits - higher[:, None]).sum(-1)
                largest[at] = higher
                local = labels[at] - words.start
                inside = (local >= 0) & (local < logits.shape[1])
                found = logits.gather(-1, local.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(-1)
                own[at] = torch.where(inside, found, own[at])
        log_sum = largest + torch.log(total)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum)
        ctx.dtype, ctx.tiles = dtype, tiles
        return own - log_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        hidden, weight, bias, labels, log_sum = ctx.saved_tensors
        tiles, upstream = ctx.tiles, grad_outputs[0].float()
        of_hidden, of_weight, of_bias = (
            torch.zeros(each.shape, dtype=torch.float32, device=hidden.device) if needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for rows, words, tile, inputs, narrow in _tiles(hidden, weight, bias, ctx.dtype):
            for stripe in tiles.stripes(tile.shape[0]):
                at = slice(rows.start + stripe.start, rows.start + stripe.stop)
                part = tile[stripe]
                part.copy_(tiles.gradient(part, log_sum[at, None], labels[at, None] - words.start, upstream[at, None]))
            if of_hidden is not None:
                tiles.add_product(of_hidden[rows], tile, narrow)
            if of_weight is not None:
                tiles.add_product(of_weight[words], tile.t(), inputs)
            if of_bias is not None:
                of_bias[words] += tile.sum(0, dtype=torch.float32)
        found = (of_hidden, hidden), (of_weight, weight), (of_bias, bias)
        return *(None if gradient is None else gradient.to(like.dtype) for gradient, like in found), None, None


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each tile's rows and words, its logits in a buffer that the next one takes, and the two factors."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    with torch.autocast(hidden.device.type, enabled=False):
        buffer = torch.empty(min(tokens, TILE_TOKENS), TILE_WORDS, dtype=dtype, device=hidden.device)
        for start in range(0, tokens, TILE_TOKENS):
            rows = slice(start, min(start + TILE_TOKENS, tokens))
            inputs = hidden[rows].to(dtype)
            for word in range(0, vocabulary, TILE_WORDS):
                words = slice(word, min(word + TILE_WORDS, vocabulary))
                narrow = weight[words].to(dtype)
                tile = buffer[: rows.stop - rows.start, : words.stop - words.start]
                torch.mm(inputs, narrow.t(), out=tile)
                if bias is not None:
                    tile.add_(bias[words].to(dtype))
                yield rows, words, tile, inputs, narrow
