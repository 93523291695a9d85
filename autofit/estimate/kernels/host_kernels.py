"""Memory that a CPU's kernels allocate within one operation, which no trace of fake tensors shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autofit.estimate.kernels.scratch import FP32_BYTES, common_scratch
from autofit.estimate.tracing.recorder import Held
from autofit.techniques import quantisation


def host_scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Held:
    """What the kernel of an operation holds while it runs.

    bitsandbytes has no 4-bit product of its own for CPUs: the weight is dequantised whole, its scales first
    (`_gemm_4bit_default_impl` of backends/default/ops.py). Arguments: (activations, packed weight, shape, ...).
    """
    name = str(func)
    if name != "bitsandbytes.gemm_4bit.default":
        return common_scratch(name, args)
    activations: torch.Tensor = args[0]
    shape: Sequence[int] = args[2]
    weights = math.prod(shape)
    return Held(before=(-(-weights // quantisation.BLOCK) * FP32_BYTES, weights * activations.element_size()))
