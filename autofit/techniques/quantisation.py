"""A 4-bit base: bitsandbytes' Linear4bit in place of the decoder's Linear layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BLOCK, SCALES_BLOCK = 64, 256
"""Weights per scale, and scales per second-level scale, of nf4 with double quantisation (Dettmers et al. 2023, section
3)."""
BYTES_PER_WEIGHT = 0.5 + (1 + 4 / SCALES_BLOCK) / BLOCK
"""4 bits, plus a scale of 8 bits per block, which has its share of an fp32 scale."""
SINGLE_BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK
"""4 bits, plus an fp32 scale per block: without double quantisation."""


def replace_linears(model: Any, *, compute_dtype: torch.dtype) -> None:
    """Replace, on the meta device, every Linear layer except the output head; nf4 with double quantisation.

    The head stays in 16 bits, as in transformers' own quantiser, whose mark on the config is set, too. Without it,
    transformers takes the packed weights' format for that of the products: flash attention would get its queries in it
    (`get_target_dtype` of integrations/flash_attention.py).
    """
    import bitsandbytes as bnb
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        if isinstance(parent, PreTrainedModel):
            parent.config._is_quantized = True
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            with torch.device("meta"):
                four_bit = bnb.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=compute_dtype,
                    compress_statistics=True,
                    quant_type="nf4",
                )
            if child.bias is not None:
                four_bit.bias = child.bias
            # Otherwise the first forward in eval mode permanently repacks the weights for inference: on CPUs with
            # avx512_bf16 that format has no backward, and gradients would silently stop here.
            four_bit.support_avx512bf16_for_cpu = False
            setattr(parent, name, four_bit)


def materialise(layer: Any, *, device: torch.device, dtype: torch.dtype, std: float, pool: Any = None) -> None:
    """Quantise random weights into `layer`. With one layer at a time, the 16-bit base never exists as a whole.

    On CUDA, `pool` is memory apart (`torch.cuda.MemPool`) in which this is done. Otherwise the 16-bit weights leave
    holes among the packed ones: 60 MiB of an 8B model (benchmarks/README.md).
    """
    import torch
    from bitsandbytes import functional
    from bitsandbytes.nn import Params4bit

    if "dynamic" not in functional.name2qmap:  # lasts, so it is made here: apart, it would hold a whole segment
        functional.name2qmap["dynamic"] = functional.create_dynamic_map().to(device)
    with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device):
        weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=device).normal_(0.0, std)
        packed = Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer)
        layer.weight = packed._quantize(device)
    if pool is not None:
        _move(layer.weight)


def _move(packed: Any) -> None:
    """Copy packed weights and their scales to where all other weights are."""
    state = packed.quant_state
    packed.data = packed.data.clone()
    for part, names in ((state, ("absmax", "code", "offset")), (state.state2, ("absmax", "code"))):
        for name in names:
            setattr(part, name, getattr(part, name).clone())
