"""What sharding and offload do to an estimate: shares against closed formulas, order, host memory, time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import CPU_HARDWARE, CUDA_HARDWARE, STACK, model
from transformers import AutoModelForCausalLM

from autofit.catalog.models import Model, architecture, shape
from autofit.core.device.hardware import Hardware
from autofit.core.device.work_kinds import HOST_LINK, LINK
from autofit.core.outcome import PHASES
from autofit.core.units import GIB
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.memory.lower_bound import floor_bytes
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.sharding import library
from autofit.estimate.sharding.hosted import hosted_bytes
from autofit.estimate.sharding.library import Traffic
from autofit.estimate.sharding.zero_third import PARAMETER_OPERATIONS, ZeroThree
from autofit.estimate.time.guessed_rates import prior
from autofit.estimate.time.transfers import amounts, seconds_per_byte
from autofit.estimate.tracing import traces
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.techniques import Job, complete, parse
from autofit.training.prerequisites import nvme

OF = model(
    "llama",
    num_hidden_layers=4,
    hidden_size=256,
    intermediate_size=1024,
    vocab_size=4096,
    tie_word_embeddings=False,
)
SHARDED = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-no-reshard")


def job(devices: int, *, hardware: Hardware = CUDA_HARDWARE, sequences: int = 4) -> Job:
    """`sequences` of each device in one optimizer step."""
    return job_of(OF, devices, hardware=hardware, sequences=sequences)


def job_of(of: Model, devices: int, *, hardware: Hardware = CUDA_HARDWARE, sequences: int = 4) -> Job:
    stack, batch = replace(STACK, deepspeed="installed"), sequences * devices
    return tiny.job(of, hardware=hardware, stack=stack, seq_len=64, global_batch=batch, devices=devices)


def estimated(
    text: str, devices: int, *, hardware: Hardware = CUDA_HARDWARE, sequences: int = 4, limit: int = 80 * GIB
) -> Estimate:
    of = job(devices, hardware=hardware, sequences=sequences)
    return estimator(of).estimate(complete(parse(text)), memory_limit_bytes=limit)


@cache
def estimator(of: Job) -> Estimator:
    """Jobs that differ in devices and batch alone have their traces in common."""
    return Estimator(of, prior(of.hardware), cache=TraceCache.of_user())


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("sharding", "weights", "optimizer"),
    [
        # Bytes per parameter in mixed precision: (whole, shared).
        ("ddp", (4, 0), (8, 0)),
        ("fsdp", (0, 4), (0, 8)),
        ("fsdp-no-reshard", (0, 4), (0, 8)),
        ("zero1", (2, 0), (0, 12)),
        ("zero2", (2, 0), (0, 12)),
        ("zero3", (0, 2), (0, 12)),
    ],
)
def test_shares_are_their_formats_times_the_parameters_over_the_ranks(
    sharding: str, weights: tuple[int, int], optimizer: tuple[int, int], devices: int
) -> None:
    found = estimated(f"sharding={sharding},micro_batch=2", devices)
    parameters = shape(OF).parameters
    assert found.breakdown["weights"] == pytest.approx((weights[0] + weights[1] / devices) * parameters, rel=0.01)
    assert found.breakdown["optimizer"] == pytest.approx((optimizer[0] + optimizer[1] / devices) * parameters, rel=0.01)


@pytest.mark.parametrize("sharding", SHARDED)
@pytest.mark.parametrize("base", ["method=full", "method=lora,rank=8", "method=full,precision=bf16"])
def test_the_parts_add_up_on_every_rank(sharding: str, base: str) -> None:
    for sequences in (1, 4):
        found = estimated(f"{base},sharding={sharding},micro_batch=1", 2, sequences=sequences)
        assert sum(found.breakdown.values()) == found.device_bytes
        assert min(found.breakdown.values()) >= 0
        assert max(found.phase_peaks.values()) == found.peak_allocated_bytes <= found.peak_reserved_bytes


def test_the_more_is_shared_the_less_a_device_holds() -> None:
    ddp, zero1, zero2, zero3, fsdp, kept = (
        estimated(f"sharding={value},micro_batch=1,checkpointing=full", 4).peak_allocated_bytes for value in SHARDED
    )
    assert ddp > zero1 > zero2 > zero3
    assert ddp > kept >= fsdp


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3", "fsdp", "fsdp-no-reshard"])
def test_more_devices_never_take_more_of_each(sharding: str) -> None:
    found = [estimated(f"sharding={sharding},micro_batch=1", n).peak_allocated_bytes for n in (2, 4, 8)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


DEEP = model("llama", num_hidden_layers=24, hidden_size=256, intermediate_size=1024, vocab_size=2048)
"""Of which more than two layers may be whole at once."""


def test_adapters_do_not_use_up_what_may_be_prefetched() -> None:
    """Those of rank 16 are gathered, too: the layers that are whole beside them stay whole."""
    kept, gathered = (
        estimator(job_of(DEEP, 2))
        .estimate(
            complete(parse(f"method=lora,rank={rank},targets=attention,sharding=zero3,micro_batch=1,precision=bf16")),
            memory_limit_bytes=80 * GIB,
        )
        .peak_allocated_bytes
        for rank in (8, 16)
    )
    assert gathered >= kept


def whole(checkpointing: str) -> dict[str, int]:
    """The most parameters that stage 3 has gathered in each phase of a step that trains small adapters."""
    config = complete(
        parse(f"method=lora,rank=1,sharding=zero3,micro_batch=1,precision=bf16,checkpointing={checkpointing}")
    )
    line = estimator(job_of(DEEP, 2)).trace(config).timeline
    gathered = np.cumsum(np.where(line.streams == 1, line.sizes, 0)) // 2
    return {phase: int(gathered[line.phases == index].max()) for index, phase in enumerate(PHASES)}


def test_no_more_is_prefetched_than_may_be_live_and_a_recomputed_frozen_layer_comes_beside_it() -> None:
    """The input embedding counts among what may be live. Layers whose recomputed weights DeepSpeed has
    released are fetched when they are used, whatever may be live."""
    of = shape(DEEP)
    layer, live = (of.parameters - 2 * of.embedding_parameters) // DEEP.config["num_hidden_layers"], of.parameters // 8
    largest = 256 * 1024
    kept, recomputed = whole("none"), whole("full")
    for found in (kept, recomputed):
        assert live - largest < found["forward"] <= live + 2 * largest
    assert live - largest < kept["backward"] <= live + 2 * largest
    assert recomputed["backward"] - kept["backward"] == pytest.approx(layer, abs=largest)


@pytest.mark.parametrize(("loss", "tied", "spared"), [("full", True, 1), ("fused", True, 0), ("full", False, 0)])
def test_stage_3_adds_to_the_gradient_of_a_head_that_is_the_input_embedding(
    loss: str, tied: bool, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain training has three tensors of its size for a moment. A fused loss keeps what it has computed."""
    small = model("llama", num_hidden_layers=2, hidden_size=256, vocab_size=8192, tie_word_embeddings=tied)
    config = complete(parse(f"method=full,precision=fp32,sharding=zero3,micro_batch=1,loss={loss}"))

    def made() -> int:
        """How many tensors of its size two steps of two micro-steps make while gradients are computed."""
        line = Estimator(job_of(small, 2), None).trace(config).timeline
        return int(np.count_nonzero((line.sizes == 4 * 8192 * 256) & (line.phases == PHASES.index("backward"))))

    found = made()
    monkeypatch.setattr(ZeroThree, "_add_in_place", lambda *_: None)
    assert made() - found == spared * 2 * 2


