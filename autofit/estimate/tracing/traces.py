"""What the configs of one job have in common, each part traced only once: decoders, losses and updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.kernels.scratch import Scratch, host_scratch
from autofit.estimate.memory.events import DecoderEvents, Evaluation, Updates
from autofit.estimate.memory.memory_trace import LOSS, Category, MemoryTrace, Place
from autofit.estimate.memory.symbolic_sizes import RANK, SymbolicSizes
from autofit.estimate.sharding import Holdings, Library
from autofit.estimate.sharding.edit import loaded_in_order
from autofit.estimate.time.op_costs import Costs, Works
from autofit.estimate.tracing.loss_boundary import HeadShape, trace_loss
from autofit.estimate.tracing.pattern import representatives
from autofit.estimate.tracing.recorder import NotTraced
from autofit.estimate.tracing.repeat_layers import NotUniform, repeat_layers
from autofit.estimate.tracing.trace import HOST, at_primes, layer_kinds, trace_decoder, trace_evaluation
from autofit.estimate.tracing.trace_cache import TraceCache, trace_key
from autofit.estimate.tracing.update import trace_updates
from autofit.techniques import Job, Part, affecting
from autofit.techniques.axes.batching import micro_batches, separates_sequences
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.axes.loss import chunks_are_one
from autofit.techniques.axes.optimizer import kind_of
from autofit.techniques.habits import masks_padding, of_formats
from autofit.techniques.selective import budget
from autofit.training.build import make_plan

V = TypeVar("V")
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TracedDecoder:
    """The decoder of one method, precision and checkpointing, at every micro-batch and rank."""

    events: DecoderEvents
    head: HeadShape
    works: tuple[Works, Works]
    """Those of the first micro-step, and of every further one."""
    offloaded: SymbolicSizes
    """Bytes of every activation that a forward copies to the host."""
    is_flash: bool
    """Whether every layer's attention is torch's own flash kernel."""
    compiled: bool
    """Whether its layers were compiled."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedLoss:
    """One loss kernel at one number of tokens."""

    trace: MemoryTrace
    costs: tuple[Costs, Costs]
    """Those of the first micro-step, and of every further one."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedUpdate:
    """One optimizer on one set of parameters."""

    trace: MemoryTrace
    events: Updates
    works: Works
    paged_bytes: int
    """States in managed memory: all of them, as in a trial, because a device with room holds them."""

    @property
    def states_bytes(self) -> int:
        """Bytes of the optimizer's states on one device."""
        storages = self.events.storages
        return int(storages.sizes.at(1, 1)[storages.categories == Category.OPTIMIZER].sum())


