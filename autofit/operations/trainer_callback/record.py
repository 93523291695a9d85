"""An ordinary run of a Trainer as a trial in the store, in a context of its own: its workload has the run's command."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from autofit.core.lattice import Config
from autofit.operations.recommendation import search_command
from autofit.operations.trainer_callback.config import config_of, job_of, options_of
from autofit.planning.requests import WorkloadOptions
from autofit.store import Store
from autofit.techniques import Job
from autofit.trial.machine import nvml
from autofit.trial.program.observer import NotRecorded, RunObserver
from autofit.trial.request import TrialRequest

if TYPE_CHECKING:
    from transformers import TrainingArguments


class RunRecord:
    """One run from the beginning of its training to its end. Used from one thread."""

    def __init__(
        self, args: TrainingArguments, model: Any, optimizer: Any, *, seq_len: int | None, held_bytes: int | None
    ) -> None:
        """`held_bytes`: what the device showed before this process used it. Raises `UsageError`."""
        self._config: Config = config_of(args, model, optimizer)
        self._options: WorkloadOptions = options_of(args, model, self._config, seq_len)
        self._job: Job = job_of(self._options, args)
        if args.device.type == "cuda" and held_bytes is None and nvml.own_bytes() is None:
            raise NotRecorded(
                "its memory cannot be told from that of others: make the callback first, before TrainingArguments"
            )
        self._is_finite = True
        self.observer = RunObserver(self._job, self._config, held_bytes)
        self._tokens = TokenCount()
        self._hook = model.register_forward_pre_hook(self._tokens, with_kwargs=True)

    def step(self) -> None:
        self.observer.step(self._tokens.taken())

    def learned(self, loss: float, gradient_norm: float | None) -> None:
        """A loss was logged, without what is no number: gradients' norms tell of that, unless losses are scaled."""
        norm = 0.0 if gradient_norm is None or self._config["precision"] == "fp16-mixed" else gradient_norm
        self._is_finite = self._is_finite and math.isfinite(loss) and math.isfinite(norm)

    def store(self, url: str | None) -> str:
        """Store the run, which has ended, and say how to ask for it. Raises `NotRecorded`."""
        self.close()
        attempt = self.observer.conclude()
        if not self._is_finite:
            raise NotRecorded("its loss was not a number")
        # No limit was enforced: there was the device's memory.
        limit = self._job.hardware.memory_bytes
        request = TrialRequest(job=self._job, config=self._config, memory_limit_bytes=limit)
        # Without a prediction: that is of autofit's own step. What it misses of a script's data, evaluations and
        # checkpoints would be learned as its error on this hardware, and it takes time that the run has not asked for.
        with Store.open(url) as opened:
            stored = opened.add(request.trial(attempt))
        asked = search_command(self._options).replace("autofit search", "autofit frontier", 1)
        return f"this run is stored as trial {stored.trial_id}: `{asked}` shows it"

    def close(self) -> None:
        """Take back what was added to the model."""
        self._hook.remove()


class TokenCount:
    """Counts the tokens of a model's batches, as a hook that is copied and saved with it: it holds a number."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tokens = keywords.get("input_ids", inputs[0] if inputs else None)
        if module.training and isinstance(tokens, torch.Tensor):
            self._count += tokens.numel()

    def taken(self) -> int:
        """The tokens since the last call."""
        count, self._count = self._count, 0
        return count
