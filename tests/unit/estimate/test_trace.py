"""Repeating a few layers gives the trace of all of them, byte by byte, whatever the stack is made of."""

from __future__ import annotations

import pytest
import torch
from tiny import CUDA_HARDWARE, STACK, model

from autofit.catalog.models import Model
from autofit.core.lattice import Config
from autofit.core.workload import Workload
from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.tracing.pattern import representatives
from autofit.estimate.tracing.recorder import Recorder, without_data
from autofit.estimate.tracing.repeat_layers import repeat_layers
from autofit.estimate.tracing.trace import layer_kinds, trace_decoder
from autofit.techniques import Job, complete, parse

UNGROUPED = model("llama", num_hidden_layers=7, num_key_value_heads=4, tie_word_embeddings=False)
GQA = model("llama", num_hidden_layers=9, tie_word_embeddings=False)
TIED = model("qwen2", num_hidden_layers=8, tie_word_embeddings=True)
SLIDING = model(
    "gemma3_text",
    num_hidden_layers=10,
    sliding_window=8,
    layer_types=[*(["sliding_attention"] * 3 + ["full_attention"]) * 2, *["sliding_attention"] * 2],
    query_pre_attn_scalar=16,
)
MIXTURE = model(
    "qwen3_moe",
    num_hidden_layers=9,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)
MODELS = {"ungrouped": UNGROUPED, "gqa": GQA, "tied": TIED, "sliding": SLIDING, "mixture": MIXTURE}
CONFIGS = (
    "method=full,precision=bf16,checkpointing=none",
    "method=full,precision=bf16-mixed,checkpointing=full,loss=chunked",
    "method=full,precision=fp32,checkpointing=every-4,attention=eager",
    "method=lora,precision=bf16,checkpointing=selective",
    "method=lora,precision=bf16-mixed,checkpointing=none,targets=attention",
    "method=lora,precision=bf16,checkpointing=offload",
    "method=qlora,precision=bf16,checkpointing=full",
    "method=qlora,precision=bf16-mixed,checkpointing=every-4",
)


def job(of: Model) -> Job:
    workload = Workload(model=of.name, model_digest=of.digest, seq_len=64, global_batch=4)
    return Job(model=of, workload=workload, hardware=CUDA_HARDWARE, stack=STACK)


def traced(config: Config, of: Model, layers: tuple[int, ...]) -> MemoryTrace:
    trace, _ = trace_decoder(config, job(of), layers, cuda_scratch)
    return trace


def history(trace: MemoryTrace) -> list[tuple[str, int, int]]:
    """(stage, layer, bytes) of each event, negative where a storage is freed."""
    return [
        (place.stage, place.layer, trace.storages[event.storage].bytes * (1 if event.allocates else -1))
        for place, event in trace.events()
    ]


CASES = [
    ("ungrouped", CONFIGS[2]),
    *(("gqa", text) for text in CONFIGS),
    ("tied", CONFIGS[1]),
    ("sliding", CONFIGS[2]),
    ("mixture", CONFIGS[3]),
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_repeating_layers_gives_the_full_trace_byte_by_byte(name: str, text: str) -> None:
    config = complete(parse(text))
    kinds = layer_kinds(config, job(MODELS[name]))
    layers, stand_ins = representatives(kinds)
    repeated = repeat_layers(traced(config, MODELS[name], layers), stand_ins)
    full = traced(config, MODELS[name], tuple(range(len(kinds))))
    assert [s.bytes for s in repeated.storages if s.allocated is None] == [
        s.bytes for s in full.storages if s.allocated is None
    ]
    assert history(repeated) == history(full)


def test_a_4_bit_product_is_one_and_drops_what_it_made_in_the_order_of_its_locals() -> None:
    """It takes cuBLAS's workspace, in a recomputed layer before the adapter does."""
    import bitsandbytes  # noqa: F401  # which registers it

    with without_data(), Recorder(cuda_scratch) as recorder:
        recorder.move("forward-1", 0)
        activations = torch.empty(32, 64, dtype=torch.bfloat16)
        packed, scales = torch.empty(128 * 32, 1, dtype=torch.uint8), torch.empty(128)
        product = torch.ops.bitsandbytes.gemm_4bit.default(activations, packed, (128, 64), scales, 64, "nf4")
        recorder.close()
        taken = [event for _, event in recorder.trace.events()][3:]
    storages = recorder.trace.storages
    assert product.shape == (32, 128)
    unpacked, shifted, weight, result = (event.storage for event in taken[:4])
    assert [event.storage for event in taken[4:]] == [shifted, unpacked, weight]
    assert [storages[i].of_product for i in (unpacked, shifted, weight, result)] == [False, False, False, True]
