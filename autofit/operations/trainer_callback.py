"""`autofit.TrainerCallback`: in a trial it measures the Trainer that has it, in any other run it does nothing yet."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import transformers

from autofit.trial.program.environment import REPORT_TO
from autofit.trial.program.reporter import Session, session

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class TrainerCallback(transformers.TrainerCallback):
    """For `Trainer(callbacks=[autofit.TrainerCallback()])`: lets `autofit search --command` measure the program.

    Make it as early as you can: a trial's memory limit is enforced from then on.
    """

    def __init__(self) -> None:
        self._trial = session() if REPORT_TO in os.environ else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if self._trial is not None:
            check_asked_for(self._trial, args)
            self._trial.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._trial is not None:
            self._trial.step()
            # The first loss and gradient are judged; those of timed steps only if the program itself tells them.
            control.should_log = control.should_log or self._trial.steps == 1

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if self._trial is not None and logs and "loss" in logs:
            self._trial.learned(_number(logs["loss"]), _number(logs.get("grad_norm")))


def check_asked_for(trial: Session, args: TrainingArguments) -> None:
    """End the trial if the Trainer does not train the config: a program may ignore its arguments."""
    asked = trial.request.config.number("micro_batch")
    accumulation = trial.request.job.workload.batch_per_device // asked
    trains = (args.train_batch_size, args.gradient_accumulation_steps)
    if trains != (asked, accumulation):
        trial.refuse(
            f"the program trains with micro-batch {trains[0]} and {trains[1]} micro-steps an update, the trial asked "
            f"for micro-batch {asked} and {accumulation}"
        )
    if args.world_size > 1:
        trial.refuse(f"the program trains on {args.world_size} devices, the trial asked for 1")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