def test_frozen_layers_keep_their_inputs_under_stage_3_alone() -> None:
    """Of a layer without adapters: what goes into the last product of its MLP, and into the first two."""
    texts = (
        f"method=lora,targets=attention,checkpointing=none,precision=bf16,micro_batch=1,sharding={sharding}"
        for sharding in ("zero2", "zero3")
    )
    two, three = (estimated(text, 2).breakdown["activations"] for text in texts)
    assert three - two == 4 * 64 * (1024 + 256) * 2


@pytest.mark.parametrize("text", ["method=full", "method=lora,rank=8"])
def test_a_rank_is_estimated_from_one_trace(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, ran = traces.trace_decoder, []

    def counted(*arguments: Any, **options: Any) -> Any:
        ran.append(options)
        return trace(*arguments, **options)

    monkeypatch.setattr(traces, "trace_decoder", counted)
    config = complete(parse(f"{text},sharding=zero3,micro_batch=1"))
    Estimator(job(2), None).estimate(config, memory_limit_bytes=80 * GIB)
    assert len(ran) == 1


def test_ddp_is_one_device_and_its_buckets() -> None:
    parameters = shape(OF).parameters
    for sequences, accumulates in ((1, False), (4, True)):
        one = estimated("micro_batch=1", 1, sequences=sequences)
        ddp = estimated("sharding=ddp,micro_batch=1", 2, sequences=sequences)
        added = ddp.peak_allocated_bytes - one.peak_allocated_bytes
        # Without accumulation gradients go into the buckets as they come: they are there in forward, too.
        assert 0 <= added <= 4 * parameters * 1.01
        assert not accumulates or added == pytest.approx(4 * parameters, rel=0.01)


@pytest.mark.parametrize("sequences", [1, 4])
def test_a_trainers_ddp_holds_gradients_beside_its_buckets(sequences: int) -> None:
    of, config = job(2, sequences=sequences), complete(parse("sharding=ddp,micro_batch=1"))
    with_habits = replace(of, workload=replace(of.workload, trainer="transformers"))
    once, twice = (
        Estimator(each, None, cache=TraceCache.of_user()).estimate(config, memory_limit_bytes=80 * GIB)
        for each in (of, with_habits)
    )
    more = {phase: twice.phase_peaks[phase] - once.phase_peaks[phase] for phase in PHASES}
    assert more["optimizer"] == pytest.approx(4 * shape(OF).parameters, rel=0.01)
    assert 0 <= more["backward"] <= more["optimizer"]


@pytest.mark.parametrize(
    ("text", "devices", "each"),
    [
        ("offload=optimizer", 1, 4 + 4 + 8 + 2 + 2),  # masters, gradients, states, what goes back, what is summed up
        ("offload=params", 1, 4 + 4 + 8 + 4 + 2),
        ("sharding=zero2,offload=optimizer", 2, 20 / 2),
        ("sharding=zero3,offload=params", 2, 22 / 2),
        ("sharding=fsdp,offload=params", 2, 16 / 2),
    ],
)
def test_the_host_holds_what_the_device_does_not(text: str, devices: int, each: float) -> None:
    here = replace(CPU_HARDWARE, memory_bytes=64 * GIB)  # nothing is page-locked
    found = estimator(job(devices, hardware=here)).trace(complete(parse(f"{text},micro_batch=1")))
    passing = 0 if "zero3" in text or "offload=params" in text else 2 * shape(OF).embedding_parameters
    assert found.hosted.total == pytest.approx(each * shape(OF).parameters + passing, rel=0.01)


def test_the_host_holds_sums_only_where_stage_2_accumulates_there() -> None:
    here = replace(CPU_HARDWARE, memory_bytes=64 * GIB)
    one, four = (
        {
            stage: estimator(job(2, hardware=here, sequences=n))
            .trace(complete(parse(f"sharding={stage},offload=optimizer,micro_batch=1")))
            .hosted.total
            for stage in ("zero1", "zero2")
        }
        for n in (1, 4)
    )
    assert one["zero1"] == one["zero2"] == four["zero1"]
    assert four["zero2"] - one["zero2"] == pytest.approx(2 / 2 * shape(OF).parameters, rel=0.05)


def test_the_host_holds_the_buffers_of_what_is_in_files() -> None:
    here = job(2, hardware=replace(CPU_HARDWARE, memory_bytes=64 * GIB))
    config = complete(parse("sharding=zero3,offload=nvme,micro_batch=1"))
    found = estimator(here).trace(config).hosted
    assert found.gradients == pytest.approx(4 / 2 * shape(OF).parameters, rel=0.01)
    assert found.parameters == pytest.approx(2 / 2 * shape(OF).parameters, rel=0.01)  # up to 1e9
    assert found.optimizer == 0
    assert 8 * shape(OF).embedding_parameters < found.passing <= nvme.locked_bytes(config, here)


def test_a_host_that_is_too_small_rules_a_config_out() -> None:
    text = "sharding=zero3,offload=params,micro_batch=1"
    enough = estimated(text, 2, hardware=replace(CUDA_HARDWARE, count=2, host_memory_bytes=64 * GIB))
    small = estimated(text, 2, hardware=replace(CUDA_HARDWARE, count=2, host_memory_bytes=enough.host_bytes))
    assert enough.fits and not enough.host_short_bytes
    assert small.machine_host_bytes == 2 * small.host_bytes
    assert small.devices == 2
    assert not small.fits and small.fits_device and small.host_short_bytes == small.host_bytes
    elsewhere = estimated(text, 2, hardware=CUDA_HARDWARE)
    assert elsewhere.fits and elsewhere.host_memory_bytes is None
    assert "how much it has is not known" in "".join(elsewhere.assumptions)


def test_where_each_worker_sees_one_device_a_rank_at_least_is_on_its_host() -> None:
    """As on a cluster whose machines have one each."""
    text = "sharding=zero3,offload=params,micro_batch=1"
    needed = estimated(text, 4).host_bytes
    one, small = (replace(CUDA_HARDWARE, host_memory_bytes=there) for there in (needed, needed - 1))
    found = estimated(text, 4, hardware=one)
    assert found.fits and found.machine_host_bytes == needed
    assert any(
        sentence.startswith("each of the 4 ranks has a host's memory to itself") for sentence in found.assumptions
    )
    beyond = estimated(text, 4, hardware=small)
    assert beyond.fits_device and not beyond.fits and beyond.host_short_bytes == 1
    pairs = estimated(text, 4, hardware=replace(one, count=2))
    assert pairs.host_short_bytes == needed
    assert any(sentence.startswith("2 of the 4 ranks share a host's memory") for sentence in pairs.assumptions)
    together = estimated(text, 4, hardware=replace(one, count=4))
    assert together.host_short_bytes == 3 * needed
    assert not any("to itself" in sentence for sentence in together.assumptions)


@pytest.mark.parametrize(
    "method", ["method=full", "method=full,precision=bf16", "method=lora,rank=8", "method=qlora,rank=8"]
)
@pytest.mark.parametrize(
    "placed",
    [
        *(f"sharding={value}" for value in SHARDED),
        "sharding=zero1,offload=optimizer",
        "sharding=zero2,offload=optimizer",
        "sharding=zero3,offload=params",
        "sharding=fsdp,offload=params",
    ],
)
def test_no_estimate_is_below_the_floor(method: str, placed: str) -> None:
    text = f"{method},{placed},micro_batch=1"
    assert floor_bytes(complete(parse(text)), job(2)) <= estimated(text, 2, sequences=1).peak_allocated_bytes


@pytest.mark.parametrize("sharding", SHARDED)
def test_links_take_time(sharding: str) -> None:
    found = estimated(f"sharding={sharding},micro_batch=2", 2)
    assert found.work is not None
    assert found.work.beside.keys() | found.work.waits.keys() == {LINK}
    slow = replace(CUDA_HARDWARE, name="l4")
    other = estimator(job(2, hardware=slow)).estimate(
        complete(parse(f"sharding={sharding},micro_batch=2")), memory_limit_bytes=80 * GIB
    )
    assert other.work is not None
    assert (other.work.beside, other.work.waits) == (found.work.beside, found.work.waits)
    assert seconds_per_byte(slow)[LINK] > 5 * seconds_per_byte(CUDA_HARDWARE)[LINK]


def test_gathering_moves_what_a_ring_moves() -> None:
    parameters = shape(OF).parameters
    traced = estimator(job(4)).trace(complete(parse("sharding=fsdp,micro_batch=2")))
    # Two micro-steps: 16 bits gathered twice, fp32 reduced once, three quarters of it from and to others.
    assert traced.traffic.linked == pytest.approx(2 * (2 * 2 + 4) * parameters * 3 / 4, rel=0.01)
    assert estimator(job(1)).trace(complete(parse("micro_batch=2"))).traffic == Traffic()


def test_the_code_around_each_parameter_takes_the_host_time_at_every_micro_step() -> None:
    def operations(text: str) -> float:
        work = estimated(f"{text},micro_batch=2", 2, sequences=4).work
        assert work is not None
        return work.amounts["launch"]

    config = complete(parse("sharding=zero3,micro_batch=2"))
    trained = len(estimator(job(2))._traces.holdings(config, library(config, job(2))).sizes)
    assert trained == 2 + 9 * OF.config["num_hidden_layers"] + 1  # embedding and head; each layer's; the last norm
    added = operations("sharding=zero3") - operations("sharding=zero2")
    assert added == pytest.approx(2 * trained * PARAMETER_OPERATIONS, rel=0.02)


def test_transfers_go_at_the_pace_of_the_links() -> None:
    per = seconds_per_byte(CUDA_HARDWARE)
    link, host = 1 / per[LINK], 1 / per[HOST_LINK]
    assert link > host  # NVLink and PCIe
    assert waits(Traffic(linked=link, overlapped=True)) == pytest.approx((1.0, 0.0))
    assert waits(Traffic(linked=link, hosted=host)) == pytest.approx((0.0, 2.0))
    unknown = seconds_per_byte(replace(CUDA_HARDWARE, name="a card of tomorrow"))
    assert unknown[LINK] == unknown[HOST_LINK] > 0
    assert waits(Traffic(disk_read=1e9, disk_written=1e9))[1] > 0


def waits(traffic: Traffic, ranks_per_host: int = 1, hardware: Hardware = CUDA_HARDWARE) -> tuple[float, float]:
    """Seconds of what is transferred beside the arithmetic, and of what it waits for."""
    per = seconds_per_byte(hardware)
    beside, waited = amounts(traffic, hardware, ranks_per_host=ranks_per_host)
    return sum(size * per[kind] for kind, size in beside.items()), sum(s * per[kind] for kind, s in waited.items())


def test_ranks_of_one_machine_share_its_disk_and_its_memory_but_not_their_links() -> None:
    for shared in (Traffic(disk_read=1e9), Traffic(disk_written=1e9), Traffic(updated_on_host=1e9)):
        assert waits(shared, 8)[1] == pytest.approx(8 * waits(shared)[1])
    for own in (Traffic(hosted=1e9), Traffic(linked=1e9)):
        assert waits(own, 8) == waits(own)
    assert waits(Traffic(hosted=1e9), 2, CPU_HARDWARE)[1] == 2 * waits(Traffic(hosted=1e9), 1, CPU_HARDWARE)[1]


@pytest.mark.parametrize(
    ("offload", "shared"), [("optimizer", "optimizers of its 2 ranks"), ("nvme", "which the 2 ranks")]
)
def test_more_ranks_on_one_machine_do_not_write_or_update_faster(offload: str, shared: str) -> None:
    """Each moves half as much, at half the pace; the links to the host are the ranks' own."""
    text = f"sharding=zero3,offload={offload},micro_batch=2"
    together, apart = CUDA_HARDWARE, replace(CUDA_HARDWARE, count=1, host_memory_bytes=GIB)

    def waiting(hardware: Hardware) -> float:
        there = estimator(job(2, hardware=hardware))
        found = there.estimate(complete(parse(text)), memory_limit_bytes=80 * GIB)
        assert any(shared in sentence for sentence in found.assumptions) is (hardware is together)
        traffic = there.trace(complete(parse(text))).traffic
        assert found.work is not None
        waited = sum(size * seconds_per_byte(hardware)[kind] for kind, size in found.work.waits.items())
        assert waited == pytest.approx(waits(traffic, 2 if hardware is together else 1)[1])
        return waited

    assert waiting(together) > 1.2 * waiting(apart)


@pytest.mark.parametrize("placed", ["sharding=zero3,offload=params", "sharding=fsdp,offload=params"])
def test_fp16_takes_as_much_of_the_host_as_bf16(placed: str) -> None:
    """Also by formula, which decides what a host is too small for."""
    fp16, bf16 = (
        complete(parse(f"precision={value},micro_batch=2,{placed}")) for value in ("fp16-mixed", "bf16-mixed")
    )
    assert hosted_bytes(fp16, job(2)) == hosted_bytes(bf16, job(2)) > 0


def most_gathered(of: Model, checkpointing: str) -> int:
    """The most bytes that stage 3 has gathered at a time."""
    config = complete(
        parse(f"method=lora,rank=1,sharding=zero3,micro_batch=1,precision=bf16,checkpointing={checkpointing}")
    )
    line = estimator(job_of(of, 2)).trace(config).timeline
    return int(np.cumsum(np.where(line.streams == 1, line.sizes, 0)).max())


def test_stage_3_keeps_the_experts_of_every_layer_that_is_not_recomputed() -> None:
    """Autograd saves slices of what was gathered: an emulated card took 54 GiB for 24 layers of Qwen3-30B-A3B."""
    layers, sizes = 8, {"num_experts": 8, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
    of = model("qwen3_moe", num_hidden_layers=layers, hidden_size=256, intermediate_size=256, vocab_size=1024, **sizes)
    experts = 2 * shape(of).expert_parameters
    assert most_gathered(of, "none") - most_gathered(of, "full") > 0.7 * experts
    assert most_gathered(of, "every-2") - most_gathered(of, "full") == pytest.approx(0.5 * experts, rel=0.3)


def test_stage_1_is_judged_by_the_rank_that_holds_the_most() -> None:
    """The rank with the input embedding takes a norm of its gradient, in fp64, beside the fp32 sums of whatever is
    others' and too large for a bucket: SmolLM2-360M took 2,969.5 MiB on two emulated A100s, 360 for the norm."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 2048}
    of = model("llama", tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        counts = [p.numel() for p in AutoModelForCausalLM.from_config(architecture(of)).parameters()]
    ends, half = list(accumulate(counts)), sum(counts) / 2
    parts = [
        {i for i, end in enumerate(ends) if end - counts[i] < half},
        {i for i, end in enumerate(ends) if end > half},
    ]
    kept = [4 * sum(n for i, n in enumerate(counts) if i not in part and n > 128 * 128) for part in parts]
    norms = [8 * max(counts[i] for i in part) for part in parts]
    config = complete(parse("sharding=zero1,micro_batch=1,precision=fp16-mixed,checkpointing=full"))
    job_of_two = job_of(of, 2, sequences=1)
    lines = estimator(job_of_two).trace(config).timelines
    found = [line.phase_peaks()["optimizer"] for line in lines]
    assert found[0] - found[1] == pytest.approx(kept[0] + norms[0] - kept[1] - norms[1], rel=0.001)
    whole = estimator(job_of_two).estimate(config, memory_limit_bytes=80 * GIB)
    backward = max(line.phase_peaks()["backward"] for line in lines)
    assert whole.phase_peaks["optimizer"] - max(found) == whole.phase_peaks["backward"] - backward


def test_fsdp_holds_the_root_until_the_first_layer_is_whole() -> None:
    """A variable of `wait_for_unshard` holds it, until that returns."""
    line = estimator(job_of(OF, 2)).trace(complete(parse("sharding=fsdp,micro_batch=1,precision=bf16"))).timeline
    sizes, streams = line.sizes[line.setup : line.second], line.streams[line.setup : line.second]
    gathered = np.flatnonzero((streams == 1) & (sizes > 0))
    freed = np.flatnonzero((streams == 1) & (sizes < 0))
    root, layer = sizes[gathered[:2]]
    assert -sizes[freed[0]] == root
    assert sizes[gathered[1] + 1 : freed[0]].sum() == pytest.approx(layer, rel=0.01)


def test_a_flat_buffer_is_one_block_and_what_it_replaces_leaves_holes() -> None:
    """`flatten_on_accelerator`: the adapters lie between the base's weights until they are copied."""
    line = (
        estimator(job_of(OF, 2))
        .trace(complete(parse("method=qlora,precision=fp32,sharding=zero2,micro_batch=1")))
        .timeline
    )
    sizes, storages = line.sizes[: line.setup], line.storages[: line.setup]
    freed = np.flatnonzero(sizes < 0)
    made = [int(np.flatnonzero((storages == storages[i]) & (sizes > 0))[0]) for i in freed]
    flat = freed[0] - 1
    assert len(freed) == 2 * 7 * 4, "two matrices at each of the seven projections of four layers"
    assert sizes[flat] == pytest.approx(-sizes[freed].sum(), rel=0.01)
    frozen = set(range(flat)) - set(made)
    assert min(made) > min(frozen) and max(made) < flat
    assert sum(b - a > 1 for a, b in pairwise(sorted(made))) >= 4 * 7 - 1, "scales and weights lie between them"


def test_the_hosts_master_weights_are_made_from_a_copy_after_which_a_hole_is_left() -> None:
    config = complete(parse("method=lora,precision=bf16-mixed,offload=optimizer,micro_batch=1"))
    line = estimator(job_of(OF, 1)).trace(config).timeline
    sizes, storages = line.sizes[: line.setup], line.storages[: line.setup]
    last = int(np.flatnonzero(sizes < 0)[-1])
    assert storages[last] == storages[last - 1] and sizes[last - 1] == -sizes[last]
    flat = next(size for size in reversed(sizes[: last - 1]) if size > 0)
    assert sizes[last - 1] == flat, "as large as the flat buffer"


def test_gradients_go_in_the_order_of_their_parameters() -> None:
    """Which is the reverse of that in which they came."""
    line = estimator(job_of(OF, 1)).trace(complete(parse("precision=bf16,micro_batch=1,optimizer=sgd"))).timeline
    step = slice(line.setup, line.second)
    (gradients,) = np.where(line.categories[step] == Category.GRADIENTS)
    sizes, storages = line.sizes[step][gradients], line.storages[step][gradients]
    freed = storages[sizes < 0]
    came = [storage for storage in storages[sizes > 0] if storage in set(freed)]
    assert len(freed) > 20 and freed.tolist() == came[::-1]


def test_stage_2_allocates_a_partition_at_the_first_reduction_of_a_rank_s_own_gradients() -> None:
    """`copy_grads_in_partition`: from the head to the embedding, and the first rank waits for its own."""
    config = complete(parse("sharding=zero2,micro_batch=1,precision=fp32,checkpointing=full"))
    lines = estimator(job_of(OF, 2, sequences=1)).trace(config).timelines
    with torch.device("meta"):
        half = sum(p.numel() for p in AutoModelForCausalLM.from_config(architecture(OF)).parameters()) * 4 // 2
    shares = []
    for line in lines:
        (backward,) = np.where(line.phases[line.setup : line.second] == PHASES.index("backward"))
        sizes = line.sizes[line.setup : line.second][backward]
        (at, *_) = np.flatnonzero(np.abs(sizes / half - 1) < 0.02)
        shares.append(at / len(sizes))
    assert min(shares) < 0.1 and 0.4 < max(shares) < 0.8
