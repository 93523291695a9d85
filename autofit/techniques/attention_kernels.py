"""Which of torch's attention kernels a CUDA device runs."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from autofit.core.device.hardware import compute_capability


class Attention(Enum):
    """A kernel of torch's scaled_dot_product_attention.

    Besides query, key and value, each keeps the following for the backward. `FLASH` and `EFFICIENT`: the result and
    every row's log-sum-exp (fp32 [batch, heads, tokens]; efficient attention rounds tokens up to a multiple of 32), as
    does the CPU's own kernel, which is traced for both. `MATH`: the scores [batch, heads, tokens, tokens], once or
    twice, in fp32 even where the operands are in 16 bits.
    """

    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def attention_kernel(
    *,
    number_format: str,
    width: int,
    value_width: int,
    grouped: bool,
    masked: bool,
    capability: str | None,
    dropout: bool = False,
) -> Attention:
    """The kernel that torch 2.11 to 2.13 picks for a training step.

    `number_format` is that of the product, autocast included: `bf16`, `fp16` or `fp32`; `width` and `value_width` are
    per head; `grouped` says whether several query heads share a key head; `masked` whether there is a mask tensor
    besides causality; `dropout` whether it drops scores; a `capability` of None is taken as a recent card's.

    | kernel    | 16 bits           | fp32 | mask | grouped | head width                                          |
    |-----------|-------------------|------|------|---------|-----------------------------------------------------|
    | flash     | from 8.0 on       | no   | no   | yes     | up to 256; on 8.6 to 8.9 and 12 not 193 to 224, and |
    |           |                   |      |      |         | with dropout up to 192                              |
    | efficient | bf16 from 8.0 on  | yes  | yes  | no      | a multiple of the alignment of tensor-core loads    |
    | math      | yes               | yes  | yes  | yes     | any                                                 |

    Source: can_use_flash_attention, can_use_mem_efficient_attention and select_sdp_backend in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; efficient attention supports grouped heads only after 2.13
    (pull request 191085). cuDNN's kernel, which is preferred on 9.0 and 10.x, keeps what flash attention keeps; its
    workspace is undocumented and taken to be as large.
    """
    card = generation(capability)
    half = number_format != "fp32"
    if (
        half
        and card.ampere
        and not masked
        and width == value_width <= 256
        and not (card.little_shared_memory and width > 192 and (dropout or width <= 224))
    ):
        return Attention.FLASH
    alignment = _alignment(half, card)
    if not grouped and width % alignment == 0 == value_width % alignment and (card.ampere or number_format != "bf16"):
        return Attention.EFFICIENT
    return Attention.MATH


class Generation(NamedTuple):
    """The properties of a card that decide which kernels run on it."""

    volta: bool
    """Compute capability 7.0 or higher: tensor cores."""
    ampere: bool
    """8.0 or higher."""
    little_shared_memory: bool
    """8.6 to 8.9 and 12: less of it than the data centre's cards."""


def generation(capability: str | None) -> Generation:
    """The generation of a compute capability; None is taken as a recent card's."""
    version = compute_capability(capability) or 9.0
    return Generation(version >= 7.0, version >= 8.0, 8.6 <= version <= 8.9 or 12.0 <= version < 13.0)


def _alignment(half: bool, card: Generation) -> int:
    """Elements of which efficient attention needs the head width to be a multiple (minimum_gemm_alignment of
    sdp_utils.cpp)."""
    if card.ampere:
        return 8 if half else 4
    return 8 if half and card.volta else 1
