"""Sequences that share a row and are kept apart, beside the same sequences padded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from autofit.catalog.models import Model
from autofit.techniques import unsupported
from autofit.techniques.axes.batching import KEPT_APART, micro_batches, separates_sequences
from autofit.techniques.technique import IGNORE_INDEX
from autofit.training.build import build
from autofit.training.rows import Rows
from autofit.training.step import TrainingStep
from tests import tiny

SEQUENCES = (2, 5, 9)
ROW = sum(SEQUENCES)
ROWS = 2


def built(model: Model, **values: Any) -> TrainingStep:
    """A step in fp32 on the CPU, of the same weights for each of a model's configs."""
    config = tiny.config(precision="fp32", **values)
    job = tiny.job(model, seq_len=ROW, global_batch=12, lengths=tuple(sorted(SEQUENCES)))
    assert unsupported(config, job) is None
    batches = micro_batches(config, job.workload)
    assert batches is not None and batches.shared_row == (
        SEQUENCES if separates_sequences(config) else batches.shared_row
    )
    torch.manual_seed(1)
    return build(config, job, tiny.CPU)


def tokens_of_rows() -> torch.Tensor:
    return torch.randint(tiny.VOCABULARY, (ROWS, ROW), generator=torch.Generator().manual_seed(2))


Learnt = tuple[float, dict[str, torch.Tensor]]
"""A mean loss and its gradients."""


def from_padded(step: TrainingStep, rows: torch.Tensor) -> Learnt:
    """From the sequences in `rows`, padded, in one micro-batch."""
    sequences = [sequence for row in rows for sequence in row.split(SEQUENCES)]
    labels = pad_sequence([s[1:] for s in sequences], batch_first=True, padding_value=IGNORE_INDEX)
    labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)
    targets = int((labels != IGNORE_INDEX).sum())
    loss = step.micro_step(pad_sequence(sequences, batch_first=True), labels, targets, last=True)
    return float(loss), tiny.gradients(step)


def from_rows(step: TrainingStep, rows: torch.Tensor) -> Learnt:
    return tiny.accumulate(step, rows), tiny.gradients(step)


def assert_alike(result: Learnt, expected: Learnt) -> None:
    """But for the order of sums."""
    assert result[0] == pytest.approx(expected[0], rel=1e-6)
    assert tiny.relative_error(result[1], expected[1]) < 5e-6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", tiny.one_of_each_architecture())
def test_each_architecture_learns_the_same_from_sequences_in_a_row_as_from_padded_ones(
    name: str, attention: str
) -> None:
    model = tiny.shrunk(name)
    assert model.config["model_type"] in KEPT_APART
    if attention == "sdpa" and tiny.attention_of(model) == "eager":
        pytest.skip("has no fused attention")
    rows = tokens_of_rows()
    expected = from_padded(built(model, attention=attention, micro_batch=6), rows)
    apart, packed = (
        from_rows(built(model, attention=attention, micro_batch=ROWS, batching=batching), rows)
        for batching in ("padding-free", "packed")
    )
    assert_alike(apart, expected)
    assert packed[0] != pytest.approx(expected[0], rel=1e-4)  # attention across boundaries


@pytest.mark.parametrize(
    "values",
    [
        {"micro_batch": 1},
        {"checkpointing": "full"},
        {"checkpointing": "selective", "loss": "chunked"},
        {"compile": True},
    ],
)
def test_so_it_does_with_other_techniques(values: dict[str, Any]) -> None:
    rows = tokens_of_rows()
    expected = from_padded(built(tiny.LLAMA, micro_batch=6), rows)
    assert_alike(
        from_rows(built(tiny.LLAMA, **{"micro_batch": ROWS, **values}, batching="padding-free"), rows), expected
    )


def test_every_loss_of_a_step_is_normalised_by_the_targets_within_sequences() -> None:
    rows = tokens_of_rows()[:1].expand(4, -1)
    mean, _ = from_padded(built(tiny.LLAMA, micro_batch=12), rows)
    step = built(tiny.LLAMA, micro_batch=2, batching="padding-free")
    assert step.module.rows.targets(rows) == 4 * (ROW - len(SEQUENCES))
    assert step.reference_loss(rows) == pytest.approx(mean, rel=1e-5)
    assert float(step.evaluate(rows)) == pytest.approx(mean, rel=1e-5)
    plain = step.plain_gradient_norm(rows[:1])
    assert float(step.run(rows)) == pytest.approx(mean, rel=1e-5)
    assert float(step.gradient_norm) == pytest.approx(plain, rel=1e-4)


