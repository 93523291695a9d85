"""Activation checkpointing: which layers recompute, what they recompute, and what is kept meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from autofit.techniques.selective import is_trained
from autofit.training.step import TrainingStep
from tests.tiny import (
    GEMMA2,
    LLAMA,
    QWEN3_MOE,
    accumulate,
    attention_of,
    built,
    config,
    gradients,
    model,
    relative_error,
    rows,
)

DEEP = model("llama", num_hidden_layers=9)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Operations(TorchDispatchMode):
    """Counts the operations that are really executed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def layers(step: TrainingStep) -> list[GradientCheckpointingLayer]:
    return [m for m in step.module.modules() if isinstance(m, GradientCheckpointingLayer)]


def products(counts: Counter[str]) -> int:
    """Matrix products: mm, addmm, bmm, _grouped_mm of experts, gemm_4bit of bitsandbytes."""
    return sum(count for name, count in counts.items() if "mm" in name)


def executed_backward(step: TrainingStep) -> Counter[str]:
    """What the backward pass of one micro-batch executes, recomputation included."""
    inputs, labels = next(step.split(rows()))
    with step.precision():
        loss = step.engine.root(inputs, labels)
    with Operations() as operations:
        loss.backward()
    return operations.counts


def kept_bytes(step: TrainingStep) -> int:
    """What autograd keeps between forward and backward outside of parameters."""
    own = {p.untyped_storage().data_ptr() for p in step.module.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs, labels = next(step.split(rows()))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), step.precision():
        step.engine.root(inputs, labels)
    return sum(size for address, size in kept.items() if address not in own)


@pytest.mark.parametrize(
    ("value", "checkpointed"),
    [
        ("none", []),
        ("full", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("save-attention", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("selective", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("offload", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("every-2", [0, 2, 4, 6, 8]),
        ("every-4", [0, 4, 8]),
    ],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_layers_that_a_value_names_are_checkpointed(value: str, checkpointed: list[int], method: str) -> None:
    step = built(config(method=method, checkpointing=value), DEEP)
    assert [index for index, layer in enumerate(layers(step)) if layer.gradient_checkpointing] == checkpointed


@pytest.mark.parametrize("value", ["full", "save-attention", "every-2", "every-4", "selective", "none"])
def test_each_checkpointed_layer_runs_its_attention_a_second_time(value: str) -> None:
    step = built(config(checkpointing=value, micro_batch=4), DEEP)
    # two keep the outputs of attention, the others none of a layer's
    again = {"full": 9, "save-attention": 0, "every-2": 5, "every-4": 3, "selective": 0, "none": 0}
    assert executed_backward(step)[ATTENTION] == again[value]


@pytest.mark.parametrize(
    ("values", "again"),
    [
        # Llama's seven products of a layer: k, o and up are computed again. The last, down, is kept in vain.
        ({"method": "full", "precision": "fp32"}, 3),
        # And the adapters' two of each of the seven, of which the very last is needed by nothing.
        ({"method": "lora", "precision": "fp32"}, 3 + 13),
        ({"method": "qlora", "precision": "fp32"}, 3 + 13),
        # As many with a rank that is a dimension of the base: here the outputs of k and v, as in Qwen2.5 at rank 128.
        ({"method": "lora", "precision": "bf16-mixed", "rank": 32}, 3 + 13),
    ],
)
def test_selective_recomputes_every_second_product_and_the_adapters(values: dict[str, Any], again: int) -> None:
    counts = {
        value: executed_backward(built(config(**values, checkpointing=value, attention="sdpa", micro_batch=4)))
        for value in ("none", "selective", "save-attention", "full")
    }
    layers = LLAMA.config["num_hidden_layers"]
    assert products(counts["selective"]) - products(counts["none"]) == again * layers
    assert products(counts["selective"]) < products(counts["full"]) == products(counts["save-attention"])
    assert counts["none"]["rsqrt"] < counts["selective"]["rsqrt"] == counts["full"]["rsqrt"]


def test_a_product_of_the_base_and_an_adapter_is_the_bases() -> None:
    """As peft trains experts: their frozen weights with an adapter's product added."""
    base, a, b = torch.zeros(4, 4), torch.zeros(2, 4, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
    assert not is_trained(base.t()) and not is_trained(torch.addmm(base, b, a).t())
    assert is_trained(a) and is_trained(a.bfloat16().t())


def test_products_with_experts_are_kept_too() -> None:
    counts = {
        value: executed_backward(built(config(checkpointing=value, micro_batch=4, precision="fp32"), QWEN3_MOE))
        for value in ("none", "selective", "full")
    }
    assert products(counts["none"]) < products(counts["selective"]) < products(counts["full"])


def test_less_is_kept_the_more_is_recomputed() -> None:
    kept = {
        value: kept_bytes(built(config(checkpointing=value, micro_batch=4, precision="fp32"), DEEP))
        for value in ("full", "every-2", "every-4", "none")
    }
    assert kept["full"] < kept["every-2"] < kept["every-4"] < kept["none"]


@pytest.mark.parametrize("tiny", [LLAMA, GEMMA2, QWEN3_MOE], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("value", ["full", "save-attention", "every-2", "every-4", "selective", "offload"])
def test_recomputation_changes_nothing(tiny: Any, value: str) -> None:
    plain = config(precision="fp32", attention=attention_of(tiny), micro_batch=2)
    steps = [built(plain, tiny), built(plain.replace(checkpointing=value), tiny)]
    losses = [accumulate(step, rows()) for step in steps]
    assert losses[0] == losses[1]
    assert relative_error(gradients(steps[1]), gradients(steps[0])) < 1e-6


def test_recomputation_draws_the_same_dropout_again() -> None:
    values = {"method": "lora", "precision": "fp32", "micro_batch": 4}
    result = []
    for value in ("none", "full", "selective"):
        step = built(config(**values, checkpointing=value), lora_dropout=0.5)
        torch.manual_seed(3)
        accumulate(step, rows())
        result.append(gradients(step))
    assert relative_error(result[1], result[0]) < 1e-6
    assert relative_error(result[2], result[0]) < 1e-6


def test_nothing_is_checkpointed_in_evaluation() -> None:
    step = built(config(checkpointing="full"))
    step.module.eval()
    assert executed_backward(step)[ATTENTION] == 0


def test_offload_trains_where_there_is_nothing_to_offload_from() -> None:
    step = built(config(checkpointing="offload", micro_batch=2))
    losses = [float(step.run(rows())) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
