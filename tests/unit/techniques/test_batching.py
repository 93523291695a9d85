"""How sequences of different lengths make micro-batches, beside what the trainers' own code makes of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from autofit import export
from autofit.core.lengths import Lengths, mean
from autofit.core.workload import Goal, Workload
from autofit.estimate.estimator import Estimator
from autofit.planning.lattices import load_space, narrow
from autofit.techniques import Job, changes, complete, parse, unsupported
from autofit.techniques.axes.batching import micro_batches
from autofit.techniques.habits import TRAINERS
from tests import tiny
from tests.unit.export.export_samples import make_recommendation

COUNTS = [min(2000, max(2, int(random.Random(n).lognormvariate(6.0, 0.8)))) for n in range(5000)]
TOKENS = Lengths.of(COUNTS).tokens


def workload(**fields: Any) -> Workload:
    return Workload(model="m", model_digest="0" * 16, **{"seq_len": 2000, "lengths": TOKENS, **fields})


def config(batching: str, micro_batch: int = 4) -> Any:
    return tiny.config(micro_batch=micro_batch, batching=batching)


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "ranks"), [(4, 16, 1), (1, 4, 1), (1, 1, 1), (2, 1, 1), (8, 1, 1), (4, 4, 4)]
)
def test_grouped_micro_batches_are_as_long_as_those_of_transformers(
    micro_batch: int, accumulation: int, ranks: int
) -> None:
    torch.manual_seed(0)
    order = get_length_grouped_indices(COUNTS, micro_batch * accumulation)
    together = micro_batch * ranks  # ranks take micro-batches in turn, and wait for each other
    theirs = [max(COUNTS[i] for i in order[at : at + together]) for at in range(0, len(order), together)]
    ours = micro_batches(
        config("grouped", micro_batch), workload(global_batch=micro_batch * accumulation * ranks, devices=ranks)
    )
    assert ours is not None
    for power in (1, 2):
        assert ours.moment(power) == pytest.approx(sum(n**power for n in theirs) / len(theirs), rel=0.02)
    assert sum(weight for _, weight in ours.nodes) == pytest.approx(1.0)


def test_ranks_wait_for_the_longest_of_all() -> None:
    two, one = workload(devices=2), workload(devices=1)
    assert micro_batches(config("padded", 4), two) == micro_batches(config("padded", 8), one)


@pytest.mark.parametrize(("row", "counts"), [(2000, COUNTS), (1000, COUNTS), (500, [300] * 400), (64, [2, 64] * 200)])
def test_packed_rows_are_as_many_as_trl_makes(row: int, counts: list[int]) -> None:
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    cut = [min(count, row) for count in counts]
    theirs = pack_dataset(Dataset.from_dict({"input_ids": [[0] * count for count in cut]}), row, strategy="bfd")
    ours = micro_batches(config("packed"), workload(seq_len=row, lengths=Lengths.of(cut).tokens))
    assert ours is not None
    assert ours.nodes == ((row, 1.0),)
    assert ours.rows == pytest.approx(len(theirs) / len(cut), rel=0.02)


def test_a_row_that_is_not_full_yet_is_no_padding() -> None:
    ours = micro_batches(config("packed"), workload(seq_len=2**17, lengths=TOKENS))
    assert ours is not None and ours.tokens == pytest.approx(mean(TOKENS), rel=1e-3)


def test_the_row_that_stands_for_all_is_full_and_as_much_work_for_attention_as_the_mean() -> None:
    ours = micro_batches(config("padding-free"), workload())
    assert ours is not None and sum(ours.row) == 2000
    squares = sum(length**2 for length in TOKENS) / len(TOKENS) / ours.rows
    assert sum(length**2 for length in ours.row) == pytest.approx(squares, rel=0.05)
    assert ours.nodes == micro_batches(config("packed"), workload()).nodes  # type: ignore[union-attr]
    mostly_alone = micro_batches(config("padding-free"), workload(seq_len=64, lengths=(30, 34, *[64] * 8)))
    assert mostly_alone is not None and (mostly_alone.row, mostly_alone.shared_row) == ((64,), (30, 34))
    assert mostly_alone.attended == pytest.approx((8 * 64**2 + 30**2 + 34**2) / 9 / 64**2)
    assert (mostly_alone.most_in_row, ours.attended) == (2, pytest.approx(squares / 2000**2, rel=0.01))


def test_keeping_sequences_apart_takes_a_mask_with_sdpa_and_spares_attention_with_flash() -> None:
    model = tiny.model("llama", vocab_size=512, num_hidden_layers=2, num_key_value_heads=4)
    job = tiny.job(model, seq_len=2048, global_batch=8, lengths=(512, 1536))  # each row has both
    stack = replace(job.stack, flash_attn="2.8.0")
    estimator = Estimator(replace(job, hardware=tiny.CUDA_HARDWARE, stack=stack), None)

    def predicted(batching: str, attention: str) -> Any:
        result = tiny.config(micro_batch=4, precision="bf16", batching=batching, attention=attention)
        return estimator.estimate(result, memory_limit_bytes=tiny.CUDA_HARDWARE.memory_bytes)

    masked, unmasked = (predicted(batching, "sdpa").peak_allocated_bytes for batching in ("padding-free", "packed"))
    # The mask, once, and in each layer in bf16 what is added to the scores instead, but for what is gone at the peak.
    assert 1 + 2 <= (masked - unmasked) / (4 * 2048**2) <= 1 + 2 * 2
    apart, together = (predicted(batching, "flash") for batching in ("padding-free", "packed"))
    assert apart.peak_allocated_bytes == pytest.approx(together.peak_allocated_bytes, rel=0.005)
    fused = [kind for kind in together.work.amounts if kind.startswith("attention/")]
    assert len(fused) == 2
    for kind in fused:
        assert apart.work.amounts[kind] == pytest.approx(
            (512**2 + 1536**2) / 2048**2 * together.work.amounts[kind], rel=1e-6
        )


@pytest.mark.parametrize(
    ("trainer", "attention", "reason"),
    [
        ("trl", "sdpa", "joins the rows of a micro-batch, under one mask without attention=flash"),
        ("trl", "flash", None),
        ("axolotl", "sdpa", None),
        ("llamafactory", "sdpa", None),
        ("llamafactory", "flash", "takes one row at a time with attention=flash"),
    ],
)
def test_what_trainers_do_instead_of_keeping_sequences_apart(trainer: str, attention: str, reason: str | None) -> None:
    result = complete({"batching": "padding-free", "attention": attention, "micro_batch": 2, "method": "lora"})
    result = result.replace(loss=TRAINERS[trainer].usual.get("loss", "full"))
    assert TRAINERS[trainer].unsupported(result.replace(micro_batch=1)) is None
    refusal = TRAINERS[trainer].unsupported(result)
    assert refusal == (reason and f"batching=padding-free is not possible here with {trainer}, which {reason}")


def test_packing_trains_as_fast_on_a_token_as_full_sequences_and_takes_the_same_memory() -> None:
    model = tiny.model("llama", vocab_size=512, num_hidden_layers=2)
    lengths = tuple(range(8, 72, 8))  # two of them fill a row, so none of it is padding

    def predicted(batching: str, **of_workload: Any) -> Any:
        job = tiny.job(model, seq_len=64, global_batch=8, **of_workload)
        job = Job(model=job.model, workload=job.workload, hardware=tiny.CUDA_HARDWARE, stack=job.stack)
        return Estimator(job, None).estimate(config(batching), memory_limit_bytes=job.hardware.memory_bytes)

    full, packed, padded = (
        predicted("padded"),
        predicted("packed", lengths=lengths),
        predicted("padded", lengths=lengths),
    )
    same = ("peak_allocated_bytes", "peak_reserved_bytes", "phase_peaks")
    assert [getattr(packed, name) for name in same] == [getattr(full, name) for name in same]
    assert padded.peak_allocated_bytes == full.peak_allocated_bytes
    # Rows of 64 tokens in place of sequences of 36.
    assert packed.work is not None and full.work is not None and mean(lengths) == 36.0
    assert packed.work.amounts == pytest.approx({kind: 36 / 64 * n for kind, n in full.work.amounts.items()}, rel=1e-3)


def test_padded_goes_without_saying_and_the_others_need_lengths() -> None:
    assert "batching" not in complete({}) and complete({"batching": "padded"}) == complete({})
    job = tiny.job()
    assert (
        unsupported(config("grouped"), job)
        == "batching=grouped needs --lengths: without them every sequence is full, as if packed"
    )
    assert [change.split(" changes ")[0] for change in changes(config("packed")) if "batching" in change] == [
        "batching=packed instead of padded"
    ]
    with pytest.raises(Exception, match="write batching=grouped"):
        parse("group_by_length=true")
    with pytest.raises(Exception, match="write batching=packed"):
        parse("sample_packing=true")
    with pytest.raises(Exception, match="write batching=padding-free"):
        parse("padding_free=true")


@pytest.mark.parametrize(
    ("lengths", "allow", "tried"),
    [
        ((8, 32), "training", {None, "grouped", "packed", "padding-free"}),
        ((8, 32), "numerics", {None}),
        (None, "training", {None}),
    ],
)
def test_a_search_tries_all_where_lengths_are_known_and_training_may_change(
    lengths: tuple[int, ...] | None, allow: str, tried: set[str | None]
) -> None:
    job = tiny.job(seq_len=32, global_batch=4, lengths=lengths)
    lattice = narrow(load_space("cpu"), Goal.of("any", 8, allow), job).lattice
    assert {config.get("batching") for config in lattice.configs} == tried


SAID = {
    "transformers": ("train_sampling_strategy='group_by_length'", "none of them padding"),
    "trl": ("train_sampling_strategy: group_by_length", "packing: true"),
    "axolotl": ("group_by_length: true", "sample_packing: true"),
    "llamafactory": ("train_sampling_strategy: group_by_length", "packing: true"),
}
APART = {
    "transformers": "data_collator=apart",
    "trl": "packing_strategy: bfd",
    "axolotl": "sample_packing: true",
    "llamafactory": "neat_packing: true",
}


@pytest.mark.parametrize("form", SAID)
def test_exports_group_and_pack(form: str) -> None:
    def text(batching: str) -> str:
        result = make_recommendation(config(batching), seq_len=64, global_batch=4, lengths=(10, 64))
        return export.export(result, format=form, source="here").text

    grouping, packing = SAID[form]
    every = [("padded", set()), ("grouped", {grouping}), ("packed", {packing}), ("padding-free", {packing})]
    for batching, expected in every if form != "transformers" else every[:3]:
        assert {setting for setting in SAID[form] if setting in text(batching)} == expected
    assert "the config does not name" not in text("padded")
    assert APART[form] in text("padding-free") and (form == "axolotl" or APART[form] not in text("packed"))
