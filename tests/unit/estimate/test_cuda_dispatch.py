"""What CUDA's dispatcher does otherwise than a CPU's: the formats of autocast, and what dropout keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import CPU_HARDWARE, CUDA_HARDWARE, GPT2, LLAMA, config, job, model
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.catalog.models import Model
from autofit.core.device.hardware import Hardware
from autofit.core.lattice import Value
from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.kernels.scratch import host_scratch
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH
from autofit.estimate.tracing import as_on_device, trace
from autofit.estimate.tracing.cuda_dispatch import AS_GIVEN, SUMMED_WIDE, WIDENED, cuda_dispatch

NEOX = model("gpt_neox", num_hidden_layers=2, hidden_act="gelu", attention_bias=True)
"""Normalises with nn.LayerNorm."""
SEQ_LEN = 16
BF16 = torch.bfloat16


def kept(of: Model, *, hardware: Hardware = CUDA_HARDWARE, lora_dropout: float = 0.0, **values: Value) -> float:
    """Bytes per token that a micro-step's forward leaves for its backward."""
    asked = job(of, hardware=hardware, seq_len=SEQ_LEN, lora_dropout=lora_dropout)
    scratch = cuda_scratch if hardware.kind == "cuda" else host_scratch
    found, _ = trace.trace_decoder(config(**values), asked, (0, 1), scratch)
    left = [
        storage.bytes
        for storage in found.storages
        if storage.allocated is not None
        and storage.allocated.stage == "forward-1"
        and (storage.freed is None or storage.freed.stage != "forward-1")
    ]
    return sum(left) / (MICRO_BATCH * SEQ_LEN)


@pytest.mark.parametrize(("hardware", "mask_bytes"), [(CUDA_HARDWARE, 1), (CPU_HARDWARE, 2)])
def test_dropout_before_adapters_keeps_a_byte_per_element_on_cuda(hardware: Hardware, mask_bytes: int) -> None:
    """Each adapter keeps its own dropped input in bf16, in place of one that several share, and a mask if its input
    needs a gradient, as that of the first layer does not."""
    lora: dict[str, Value] = {"method": "lora", "precision": "bf16"}
    found = kept(LLAMA, hardware=hardware, lora_dropout=0.1, **lora) - kept(LLAMA, hardware=hardware, **lora)
    layers, width, inner = 2, 64, 128
    masked = layers * (3 * width + width + 2 * width + inner) - 3 * width
    own = layers * (2 * width + width + width)  # query, key and value; output, whose input attention keeps; gate and up
    assert found == mask_bytes * masked + 2 * own


def explicit_layer_norm(norm: nn.LayerNorm, given: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(given.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_layer_norm_under_autocast_keeps_what_an_explicit_fp32_one_does(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = kept(NEOX, method="lora", precision=precision)
    monkeypatch.setattr(as_on_device, "cuda_dispatch", nullcontext)
    as_on_cpu = kept(NEOX, method="lora", precision=precision)
    if precision == "bf16":
        assert emulated == as_on_cpu
        return
    monkeypatch.setattr(nn.LayerNorm, "forward", explicit_layer_norm)
    assert emulated == kept(NEOX, method="lora", precision=precision) > as_on_cpu


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_fused_attention_keeps_nothing_of_its_dropout(attention: str) -> None:
    without = replace(GPT2, config={**GPT2.config, "attn_pdrop": 0.0})
    values: dict[str, Value] = {"method": "full", "precision": "bf16", "attention": attention}
    assert kept(GPT2, **values) == kept(without, **values)


def test_unfused_attention_keeps_a_byte_per_dropped_score() -> None:
    """Heads of 18 elements in fp32 are for no fused kernel. What is dropped is kept beside its mask, in fp32."""
    narrow = {**LLAMA.config, "head_dim": 18, "num_key_value_heads": 4}
    without, dropping = (replace(LLAMA, config={**narrow, "attention_dropout": p}) for p in (0.0, 0.1))
    values: dict[str, Value] = {"method": "full", "precision": "fp32", "micro_batch": 2}  # one is traced apart
    layers, heads = 2, 4
    assert kept(dropping, **values) - kept(without, **values) == layers * heads * SEQ_LEN * (1 + 4)


Operation = Callable[[torch.Tensor], Any]
NARROW = torch.linspace(0.5, 2.0, 8, dtype=BF16).reshape(2, 4)
CALLS: dict[str, Operation] = {
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "rms_norm": lambda x: functional.rms_norm(x, (4,)),
    "pow.Tensor_Scalar": lambda x: x**3,
    "pow.Tensor_Tensor": lambda x: x**x,
    "pow.Scalar": lambda x: 2**x,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "log10": torch.log10,
    "softplus": functional.softplus,
    "logsumexp": lambda x: x.logsumexp(-1),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x),
    "softmax.int": lambda x: functional.softmax(x, -1),
    "log_softmax.int": lambda x: functional.log_softmax(x, -1),
    "sum": torch.sum,
    "sum.dim_IntList": lambda x: x.sum(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "linalg_vector_norm": torch.linalg.vector_norm,
}


@pytest.mark.parametrize("operation", [*WIDENED, *SUMMED_WIDE], ids=lambda operation: operation.name())
def test_operations_of_cudas_list_are_in_fp32_under_autocast_alone(operation: Any) -> None:
    run = CALLS[operation.name().removeprefix("aten::")]
    listed = operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.AutocastCUDA)
    assert listed or operation is torch.ops.aten.rms_norm.default, "torch's list has changed"
    with torch.autocast("cpu", BF16):
        assert run(NARROW).dtype == BF16, "a CPU's list has changed"
        with cuda_dispatch():
            wide = run(NARROW)
            assert wide.dtype == (torch.float32 if listed else BF16)
            with torch.autocast("cpu", enabled=False):
                torch.testing.assert_close(wide, run(NARROW.float() if listed else NARROW))
                assert run(NARROW).dtype == BF16
        assert run(NARROW).dtype == BF16


@pytest.mark.parametrize("operation", AS_GIVEN, ids=lambda operation: operation.name())
def test_operations_that_only_a_cpus_autocast_promotes_are_left_alone(operation: Any) -> None:
    has = operation.has_kernel_for_dispatch_key
    assert has(torch._C.DispatchKey.AutocastCPU) and not has(torch._C.DispatchKey.AutocastCUDA)


def test_formats_that_are_joined_are_not_copied_first() -> None:
    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", BF16), cuda_dispatch(), Noting():
        assert torch.cat([NARROW, NARROW.float()]).dtype == torch.float32
    assert seen[-1] is torch.ops.aten.cat.default and seen.count(torch.ops.aten._to_copy.default) == 1, "the test's own"


def test_a_format_that_is_asked_for_and_doubles_are_left_as_they_are() -> None:
    with cuda_dispatch(), torch.autocast("cpu", BF16):
        assert functional.softmax(NARROW, -1, dtype=BF16).dtype == NARROW.sum(dtype=BF16).dtype == BF16
        assert torch.exp(NARROW.double()).dtype == NARROW.double().sum().dtype == torch.float64
        assert torch.ones(3, dtype=torch.int32).cumsum(0).dtype == torch.int64


def test_dropout_that_drops_nothing_copies_nothing() -> None:
    with cuda_dispatch():
        assert functional.dropout(NARROW, 0.0) is NARROW
        assert functional.dropout(NARROW, 0.5, training=False) is NARROW
