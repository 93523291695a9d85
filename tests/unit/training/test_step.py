"""One optimizer step: one gradient however the batch is cut, phases in order, a reference that disturbs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch

from autofit.catalog.models import Model
from autofit.core.outcome import PHASES
from autofit.techniques import unsupported
from autofit.techniques.technique import IGNORE_INDEX
from autofit.training.loss_module import LossModule
from autofit.training.step import TrainingStep
from tests.tiny import (
    COHERE,
    FAMILIES,
    LLAMA,
    PHI,
    QWEN3_MOE,
    VOCABULARY,
    accumulate,
    attention_of,
    built,
    config,
    gradients,
    job,
    relative_error,
    rows,
    shrunk,
    stir_adapters,
)


def uneven(step: TrainingStep, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches whose rows have 15, 2, 9 and no targets."""
    given = []
    lengths = iter((15, 2, 9, 0))
    for inputs, labels in step.split(tokens):
        for row in labels:
            row[next(lengths) :] = IGNORE_INDEX
        given.append((inputs, labels))
    return given


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_neither_accumulation_nor_uneven_padding_changes_the_gradient(method: str, loss: str) -> None:
    found = []
    for micro_batch in (4, 2, 1):
        step = built(config(method=method, loss=loss, precision="fp32", micro_batch=micro_batch))
        stir_adapters(step)
        micro_batches = uneven(step, rows())
        assert len(micro_batches) == 4 // micro_batch
        targets = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in micro_batches)
        assert targets == 26
        losses = [step.micro_step(inputs, labels, targets, last=False) for inputs, labels in micro_batches]
        found.append((float(sum(losses)), gradients(step)))
    for total, gradient in found[1:]:
        assert total == pytest.approx(found[0][0], rel=1e-6)
        assert relative_error(gradient, found[0][1]) < 1e-6


def test_the_gradient_is_that_of_the_mean_over_all_targets() -> None:
    step = built(config(precision="fp32", micro_batch=2))
    for inputs, labels in uneven(step, rows()):
        step.micro_step(inputs, labels, 26, last=False)
    accumulated = gradients(step)
    whole = built(config(precision="fp32", micro_batch=4))
    ((inputs, labels),) = uneven(whole, rows())
    logits = whole.module.model(input_ids=inputs).logits  # type: ignore[operator]
    torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)).backward()  # type: ignore[no-untyped-call]
    assert relative_error(accumulated, gradients(whole)) < 1e-6


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_run_returns_the_mean_loss_before_its_update(micro_batch: int) -> None:
    step = built(config(precision="fp32", micro_batch=micro_batch))
    expected = step.reference_loss(rows())
    losses = [float(step.run(rows())) for _ in range(2)]
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert losses[1] < losses[0]


def test_a_share_of_the_loss_is_detached() -> None:
    step = built(config(micro_batch=4))
    inputs, labels = next(step.split(rows()))
    share = step.micro_step(inputs, labels, 60, last=True)
    assert not share.requires_grad
    assert share.dtype is torch.float32 and share.shape == ()


def test_split_shifts_labels_and_leaves_the_last_position_without_a_target() -> None:
    step = built(config(micro_batch=2))
    tokens = rows()
    parts = list(step.split(tokens))
    assert [inputs.shape for inputs, _ in parts] == [(2, 16), (2, 16)]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), tokens)
    labels = torch.cat([labels for _, labels in parts])
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    assert (labels[:, -1] == IGNORE_INDEX).all()


def test_each_phase_is_observed_as_it_runs() -> None:
    seen: list[str] = []

    @contextmanager
    def observe(phase: str) -> Iterator[None]:
        seen.append(phase)
        yield
        seen.append(f"{phase} ends")

    def ended(*phases: str) -> list[str]:
        return [mark for phase in phases for mark in (phase, f"{phase} ends")]

    step = built(config(micro_batch=2))
    step.run(rows(), observe)
    assert seen == ended("forward", "backward", "forward", "backward", "optimizer")
    assert set(PHASES) <= set(seen)
    seen.clear()
    inputs, labels = next(step.split(rows()))
    step.micro_step(inputs, labels, 30, last=True, observe=observe)
    assert seen == ended("forward", "backward")
    step.update(observe)
    assert seen[4:] == ended("optimizer")


