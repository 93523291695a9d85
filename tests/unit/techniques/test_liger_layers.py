"""Liger's kernels put in and taken out again. Liger itself runs on a card alone: what it binds is made here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from jobs import tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from autofit.catalog.models import architecture
from autofit.techniques.liger_layers import LigerLayers


def doubled_norms(model: Any, **options: bool) -> None:
    """What Liger's own function does, by norms and rotary embeddings that are plainly others."""
    assert options == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    modeling_llama.apply_rotary_pos_emb = lambda queries, keys, *others: (queries, keys)  # type: ignore[assignment]
    modeling_llama.LlamaRMSNorm = torch.nn.Identity  # type: ignore[misc,assignment]
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            vars(module)["forward"] = lambda hidden: 2.0 * hidden


def test_plainly_a_model_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, norm = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotary)
    made: Any = ModuleType("liger_kernel.transformers")
    made._apply_liger_kernel_to_instance = doubled_norms
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", made)
    model = AutoModelForCausalLM.from_config(architecture(tiny_model()))
    tokens = torch.arange(8).view(1, 8)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(tokens).logits
        return result

    plain = logits()
    layers = LigerLayers(model)
    replaced = logits()
    assert not torch.allclose(replaced, plain)
    with layers.plainly():
        assert torch.equal(logits(), plain)
    assert torch.equal(logits(), replaced)
    assert modeling_llama.LlamaRMSNorm is norm, "models to come are made of transformers' own"
    model = AutoModelForCausalLM.from_config(architecture(tiny_model()))
    with LigerLayers(model).plainly():
        assert modeling_llama.apply_rotary_pos_emb is rotary, "also of the second model in a process"
