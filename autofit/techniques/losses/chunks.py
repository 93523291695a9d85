"""How many rows of logits the chunked cross-entropy holds at a time, and whether that saves anything."""

from __future__ import annotations

MIN_CHUNK = 256
"""Minimum rows per chunk: with fewer, matrix products are inefficient on any device."""


def chunk_rows(tokens: int, hidden_size: int, vocabulary: int) -> int:
    """Rows per chunk: enough to make a chunk's logits about as large as all hidden states, at least MIN_CHUNK."""
    rows = max(1, tokens * hidden_size // vocabulary)
    return min(tokens, max(MIN_CHUNK, 1 << (rows - 1).bit_length()))


def chunks_save(tokens: int, hidden_size: int, vocabulary: int, early_bytes: int) -> bool:
    """Whether chunks need less memory than all logits at once.

    Bytes per logit: all logits at once take 12 (fp32 log-probabilities, their gradient, and the gradient of the
    logits), a chunk at most 12 (8 without a softcap). Chunks also hold `early_bytes` of gradients, those of the hidden
    states and of a trained head, before the backward pass frees anything; with few tokens these exceed the logits.
    """
    return 12 * chunk_rows(tokens, hidden_size, vocabulary) * vocabulary + early_bytes <= 12 * tokens * vocabulary
