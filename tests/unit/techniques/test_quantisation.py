"""QLoRA: a base that is really held in 4 bits, and that trains as its dequantised twin does."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.flash_attention import get_target_dtype

from autofit.catalog.models import Model
from autofit.techniques import quantisation
from autofit.training.build import make_plan, make_skeleton
from autofit.training.step import TrainingStep
from autofit.training.weights import materialise
from tests.tiny import (
    CPU,
    GEMMA2,
    LLAMA,
    LLAMA_TIED,
    QWEN2,
    accumulate,
    attention_of,
    built,
    config,
    gradients,
    job,
    model,
    relative_error,
    rows,
    stir_adapters,
)

MODELS = pytest.mark.parametrize("tiny", [LLAMA, LLAMA_TIED, QWEN2, GEMMA2], ids=lambda tiny: tiny.name)


def packed(step: TrainingStep) -> dict[str, Any]:
    return {n: m for n, m in step.module.named_modules() if isinstance(m, bnb.nn.Linear4bit)}


@MODELS
def test_every_linear_layer_but_the_head_is_nf4_with_double_quantisation(tiny: Model) -> None:
    step = built(config(method="qlora", attention=attention_of(tiny)), tiny)
    layers = packed(step)
    assert len(layers) == 7 * tiny.config["num_hidden_layers"]
    for layer in layers.values():
        weight, state = layer.weight, layer.weight.quant_state
        assert weight.dtype is torch.uint8
        assert weight.numel() == layer.in_features * layer.out_features // 2
        assert not weight.requires_grad
        assert state.quant_type == "nf4" and state.blocksize == 64
        assert state.shape == (layer.out_features, layer.in_features)
        assert state.nested and state.absmax.dtype is torch.uint8
        assert state.state2.blocksize == 256 and state.state2.absmax.dtype is torch.float32
        assert layer.compute_dtype is torch.bfloat16
    others = [m for m in step.module.modules() if isinstance(m, nn.Linear) and m not in layers.values()]
    assert all(m.weight.dtype is torch.float32 for m in others if m.weight.requires_grad)
    head = step.module.head().weight
    assert head.dtype is torch.bfloat16 and head.shape == (512, 64)


@MODELS
def test_packed_weights_spread_as_transformers_would_have_them(tiny: Model) -> None:
    for layer in packed(built(config(method="qlora", attention=attention_of(tiny)), tiny)).values():
        weight = dequantize_4bit(layer.weight, layer.weight.quant_state).float()
        assert float(weight.mean()) == pytest.approx(0.0, abs=0.02 / 10)
        assert float(weight.std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("trainer", [None, "transformers"])
def test_flash_attention_takes_the_products_format(trainer: str | None) -> None:
    """transformers copies fp32 queries for it, into the weights' format unless it knows that these are packed."""
    step = built(config(method="qlora", precision="bf16"), trainer=trainer)
    attention = next(m for m in step.module.modules() if type(m).__name__ == "LlamaAttention")
    assert get_target_dtype(torch.zeros(1), attention) is torch.bfloat16


def test_biases_stay_and_are_frozen() -> None:
    step = built(config(method="qlora"), QWEN2)
    biases = {n.split(".")[-2]: m.bias for n, m in packed(step).items() if m.bias is not None}
    assert set(biases) == {"q_proj", "k_proj", "v_proj"}
    for bias in biases.values():
        assert bias.dtype is torch.bfloat16 and bias.device == CPU
        assert not bias.requires_grad and not bias.any()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16), ("fp32", torch.float32)]
)
def test_products_are_computed_in_the_precisions_format(precision: str, dtype: torch.dtype) -> None:
    for layer in packed(built(config(method="qlora", precision=precision))).values():
        assert layer.compute_dtype is dtype


@MODELS
def test_it_trains_as_lora_on_the_dequantised_base(tiny: Model) -> None:
    values = {"precision": "fp32", "micro_batch": 4, "attention": attention_of(tiny)}
    four_bit = built(config(method="qlora", **values), tiny)
    plain = built(config(method="lora", **values), tiny)
    stir_adapters(four_bit)
    source = dict(four_bit.module.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.module.named_parameters():
            theirs: Any = source[name]
            state = getattr(theirs, "quant_state", None)
            parameter.copy_(theirs if state is None else dequantize_4bit(theirs, state))
    losses = [accumulate(step, rows()) for step in (four_bit, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert relative_error(gradients(four_bit), gradients(plain)) < 1e-5


@MODELS
def test_taking_the_reference_loss_leaves_the_weights_and_the_gradients_as_they_are(tiny: Model) -> None:
    # In evaluation bitsandbytes may repack weights for AVX-512 kernels that have no backward pass.
    result = []
    for refer in (False, True):
        step = built(config(method="qlora", micro_batch=4, attention=attention_of(tiny)), tiny)
        stir_adapters(step)
        before = {n: m.weight.detach().clone() for n, m in packed(step).items()}
        if refer:
            step.reference_loss(rows())
        for name, layer in packed(step).items():
            assert torch.equal(layer.weight, before[name])
            assert layer.weight.quant_state.nested
        accumulate(step, rows())
        result.append(gradients(step))
    assert relative_error(result[1], result[0]) == 0.0


def test_the_base_never_exists_in_sixteen_bits_as_a_whole() -> None:
    wide = model("llama", num_hidden_layers=6, hidden_size=128, intermediate_size=512, vocab_size=16)
    qlora = config(method="qlora", precision="bf16")
    plan = make_plan(qlora, job(wide), CPU)
    skeleton = make_skeleton(plan)
    largest_layer = 128 * 512
    with _Largest() as made:
        materialise(skeleton, device=CPU)
    assert made.elements == largest_layer


class _Largest(TorchDispatchMode):
    """Notes the largest real tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        real = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor) and not t.is_meta]
        self.elements = max([self.elements, *real])
        return out


def test_replacing_leaves_the_head_where_it_is_tied_or_not() -> None:
    for tiny in (LLAMA, LLAMA_TIED):
        full = config()
        skeleton: Any = make_skeleton(make_plan(full, job(tiny), CPU))
        head = skeleton.get_output_embeddings()
        quantisation.replace_linears(skeleton, compute_dtype=torch.bfloat16)
        assert skeleton.get_output_embeddings() is head
        assert type(head) is nn.Linear
        assert all(p.is_meta for p in skeleton.parameters())