class Traces:
    """The parts of one job's configs. What cannot be traced raises `NotTraced`, and is tried only once."""

    def __init__(self, job: Job, *, exact: bool = False, cache: TraceCache | None = None) -> None:
        """`exact` and `cache` as for `Estimator`."""
        self.job = job
        self._exact = exact
        self._cache = cache
        self._scratch = cuda_scratch if job.hardware.kind == "cuda" else host_scratch
        self._results: dict[tuple[str, Hashable], Any] = {}

    def decoder(self, config: Config, library: Library | None, *, accumulates: bool) -> TracedDecoder:
        """The decoder of `config`, which `library` distributes; `accumulates` says whether micro-steps follow the
        first."""
        if library is None:
            return self._single(config, None)
        # A library decides by size what it shards, and the gradients of a single micro-batch take another path.
        key = *self._single_key(config, library), accumulates, config.get("rank"), library
        return self._once("rank", key, lambda: self._on_one_rank(config, library, accumulates), keeps=False)

    def loss(self, config: Config, head: HeadShape, tokens: int) -> TracedLoss:
        """The loss kernel of a single-device config."""
        key = affecting(config, Part.LOSS), head, tokens
        return self._once("loss", key, lambda: self._trace_loss(config, head, tokens))

    def update(self, config: Config, library: Library | None) -> TracedUpdate:
        """The optimizer of `config`, on the parameters that `library` lets it see."""
        flat, job = None if library is None else library.flat, self._job(library)
        if library is None and "rank" in config and kind_of(config).by_element:
            config = config.replace(rank=RANK)  # one trace serves every rank
        formats = tuple(type(habit).__name__ for habit in of_formats(config, job.workload.trainer))
        key = affecting(config, Part.UPDATE, sizes=True), flat, formats
        return self._once("update", key, lambda: self._trace_updates(config, job, flat))

    def evaluation(self, config: Config, library: Library | None) -> Evaluation | None:
        """What evaluating the workload's `eval_batch` takes, without what a sharding library gathers; None where
        nothing is evaluated."""
        sequences = self.job.workload.eval_batch
        if sequences is None:
            return None
        config, job = alone(config, library), self._job(library)
        masked = masks_padding(config, self.job)
        key = affecting(config, Part.EVALUATION), job.workload.trainer, sequences, masked
        traced = partial(self._trace_evaluation, job=job, sequences=sequences, masked=masked)
        return self._once("evaluation", key, partial(_compiled_if_possible, config, traced))

    def holdings(self, config: Config, library: Library | None) -> Holdings:
        """The model's sizes over all ranks together, as `config` trains it."""
        single, job = alone(config, library), self._job(library)
        loaded = loaded_in_order(self._single(config, library).events.trace)
        of_trained, of_frozen = (
            SymbolicSizes.of(s.bytes for s in loaded if s.trained is is_trained).at(1, int(config.get("rank") or 1))
            for is_trained in (True, False)
        )
        trained, frozen = int(of_trained.sum()), int(of_frozen.sum())
        count = trained / make_plan(single, job, HOST).trained_dtype.itemsize
        return Holdings(
            trained=count,
            trained_bytes=trained,
            sizes=tuple(map(int, of_trained)),
            frozen_bytes=frozen,
            stored_bytes=int(count * make_plan(config, job, HOST).trained_dtype.itemsize),
            states_bytes=self.update(config, library).states_bytes,
        )

    def of_depths(self, config: Config, depths: Sequence[int]) -> tuple[HeadShape, dict[int, Works]]:
        """For each depth, the operations of a micro-step of so many first decoder layers that adds to gradients,
        without the loss: from one trace of a few of these."""
        layers, representative = representatives(layer_kinds(config, self.job)[: max(depths)])
        trace, head = trace_decoder(config, self.job, layers, self._scratch)

        def works(depth: int) -> Works:
            counts = {place: representative[:depth].count(place) for place in range(len(layers))}
            return _decoder_works(trace, counts)[1]

        return head, {depth: works(depth) for depth in depths}

    def forget_decoders(self) -> None:
        """Let go of what only configs with one decoder share: those of a whole lattice take gigabytes."""
        self._results = {key: result for key, result in self._results.items() if key[0] in ("loss", "update")}

    def _once(self, part: str, key: Hashable, trace: Callable[[], V], *, keeps: bool = True) -> V:
        """What `trace` gave for this key in this process or, if it `keeps` that, in an earlier one. Raises `NotTraced`
        if it failed: no failure is repeated."""
        if (part, key) not in self._results:
            self._results[part, key] = _result_or_failure(lambda: self._cached(part, key, trace) if keeps else trace())
        result = self._results[part, key]
        if isinstance(result, NotTraced):
            raise NotTraced(str(result))
        value: V = result
        return value

    def _cached(self, part: str, key: Hashable, trace: Callable[[], V]) -> V:
        if self._cache is None:
            return trace()
        name = trace_key(self.job, part, self._exact, key)
        value: V | None = self._cache.get(name)
        if value is None:
            value = trace()
            self._cache.put(name, value)
        return value

    def _on_one_rank(self, config: Config, library: Library, accumulates: bool) -> TracedDecoder:
        single = self._single(config, library)
        trace = library.micro_steps(single.events.trace, accumulates=accumulates)
        return replace(single, events=DecoderEvents(trace))

    def _single(self, config: Config, library: Library | None) -> TracedDecoder:
        """The decoder on one device, from which those for several values of `sharding` and `offload` are made."""
        if config["attention"] == "flash" and shape(self.job.model).sdpa and not separates_sequences(config):
            as_sdpa, trainer = config.replace(attention="sdpa"), self._job(library).workload.trainer
            if of_formats(as_sdpa, trainer) == of_formats(config, trainer):
                with suppress(NotTraced):
                    by_torch = self._single(as_sdpa, library)
                    if by_torch.is_flash:  # the package's kernel keeps and allocates what torch's build of it does
                        return by_torch
        key = self._single_key(config, library)
        _, keeps_inputs, _, masked = key
        config, job = self._on_one_device(config, library), self._job(library)
        traced = partial(self._trace_decoder, job=job, keeps_inputs=keeps_inputs, masked=masked)
        return self._once("decoder", key, partial(_compiled_if_possible, config, traced))

    def _on_one_device(self, config: Config, library: Library | None) -> Config:
        """What one device trains of `config`: a loss in a single chunk is the full one."""
        config = alone(config, library)
        is_full = config["loss"] == "chunked" and chunks_are_one(config, self.job)
        return config.replace(loss="full") if is_full else config

    def _single_key(self, config: Config, library: Library | None) -> tuple[Hashable, bool, str | None, bool]:
        """What the decoder on one device depends on: the config, whether checkpoints keep their inputs, the trainer,
        and whether padding is masked."""
        config = self._on_one_device(config, library)
        # A single sequence has no padding, of whatever micro-batch the trace is.
        masked = masks_padding(config, self.job) and config["micro_batch"] != 1
        keeps_inputs = library is not None and library.keeps_inputs
        return self._decoder_key(config), keeps_inputs, self._job(library).workload.trainer, masked

    def _job(self, library: Library | None) -> Job:
        """The job as `library` lets a rank train it: without the trainer's habits where it converts the weights itself,
        but for those of the loss, which is traced apart."""
        if library is None or not library.converts:
            return self.job
        return replace(self.job, workload=replace(self.job.workload, trainer=None))

    def _decoder_key(self, config: Config) -> Hashable:
        """What a decoder depends on, with the sizes by which torch keeps to a budget, and with how the loss gives the
        gradient of a head that is the embedding, too."""
        affects = affecting(config, Part.DECODER, sizes=budget(config) < 1)
        tied = config["method"] == "full" and shape(self.job.model).tied_embeddings and config["loss"] == "full"
        return affects, at_primes(config, self.job)["micro_batch"], tied, self._most_in_row(config)

    def _most_in_row(self, config: Config) -> int:
        """How many sequences flash attention has to keep apart at most in a row; 0 where it keeps none."""
        batches = micro_batches(config, self.job.workload)
        apart = batches is not None and separates_sequences(config) and config["attention"] == "flash"
        return batches.most_in_row if batches is not None and apart else 0

    def _kernels(self, config: Config) -> Scratch:
        most = self._most_in_row(config)
        return partial(cuda_scratch, sequences=most) if most and self._scratch is cuda_scratch else self._scratch

    def _trace_decoder(self, config: Config, job: Job, *, keeps_inputs: bool, masked: bool) -> TracedDecoder:
        scratch = self._kernels(config)
        run = partial(trace_decoder, config, job, scratch=scratch, keeps_inputs=keeps_inputs, masked=masked)
        trace, small, head, counts = self._of_all_layers(layer_kinds(config, job), run)
        return _decoder(config, trace, head, small, counts)

    def _of_all_layers(
        self, kinds: tuple[Hashable, ...], run: Callable[[tuple[int, ...]], tuple[MemoryTrace, V]]
    ) -> tuple[MemoryTrace, MemoryTrace, V, dict[int, int]]:
        """(trace of the full stack, trace of what was run of it, what came with that, for each layer that was run how
        many it stands for). Where layers of one kind differ after all, every one of them is run."""
        if not self._exact:
            layers, representative = representatives(kinds)
            small, beside = run(layers)
            with suppress(NotUniform):
                counts = {place: representative.count(place) for place in range(len(layers))}
                return repeat_layers(small, representative), small, beside, counts
        every = tuple(range(len(kinds)))
        full, beside = run(every)
        return full, full, beside, dict.fromkeys(every, 1)

    def _trace_loss(self, config: Config, head: HeadShape, tokens: int) -> TracedLoss:
        kernel = make_plan(config, self.job, HOST).loss
        trace = trace_loss(kernel, head, tokens, self._scratch, capability=self.job.hardware.capability)
        first, further = (_works(trace, number, lambda place: place.layer == LOSS) for number in "12")
        return TracedLoss(trace, (first.at(1, 1), further.at(1, 1)))

    def _trace_evaluation(self, config: Config, job: Job, *, sequences: int, masked: bool) -> Evaluation:
        kinds = layer_kinds(config.replace(checkpointing="none"), job)

        def run(layers: tuple[int, ...]) -> tuple[MemoryTrace, None]:
            return trace_evaluation(config, job, layers, self._scratch, sequences=sequences, masked=masked), None

        return Evaluation.of(self._of_all_layers(kinds, run)[0])

    def _trace_updates(self, config: Config, job: Job, flat: float | None) -> TracedUpdate:
        trace = trace_updates(config, job, self._scratch, exact=self._exact, flat=flat)
        sizes = SymbolicSizes.of if config.get("rank") == RANK else SymbolicSizes.constant
        return TracedUpdate(
            trace,
            Updates.of(trace, sizes),
            _works(trace, "2", lambda place: True),
            paged_bytes=sum(map(sum, trace.outside_allocator.values())),
        )


