"""What an estimate says that it assumes, held against the records that it speaks of."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import CPU_HARDWARE, CUDA_HARDWARE, GPT2, LLAMA, STACK, job

from autofit.catalog.hardware import cards
from autofit.catalog.models import Model, load
from autofit.core.device.hardware import Hardware
from autofit.core.units import format_bytes
from autofit.core.workload import Workload
from autofit.estimate.assumptions import ASSUMED, CONTEXT_BYTES, SEEN_CONTEXT_BYTES, assumptions, of_trace
from autofit.estimate.bound import bounded
from autofit.estimate.estimator import Estimator
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.operations.recording.table_file import read_table
from autofit.prediction.estimation import site
from autofit.techniques import Job, complete, parse
from autofit.techniques.axes.attention import keeps_scores
from autofit.trial.machine.detection import installed_stack

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded"
RECORD = RECORDED / "cpu-zen5-2c-sharded-memory.json"


def assumed_of(text: str, hardware: Hardware, **packages: str | None) -> tuple[str, ...]:
    workload = Workload(model=LLAMA.name, model_digest=LLAMA.digest, seq_len=16, global_batch=4, devices=2)
    stack = replace(STACK, deepspeed="installed", **packages)
    return of_trace(complete(parse(text)), Job(model=LLAMA, workload=workload, hardware=hardware, stack=stack))


def heap_sentence(text: str, hardware: Hardware = CPU_HARDWARE) -> str | None:
    return next((sentence for sentence in assumed_of(text, hardware) if "C library" in sentence), None)


def test_a_processors_memory_is_said_to_be_off_by_what_was_recorded() -> None:
    errors = json.loads((RECORDED / "estimate-cpu.json").read_text(encoding="utf-8"))["all_tables"]["memory"]
    median, worst = math.ceil(100 * errors["median_absolute_error"]), round(100 * abs(errors["worst_error"]))
    sentence = heap_sentence("method=full")
    assert sentence is not None
    assert sentence.endswith(f"half of them were off by less than {median} %, and the worst by {worst} %")


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_processors_ranks_are_said_to_be_off_by_what_was_recorded(sharding: str) -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["configs"]
    errors = {(row["config"]["sharding"], row["config"]["method"]): row["error"] for row in rows}
    sentence = heap_sentence(f"sharding={sharding}")
    assert sentence is not None
    median = int(100 * statistics.median(map(abs, errors.values())))
    assert f"of {len(errors)} predictions for two ranks half were off by more than {median} %" in sentence
    low = [-error for (name, _), error in errors.items() if name in ("zero3", "fsdp")]
    assert f"{100 * min(low):.0f} to {100 * max(low):.0f} % too low" in sentence
    assert sentence == heap_sentence(f"sharding={sharding},offload=params")
    assert heap_sentence(f"sharding={sharding}", CUDA_HARDWARE) is None


def test_a_processors_memory_with_offload_is_said_to_be_off_by_what_was_recorded() -> None:
    every = json.loads((RECORDED / "estimate-cpu.json").read_text(encoding="utf-8"))["all_tables"]
    kinds = every["errors_by_kind"]["offload"]
    errors = kinds["device_bytes"]
    median, worst = math.ceil(100 * errors["median_absolute"]), math.ceil(100 * max(-errors["least"], errors["most"]))
    sentence = heap_sentence("offload=optimizer")
    assert sentence is not None
    assert sentence.endswith(
        f"of {kinds['configs']} with offload half were off by less than {median} %, and the worst by {worst} %"
    )


def test_every_estimate_for_a_gpu_says_that_its_context_is_a_guess() -> None:
    other = replace(CUDA_HARDWARE, name="a100-80g", capability="8.0")
    emulated = replace(CUDA_HARDWARE, name="emulated-h100-80g")
    for hardware, size in (
        (CUDA_HARDWARE, SEEN_CONTEXT_BYTES["9.0"]),
        (other, CONTEXT_BYTES),
        (emulated, CONTEXT_BYTES),
    ):
        (sentence,) = (s for s in assumed_of("method=full,attention=eager", hardware) if "context" in s)
        assert format_bytes(size) in sentence
    (sentence,) = (s for s in assumed_of("method=full,attention=eager", CUDA_HARDWARE) if "context" in s)
    workload = Workload(model=LLAMA.name, model_digest=LLAMA.digest, seq_len=16, global_batch=4)
    alone = Job(model=LLAMA, workload=workload, hardware=CUDA_HARDWARE, stack=STACK)
    by_formula = bounded(complete(parse("method=full")), alone, memory_limit_bytes=1, reason="a test")
    assert sentence in assumptions(by_formula, alone)
    assert not any("context" in s for s in assumed_of("method=full", CPU_HARDWARE))


def test_how_far_compiled_trials_were_is_that_of_the_records() -> None:
    table = read_table(RECORDED / "memory" / "compiled-cpu-zen4-2c-smollm2-135m.jsonl")
    job = Job(model=load("smollm2-135m"), workload=table.workload, hardware=table.hardware, stack=table.stack)
    estimator = Estimator(job, None, cache=TraceCache.of_user())
    of_processor = [
        trial.measurement.device_bytes
        / estimator.estimate(trial.config, memory_limit_bytes=table.memory_limit_bytes).device_bytes
        for trial in table.trials
        if trial.measurement is not None and trial.config["compile"] is True
    ]
    lines = [
        json.loads(line)
        for file in sorted((RECORDED / "emulated-compiled").glob("*.jsonl.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()[1:]
    ]
    assert lines and all(line["config"]["compile"] for line in lines)
    size = "peak_reserved_bytes"
    of_cards = [line["measured"][size] / line["predicted"][size] for line in lines if line["measured"]]
    for hardware, where, found in (
        (CPU_HARDWARE, "a processor", of_processor),
        (CUDA_HARDWARE, "emulated cards", of_cards),
    ):
        (sentence,) = (sentence for sentence in assumed_of("compile=true", hardware) if "compile=true" in sentence)
        stated = (
            f"of {len(found)} configs that trained on {where}, memory was {min(found):.2f} to {max(found):.2f} times"
        )
        assert stated in sentence


@pytest.mark.parametrize(
    ("capability", "text", "assumed"),
    [
        ("9.0", "precision=bf16-mixed", True),
        ("10.3", "precision=bf16", True),
        ("9.0", "precision=fp32", False),
        ("9.0", "attention=eager", False),
        ("8.0", "precision=bf16", False),
        ("12.0", "precision=bf16", False),
    ],
)
def test_cudnns_workspace_is_said_to_be_assumed_where_torch_prefers_its_kernel(
    capability: str, text: str, assumed: bool
) -> None:
    found = assumed_of(f"method=full,{text}", replace(CUDA_HARDWARE, capability=capability))
    assert any("cuDNN" in sentence and capability in sentence for sentence in found) is assumed


@pytest.mark.parametrize(
    ("text", "package", "name"),
    [
        ("loss=fused", "liger_kernel", "liger-kernel"),
        ("kernels=liger", "liger_kernel", "liger-kernel"),
        ("attention=flash", "flash_attn", "flash-attn"),
    ],
)
def test_a_package_that_only_a_card_of_the_catalog_is_taken_to_have_is_named(
    text: str, package: str, name: str
) -> None:
    _, of_card = site("h100-80g")
    assert getattr(of_card, package) in (ASSUMED, getattr(installed_stack(), package))
    for version, expected in ((ASSUMED, True), ("1.0", False)):
        for config in (text, "method=full"):
            found = any(name in sentence for sentence in assumed_of(config, CUDA_HARDWARE, **{package: version}))
            assert found is (expected and config == text)


@pytest.mark.parametrize(
    ("hardware", "shown", "assumed"),
    [(CUDA_HARDWARE, None, True), (CUDA_HARDWARE, True, False), (CUDA_HARDWARE, False, False),
     (CPU_HARDWARE, None, False)],
)  # fmt: skip
def test_expandable_segments_are_said_to_be_assumed_until_a_trial_has_shown_them(
    hardware: Hardware, shown: bool | None, assumed: bool
) -> None:
    found = of_trace(complete(parse("method=full")), replace(job(hardware=hardware), expandable_segments=shown))
    assert any("expandable segments" in sentence and hardware.name in sentence for sentence in found) is assumed


def test_several_gpus_are_said_to_leave_out_what_their_collectives_take() -> None:
    assert any("NCCL" in sentence for sentence in assumed_of("sharding=fsdp", CUDA_HARDWARE))
    assert not any("NCCL" in sentence for sentence in assumed_of("method=full", CUDA_HARDWARE))
    assert not any("NCCL" in sentence for sentence in assumed_of("sharding=fsdp", CPU_HARDWARE))


@pytest.mark.parametrize("text", ["sharding=zero2", "offload=optimizer", "checkpointing=offload"])
def test_a_link_that_is_not_known_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(hardware: Hardware) -> list[str]:
        return [sentence for sentence in assumed_of(text, hardware) if "PCIe 4.0 x16" in sentence]

    assert named(CUDA_HARDWARE) == named(CPU_HARDWARE) == []
    assert named(replace(CUDA_HARDWARE, name="rtx-a6000-48g")) == [
        "the link to the host is PCIe 4.0 x16, because rtx-a6000-48g is not in the catalog"
    ]
    without = tuple(replace(card, host_link=None) for card in cards())
    monkeypatch.setattr("autofit.catalog.hardware.cards", lambda: without)
    assert named(CUDA_HARDWARE) == [
        "the link to the host is PCIe 4.0 x16, because the catalog lacks the host link (host_link) of h100-80g"
    ]
    assert not [sentence for sentence in assumed_of("method=full", CUDA_HARDWARE) if "PCIe 4.0 x16" in sentence]


@pytest.mark.parametrize("hardware", [CUDA_HARDWARE, CPU_HARDWARE])
def test_what_double_quantisation_spares_is_told_of_4_bit_weights(hardware: Hardware) -> None:
    of = load("llama-3.1-8b")
    (sentence,) = (s for s in of_trace(complete({"method": "qlora"}), job(of, hardware=hardware)) if "double" in s)
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert sentence.endswith(f"{format_bytes(weights // 64 * 3 - weights // 64 // 64)} more")
    assert not any("double" in s for s in of_trace(complete({"method": "lora"}), job(of, hardware=hardware)))


@pytest.mark.parametrize("trainer", [None, "transformers"])
def test_attention_that_a_trainer_widens_is_told_to_have_no_fused_kernel(trainer: str | None) -> None:
    asked = job(hardware=CUDA_HARDWARE, trainer=trainer)
    found = of_trace(complete({"method": "qlora", "precision": "bf16"}), asked)
    told = any("no fused attention" in s and "fp32" in s and "attention=efficient" in s for s in found)
    assert told is (trainer is not None)


@pytest.mark.parametrize("capability", ["7.5", "8.0", "9.0"])
@pytest.mark.parametrize("precision", ["bf16", "fp16-mixed", "fp32"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["grouped", "ungrouped"])
def test_attention_without_a_fused_kernel_is_told_where_the_trace_has_none(
    model: Model, precision: str, capability: str
) -> None:
    card = replace(CUDA_HARDWARE, capability=capability)
    asked, of = job(model, hardware=card), complete({"precision": precision, "attention": "sdpa"})
    sentences = [sentence for sentence in of_trace(of, asked) if "no fused attention" in sentence]
    assert bool(sentences) == keeps_scores(of, asked)
    helps = not keeps_scores(of.replace(attention="efficient"), asked)
    assert all(("attention=efficient" in sentence) == helps for sentence in sentences)
