"""Predicts a config's memory and speed from its own training step, without a device."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

from autofit.core.device.work_kinds import FORMATS, PASSES, attention
from autofit.core.lattice import Config
from autofit.core.lengths import padded
from autofit.core.prediction import StepWork
from autofit.estimate.assumptions import context_bytes
from autofit.estimate.bound import bounded
from autofit.estimate.estimate import Estimate
from autofit.estimate.footprint import Footprint
from autofit.estimate.kernels.column_sums import blocks_at_a_time
from autofit.estimate.kernels.cuda_kernels import cublas_workspace_bytes
from autofit.estimate.memory.allocator import MIN_BLOCK
from autofit.estimate.memory.events import Updates
from autofit.estimate.memory.heap import Traits
from autofit.estimate.memory.memory import Memory, cuda_memory, host_memory, most_of
from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.memory.replays import Fragmentation, Replays, alike
from autofit.estimate.memory.timeline import Timeline, timeline
from autofit.estimate.saving import whole_bytes
from autofit.estimate.sharding import Holdings, Hosted, Library, Traffic, library
from autofit.estimate.time.guessed_rates import prior, tf32_speedup
from autofit.estimate.time.op_costs import Costs
from autofit.estimate.time.roofline import Rates, step_work
from autofit.estimate.time.transfers import amounts as transferred
from autofit.estimate.tracing.recorder import NotTraced
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.estimate.tracing.traces import Traces, alone
from autofit.estimate.warm import without_collections
from autofit.techniques import Job
from autofit.techniques.axes.batching import micro_batches, packs, separates_sequences
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.axes.optimizer import kind_of
from autofit.techniques.axes.precision import in_tf32, is_mixed, product_format
from autofit.techniques.axes.sharding import micro_steps_run
from autofit.techniques.axes.update import updates_in_backward
from autofit.techniques.habits import is_under_autocast
from autofit.techniques.job import ranks_per_host
from autofit.techniques.selective import interval, keeps_results

CHECKPOINTED_OPERATION, SELECTIVE_OPERATION, QUANTISED_OPERATION = 0.4, 1.5, 0.3
"""Host time that an operation takes besides its own, in units of that, beside an accelerator: in a checkpointed layer,
whose saved tensors pass through Python; with selective checkpointing, which sees every operation from Python; with a
4-bit base, whose products are Python's. Measured by `benchmarks/timings.py launches` on an emulated H100; four configs
of real cards bear it out (benchmarks/README.md)."""
SELECTIVE_ON_PROCESSOR = 0.8
"""The same on a processor, over full checkpointing: 31 and 17 microseconds on one core of an AMD EPYC (torch 2.13).
With the others, too, recorded tables are ranked worse."""
HOST_ALIGNMENT = 64
"""Bytes to which PyTorch aligns host memory (c10/core/alignment.h)."""

INDEX_BYTES = 8
"""Of a token or a label (torch.long)."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What a config's step does on a kind of device, before any rate is applied."""

    timelines: tuple[Timeline, ...]
    """Of the ranks of which one holds the most: first the one with the highest peak."""
    costs: tuple[Costs, ...]
    """Costs of the micro-steps of one optimizer step of the whole global batch."""
    update_costs: Costs
    pinned_bytes: int
    """Host memory that offloaded activations take."""
    paged_bytes: int
    """Optimizer states in managed memory."""
    traffic: Traffic
    """Traffic of one rank in one optimizer step."""
    hosted: Hosted
    """What one rank's offloaded weights, gradients and states take of the host's memory."""
    uncompiled: bool
    """As `Footprint.uncompiled`."""

    @property
    def timeline(self) -> Timeline:
        return self.timelines[0]


@dataclass(frozen=True, slots=True)
class _Update:
    """An optimizer's update by one rank."""

    events: Updates
    costs: Costs
    paged_bytes: int


