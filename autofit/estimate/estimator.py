"""Predicts a config's memory and speed from its own training step, without a device."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from autofit.estimate.allocator import MIN_BLOCK
from autofit.estimate.amounts import Amounts
from autofit.estimate.assumptions import assumptions
from autofit.estimate.bound import bounded
from autofit.estimate.cuda_kernels import cuda_scratch
from autofit.estimate.elsewhere import PinnedCopies, paged_bytes
from autofit.estimate.estimate import Estimate
from autofit.estimate.events import DecoderEvents, MicroSteps, Updates, updates
from autofit.estimate.host_kernels import host_scratch
from autofit.estimate.libraries import Holdings, Library, Traffic, library
from autofit.estimate.libraries.edit import in_order
from autofit.estimate.memory import Memory, memory
from autofit.estimate.pattern import representatives
from autofit.estimate.recorder import NotTraced
from autofit.estimate.seam import HeadShape, trace_loss
from autofit.estimate.speed import Rates, prior, step_work
from autofit.estimate.splice import NotUniform, splice
from autofit.estimate.tape import LOSS, Category, Place, Tape
from autofit.estimate.timeline import Timeline, timeline
from autofit.estimate.trace import HOST, MICRO_STEPS, at_primes, layer_kinds, trace_decoder
from autofit.estimate.transfers import seconds as transfer_seconds
from autofit.estimate.update import trace_updates
from autofit.estimate.work import Costs, Works
from autofit.lattice import Config
from autofit.outcome import StepWork
from autofit.techniques import Job
from autofit.training.build import make_plan

if TYPE_CHECKING:
    from autofit.techniques.technique import LossKernel

SELECTIVE_OPERATION = 1.8
"""Host time per operation with selective checkpointing, which sees every operation from Python, over that with full
checkpointing: 31 and 17 microseconds on one core of an AMD EPYC (torch 2.13), on tensors too small to matter."""
HOST_ALIGNMENT = 64
"""Bytes to which PyTorch aligns host memory (c10/core/alignment.h)."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What a config's step does on a kind of device, before any rate is applied."""

    timeline: Timeline
    costs: tuple[Costs, ...]
    """Of one optimizer step of the whole global batch."""
    pinned_bytes: int
    """Host memory that offloaded activations take."""
    paged_bytes: int
    """Of optimizer states in managed memory."""
    traffic: Traffic
    """Of one rank in one optimizer step."""
    hosted_bytes: int = 0
    """Host memory that one rank's offloaded weights, gradients and states take."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """A decoder's tape on one device, with what is the same on every rank."""

    tape: Tape
    head: HeadShape
    works: tuple[Works, Works]
    copies: PinnedCopies

    def decoder(self, tape: Tape) -> _Decoder:
        """The decoder with the events of `tape`."""
        return _Decoder(DecoderEvents(tape), self.head, self.works, self.copies)


@dataclass(frozen=True, slots=True, eq=False)
class _Decoder:
    """The decoder for one method, precision and checkpointing, at every micro-batch and rank."""

    events: DecoderEvents
    head: HeadShape
    works: tuple[Works, Works]
    """Of the first micro-step and of every further one."""
    copies: PinnedCopies


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """One loss kernel at one number of tokens."""

    tape: Tape
    costs: tuple[Costs, Costs]
    """Of the first micro-step and of every further one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """One optimizer on one set of parameters."""

    tape: Tape
    events: Updates
    costs: Costs
    paged_bytes: int

    @property
    def states_bytes(self) -> int:
        """Of the optimizer's states on one device."""
        return int(self.events.sizes[self.events.categories == Category.OPTIMIZER].sum())


