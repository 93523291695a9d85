"""What a user's Trainer does between steps, as phases of its trial: it saves a checkpoint, and evaluates.

Each is done once, after the timed steps, if the Trainer would ever do it. Before that it is put off, since it would be
part of a step's time.
"""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from autofit.core.outcome import EVALUATION, SAVING
from autofit.core.units import GIB

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainingArguments

    from autofit.trial.program.reporter import Session

EVALUATION_SECONDS = 10.0
"""After which a trial ends within an evaluation: about what its timed steps may take (`pace.LONG_SECONDS`)."""
CHECKPOINT_BYTES = GIB
"""Most that a trial writes: seconds on any disk. Larger checkpoints are left to the estimate's formula."""


class TrainerPhases:
    """One Trainer in a trial. Used from one thread."""

    def __init__(self, trial: Session, args: TrainingArguments) -> None:
        """Training begins with `args`."""
        self._trial, self._args, self._output_dir = trial, args, args.output_dir
        # Saving comes first: the trial may end before an evaluation does. A checkpoint is not uploaded.
        saves = args.save_strategy != "no" and not args.push_to_hub
        self._left = [SAVING] * saves + [EVALUATION] * (args.eval_strategy != "no")
        self._folder: TemporaryDirectory[str] | None = None
        """Where a checkpoint is saved."""
        self._evaluates_until: float | None = None

    def direct(self, control: TrainerControl, model: Any, optimizer: Any) -> None:
        """Steps have ended: have the Trainer do what is next, which is nothing while steps are timed."""
        self._clean_up()
        control.should_save = control.should_evaluate = False
        if not self._trial.is_timed:
            return
        if SAVING in self._left and checkpoint_bytes(model, optimizer) > CHECKPOINT_BYTES:
            self._left.remove(SAVING)
        self._end_if_done()
        phase = self._left.pop(0)
        control.should_save, control.should_evaluate = phase == SAVING, phase == EVALUATION
        if phase == SAVING:
            self._folder = TemporaryDirectory(prefix="autofit-", dir=self._output_dir)
            self._args.output_dir = self._folder.name
        else:
            self._evaluates_until = time.monotonic() + EVALUATION_SECONDS
        self._trial.enter(phase)

    def evaluates(self) -> None:
        """A batch was evaluated."""
        if self._evaluates_until is not None and time.monotonic() > self._evaluates_until:
            self._trial.succeed()

    def done(self) -> None:
        """The Trainer has saved, or evaluated."""
        if self._trial.is_timed:
            self._trial.leave()
            self._end_if_done()

    def end(self) -> None:
        """Training has ended by itself."""
        self._clean_up()
        self._trial.conclude()

    def _end_if_done(self) -> None:
        if not self._left or not self._trial.has_seconds(EVALUATION_SECONDS):
            self._clean_up()
            self._trial.succeed()

    def _clean_up(self) -> None:
        """Forget the checkpoint: not as soon as it is saved, for callbacks of the user's may look for it."""
        if self._folder is not None:
            self._args.output_dir = self._output_dir
            self._folder.cleanup()
            self._folder = None


def checkpoint_bytes(model: Any, optimizer: Any) -> int:
    """What a checkpoint takes: the weights, of a model with adapters theirs alone, and the optimizer's states."""
    has_adapters = bool(getattr(model, "peft_config", None))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad or not has_adapters]
    states = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")]
    return sum(int(tensor.nbytes) for tensor in (*weights, *states))
