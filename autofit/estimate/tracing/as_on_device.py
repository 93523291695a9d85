"""Has torch and transformers do on fake tensors what they do on a device, where that changes what is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.lattice import Config
from autofit.estimate.tracing.cuda_dispatch import cuda_dispatch
from autofit.estimate.tracing.recorder import Recorder
from autofit.techniques import Job
from autofit.techniques.attention_kernels import Attention, attention_kernel
from autofit.techniques.axes.batching import separates_sequences


@contextmanager
def as_on_device(config: Config, job: Job, recorder: Recorder) -> Iterator[None]:
    """Have transformers build its masks as without a trace. On CUDA, have torch choose the device's kernels and formats
    and offload activations to a separate host."""
    from transformers import masking_utils

    # Told that it is being traced, transformers builds masks to be on the safe side; sequences are kept apart by one.
    # Of a mask that is given, it would ask whether every token is real.
    inspects = patch.multiple(
        masking_utils,
        is_tracing=lambda tensor=None: separates_sequences(config),
        _ignore_causal_mask_sdpa=partial(_ignores_mask, masking_utils._ignore_causal_mask_sdpa),
    )
    if job.hardware.kind != "cuda":
        with inspects:
            yield
        return
    torch_attention, capability = torch.nn.functional.scaled_dot_product_attention, job.hardware.capability

    def attention(*args: Any, **options: Any) -> torch.Tensor:  # a function, as torch.compile follows those
        return _attention(torch_attention, capability, *args, **options)

    with (
        inspects,
        patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        patch.object(torch.autograd.graph, "save_on_cpu", _disable_dynamo(partial(_save_on_host, recorder))),
        cuda_dispatch(),
    ):
        yield


def _ignores_mask(ignores: Any, padding_mask: torch.Tensor | None, *args: Any, **options: Any) -> bool:
    """Transformers' own function, where sequences are padded if a mask is given."""
    return padding_mask is None and bool(ignores(padding_mask, *args, **options))


_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _attention(
    torch_attention: Any,
    capability: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """scaled_dot_product_attention as the device's kernel, whose results differ in layout from those of the CPU's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    kernel = attention_kernel(
        number_format=_FORMATS.get(dtype, "fp32"),
        width=query.shape[-1],
        value_width=value.shape[-1],
        grouped=key.shape[-3] != query.shape[-3],
        masked=attn_mask is not None,
        capability=capability,
        dropout=dropout_p > 0.0,
    )
    result: torch.Tensor
    if kernel is Attention.MATH and torch.compiler.is_compiling():  # which follows neither of the modes below
        result, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options
        )
        return result
    if kernel is Attention.MATH:
        with sdpa_kernel(SDPBackend.MATH), _MasksInPlace():  # type: ignore[no-untyped-call]
            result = torch_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)
        return result
    operands = [tensor.to(dtype) for tensor in (query, key, value)]
    flags = {"is_causal": bool(options.get("is_causal")), "scale": options.get("scale")}
    if kernel is Attention.FLASH:
        result, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*operands, dropout_p, **flags)
        return result
    bias = _as_bias(attn_mask, dtype) if attn_mask is not None and attn_mask.dtype is torch.bool else attn_mask
    result, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*operands, bias, True, dropout_p, **flags)
    return result


class _MasksInPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has the mask added to the scores in place, as torch does unless a mode such as the recorder is on
    (_scaled_dot_product_attention_math of aten/src/ATen/native/transformers/attention.cpp)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            return torch.ops.aten.view.default(args[0].add_(args[1]), args[0].shape)
        return func(*args, **(kwargs or {}))


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores where a mask forbids (convert_boolean_attn_mask of aten/src/ATen/native/transformers/
    attention.cpp)."""
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=dtype, device=mask.device))


def _save_on_host(recorder: Recorder, pin_memory: bool = False) -> AbstractContextManager[None]:
    """torch.autograd.graph.save_on_cpu as it works between a device and its host; on the host alone it does nothing."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with recorder.outside_allocator():
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def unpack(copy: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # like the recomputation that it serves, so that it counts as an activation
            return torch.empty_like(copy)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def traceable_attention(attention: str) -> str:
    """transformers' name for an attention that can be traced in place of `attention`."""
    if attention != "flash_attention_2":
        return attention
    from transformers.modeling_utils import AttentionInterface

    # For an attention to which transformers assigns no mask function it builds no mask, as for flash-attn.
    AttentionInterface.register(UNMASKED, _unmasked_attention)
    return UNMASKED


UNMASKED = "unmasked"


def _unmasked_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention without dropout, windows and caps on the scores: flash-attn applies these in place, without
    memory. Of what is fp32, transformers gives it a copy in the format of the products."""
    from transformers.integrations.flash_attention import get_target_dtype
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if (narrow := get_target_dtype(query, module)) is not None:
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    supported = {name: options[name] for name in ("scaling", "is_causal") if name in options}
    return cast("tuple[torch.Tensor, None]", sdpa_attention_forward(module, query, key, value, None, **supported))