class Estimator:
    """Predicts configs of one job. What configs have in common is traced only once."""

    def __init__(self, job: Job, rates: Rates | None, *, exact: bool = False) -> None:
        """`rates` of None leaves the time out; `exact` runs every decoder layer instead of repeating a few.

        What bounds an operation is decided by the data sheet, or by `rates` for hardware without one.
        """
        self.job = job
        self.rates = rates
        self._sheet = prior(job.hardware) or rates
        self._exact = exact
        self._scratch = partial(cuda_scratch, capability=job.hardware.capability) if _cuda(job) else host_scratch
        self._decoders: dict[tuple[Config, bool, object], _Decoder | NotTraced] = {}
        self._stacks: dict[Config, _Stack] = {}
        self._losses: dict[tuple[LossKernel, HeadShape, int], _Loss] = {}
        self._latest: _Decoder | None = None
        self._micro_steps: dict[_Loss, MicroSteps] = {}
        self._updates: dict[tuple[Config, float | None], _Update] = {}
        self._fragmentation: dict[Config, float] = {}
        self._figures: dict[tuple[Config, bool], tuple[Memory, StepWork | None]] = {}

    def estimate(self, config: Config, *, memory_limit_bytes: int, replayed: bool = True) -> Estimate:
        """Predict memory and time of `config`, which must be supported; memory by formula where no trace can be made.

        Without `replayed`, fragmentation is taken from the first config with the same decoder: for whole lattices.
        """
        started = time.monotonic()
        # Compiled or not, it is the eager step that is traced.
        key = _common(config, without=("compile",)), replayed
        try:
            found, work = _cached(self._figures, key, lambda: self._memory_and_work(config, replayed=replayed))
        except NotTraced as error:
            by_formula = bounded(config, self.job, memory_limit_bytes=memory_limit_bytes, reason=str(error))
            return by_formula.timed(self.job, self.rates)
        estimate = Estimate(
            config=config,
            hardware=self.job.hardware.name,
            memory_limit_bytes=memory_limit_bytes,
            peak_allocated_bytes=found.peak_allocated_bytes,
            peak_reserved_bytes=found.peak_reserved_bytes,
            device_bytes=found.device_bytes,
            host_bytes=found.host_bytes,
            breakdown=found.breakdown,
            phase_peaks=found.phase_peaks,
            work=work,
            assumptions=assumptions(config, self.job),
            seconds_to_estimate=time.monotonic() - started,
        )
        return estimate.timed(self.job, self.rates)

    def _memory_and_work(self, config: Config, *, replayed: bool) -> tuple[Memory, StepWork | None]:
        traced = self.trace(config)
        found = _with_elsewhere(self._memory(config, traced.timeline, replayed=replayed), traced, self.job)
        if self._sheet is None:
            return found, None
        slower = SELECTIVE_OPERATION if config["checkpointing"] == "selective" else 1.0
        work = step_work(
            traced.costs,
            self._sheet,
            moved_bytes=traced.traffic.hosted,
            operation=slower,
            transfers=transfer_seconds(traced.traffic, self.job.hardware),
        )
        # The rates are those of all cores together, which the ranks on a CPU share.
        return found, work.times(self.job.workload.devices) if self.job.hardware.kind == "cpu" else work

    def _memory(self, config: Config, line: Timeline, *, replayed: bool) -> Memory:
        key = _common(config, without=("optimizer", "micro_batch", "rank", "loss", "compile"))
        known = None if replayed else self._fragmentation.get(key)
        precision = _alone(config, library(config, self.job)).text("precision")
        found = memory(line, self.job.hardware, known, wide=precision == "fp32", autocast=precision.endswith("-mixed"))
        in_use = found.peak_reserved_bytes - found.breakdown["fragmentation"]
        self._fragmentation.setdefault(key, found.breakdown["fragmentation"] / in_use)
        return found

    def trace(self, config: Config) -> Traced:
        """The memory of `config`'s step, event by event, and its work. Raises `NotTraced`."""
        with _without_collections():
            return self._trace(config)

    def _trace(self, config: Config) -> Traced:
        micro_batch, rank = config.number("micro_batch"), int(config.get("rank") or 1)
        accumulation = self.job.workload.batch_per_device // micro_batch
        spread = library(config, self.job)
        decoder = self._decoder(config, spread, accumulates=accumulation > 1)
        alone = _alone(config, spread)
        loss = self._loss(alone, decoder.head, micro_batch * self.job.workload.seq_len)
        if self._latest is not decoder:  # for a large model every pair of decoder and loss takes megabytes
            self._latest = decoder
            self._micro_steps.clear()
        steps = _cached(self._micro_steps, loss, lambda: decoder.events.with_loss(loss.tape))
        update = self._update(config, spread)
        holdings = None if spread is None else self._holdings(config, alone, rank, update)
        line = timeline(
            steps,
            update.events if spread is None or holdings is None else updates(spread.update(update.tape, holdings)),
            micro_batch=micro_batch,
            rank=rank,
            accumulates=accumulation > 1,
            rounding=MIN_BLOCK if _cuda(self.job) else HOST_ALIGNMENT,
        )
        costs = [update.costs if spread is None else update.costs.shared(spread.updaters)]
        for works, of_loss, times in zip(decoder.works, loss.costs, (1, accumulation - 1), strict=True):
            costs += [works.at(micro_batch, rank).repeated(times), of_loss.repeated(times)]
        traced = Traced(
            line,
            tuple(costs),
            pinned_bytes=decoder.copies.blocks_at(micro_batch, rank),
            paged_bytes=update.paged_bytes,
            traffic=Traffic(hosted=2 * accumulation * decoder.copies.bytes_at(micro_batch, rank)),
        )
        if spread is None or holdings is None:
            return traced
        traffic = spread.traffic(holdings, accumulation)
        return replace(
            traced,
            paged_bytes=update.paged_bytes // spread.updaters if spread.updaters else 0,
            hosted_bytes=spread.host_bytes(holdings, accumulates=accumulation > 1),
            traffic=replace(traffic, hosted=traffic.hosted + traced.traffic.hosted),
        )

    def _decoder(self, config: Config, spread: Library | None, *, accumulates: bool) -> _Decoder:
        # A library decides by size what it shards, and the gradients of a single micro-batch take another path.
        of_ranks = (False, None) if spread is None else (accumulates, config.get("rank"))
        key = (_common(at_primes(config), without=("optimizer", "loss", "compile")), *of_ranks)
        found = _cached(self._decoders, key, lambda: _followed(lambda: self._made(config, spread, accumulates)))
        if isinstance(found, NotTraced):
            raise NotTraced(str(found))
        return found

    def _made(self, config: Config, spread: Library | None, accumulates: bool) -> _Decoder:
        if spread is None:
            stack = self._trace_stack(config)
            return stack.decoder(stack.tape)
        stack = self._stack(spread.traced(config))
        return stack.decoder(spread.micro_steps(stack.tape, accumulates=accumulates))

    def _stack(self, config: Config) -> _Stack:
        """A single-device tape from which those for several values of `sharding` and `offload` are made."""
        key = _common(at_primes(config), without=("optimizer", "loss", "compile"))
        return _cached(self._stacks, key, lambda: self._trace_stack(config))

    def _trace_stack(self, config: Config) -> _Stack:
        kinds = layer_kinds(config, self.job)
        every = tuple(range(len(kinds)))
        if not self._exact:
            layers, representative = representatives(kinds)
            small, head = trace_decoder(config, self.job, layers, self._scratch)
            try:
                spliced = splice(small, representative)
            except NotUniform:
                pass  # layers of one kind differ after all: run every one of them
            else:
                counts = {place: representative.count(place) for place in range(len(layers))}
                return _Stack(spliced, head, _decoder_works(small, counts), PinnedCopies.of(small, counts))
        full, head = trace_decoder(config, self.job, every, self._scratch)
        return _Stack(full, head, _decoder_works(full, {}), PinnedCopies.of(full, {}))

    def lasting_bytes(self, config: Config) -> int:
        """Weights, gradients and optimizer states on a device as an update begins, once the first has made the states.

        Raises `NotTraced`.
        """
        traced = self.trace(config)
        held = traced.timeline.breakdown(traced.timeline.before_update())
        lasting = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)
        return sum(held[category] for category in lasting) + traced.paged_bytes + _on_same_memory(traced, self.job)

    def holdings(self, config: Config) -> Holdings:
        """The model's sizes over all ranks together, as `config` trains it. Raises `NotTraced`."""
        spread = library(config, self.job)
        alone = _alone(config, spread)
        with _without_collections():
            return self._holdings(config, alone, int(config.get("rank") or 1), self._update(config, spread))

    def _holdings(self, config: Config, alone: Config, rank: int, update: _Update) -> Holdings:
        """The sizes of `config`'s model, from its single-device config `alone`."""
        parameters = in_order(self._stack(alone).tape)
        of_trained, of_frozen = (
            Amounts.of(s.bytes for s in parameters if s.trained is is_trained).at(1, rank)
            for is_trained in (True, False)
        )
        trained, frozen = int(of_trained.sum()), int(of_frozen.sum())
        count = trained / make_plan(alone, self.job, HOST).trained_dtype.itemsize
        return Holdings(
            trained=count,
            trained_bytes=trained,
            sizes=tuple(map(int, of_trained)),
            frozen_bytes=frozen,
            stored_bytes=int(count * make_plan(config, self.job, HOST).trained_dtype.itemsize),
            states_bytes=update.states_bytes,
        )

    def _loss(self, config: Config, head: HeadShape, tokens: int) -> _Loss:
        kernel = make_plan(config, self.job, HOST).loss
        assert kernel is not None
        return _cached(self._losses, (kernel, head, tokens), lambda: self._trace_loss(kernel, head, tokens))

    def _trace_loss(self, kernel: LossKernel, head: HeadShape, tokens: int) -> _Loss:
        tape = trace_loss(kernel, head, tokens, MICRO_STEPS, self._scratch, capability=self.job.hardware.capability)
        first, further = (_works(tape, number, lambda place: place.layer == LOSS) for number in "12")
        return _Loss(tape, (first.at(1, 1), further.at(1, 1)))

    def _update(self, config: Config, spread: Library | None) -> _Update:
        flat = None if spread is None else spread.flat
        key = _common(config, only=("method", "precision", "optimizer", "rank", "targets")), flat
        return _cached(self._updates, key, lambda: self._trace_updates(config, flat))

    def _trace_updates(self, config: Config, flat: float | None) -> _Update:
        tape = trace_updates(config, self.job, self._scratch, exact=self._exact, flat=flat)
        return _Update(tape, updates(tape), _works(tape, "2", lambda place: True).at(1, 1), paged_bytes(tape))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Suspend garbage collection: scanning what a trace and the libraries hold takes as long as tracing some layers."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _followed(trace: Callable[[], _Decoder]) -> _Decoder | NotTraced:
    """Run a trace; any error is returned, so that no lattice repeats it. Model code may raise anything without data."""
    try:
        return trace()
    except NotTraced as error:
        return NotTraced(str(error))  # the error itself would keep everything traced alive
    except Exception as error:
        return NotTraced(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


# On import, bitsandbytes warns about kernels that it could fetch: no trace runs them.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

K = TypeVar("K")
V = TypeVar("V")


def _cached(known: dict[K, V], key: K, make: Callable[[], V]) -> V:
    if key not in known:
        known[key] = make()
    return known[key]


def _alone(config: Config, spread: Library | None) -> Config:
    """The config that one rank runs between its collectives."""
    return config if spread is None else spread.traced(config)


def _common(config: Config, *, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None) -> Config:
    """`config` reduced to what the trace of a part depends on."""
    return Config(items=tuple((k, v) for k, v in config.items if k not in without and (only is None or k in only)))


def _works(
    tape: Tape, number: str, belongs: Callable[[Place], bool], times: Callable[[int], int] = lambda layer: 1
) -> Works:
    """The operations of stages ending in `number` where `belongs` accepts the place, each `times(layer)` times."""
    return Works.joined(
        [
            Works.of(found, times=times(place.layer))
            for place, found in tape.work.items()
            if place.stage.endswith(number) and belongs(place)
        ]
    )


def _decoder_works(tape: Tape, counts: dict[int, int]) -> tuple[Works, Works]:
    """Of the first and of a further micro-step; a layer's operations count for all layers that it stands for."""
    first, further = (
        _works(tape, number, lambda place: place.layer != LOSS, lambda layer: counts.get(layer, 1)) for number in "12"
    )
    return first, further


def _with_elsewhere(found: Memory, traced: Traced, job: Job) -> Memory:
    """Add the memory outside the allocator: paged states count as in a trial, on the device and in full."""
    here = _on_same_memory(traced, job)
    beside = traced.paged_bytes + here
    return replace(
        found,
        peak_allocated_bytes=found.peak_allocated_bytes + here,
        peak_reserved_bytes=found.peak_reserved_bytes + here,
        device_bytes=found.device_bytes + beside,
        host_bytes=found.host_bytes + traced.pinned_bytes + traced.hosted_bytes,
        breakdown={**found.breakdown, "optimizer": found.breakdown["optimizer"] + beside},
        phase_peaks={phase: size + here for phase, size in found.phase_peaks.items()},
    )


def _on_same_memory(traced: Traced, job: Job) -> int:
    """Bytes that offloading puts on the host and does not save: a CPU's device memory is that of its host."""
    return 0 if _cuda(job) else traced.hosted_bytes


def _cuda(job: Job) -> bool:
    return job.hardware.kind == "cuda"