def test_of_the_beginnings_of_rows_the_sequences_are_cut() -> None:
    rows, tokens = Rows(SEQUENCES), tokens_of_rows()[:, :11]
    assert rows.targets(tokens) == ROWS * 8
    assert [at for at, label in enumerate(rows.labels(tokens)[0]) if label == IGNORE_INDEX] == [1, 6, 10]
    assert rows.decoder_arguments(tokens)["position_ids"][1].tolist() == [*range(2), *range(5), *range(4)]
    assert [len(row[0]) for row, _ in rows.alone(tokens[:1])] == [2, 5, 4]


def test_flash_attention_is_given_one_row_and_where_sequences_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def varlen(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        """As flash-attn's kernel of that name computes, which runs on a GPU alone."""
        assert attention_mask is None and query.shape[0] == 1 and options["position_ids"].shape == (1, ROWS * ROW)
        assert options["max_length_q"] == options["max_length_k"] == max(SEQUENCES)
        lengths = [options[f"cu_seq_lens_{side}"].diff().tolist() for side in "qk"]
        assert lengths == [[*SEQUENCES * ROWS]] * 2
        parts = zip(*(tensor.split(lengths[0], dim=2) for tensor in (query, key, value)), strict=True)
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return torch.cat([sdpa(module, *part, None, scaling=options["scaling"])[0] for part in parts], dim=1), None

    AttentionInterface.register("varlen", varlen)
    monkeypatch.setattr("autofit.training.build.IMPLEMENTATIONS", {"flash": "varlen"})
    monkeypatch.setattr("autofit.techniques.axes.attention.IMPLEMENTATIONS", {"sdpa": "sdpa", "eager": "varlen"})
    rows = tokens_of_rows()
    for name in tiny.one_of_each_architecture():
        model = tiny.shrunk(name)
        if tiny.attention_of(model) == "eager":
            continue  # the kernel would be told how to cap scores
        window = {"sliding_window": ROW} if model.config.get("sliding_window") else {}
        model = replace(model, config={**model.config, **window})
        expected = from_padded(built(model, micro_batch=6), rows)
        result = from_rows(built(model, attention="eager", micro_batch=ROWS, batching="padding-free"), rows)
        assert_alike(result, expected)


def test_a_kernel_that_does_not_keep_them_apart_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial compares its loss with that of each sequence in a row of its own, by the same kernel."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    def ignores(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, scaling=options["scaling"])

    AttentionInterface.register("ignores", ignores)
    monkeypatch.setattr("autofit.techniques.axes.attention.IMPLEMENTATIONS", {"sdpa": "sdpa", "eager": "ignores"})
    rows = tokens_of_rows()
    step = built(tiny.LLAMA, attention="eager", micro_batch=ROWS, batching="padding-free")
    assert step.reference_loss(rows) == pytest.approx(from_padded(built(tiny.LLAMA, micro_batch=6), rows)[0], rel=1e-5)
    assert abs(float(step.run(rows)) / step.reference_loss(rows) - 1.0) > 1e-4


def test_what_flash_attention_is_given_is_what_the_collators_of_trl_and_transformers_give() -> None:
    from transformers import DataCollatorWithFlattening
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    tokens = tokens_of_rows()
    arguments = Rows(SEQUENCES, joins=True).decoder_arguments(tokens)
    targets = Rows(SEQUENCES).labels(tokens).flatten()[:-1]
    packed = [{"input_ids": row.tolist(), "seq_lengths": list(SEQUENCES)} for row in tokens]
    apart = [{"input_ids": sequence.tolist()} for row in tokens for sequence in row.split(SEQUENCES)]
    for collated in (
        DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(packed),
        DataCollatorWithFlattening(return_flash_attn_kwargs=True)(apart),
    ):
        for name, value in arguments.items():
            given = collated[name]
            assert given == value if isinstance(value, int) else torch.equal(given, value), name
        assert torch.equal(collated["labels"][0, 1:], targets)


def test_where_it_is_not_known_to_be_exact_it_is_refused() -> None:
    def reason(model: Model = tiny.LLAMA, lengths: tuple[int, ...] | None = (2, 16), **values: Any) -> str | None:
        job = tiny.job(model, lengths=lengths)
        hardware, stack = tiny.CUDA_HARDWARE, replace(job.stack, flash_attn="2.8.0")
        return unsupported(tiny.config(batching="padding-free", **values), replace(job, hardware=hardware, stack=stack))

    assert reason() is None and reason(attention="flash") is None and reason(compile=True) is None
    assert "needs --lengths" in str(reason(lengths=None))
    assert "not known to keep sequences apart in tiny-gpt2" in str(reason(tiny.GPT2))
    assert "never tried compiled" in str(reason(attention="flash", compile=True))
