"""A trainer's own file on one card: whether the run that it asks for fits, and the edits that help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autofit.catalog.models import notes
from autofit.core.errors import UsageError
from autofit.core.lattice import Config, Value
from autofit.core.outcome import EVALUATION, PHASES
from autofit.core.units import format_bytes
from autofit.core.workload import Effect
from autofit.estimate.estimate import Change, Estimate, Lightest
from autofit.estimate.saving import too_much
from autofit.export.document import Task
from autofit.export.trainer_arguments import SYNC_EACH_BATCH, TORCH_NAMES
from autofit.operations.diagnosing.beyond import bytes_beyond, counted, notes_on_formats
from autofit.operations.diagnosing.diagnosis import Diagnosis, Remedy
from autofit.operations.diagnosing.run_reader import RunReader
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.calibration import why_not
from autofit.prediction.estimation import Estimation, calibrated
from autofit.prediction.helpful_changes import Expressible, changed, effect_of
from autofit.techniques import complete
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.habits import trained_format
from autofit.trainers.edits import REMOVED, Edits, KeyPath, applied, edits_for, spelled_option
from autofit.trainers.keys import settings_in_text
from autofit.trainers.out_of_memory import ReportedOutOfMemory
from autofit.trainers.run import Run
from autofit.trainers.source_file import SourceFile
from autofit.trainers.training_arguments import OF_TRANSFORMERS_5_17, OLDER

ROOM = 0.08
"""Share left to fragmentation and to the prediction's error before an evaluation counts as one that fits; the answer
is then judged as every other."""
DOUBTFUL = 0.15
"""Share of a prediction by which an error may contradict it: one that does by more may be another run's. A guess, above
what emulated cards have shown predictions to be off by (12 %, benchmarks/README.md)."""
DOUBT = ": is the error of this run?"
OF_A_LOGIT = 12
"""Bytes: a logit and its gradient, both in 16 bits and in fp32 (`ForCausalLMLoss` of transformers widens them)."""

IN_SCRIPT: Mapping[str, Mapping[str, Value]] = {
    "dtype=torch.bfloat16": {"precision": "bf16"},
    "LoRA": {"method": "lora"},
    "QLoRA": {"method": "qlora"},
}
"""What a script that makes the model may do, and the values of axes that stand for it."""


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
    ) -> None:
        """With `edited`, the file with these edits, whose effect is `effect`: changes are then those edits and what
        helps beside them. `missed_bytes` are what predictions missed of the file as it is."""
        self._file, self._reader, self._request = file, reader, reader.request
        self._edited, self._effect = dict(edited or {}), effect
        self._values = applied(file.values, self._edited)
        self._in_text = settings_in_text(self._values, reader.where)
        self.run = reader.read(self._values)
        self.options = reader.options(self.run)
        model, _ = self.options.resolve()
        self._beyond = bytes_beyond(self.run, model)
        self._extra_bytes = sum(self._beyond.values())
        self._only_bf16: str | None = None
        """Why the trainer can only emulate bf16 on this card; None where it need not."""
        self.estimation = self._estimation()
        job = self.estimation.job
        self._task = Task(
            config=self.run.config,
            workload=job.workload,
            hardware=job.hardware,
            stack=job.stack,
            source=self.options.model,
        )
        self._edits: dict[Config, dict[KeyPath, Any]] = {}
        """The edits after which the file asks for a config."""
        self._runs = {self.run.config: self.run}
        """The run that the file then asks for."""
        self._missed_bytes = self._missed_by_prediction() if missed_bytes is None else missed_bytes

    def _estimation(self) -> Estimation:
        """Of what the file asks for or, where the card only emulates the bf16 of that, of the same in fp16."""
        config = self.run.config
        if product_format(config) == "bf16" and not self._reader.where.bf16:
            try:
                return self._estimation_of(self.options, config.replace(precision="fp16-mixed"))
            except UsageError as error:
                # With loss scaling, a trainer cannot have its adapters in bf16.
                if trained_format(config, self.options.trainer) != "bfloat16":
                    card = "this machine's GPU" if self._request.hardware == "auto" else self._request.hardware
                    reason = f"{self._asks_for_bf16(card)}, and fp16 in its place cannot be estimated"
                    raise UsageError(f"{reason}: {error}") from error
                self._only_bf16 = str(error)
        try:
            return self._estimation_of(self.options, config)
        except UsageError as error:
            raise UsageError(f"what {self._file.name} asks for cannot be estimated: {error}") from error

    def _estimation_of(self, options: WorkloadOptions, config: Config) -> Estimation:
        """Raises `UsageError` for a config that cannot work. Emulated bf16 takes the memory of any other; its speed is
        not known."""
        hardware, limit = self._request.hardware, self._request.memory_limit_bytes
        if self._only_bf16 is None:
            return Estimation.of(options, config, hardware=hardware, memory_limit_bytes=limit)
        calibration, limit = calibrated(options, hardware, limit, None)
        job = replace(calibration.job, hardware=replace(calibration.job.hardware, bf16=True))
        if reason := why_not(config, job):
            raise UsageError(reason)
        calibration = replace(calibration, job=job, rates=None)
        return Estimation(calibration=calibration, config=config, memory_limit_bytes=limit)

    def diagnosed(self, report: Callable[[int], None]) -> Diagnosis:
        if self.estimation.config != self.run.config:
            return self._in_fp16(report)
        estimate = self._advised(report)
        whole = self._counted(replace(estimate, advice=(), lightest=self._lightest(estimate)), self.run)
        remedies = self._remedies(estimate, whole.likely_fits, report)
        failure = self._request.failure
        trains_else = all(remedy.change.effect is Effect.TRAINING for remedy in remedies)
        in_script = dict(self._in_script()) if trains_else and not whole.likely_fits else {}
        on_adapters = () if whole.likely_fits or remedies or in_script else self._notes_on_adapters()
        return Diagnosis(
            run=self.run,
            options=self.options,
            estimate=whole,
            remedies=tuple(remedies),
            in_script=in_script,
            notes=(*self._notes(estimate), *on_adapters, *_notes_on_versions(remedies)),
            failure=failure and replace(failure, lacking_bytes=max(0, -whole.headroom_bytes)),
        )

    def _remedies(self, estimate: Estimate, fits: bool, report: Callable[[int], None]) -> Sequence[Remedy]:
        """What helps. If the file `fits` as it was edited, these edits do. One that fits and has failed all the same
        may have failed in evaluation. One that does not fit may fit with changes to its config, or with other keys."""
        if fits and self._edited:
            return [self._remedy(Change(values={}, effect=Effect.EXACT, estimate=estimate, roles=("smallest",)))]
        if fits and self._has_failed:
            edits = {**self._half_as_many_evaluated(), **self._saved_in_shards()}
            return self._remedies_with(edits, Effect.EXACT, report)
        of_config = map(self._remedy, estimate.advice)
        remedies: Sequence[Remedy] = [remedy for remedy in of_config if remedy.change.estimate.likely_fits]
        if fits:
            return remedies
        if self.run.narrower is not None:
            key, value = self.run.narrower
            remedies = _more_faithful(self._remedies_with({(key,): value}, Effect.NUMERICS, report), remedies)
        remedies = self._remedies_with(self._synchronised, Effect.EXACT, report) or remedies
        remedies = self._remedies_with(self._fewer_evaluated(estimate), Effect.EXACT, report) or remedies
        if self.run.adapters is not None:
            key, turned_on = self.run.adapters
            with suppress(UsageError):  # the trainer or the card may be unable to do what the file then asks for
                remedies = self._remedies_with({(key,): turned_on}, Effect.TRAINING, report) or remedies
        return remedies

    def _remedies_with(
        self, edits: Mapping[KeyPath, Any], effect: Effect, report: Callable[[int], None]
    ) -> Sequence[Remedy]:
        """The remedies that begin with these edits; none without any."""
        return self._edited_by(edits, effect).diagnosed(report).remedies if edits else ()

    def _in_script(self) -> Iterator[tuple[str, Change]]:
        """Changes that are likely to fit, of what the user's script decides where the file does not, each after what
        the script is to do."""
        before = self.run.config
        if self._edited or "method" in self._reader.trainer.table or before["method"] != "full":
            return
        converts = has_own_mixed_precision(before)  # the weights, whatever they were loaded in
        for script, values in IN_SCRIPT.items():
            config = changed(before, values)
            if "precision" in values and (converts or before["precision"] == "fp16-mixed"):
                continue  # the copies that are trained stay in fp32; loss scaling refuses gradients in bf16
            if values.get("method") == "lora" and is_mixed(config) and not converts:
                script = f"dtype=torch.{TORCH_NAMES[product_format(config)]} and {script}"
            with suppress(UsageError):  # it cannot be estimated here
                run = replace(self.run, config=config)
                estimate = self._counted(self._estimation_of(self.options, config).estimate(), run)
                if estimate.likely_fits and config != before:
                    effect = effect_of(before, config, self.estimation.job)
                    yield script, Change(values=values, effect=effect, estimate=estimate)

    def _in_fp16(self, report: Callable[[int], None]) -> Diagnosis:
        """The diagnosis of the file edited to train in fp16, for a card that only emulates the bf16 it asks for."""
        reason = self._asks_for_bf16(self.estimation.job.hardware.name)
        nearest = self.nearest_expressible(self.estimation.config)
        if nearest is None or product_format(nearest) == "bf16":
            raise UsageError(f"{reason}: set fp16: true and bf16: false in it")
        case = self._edited_by(self._edits[nearest], Effect.NUMERICS)
        return replace(case.diagnosed(report), emulated=f"{reason}: what follows is of fp16 in its place")

    def _asks_for_bf16(self, card: str) -> str:
        return f"{self._file.name} asks for bf16, which {card} only emulates"

    @property
    def _synchronised(self) -> dict[KeyPath, Any]:
        """The edit that has FSDP scatter gradients after each micro-batch; none where that would save nothing."""
        return self._synchronising if self._beyond["gradients"] > 0 else {}

    @property
    def _synchronising(self) -> dict[KeyPath, Any]:
        """The key that does so; none where the settings that hold it are in another file."""
        return {} if isinstance(self._values.get(SYNC_EACH_BATCH[0]), str) else {SYNC_EACH_BATCH: True}

    def _fewer_evaluated(self, estimate: Estimate) -> dict[KeyPath, Any]:
        """The edit that evaluates as many sequences at once as fit; none if what the file asks for fits, or none would.
        `estimate` is that of the file as it is."""
        evaluates = self.run.evaluates
        if evaluates is None or self._evaluation_fits(estimate):
            return {}
        powers = (1 << n for n in reversed(range(evaluates.sequences.bit_length())))
        for fewer in (power for power in powers if power < evaluates.sequences):
            options = replace(self.options, eval_batch=fewer)
            estimation = self._estimation_of(options, self.run.config)
            if self._evaluation_fits(estimation.estimate()):
                return {(evaluates.key,): fewer}
        return {}

    @property
    def _has_failed(self) -> bool:
        """Whether the file as it is has run out of memory: what would be faster then is of no use."""
        return self._request.failure is not None and not self._edited

    def _half_as_many_evaluated(self) -> dict[KeyPath, Any]:
        """The edit after which evaluation takes less, where it is what failed; none if it cannot take fewer."""
        failure, evaluates = self._request.failure, self.run.evaluates
        if failure is None or failure.phase != "evaluation" or evaluates is None or evaluates.sequences == 1:
            return {}
        return {(evaluates.key,): evaluates.sequences // 2}

    def _saved_in_shards(self) -> dict[KeyPath, Any]:
        """The edit after which FSDP gathers nothing to save it, where that is what failed; none if it does not, or if
        its settings are in another file."""
        is_gathered = self.run.config.text("sharding").startswith("fsdp") and not self.run.saves_in_shards
        failed_so = self._request.failure is not None and self._request.failure.phase == "saving"
        if not (is_gathered and failed_so) or isinstance(self._values.get("fsdp_config"), str):
            return {}
        return {spelled_option(self._values, "state_dict_type"): "SHARDED_STATE_DICT"}

    def _evaluation_fits(self, estimate: Estimate) -> bool:
        """Whether evaluation alone stays within the limit, with room for the prediction's error."""
        outside_phase = estimate.breakdown["context"] + self._beyond["weights"]
        return estimate.phase_peaks[EVALUATION] * (1.0 + ROOM) + outside_phase <= self.estimation.memory_limit_bytes

    def _edited_by(self, edits: Mapping[KeyPath, Any], effect: Effect) -> Case:
        """The file with other values of keys, beside what it is edited to already."""
        edited, effect = {**self._edited, **edits}, max(self._effect, effect)
        return Case(self._file, self._reader, edited=edited, effect=effect, missed_bytes=self._missed_bytes)

    def _missed_by_prediction(self) -> int:
        """By how many bytes what the failed run's tensors held and requested exceeds the prediction."""
        needed = None if self._request.failure is None else self._request.failure.needed_bytes
        return 0 if needed is None else max(0, needed - self._step_bytes(self.estimation.estimate()))

    def _step_bytes(self, estimate: Estimate) -> int:
        """The tensors' bytes at the peak of a step, without evaluation."""
        return max(estimate.phase_peaks[phase] for phase in PHASES) + self._extra_bytes

    def _advised(self, report: Callable[[int], None]) -> Estimate:
        """The config's estimate under the limit less what the run takes beyond it, with changes that help."""
        limit, left_out = self.estimation.memory_limit_bytes, self._extra_bytes + self._missed_bytes
        if limit > left_out:
            estimation = replace(self.estimation, memory_limit_bytes=limit - left_out)
            if (self._edited or self._has_failed) and (estimate := estimation.estimate()).likely_fits:
                return estimate  # the edit is the change
            return estimation.advised(report, self)
        if self.run.narrower is None and limit <= self._beyond["weights"]:
            extra = format_bytes(self._beyond["weights"])
            raise UsageError(
                f"the format of its weights takes {extra} more, and there are {format_bytes(limit)}: name a larger card"
            )
        return self.estimation.estimate()

    def _counted(self, estimate: Estimate, run: Run) -> Estimate:
        return counted(estimate, run, self.estimation, self._missed_bytes)

    def _lightest(self, estimate: Estimate) -> Lightest | None:
        if estimate.lightest is None:
            return None
        run = self._runs[estimate.lightest.estimate.config]
        return replace(estimate.lightest, estimate=self._counted(estimate.lightest.estimate, run))

    def _notes_on_adapters(self) -> Iterator[str]:
        """The option with which the user can say that the script makes adapters."""
        if self.run.config["method"] == "full":
            adapters = complete({**self.run.config.to_json(), "method": "lora"})
            if self.nearest_expressible(adapters) is None:
                yield "the file has no words for adapters: if your script makes them, add --also method=lora"

    def _notes(self, estimate: Estimate) -> Iterator[str]:
        """What explains the answer."""
        model, failure = self.estimation.job.model, self._request.failure
        yield from notes(model)
        yield from self.run.notes
        if self._only_bf16 is not None:
            yield f"bf16 is emulated on {self.estimation.job.hardware.name}, which is slow: {self._only_bf16}"
        yield from notes_on_formats(self.run, model)
        if estimate.cannot_save and estimate.host_memory_bytes is not None and not self.run.saves_in_shards:
            yield f"checkpoints: {too_much(estimate.config, estimate.saving_host_bytes, estimate.host_memory_bytes)}"
        if self._beyond["gradients"] > 0:
            held = f"takes {format_bytes(self._beyond['gradients'])} more"
            yield f"gradients stay whole until the last micro-batch, which {held}, unless {SYNC_EACH_BATCH[-1]} is set"
        logits = self._reader.logits(self.run)
        if self.run.trainer == "trl" and self.run.config["loss"] == "chunked":
            earlier = "earlier ones compute all logits at once, which takes some"
            yield f"trl is taken to be 1.7 or later: {earlier} {format_bytes(OF_A_LOGIT * logits)} more"
        if self.run.config["sharding"] == "ddp":
            yield "every GPU holds everything (DDP); if your launcher shards it, say so, such as --also sharding=zero3"
        if failure is not None:
            of_figures = self._notes_on_failure(failure, self._step_bytes(estimate))
            yield from _asking_once((*of_figures, *self._notes_on_earlier_phases(failure, estimate)))

    def _notes_on_failure(self, failure: ReportedOutOfMemory, expected: int) -> Iterator[str]:
        """What an error's figures say beside the bytes `expected` of a step."""
        if failure.phase == "evaluation" and self.run.trainer != "axolotl":
            yield "if a compute_metrics keeps logits, eval_accumulation_steps moves them to the host as evaluation goes"
        if failure.requested_bytes and self._reader.shows_logits(self.run):
            has_them = self.run.config["loss"] == "full"
            advice = ": a fused loss has none" if has_them else f", which this run never has{DOUBT}"
            yield f"what was asked for, {format_bytes(failure.requested_bytes)}, are all logits at once{advice}"
        if self._missed_bytes:
            needed, missed = format_bytes(expected + self._missed_bytes), format_bytes(self._missed_bytes)
            ask = DOUBT if self._missed_bytes > DOUBTFUL * expected else ""
            yield f"the error shows {needed}, where this file should take {format_bytes(expected)}{ask}"
            yield f"those {missed} more are counted in every figure here, as temporaries"
        elif failure.allocated_bytes is not None and failure.allocated_bytes > (1 + DOUBTFUL) * expected:
            held = format_bytes(failure.allocated_bytes)
            yield f"{held} were in use, where this file should take {format_bytes(expected)}{DOUBT}"

    def _notes_on_earlier_phases(self, failure: ReportedOutOfMemory, estimate: Estimate) -> Iterator[str]:
        """Where the error came after a phase of the step that this file should not get through."""
        if failure.phase not in PHASES:
            return
        # In a first step, gradients and states have yet to be made.
        not_yet = estimate.breakdown["gradients"] + estimate.breakdown["optimizer"]
        for phase in PHASES[: PHASES.index(failure.phase)]:
            least = estimate.phase_peaks[phase] - not_yet
            if (1 - DOUBTFUL) * least > self.estimation.memory_limit_bytes:
                yield (
                    f"the error came in the {failure.phase} phase, but the {phase} phase before it should take "
                    f"{format_bytes(least)}{DOUBT}"
                )
                if self.run.config["checkpointing"] == "none":
                    key = "disable_gradient_checkpointing: false"
                    key = key if self.run.trainer == "llamafactory" else "gradient_checkpointing: true"
                    in_script = "if your script checkpoints activations, add --also checkpointing=full"
                    in_file = f"this file checkpoints no activations: the run of the error may have had {key}"
                    yield in_script if self.run.trainer == "transformers" else in_file
                return

    def nearest_expressible(self, config: Config) -> Config | None:
        """The config that the file asks for once it is edited towards `config`, which it may be unable to express; None
        where it cannot be edited so."""
        values, read = self._values, self._reader.read
        try:
            after = replace(self._task, config=config)
            trainer = self._reader.trainer
            edits = edits_for(trainer, values, self._task, after, lambda k: read(k).config, self._in_text)
            run = read(applied(values, edits))
            if run.defers and not self.run.defers:  # it accumulates only now
                edits = {**edits, **self._synchronising}
                run = read(applied(values, edits))
        except UsageError:  # the trainer refuses it
            return None
        if not edits or run.global_batch != self.run.global_batch:
            return None
        if self._file.values.keys() & OLDER and _newest_keys(edits):
            return None
        if run.config != self.run.config:
            self._edits.setdefault(run.config, edits)
            self._runs.setdefault(run.config, run)
        return run.config

    def extra_bytes(self, config: Config) -> int:
        """Bytes that the weights' format and whole gradients take, and those that predictions missed."""
        return sum(bytes_beyond(self._runs[config], self.estimation.job.model).values()) + self._missed_bytes

    def edit_count(self, change: Change) -> int:
        """How many of the file's keys change; micro-batch and accumulation, which go together, count as one."""
        keys = len(self._edits.get(change.estimate.config, change.values))
        return max(1, keys - ("micro_batch" in change.values))

    def _remedy(self, change: Change) -> Remedy:
        config = change.estimate.config
        edits, after = {**self._edited, **self._edits.get(config, {})}, self._runs[config]
        text = self._file.changed(edits)
        if self._edited:
            edited = {path[-1]: value for path, value in self._edited.items()}
            change = replace(change, values={**edited, **change.values}, effect=max(change.effect, self._effect))
        return Remedy(
            change=replace(change, estimate=self._counted(change.estimate, after)),
            settings={".".join(path): None if value is REMOVED else value for path, value in edits.items()},
            diff=None if text is None else self._file.diff(text),
        )


def _asking_once(notes: Iterable[str]) -> Iterator[str]:
    """The notes, of which only the first that doubts the error asks whose it is."""
    has_asked = False
    for note in notes:
        yield note.removesuffix(DOUBT) if has_asked else note
        has_asked = has_asked or note.endswith(DOUBT)


def _notes_on_versions(remedies: Sequence[Remedy]) -> Iterator[str]:
    keys = {key for remedy in remedies for key in _newest_keys({(name,): v for name, v in remedy.settings.items()})}
    if keys:
        yield f"{' and '.join(sorted(keys))} need{'s' * (len(keys) == 1)} transformers 5.17 or later"


def _newest_keys(edits: Edits) -> set[str]:
    """The keys that edits set and that not every version of transformers has."""
    names = {".".join(path) for path, value in edits.items() if value not in (None, REMOVED)}
    return names & set(OF_TRANSFORMERS_5_17)


def _more_faithful(some: Sequence[Remedy], others: Sequence[Remedy]) -> Sequence[Remedy]:
    """The remedies that change less of the training; the first ones if both change as much."""
    if not some or not others:
        return some or others
    return min(some, others, key=lambda remedies: max(remedy.change.effect for remedy in remedies))