def _result_or_failure(trace: Callable[[], V]) -> V | NotTraced:
    """Run a trace; any error is returned. What models, losses and optimizers run may raise anything without data."""
    try:
        return trace()
    except NotTraced as error:
        return NotTraced(str(error))  # the error itself would keep everything traced alive
    except Exception as error:
        return NotTraced(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _compiled_if_possible(config: Config, trace: Callable[[Config], V]) -> V:
    """`trace` of `config`, or of the same without compilation where torch cannot compile it without data. Liger's layer
    kernels are traced so too: they stay as they are in a compiled layer."""
    if config["compile"] is True and not by_liger(config):
        try:
            return trace(config)
        except Exception as error:
            if budget(config) < 1:  # without compilation nothing would keep to it
                raise
            LOG.info("%s is predicted as without compilation: %s", config, error)
    return trace(config.replace(compile=False))


def alone(config: Config, library: Library | None) -> Config:
    """The config that one rank runs between its collectives."""
    return config if library is None else library.traced(config)


def _works(
    trace: MemoryTrace,
    number: str,
    belongs: Callable[[Place], bool],
    times: Callable[[int], int] = lambda layer: 1,
) -> Works:
    """The operations of stages ending in `number` where `belongs` accepts the place, each `times(layer)` times."""
    return Works.joined(
        [
            Works.of(works, times=times(place.layer))
            for place, works in trace.work.items()
            if place.stage.endswith(number) and belongs(place)
        ]
    )


def _decoder_works(trace: MemoryTrace, counts: dict[int, int]) -> tuple[Works, Works]:
    """The works of the first and of a further micro-step; a layer's count for all layers that it stands for."""
    first, further = (
        _works(trace, number, lambda place: place.layer != LOSS, lambda layer: counts.get(layer, 1)) for number in "12"
    )
    return first, further


def _decoder(
    config: Config, trace: MemoryTrace, head: HeadShape, small: MemoryTrace, counts: dict[int, int]
) -> TracedDecoder:
    """The decoder of `config`, from its `trace`; of `small`, which ran, every layer stands for so many (`counts`)."""
    offloaded = [
        size
        for place, sizes in small.outside_allocator.items()
        if place.stage == "forward-1"
        for size in sizes * counts.get(place.layer, 1)
    ]
    return TracedDecoder(
        DecoderEvents(trace),
        head,
        _decoder_works(small, counts),
        SymbolicSizes.of(offloaded),
        is_flash=small.flash_layers == len(counts),
        compiled=config["compile"] is True,
    )
