"""Cross-entropy as trl 1.16 computes it: logits exist one tile at a time, and once more in the backward pass.

A card runs trl's own kernels, as its trainer does. On a processor and in estimates, the sizes, the formats and what is
kept between the passes are those of `ChunkedLogProbFunction` in trl/kernels/chunked_logprob.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autofit.techniques.technique import IGNORE_INDEX, Head

TILE_TOKENS, TILE_WORDS = 4096, 32_768
"""`TOKEN_CHUNK_SIZE` of that file, and `_CHUNKED_LOGPROB_CHUNK_SIZE` of trl/trainer/utils.py."""


def tiled_cross_entropy(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, *, for_card: bool = False
) -> torch.Tensor:
    """Sum of the cross-entropy in nats, fp32 scalar. hidden [tokens, hidden_size], labels [tokens].

    `for_card` says to work as on a card where the tensors, which are an estimate's, are on none.
    """
    if for_card or hidden.is_cuda:  # where trl copies the tokens that have a label: all but the last of each sequence
        hidden = hidden[torch.arange(hidden.shape[0], device=hidden.device)]
    targets, has_label = labels.clamp(min=0), labels != IGNORE_INDEX
    if hidden.is_cuda:
        logprobs = _by_trl(hidden, head, targets)
    else:
        tiles = _Tiles(for_card=for_card, softcap=head.softcap, scale=head.scale)
        logprobs = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, tiles
        )
    return -torch.sum(logprobs * has_label)


def _by_trl(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token by trl's kernels, beside the statistics that `SFTTrainer` logs."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    statistics = ("log_probs", "entropy", "is_top1")
    logprobs: torch.Tensor = ChunkedLogProbFunction.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, targets, 1.0, TILE_WORDS, head.softcap, head.scale, statistics
    )[0]
    return logprobs


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How logits become log-probabilities, tile by tile."""

    for_card: bool
    softcap: float | None
    scale: float

    def rows(self, tile: torch.Tensor) -> slice:
        """The rows that are worked on outside of products: for a card, whose kernels need nothing beside the tile, one
        is traced, 128 KiB in fp32."""
        return slice(1 if self.for_card else tile.shape[0])

    def transformed(self, tile: torch.Tensor) -> torch.Tensor:
        logits = tile.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def gradient(
        self, tile: torch.Tensor, log_sum: torch.Tensor, local: torch.Tensor, upstream: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the log-probabilities by the tile, times `upstream`; `local` are the labels within the tile.
        All steps are held until the end, as trl holds them on a processor: seven times the tile in fp32."""
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
        if not self.for_card or left.dtype is torch.float32:
            total.addmm_(left.float(), right.float())
        else:  # no CPU has such a product; the same one into 16 bits takes as long and allocates nothing
            total.view(left.dtype)[:, : total.shape[1]].addmm_(left, right)


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
        total, label_logits = (hidden.new_zeros(tokens, dtype=torch.float32) for _ in range(2))
        for rows, words, tile, *_ in _tiles(hidden, weight, bias, dtype, forward=True):
            logits = tiles.transformed(tile[tiles.rows(tile)])
            at = slice(rows.start, rows.start + logits.shape[0])
            higher = torch.maximum(largest[at], logits.amax(-1))
            total[at] = total[at] * torch.exp(largest[at] - higher) + torch.exp(logits - higher[:, None]).sum(-1)
            largest[at] = higher
            local = labels[at] - words.start
            in_tile = (local >= 0) & (local < logits.shape[1])
            logit = logits.gather(-1, local.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(-1)
            label_logits[at] = torch.where(in_tile, logit, label_logits[at])
        log_sum = largest + torch.log(total)
        ctx.save_for_backward(hidden, weight, bias, labels, log_sum)
        ctx.dtype, ctx.tiles = dtype, tiles
        return label_logits - log_sum

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        hidden, weight, bias, labels, log_sum = ctx.saved_tensors
        tiles, upstream = ctx.tiles, grad_outputs[0].float()
        of_hidden, of_weight, of_bias = (
            torch.zeros(operand.shape, dtype=torch.float32, device=hidden.device) if needs_gradient else None
            for operand, needs_gradient in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        )
        for rows, words, tile, inputs, narrow in _tiles(hidden, weight, bias, ctx.dtype):
            part = tile[tiles.rows(tile)]
            at = slice(rows.start, rows.start + part.shape[0])
            part.copy_(tiles.gradient(part, log_sum[at, None], labels[at, None] - words.start, upstream[at, None]))
            if of_hidden is not None:
                tiles.add_product(of_hidden[rows], tile, narrow)
            if of_weight is not None:
                tiles.add_product(of_weight[words], tile.t(), inputs)
            if of_bias is not None:
                of_bias[words] += tile.sum(0, dtype=torch.float32)
        gradients = (of_hidden, hidden), (of_weight, weight), (of_bias, bias)
        return *(None if grad is None else grad.to(operand.dtype) for grad, operand in gradients), None, None


def _tiles(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, forward: bool = False
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each tile's rows and words, its logits in a buffer that the next one takes, and the two factors. The backward
    pass holds both until the next are there; the `forward` pass does not, and gets empty ones."""
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
                if forward:
                    narrow = tile[:0]
                yield rows, words, tile, narrow if forward else inputs, narrow
