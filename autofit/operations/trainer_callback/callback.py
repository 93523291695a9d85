"""`autofit.TrainerCallback`: in a trial it measures the Trainer that has it; in any other run it says what is known."""

from __future__ import annotations

import logging
import os
import sys
import time
from array import array
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import transformers

from autofit.core.errors import AutofitError, UsageError, in_one_line
from autofit.trial.machine import nvml
from autofit.trial.measure import process_memory
from autofit.trial.measure.pace import WARM_UPS
from autofit.trial.program.environment import REPORT_TO
from autofit.trial.program.reporter import Session, session
from autofit.trial.program.trainer_phases import TrainerPhases

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    # Imported where it is used: a trial has no use for the store, and would count its libraries' memory.
    from autofit.operations.trainer_callback.advice import RunMeasurements
    from autofit.operations.trainer_callback.record import RunRecord

_log = logging.getLogger(__name__)

NOT_STORED = "this run is not stored"


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]  # loaded lazily, so mypy knows no type
    """For `Trainer(callbacks=[autofit.TrainerCallback()])`: lets `autofit search --command` measure the program.

    Make it as early as you can: a trial's memory limit is enforced from then on. In an ordinary run it logs one line at
    the beginning if the store knows a faster config, and one at the end with what the run took. With `record` that is
    stored, apart from trials. Whatever fails in that is one line, too.
    """

    def __init__(self, store: str | None = None, *, record: bool = False, seq_len: int | None = None) -> None:
        """`store` is where ordinary runs look: a file or a URL; by default $AUTOFIT_STORE, then the user's own.

        `record`: store there what an ordinary run on one device takes. `seq_len` is how many tokens each of its
        sequences has, unless its arguments have a `max_length`. Raises `UsageError` for one that is no such number.
        """
        if seq_len is not None and (not isinstance(seq_len, int) or seq_len < 1):
            raise UsageError(f"seq_len is {seq_len!r}: it must be a whole number of at least 1")
        self._trial = session() if REPORT_TO in os.environ else None
        self._phases: TrainerPhases | None = None
        """What follows the timed steps of a trial."""
        self._store, self._seq_len = store, seq_len
        self._records = record and self._trial is None
        self._record: RunRecord | None = None
        self._held_bytes: int | None = None
        """What the device showed before this process used it, in bytes."""
        if self._records:
            _harmlessly(self._look_at_device, NOT_STORED)
        self._measurements: RunMeasurements | None = None
        self._steps = 0
        self._seconds = array("d")
        """What each timed step of an ordinary run took, the same as a `RunObserver` times."""
        self._step_began: float | None = None
        """None where the next step is not timed."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        self._steps, self._seconds, self._step_began = 0, array("d"), None
        if self._trial is not None:
            check_trained_config(self._trial, args)
            self._phases = TrainerPhases(self._trial, args)
            self._trial.begin(goes_on=True)
        elif state.is_world_process_zero:
            _harmlessly(lambda: self._advise(args, more.get("model")))
            if self._records:
                _harmlessly(lambda: self._begin_record(args, more["model"], more["optimizer"]), NOT_STORED)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._steps += 1
        if self._trial is not None:
            self._trial.step()
            # The first loss and gradient are judged; those of timed steps only if the program itself tells them.
            control.should_log = control.should_log or self._steps == 1 or self._trial.is_overflowing
            self._direct(control, more)
            return
        now = time.perf_counter()
        if self._steps > WARM_UPS and self._step_began is not None:
            self._seconds.append(now - self._step_began)
        self._step_began = now
        self._recording(lambda record: record.step())

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if self._phases is not None:
            self._phases.evaluates()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._phases is not None:
            self._phases.done()
        self._step_began = None
        self._recording(lambda record: record.observer.interrupt())

    on_save = on_evaluate

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._direct(control, more)
        del self._seconds[-1:]  # it may have been on what was left of the data
        self._step_began = None
        self._recording(lambda record: record.observer.end_epoch())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        loss = logs["loss"]
        if self._trial is not None:
            self._trial.learned(_number(loss), _number(logs.get("grad_norm")))
        self._recording(lambda record: record.learned(float(loss), _number(logs.get("grad_norm"))))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._phases is not None:
            self._phases.end()
        elif state.is_world_process_zero and self._seconds:
            _harmlessly(lambda: self._report(fmean(self._seconds)))
        self._recording(lambda record: _log.warning("autofit: %s", record.store(self._store)))
        self._record = None

    def _direct(self, control: TrainerControl, more: dict[str, Any]) -> None:
        if self._phases is not None:
            self._phases.direct(control, more["model"], more["optimizer"])

    def _look_at_device(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._held_bytes = nvml.held_bytes()

    def _begin_record(self, args: TrainingArguments, model: Any, optimizer: Any) -> None:
        from autofit.operations.trainer_callback.record import RunRecord

        if self._record is not None:  # of a run that has failed
            self._record.close()
            self._record = None  # should the next line raise
        self._record = RunRecord(args, model, optimizer, seq_len=self._seq_len, held_bytes=self._held_bytes)

    def _recording(self, work: Callable[[RunRecord], None]) -> None:
        """Go on with the record, if there is one; it ends with whatever fails."""
        record = self._record
        if record is not None and not _harmlessly(lambda: work(record), NOT_STORED):
            record.close()
            self._record = None

    def _advise(self, args: TrainingArguments, model: Any) -> None:
        from autofit.operations.trainer_callback.advice import run_measurements

        self._measurements = run_measurements(args, model, sys.argv[0], self._store)
        advice = None if self._measurements is None else self._measurements.advice()
        if advice is not None:
            _log.warning("%s", advice)

    def _report(self, step_seconds: float) -> None:
        from autofit.operations.trainer_callback.advice import report

        _log.warning("%s", report(self._measurements, step_seconds, _peak_bytes()))


def check_trained_config(trial: Session, args: TrainingArguments) -> None:
    """End the trial if the Trainer does not train the config: a program may ignore its arguments."""
    micro_batch, job = trial.request.config.number("micro_batch"), trial.request.job
    accumulation = job.workload.batch_per_device // micro_batch
    trains = (args.train_batch_size, args.gradient_accumulation_steps)
    if trains != (micro_batch, accumulation):
        trial.refuse(
            f"the program trains with micro-batch {trains[0]} and {trains[1]} micro-steps an update, the trial asked "
            f"for micro-batch {micro_batch} and {accumulation}"
        )
    if args.auto_find_batch_size:
        trial.refuse("the program shrinks its micro-batch until it fits (auto_find_batch_size): turn that off")
    if args.device.type != job.hardware.kind:
        trial.refuse(f"the program trains on {args.device.type}, the trial asked for {job.hardware.kind}")
    if args.world_size > 1:
        trial.refuse(f"the program trains on {args.world_size} devices, the trial asked for 1")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _harmlessly(work: Callable[[], None], otherwise: str = "nothing to say of this run") -> bool:
    """Do what no training may fail for. Returns whether it was done, and else says why not."""
    try:
        work()
    except Exception as error:
        _log.warning("autofit: %s: %s", otherwise, error if isinstance(error, AutofitError) else in_one_line(error))
        return False
    return True


def _peak_bytes() -> int:
    """What the device's allocator has taken or, on a processor, the memory of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    return process_memory.read().peak_anonymous