def test_an_interrupted_phase_is_seen_by_its_observer() -> None:
    failures: list[str] = []

    @contextmanager
    def observe(phase: str) -> Iterator[None]:
        try:
            yield
        except IndexError:
            failures.append(phase)
            raise

    step = built(config(micro_batch=4))
    with pytest.raises(IndexError):
        step.run(torch.full((4, 16), VOCABULARY + 5), observe)
    assert failures == ["forward"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_reference_is_the_loss_of_the_plain_forward(family: str, loss: str, checkpointing: str) -> None:
    tiny = FAMILIES[family]
    values = {"precision": "fp32", "micro_batch": 4, "attention": attention_of(tiny)}
    plain = float(built(config(**values), tiny).run(rows()))
    step = built(config(**values, loss=loss, checkpointing=checkpointing), tiny)
    assert step.reference_loss(rows()) == pytest.approx(plain, rel=1e-6)


def test_the_reference_leaves_dropout_out_and_puts_training_back() -> None:
    values = {"method": "lora", "precision": "fp32", "micro_batch": 4}
    without, with_dropout = built(config(**values)), built(config(**values), lora_dropout=0.5)
    for step in (without, with_dropout):
        stir_adapters(step)
    expected = without.reference_loss(rows())
    assert with_dropout.reference_loss(rows()) == pytest.approx(expected, rel=1e-6)
    assert with_dropout.module.training
    assert float(with_dropout.run(rows())) != pytest.approx(expected, rel=1e-6)


def twice_as_much(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler that gets it wrong."""
    return lambda *given: tuple(2.0 * result for result in module(*given))


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_plain_training_gives_is_not_compiled(
    method: str, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"method": method, "precision": "fp32", "micro_batch": 1}
    plain = built(config(**values))
    wrong = partialmethod(LossModule.compile_layers, backend=twice_as_much)
    monkeypatch.setattr(LossModule, "compile_layers", wrong)
    compiled = built(config(**values, compile=True))
    assert compiled.reference_loss(rows()) == plain.reference_loss(rows())
    assert compiled.plain_gradient_norm(rows(1)) == plain.plain_gradient_norm(rows(1))
    assert float(compiled.run(rows())) != pytest.approx(float(plain.run(rows())), rel=1e-3)


def test_each_kind_of_layer_is_compiled_once(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: the first gets inputs without a gradient, and every second is checkpointed."""
    from torch._dynamo.utils import counters

    found, gemma = [], shrunk("gemma-2-2b")
    monkeypatch.setattr(LossModule, "compile_layers", partialmethod(LossModule.compile_layers, backend="eager"))
    for layers in (4, 12):
        torch.compiler.reset()
        counters.clear()
        values = {"method": "lora", "precision": "fp32", "micro_batch": 4, "attention": "eager"}
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        model = replace(gemma, config={**gemma.config, "num_hidden_layers": layers, "layer_types": kinds})
        step = built(config(**values, checkpointing="every-2", compile=True), model)
        for length in (16, 9):
            step.run(rows(seq_len=length))
        found.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1] > 1


def test_a_reference_that_runs_out_of_memory_puts_training_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    step = built(config(precision="fp32", micro_batch=4, checkpointing="full"))
    monkeypatch.setattr("autofit.training.step.chunked_cross_entropy", refused)
    with pytest.raises(torch.OutOfMemoryError):
        step.reference_loss(rows())
    # transformers checkpoints in training mode only
    assert all(module.training for module in step.module.modules())


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed", "fp32"])
def test_the_reference_disturbs_nothing(method: str, precision: str) -> None:
    found = []
    for refer in (False, True):
        step = built(config(method=method, precision=precision, micro_batch=2))
        stir_adapters(step)
        if refer:
            step.reference_loss(rows(1))
            assert not gradients(step)
        torch.manual_seed(4)
        accumulate(step, rows())
        found.append(gradients(step))
    assert relative_error(found[1], found[0]) == 0.0


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp16-mixed", "fp32"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_plain_gradient_is_that_of_the_next_step_and_leaves_nothing(method: str, precision: str) -> None:
    values = {"method": method, "precision": precision, "micro_batch": 1, "checkpointing": "full", "loss": "chunked"}
    step = built(config(**values))
    stir_adapters(step)
    same = rows(1).expand(4, -1)
    plain = step.plain_gradient_norm(same[:1])
    assert not gradients(step) and step.module.training
    step.run(same)
    assert plain == pytest.approx(float(step.gradient_norm), rel=1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("tiny", [PHI, COHERE, QWEN3_MOE], ids=lambda tiny: tiny.name)
def test_the_reference_can_be_taken_of_every_model_that_trains(tiny: Model, method: str) -> None:
    requested = config(method=method, precision="fp32", micro_batch=4)
    if unsupported(requested, job(tiny)) is not None:
        pytest.skip("refused before anything runs")
    step = built(requested, tiny)
    reference = step.reference_loss(rows())
    assert float(step.run(rows())) == pytest.approx(reference, rel=1e-6)


def test_the_reference_reports_a_loss_that_is_not_finite() -> None:
    step = built(config(precision="fp32", micro_batch=4))
    with torch.no_grad():
        step.module.head().weight[7, 7] = float("nan")
    assert math.isnan(step.reference_loss(rows()))
    assert math.isnan(float(step.run(rows())))


def test_normalisation_counts_the_targets_of_all_ranks() -> None:
    step, alone = (built(config(precision="fp32", micro_batch=4), LLAMA) for _ in range(2))
    step.engine.ranks = 2
    assert float(step.run(rows())) == pytest.approx(float(alone.run(rows())) / 2, rel=1e-6)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_evaluation_is_of_all_sequences_at_once_and_disturbs_nothing(loss: str) -> None:
    step = built(config(method="lora", precision="fp32", loss=loss, checkpointing="full"), lora_dropout=0.5)
    tokens = rows(3)
    assert float(step.evaluate(tokens)) == pytest.approx(step.reference_loss(tokens), rel=1e-5)
    assert step.module.training
    assert not step.evaluate(tokens).requires_grad
    assert all(parameter.grad is None for parameter in step.module.parameters())


def test_a_mask_of_padding_changes_neither_loss_nor_gradients() -> None:
    """Only what computes them: keys and values are repeated for all heads."""
    masks: list[torch.Tensor | None] = []
    found = []
    for lengths in (None, (4, 16)):
        step = built(config(precision="fp32", micro_batch=2), trainer="transformers", lengths=lengths)
        step.module.decoder.register_forward_pre_hook(
            lambda module, args, options: masks.append(options["attention_mask"]), with_kwargs=True
        )
        loss = accumulate(step, rows())
        assert step.reference_loss(rows()) == pytest.approx(loss, rel=1e-5)
        found.append((loss, gradients(step)))
    (loss, plain), (masked_loss, masked) = found
    assert masked_loss == pytest.approx(loss, rel=1e-6)
    assert relative_error(masked, plain) < 1e-5
    given = [mask for mask in masks if mask is not None]
    assert len(given) == len(rows()) // 2, "a row of its own, as of the reference, has no padding"
    assert given[0].tolist() == [[1] * 16, [1] * 15 + [0]]