class Estimator:
    """Predicts configs of one job. What configs have in common is traced only once."""

    def __init__(self, job: Job, rates: Rates | None, *, exact: bool = False, cache: TraceCache | None = None) -> None:
        """`rates` of None leaves the time out of estimates; `exact` runs every decoder layer instead of repeating a
        few; `cache` keeps traces between processes. What bounds an operation is decided by the data sheet, else by
        `rates`."""
        self.job = job
        self.rates = rates
        self._sheet = prior(job.hardware) or rates
        self._exact, self._cache = exact, cache
        self._traces = Traces(job, exact=exact, cache=cache)
        segments = job.expandable_segments is not False
        self._replays = Replays(
            expandable_segments=segments, release=job.stack.torch_release, memory=job.hardware.memory_bytes
        )
        self._shares: dict[Hashable, float] = {}
        """Shares that were seen to be fragmented, by the keys of `alike`."""

    def estimate(self, config: Config, *, memory_limit_bytes: int) -> Estimate:
        """The footprint of `config` with its time at the estimator's rates."""
        return Estimate.of(self.footprint(config, memory_limit_bytes=memory_limit_bytes), self.job, self.rates)

    @without_collections()
    def footprint(self, config: Config, *, memory_limit_bytes: int, replayed: bool = True) -> Footprint:
        """What `config`, which must be supported, takes and does; by formula where no trace can be made. Without
        `replayed`, fragmentation is taken from a config alike (`replays.Fragmentation`), for whole lattices."""
        started = time.monotonic()
        try:
            traced = self.trace(config)
            estimators = {} if packs(config) else self._shorter_estimators
            shorter = {length: estimator.trace(config) for length, estimator in estimators.items()}
        except NotTraced as error:
            return bounded(config, self.job, memory_limit_bytes=memory_limit_bytes, reason=str(error))
        paged_out = 0
        if self.job.hardware.kind == "cuda":
            others = [of_length.timeline for of_length in shorter.values()]
            memory, paged_out = self._on_card(config, traced, memory_limit_bytes, others, replayed=replayed)
        else:
            memory = host_memory(traced.timeline, self._traits(config), hosted=traced.hosted.total)
        return Footprint(
            config=config,
            hardware=self.job.hardware.name,
            memory_limit_bytes=memory_limit_bytes,
            work=None if self._sheet is None else self._mean_work(config, traced, shorter, self._sheet, paged_out),
            uncompiled=traced.uncompiled,
            seconds_to_estimate=time.monotonic() - started,
            **asdict(memory),
        )

    def forget_decoders(self) -> None:
        """As `Traces.forget_decoders`."""
        self._traces.forget_decoders()

    @without_collections()
    def micro_step_works(self, config: Config, depths: Sequence[int]) -> dict[int, StepWork]:
        """For each depth, the work of a micro-step of so many first decoder layers on one device, which adds to
        gradients; {} for a device of which nothing is known. Raises `NotTraced`."""
        if self._sheet is None:
            return {}
        micro_batch, rank = config.number("micro_batch"), int(config.get("rank") or 1)
        head, works = self._traces.of_depths(config, depths)
        _, of_loss = self._traces.loss(config, head, micro_batch * self.job.workload.seq_len).costs
        return {
            depth: step_work([of_depth.at(micro_batch, rank), of_loss], of_loss.repeated(0), self._sheet)
            for depth, of_depth in works.items()
        }

    def _mean_work(
        self, config: Config, traced: Traced, shorter: Mapping[int, Traced], sheet: Rates, paged_out: int
    ) -> StepWork:
        """The work of a mean step. Where sequences have lengths, it follows from a parabola through the longest and two
        that stand for all: products are linear in the length, attention is quadratic."""
        mixed = micro_batches(config, self.job.workload)
        if mixed is None:
            return self._work(config, traced, sheet, paged_out)
        every = {self.job.workload.seq_len: traced, **shorter}
        works = {length: self._work(config, of_length, sheet, paged_out) for length, of_length in every.items()}
        weights = [mixed.rows * weight for weight in mixed.weights(list(works))]
        work = StepWork.mean(list(zip(weights, works.values(), strict=True)))
        if config["attention"] != "flash" or not separates_sequences(config):  # beside a mask all is computed
            return work
        fused = {attention(number_format, direction) for number_format in FORMATS for direction in PASSES}
        amounts = {kind: n * mixed.attended if kind in fused else n for kind, n in work.amounts.items()}
        return replace(work, amounts=amounts)

    @cached_property
    def _shorter_estimators(self) -> Mapping[int, Estimator]:
        """Estimators of the same job on sequences of one length each, by length: those that stand for all, but for the
        longest. Empty where every sequence is full."""
        workload = self.job.workload
        nodes = [] if workload.lengths is None else [length for length, _ in padded(workload.lengths, 1).nodes]
        return {
            length: Estimator(
                replace(self.job, workload=replace(workload, seq_len=length, lengths=(length,), eval_batch=None)),
                self.rates,
                exact=self._exact,
                cache=self._cache,
            )
            for length in nodes
            if length < workload.seq_len
        }

    def _work(self, config: Config, traced: Traced, sheet: Rates, paged_out: int) -> StepWork:
        traffic = replace(traced.traffic, hosted=traced.traffic.hosted + 2 * paged_out)
        costs = traced.costs
        if in_tf32(config):
            costs = tuple(part.faster_products(tf32_speedup(self.job.hardware)) for part in costs)
        work = step_work(
            costs,
            traced.update_costs,
            sheet,
            dispatched=traced.traffic.dispatched,
            operation=_host_time(
                config.replace(compile=config["compile"] and not traced.uncompiled),
                processor=self.job.hardware.kind == "cpu",
            ),
            transfers=transferred(traffic, self.job.hardware, ranks_per_host=ranks_per_host(self.job)),
        )
        # The rates are those of all cores together, which the ranks on a CPU share.
        return work.times(self.job.workload.devices) if self.job.hardware.kind == "cpu" else work

    def _on_card(
        self, config: Config, traced: Traced, limit: int, others: Sequence[Timeline], *, replayed: bool
    ) -> tuple[Memory, int]:
        """The memory, and the bytes of paged states that the driver pages out of a full device. A limit that torch
        enforces counts them all."""
        capped = limit < self.job.hardware.memory_bytes
        key = alike(config)
        # Alike are configs that train alike; what evaluation leaves of that is another matter.
        replayed = replayed or traced.timeline.peaks_in_evaluation
        fragmentation = Fragmentation(share=self._shares.get(key), by_liger=by_liger(config))
        on_rank = partial(
            cuda_memory,
            workspace=cublas_workspace_bytes(self.job.hardware.capability, self.job.stack.torch_release),
            limit=limit,
            capped=capped,
            replays=self._replays,
            fragmentation=None if replayed else fragmentation,
            others=others,
            context=context_bytes(self.job),
            saving=whole_bytes(config, self.job),
        )
        memory = most_of([on_rank(line) for line in traced.timelines])
        fits = memory.device_bytes <= limit
        if fits and not memory.gives_back_cache and not traced.timeline.peaks_in_evaluation:
            share = memory.breakdown["fragmentation"] / (memory.peak_reserved_bytes - memory.breakdown["fragmentation"])
            self._shares.setdefault(key, share)
        paged_out = max(0, memory.device_bytes + traced.paged_bytes - limit) if fits and not capped else 0
        paged_in = traced.paged_bytes - paged_out
        memory = replace(
            memory,
            device_bytes=memory.device_bytes + paged_in,
            host_bytes=traced.pinned_bytes + traced.hosted.total + paged_out,
            breakdown={**memory.breakdown, "optimizer": memory.breakdown["optimizer"] + paged_in},
        )
        return memory, paged_out

    def _traits(self, config: Config) -> Traits:
        """The traits of `config`'s step in a CPU's heap."""
        traced = alone(config, library(config, self.job))
        offloads = config["offload"] != "none"
        return Traits(
            wide=product_format(traced) == "fp32",
            autocast=is_mixed(traced) or is_under_autocast(config, self.job),
            dequantises=config["method"] == "qlora",
            quantised_states=kind_of(config).in_8_bits and not offloads,
            offloads=offloads,
        )

    @without_collections()
    def trace(self, config: Config) -> Traced:
        """The memory of `config`'s step, event by event, and its work. Raises `NotTraced`."""
        micro_batch, rank = config.number("micro_batch"), int(config.get("rank") or 1)
        if in_tf32(config):  # whose operations are those of fp32
            config = config.replace(precision="fp32")
        accumulation = self.job.workload.batch_per_device // micro_batch
        sharding_library = library(config, self.job)
        decoder = self._traces.decoder(config, sharding_library, accumulates=accumulation > 1)
        loss = self._traces.loss(alone(config, sharding_library), decoder.head, micro_batch * self.job.workload.seq_len)
        hosted, traffic, holdings = Hosted(), Traffic(), None
        if sharding_library is not None:
            holdings = self._traces.holdings(config, sharding_library)
            hosted = sharding_library.hosted(holdings, accumulates=accumulation > 1)
            traffic = sharding_library.traffic(holdings, accumulation)
        updates = None if updates_in_backward(config) else self._update(config, sharding_library, holdings)
        copied = [int(size) for size in decoder.offloaded.at(micro_batch, rank) if size]
        # One that updates in its backward pass is a later step, which makes no states.
        times = (0, 1) if updates is None else (1, accumulation - 1)
        parts = zip(decoder.works, loss.costs, times, strict=True)
        return Traced(
            self._timelines(config, sharding_library, loss.trace, None if updates is None else updates.events),
            tuple(
                costs.repeated(often)
                for works, of_loss, often in parts
                for costs in (works.at(micro_batch, rank), of_loss)
            ),
            loss.costs[0].repeated(0) if updates is None else updates.costs,
            # In blocks of the next power of two, which the next forward reuses (CachingHostAllocatorImpl::allocate in
            # aten/src/ATen/core/CachingHostAllocator.h).
            pinned_bytes=sum(1 << (size - 1).bit_length() for size in copied),
            paged_bytes=0 if updates is None else updates.paged_bytes,
            traffic=replace(traffic, hosted=traffic.hosted + 2 * accumulation * sum(copied)),
            hosted=hosted,
            uncompiled=config["compile"] is True and not decoder.compiled,
        )

    def _update(self, config: Config, sharding_library: Library | None, holdings: Holdings | None) -> _Update:
        """What one rank does of the update; `holdings` are those of a sharding library."""
        update = self._traces.update(config, sharding_library)
        costs = update.works.at(1, int(config.get("rank") or 1))
        if sharding_library is None or holdings is None:
            return _Update(update.events, costs, update.paged_bytes)
        events, updaters = Updates.of(sharding_library.update(update.trace, holdings)), sharding_library.updaters
        return _Update(events, costs.shared(updaters), update.paged_bytes // updaters if updaters else 0)

    def _timelines(
        self, config: Config, sharding_library: Library | None, loss: MemoryTrace, updates: Updates | None
    ) -> tuple[Timeline, ...]:
        """As `Traced.timelines`."""
        micro_batch, workload = config.number("micro_batch"), self.job.workload
        accumulates = workload.batch_per_device > micro_batch
        micro_steps = micro_steps_run(workload.batch_per_device // micro_batch, config)
        of_tokens = INDEX_BYTES * micro_batch * workload.seq_len
        lines = [
            timeline(
                self._traces.decoder(config, extreme, accumulates=accumulates).events.with_loss(loss),
                updates,
                self._traces.evaluation(config, sharding_library),
                batch=[micro_steps * of_tokens, *micro_steps * [of_tokens]],
                micro_batch=micro_batch,
                rank=int(config.get("rank") or 1),
                accumulates=accumulates,
                rounding=MIN_BLOCK if self.job.hardware.kind == "cuda" else HOST_ALIGNMENT,
                blocks=blocks_at_a_time(self.job.hardware),
            )
            for extreme in ((None,) if sharding_library is None else sharding_library.extremes)
        ]
        return tuple(sorted(lines, key=Timeline.peak, reverse=True))


# On import, bitsandbytes warns about kernels that it could fetch: no trace runs them.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _host_time(config: Config, *, processor: bool) -> float:
    """Host time per operation in units of plain training's; in a compiled layer none passes through Python."""
    if config["compile"] is True:
        return 1.0
    selective, every = keeps_results(config), interval(config)
    if processor:
        return 1.0 + SELECTIVE_ON_PROCESSOR * selective
    checkpointed = (SELECTIVE_OPERATION if selective else CHECKPOINTED_OPERATION) / every if every else 0.0
    return 1.0 + checkpointed + QUANTISED_OPERATION * (config["method"] == "qlora")
