"""A trainer's own file on one card: the run that it asks for, and the configs that it can be edited to ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import PHASES
from autofit.core.workload import Effect
from autofit.estimate.estimate import Change, Estimate
from autofit.export.document import Task
from autofit.export.trainer_arguments import SYNC_EACH_BATCH
from autofit.operations.diagnosing.beyond import bytes_beyond, of_whole_run
from autofit.operations.diagnosing.diagnosis import Remedy
from autofit.operations.diagnosing.run_reader import RunReader
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.calibration import why_not
from autofit.prediction.estimation import Estimation, calibrated
from autofit.prediction.helpful_changes import Expressible
from autofit.techniques.axes.precision import product_format
from autofit.techniques.habits import trained_format
from autofit.trainers.edits import REMOVED, KeyPath, applied, edits_for, newest_keys
from autofit.trainers.keys import settings_in_text
from autofit.trainers.run import Run
from autofit.trainers.source_file import SourceFile
from autofit.trainers.training_arguments import OLDER


class Case(Expressible):
    """One file on one card, and which nearby configs the file can be edited to ask for."""

    def __init__(
        self,
        file: SourceFile,
        reader: RunReader,
        *,
        edited: Mapping[KeyPath, Any] | None = None,
        effect: Effect = Effect.EXACT,
        missed_bytes: int | None = None,
        emulated: str | None = None,
    ) -> None:
        """The file with these edits, whose effect is `effect`. Predictions missed `missed_bytes` of it as it is.
        `emulated` says why it was edited to train in fp16."""
        self._file, self.reader, self.request = file, reader, reader.request
        self.edited, self._effect, self.emulated = dict(edited or {}), effect, emulated
        self.values = applied(file.values, self.edited)
        self._in_text = settings_in_text(self.values, reader.where)
        self.run = reader.read(self.values)
        self.options = reader.options(self.run)
        model, _ = self.options.resolve()
        self.beyond = bytes_beyond(self.run, model)
        self.only_bf16: str | None = None
        """Why the trainer can only emulate bf16 on this card; None where it need not."""
        self.estimation = self._estimation()
        self._reached: dict[Config, tuple[Mapping[KeyPath, Any], Run]] = {self.run.config: ({}, self.run)}
        """The configs that the file can ask for, each with the edits after which it does, and the run then."""
        self.missed_bytes = self._missed_by_prediction() if missed_bytes is None else missed_bytes

    def _estimation(self) -> Estimation:
        """Of what the file asks for or, where the card only emulates the bf16 of that, of the same in fp16."""
        config = self.run.config
        if product_format(config) == "bf16" and not self.reader.where.bf16:
            try:
                return self.estimation_of(self.options, config.replace(precision="fp16-mixed"))
            except UsageError as error:
                # With loss scaling, a trainer cannot have its adapters in bf16.
                if trained_format(config, self.options.trainer) != "bfloat16":
                    card = "this machine's GPU" if self.request.hardware == "auto" else self.request.hardware
                    reason = f"{self._asks_for_bf16(card)}, and fp16 in its place cannot be estimated"
                    raise UsageError(f"{reason}: {error}") from error
                self.only_bf16 = str(error)
        try:
            return self.estimation_of(self.options, config)
        except UsageError as error:
            raise UsageError(f"what {self._file.name} asks for cannot be estimated: {error}") from error

    def estimation_of(self, options: WorkloadOptions, config: Config) -> Estimation:
        """Of a config on this card: emulated bf16 has no known speed. Raises `UsageError` for one that cannot work."""
        calibration, limit = calibrated(options, self.request.hardware, self.request.memory_limit_bytes, None)
        if self.only_bf16 is not None:
            hardware = replace(calibration.job.hardware, bf16=True)
            calibration = replace(calibration, job=replace(calibration.job, hardware=hardware), rates=None)
        if reason := why_not(config, calibration.job):
            raise UsageError(reason)
        return Estimation(calibration=calibration, config=config, memory_limit_bytes=limit)

    def on_card(self) -> Case:
        """The file, edited to train in fp16 where the card only emulates its bf16. Raises `UsageError`."""
        if self.estimation.config == self.run.config:
            return self
        reason = self._asks_for_bf16(self.estimation.job.hardware.name)
        nearest = self.nearest_expressible(self.estimation.config)
        if nearest is None or product_format(nearest) == "bf16":
            raise UsageError(f"{reason}: set fp16: true and bf16: false in it")
        edits, _ = self._reached[nearest]
        return self.edited_by(edits, Effect.NUMERICS, f"{reason}: what follows is of fp16 in its place")

    def _asks_for_bf16(self, card: str) -> str:
        return f"{self._file.name} asks for bf16, which {card} only emulates"

    def edited_by(self, edits: Mapping[KeyPath, Any], effect: Effect, emulated: str | None = None) -> Case:
        """The file with other values of keys, beside what it is edited to already."""
        return Case(
            self._file,
            self.reader,
            edited={**self.edited, **edits},
            effect=max(self._effect, effect),
            missed_bytes=self.missed_bytes,
            emulated=emulated,
        )

    @property
    def has_failed(self) -> bool:
        """Whether the file as it is has run out of memory: what would be faster then is of no use."""
        return self.request.failure is not None and not self.edited

    @cached_property
    def estimate(self) -> Estimate:
        """Of the config alone, without advice, under what the run leaves of the limit or, if nothing, all of it."""
        return self._alone.estimate()

    def advised(self, report: Callable[[int], None]) -> Estimate:
        """The same with changes that help, which may take ten times as long."""
        is_change = (self.edited or self.has_failed) and self.estimate.likely_fits
        if is_change or self._alone is self.estimation:
            return self.estimate
        return self._alone.advised(report, self, of=self.estimate)

    @cached_property
    def _alone(self) -> Estimation:
        room_bytes = self.estimation.memory_limit_bytes - self.extra_bytes(self.run.config)
        return replace(self.estimation, memory_limit_bytes=room_bytes) if room_bytes > 0 else self.estimation

    def whole(self, estimate: Estimate) -> Estimate:
        """An estimate with all that the run takes, under the whole limit, without changes: they are remedies."""
        _, run = self._reached[estimate.config]
        lightest = estimate.lightest and replace(estimate.lightest, estimate=self.whole(estimate.lightest.estimate))
        counted = of_whole_run(estimate, run, self.estimation, self.missed_bytes)
        return replace(counted, advice=(), lightest=lightest)

    def _missed_by_prediction(self) -> int:
        """By how many bytes what the failed run's tensors held and requested exceeds the prediction."""
        needed = None if self.request.failure is None else self.request.failure.needed_bytes
        return 0 if needed is None else max(0, needed - self.step_bytes(self.estimation.estimate()))

    def step_bytes(self, estimate: Estimate) -> int:
        """The tensors' bytes at the peak of a step, without evaluation."""
        return max(estimate.phase_peaks[phase] for phase in PHASES) + sum(self.beyond.values())

    def nearest_expressible(self, config: Config) -> Config | None:
        """The config that the file asks for once it is edited towards `config`; None where it cannot be edited so."""
        values, read = self.values, self.reader.read
        try:
            before, after = self._task(self.run.config), self._task(config)
            edits = edits_for(self.reader.trainer, values, before, after, lambda k: read(k).config, self._in_text)
            run = read(applied(values, edits))
            if run.defers and not self.run.defers:  # it accumulates only now
                edits = {**edits, **self.synchronising}
                run = read(applied(values, edits))
        except UsageError:  # the trainer refuses it
            return None
        if not edits or run.global_batch != self.run.global_batch:
            return None
        if self._file.values.keys() & OLDER and newest_keys(edits):
            return None
        self._reached.setdefault(run.config, (edits, run))
        return run.config

    def _task(self, config: Config) -> Task:
        job, source = self.estimation.job, self.options.model
        return Task(config=config, workload=job.workload, hardware=job.hardware, stack=job.stack, source=source)

    @property
    def synchronising(self) -> dict[KeyPath, Any]:
        """The edit that has FSDP scatter gradients after each micro-batch; none where its key is in another file."""
        return {} if isinstance(self.values.get(SYNC_EACH_BATCH[0]), str) else {SYNC_EACH_BATCH: True}

    def extra_bytes(self, config: Config) -> int:
        """Bytes that the weights' format and whole gradients take, and those that predictions missed."""
        _, run = self._reached[config]
        return sum(bytes_beyond(run, self.estimation.job.model).values()) + self.missed_bytes

    def edit_count(self, change: Change) -> int:
        """How many of the file's keys change; micro-batch and accumulation, which go together, count as one."""
        edits, _ = self._reached[change.estimate.config]
        return max(1, len(edits) - ("micro_batch" in change.values))

    def remedy(self, change: Change) -> Remedy:
        """A change of axes as one of the file, with what it is edited to already."""
        edits = {**self.edited, **self._reached[change.estimate.config][0]}
        text = self._file.changed(edits)
        values = {**{path[-1]: value for path, value in self.edited.items()}, **change.values}
        effect, estimate = max(change.effect, self._effect), self.whole(change.estimate)
        return Remedy(
            change=replace(change, values=values, effect=effect, estimate=estimate),
            settings={".".join(path): None if value is REMOVED else value for path, value in edits.items()},
            diff=None if text is None else self._file.diff(text),
        )
