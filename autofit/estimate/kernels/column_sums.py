"""What CUDA takes to add the rows of a matrix up: all of them, for the gradients of biases and of norms' weights and in
Adafactor, or those of each entry of a vocabulary, for an embedding's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autofit.catalog.hardware import card_of
from autofit.core.device.hardware import Hardware, compute_capability
from autofit.estimate.kernels.scratch import FP32_BYTES

FEWEST_ROWS = 1021
"""With fewer, no column is divided among blocks: four threads of a block share one, and each can take 255 values."""
BLOCK_COLUMNS, BLOCK_THREADS, SHARERS = 128, 128, 4
"""Columns and threads of a block of that kernel, and how many of these share a column."""
LEAST_VALUES, MOST_VALUES = 16, 256
"""Values that each thread adds up."""
COLUMN_BYTES = 512
"""What a block leaves of a column: 4 bytes for each of as many columns as it has."""
FEW_TOKENS = 3072
"""Up to so many, an embedding's gradient is added up in place."""
ROWS_PER_SUM = 10
"""Rows of one entry of the vocabulary that are added up at a time (NROWS_PER_THREAD)."""
MULTIPROCESSORS = 132
"""Multiprocessors of a card that is in no catalog: an H100's."""
SLICE_MULTIPROCESSORS = 16
"""Multiprocessors of a slice of a partitioned card: an H100's, of which an A100 has 14 (`nvidia-smi mig -lgip`)."""


def blocks_at_a_time(hardware: Hardware) -> int:
    """How many blocks of that kernel a card runs at a time, by the multiprocessors that the catalog knows of it."""
    card = card_of(hardware.name)
    processors = (card and card.multiprocessors) or MULTIPROCESSORS
    if hardware.slices is not None:
        processors = SLICE_MULTIPROCESSORS * hardware.slices
    return processors * (threads_per_multiprocessor(hardware.capability) // BLOCK_THREADS)


def taken(values: NDArray[np.float64], columns: NDArray[np.int64], blocks: int) -> NDArray[np.float64]:
    """Bytes taken to add up matrices of so many values in so many columns on a device that runs `blocks` at a time.

    The rows of a column are divided among as many blocks as run at a time, unless each thread then had too few or too
    many values; each block leaves its sums in memory. Source: setReduceConfig and ReduceConfig::global_memory_size of
    aten/src/ATen/native/cuda/Reduce.cuh (torch 2.11 to 2.13), for contiguous matrices of up to 2 GiB whose columns are
    a multiple of four and at least as many as a block has.
    """
    rows = values / columns
    values_per_thread = np.ceil(rows / SHARERS)
    divided = np.ceil(blocks / np.ceil(columns / BLOCK_COLUMNS))
    divided = np.minimum(divided, np.ceil(values_per_thread / LEAST_VALUES))
    divided = np.maximum(divided, np.ceil(values_per_thread / MOST_VALUES))
    return np.where((rows < FEWEST_ROWS) | (divided == 1), 0.0, COLUMN_BYTES * columns * divided)


def taken_by_entry(
    values: NDArray[np.float64], columns: NDArray[np.int64], vocabulary: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Bytes taken to add up so many values, a row for each token of a batch, by its entry in the vocabulary: fp32 sums
    of a few rows each, as many as there may be. Source: embedding_dense_backward_cuda of Embedding.cu and
    embedding_backward_cuda_kernel of EmbeddingBackwardKernel.cu in aten/src/ATen/native/cuda (torch 2.11 to 2.13)."""
    tokens = values / columns
    sums = np.floor(tokens / ROWS_PER_SUM) + np.minimum(tokens, vocabulary)
    return np.where(tokens <= FEW_TOKENS, 0.0, FP32_BYTES * columns * sums)


def threads_per_multiprocessor(capability: str | None) -> int:
    """The most that reside on one at a time (CUDA C++ programming guide, "Technical Specifications per Compute
    Capability")."""
    version = compute_capability(capability) or 9.0
    if version == 7.5:
        return 1024
    return 1536 if 8.6 <= version <= 8.9 or version >= 12.0 else 2048
