"""The root module gives the loss that transformers gives, for every architecture of the catalog and then some."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.catalog.models import Model
from autofit.core.lattice import Config
from autofit.techniques import unsupported
from autofit.techniques.adapters import unwrap
from autofit.techniques.losses.cross_entropy import full_cross_entropy
from autofit.techniques.technique import IGNORE_INDEX
from autofit.training.loss_module import LossModule
from autofit.training.step import TrainingStep
from tests.tiny import (
    COHERE,
    FAMILIES,
    GEMMA2,
    GRANITE,
    LLAMA,
    PHI,
    QWEN3_MOE,
    attention_of,
    built,
    config,
    job,
    model,
    one_of_each_architecture,
    rows,
    shrunk,
)

LLAMA4 = model("llama4_text", intermediate_size_mlp=128, num_local_experts=2, attention_chunk_size=64)
EVERY = [*FAMILIES.values(), COHERE, GRANITE, PHI, *(shrunk(name) for name in one_of_each_architecture())]


def theirs(step: TrainingStep, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """The mean loss of transformers' own forward, which shifts the labels itself."""
    own: Any = unwrap(step.module.model)
    with step.precision():
        loss: torch.Tensor = own(input_ids=tokens, labels=tokens if labels is None else labels, use_cache=False).loss
    return loss


def ours(step: TrainingStep, tokens: torch.Tensor) -> torch.Tensor:
    inputs, labels = next(step.split(tokens))
    with step.precision():
        loss: torch.Tensor = step.module(inputs, labels) / (labels != IGNORE_INDEX).sum()
    return loss


def plain(model: Model, **values: Any) -> Config:
    return config(**{"precision": "fp32", "micro_batch": 4, "attention": attention_of(model), **values})


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.name)
def test_loss_and_gradients_are_transformers_own(model: Model, loss: str) -> None:
    requested = plain(model, loss=loss)
    if unsupported(requested, job(model)) is not None:
        pytest.skip("refused before anything runs")
    step = built(requested, model)
    tokens = rows()
    theirs(step, tokens).backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad.clone() for n, p in step.module.named_parameters() if p.grad is not None}
    step.module.zero_grad()
    mine = ours(step, tokens)
    mine.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mine.detach(), theirs(step, tokens).detach(), rtol=1e-6, atol=0)
    assert {n for n, p in step.module.named_parameters() if p.grad is not None} == set(expected)
    for name, parameter in step.module.named_parameters():
        if parameter.grad is not None:
            error = (parameter.grad - expected[name]).norm()
            assert error <= 1e-5 * expected[name].norm() + 1e-9, name


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_part_of_the_loss(method: str) -> None:
    step = built(plain(LLAMA, method=method))
    tokens = rows()
    with torch.no_grad():
        for name, parameter in step.module.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.05)
        torch.testing.assert_close(ours(step, tokens), theirs(step, tokens), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-4), ("bf16-mixed", 2e-4), ("fp16-mixed", 3e-5)])
def test_in_sixteen_bits_too(precision: str, tolerance: float) -> None:
    # Both round every logit to 16 bits before the softmax; only the order of sums may differ.
    step = built(plain(LLAMA, precision=precision))
    tokens = rows()
    torch.testing.assert_close(ours(step, tokens), theirs(step, tokens), rtol=tolerance, atol=0)


def test_a_model_of_a_family_with_parts_is_found_by_its_decoder() -> None:
    # Its base_model_prefix names the decoder of the multimodal whole.
    step = built(plain(LLAMA4), LLAMA4)
    torch.testing.assert_close(ours(step, rows()), theirs(step, rows()), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("model", "field", "scale", "softcap"),
    [
        (LLAMA, None, 1.0, None),
        (COHERE, "logit_scale", 0.25, None),
        (GRANITE, "logits_scaling", 0.25, None),
        (GEMMA2, "final_logit_softcapping", 1.0, 2.0),
    ],
    ids=["plain", "scaled", "divided", "softcapped"],
)
def test_the_head_says_what_becomes_of_the_logits(
    model: Model, field: str | None, scale: float, softcap: float | None
) -> None:
    head = built(plain(model), model).module.head()
    assert (head.scale, head.softcap, head.bias) == (scale, softcap, None)
    assert head.weight.shape == (512, 64)
    if field is not None:
        # and it matters: with transformers' usual weights it would vanish in the noise
        other = Model(
            name="other", config={**model.config, field: None if softcap else 1.0}, source="", parameters=None
        )
        losses = [float(ours(built(plain(m), m), rows()).detach()) for m in (model, other)]
        assert abs(losses[0] - losses[1]) > 0.01


def test_the_heads_bias_is_seen() -> None:
    head = built(plain(PHI), PHI).module.head()
    assert head.bias is not None and head.bias.shape == (512,)


def test_ignored_labels_do_not_count() -> None:
    step = built(plain(LLAMA))
    tokens = rows()
    labels = tokens.clone()
    labels[0, 3:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    mine = step.module(tokens, shifted) / (shifted != IGNORE_INDEX).sum()
    torch.testing.assert_close(mine, theirs(step, tokens, labels), rtol=1e-6, atol=0)


def test_every_parameter_is_registered_once() -> None:
    for tiny in (LLAMA, QWEN3_MOE):
        module = built(plain(tiny), tiny).module
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        assert len(names) == len(set(names))
        assert all(name.startswith("model.") for name in names)
        assert len(list(module.children())) == 1


def test_the_plain_loss_uses_the_kernel_it_is_given() -> None:
    step = built(plain(LLAMA, loss="chunked"))
    seen = []

    def kernel(hidden: torch.Tensor, head: Any, labels: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape)
        return full_cross_entropy(hidden, head, labels)

    inputs, labels = next(step.split(rows()))
    with torch.no_grad():
        result = step.module(inputs, labels, kernel)
        torch.testing.assert_close(result, step.module(inputs, labels), rtol=1e-6, atol=0)
    assert seen == [(4 * 16, 64)]
    assert isinstance(step.module, LossModule)
