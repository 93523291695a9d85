"""What the checks share: the device, its fork servers, the estimator, and the findings of earlier checks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import Model
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe
from autofit.core.errors import AutofitError, EnvironmentLacks, in_one_line
from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Fits, Trial, Unsupported
from autofit.core.workload import Workload
from autofit.estimate.assumptions import as_probed
from autofit.operations.self_test.finding import Finding, Verdict
from autofit.operations.service.prediction_process import Overloaded, PredictionProcess, TooLate
from autofit.planning.requests import memory_limit_here
from autofit.techniques import Job, complete
from autofit.training.prerequisites.requirements import why_not_trainable
from autofit.trial.attempt import Attempt
from autofit.trial.machine import device_lock
from autofit.trial.machine.detection import check_devices, detect
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.request import TrialRequest

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator

PREDICTION_SECONDS = 30.0
"""Longest wait for one estimate, the estimator's imports included."""
TINY = Model(
    name="self-test",
    config={
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 256,
        # With transformers' 0.02 attention is nearly uniform, and what a wrong mask changes vanishes in rounding.
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    },
    source="the self-test",
    parameters=None,
)
"""Grouped-query attention and three layers: enough for each technique, small enough for a trial of about a second."""
TINY_SEQ_LEN, TINY_BATCH = 64, 4
EMULATED = "emulated"
"""The figure of the check `probe` with one sentence for each number format (`bf16`, `fp16`) that is emulated."""
PLAIN_PRECISIONS = ("bf16-mixed", "fp16-mixed", "fp32")
"""What the plain recipe's precision is replaced by where the device refuses or emulates it, best first."""


class NoTimeLeft(AutofitError):
    """A trial would need more time than there is."""


@dataclass(slots=True, kw_only=True)
class DeviceUnderTest:
    """One self-test's device and its findings so far. Checks only read `findings`."""

    device: str
    ranks: int = 1
    """Processes of the checks of sharding, at least 2 where there are as many NVIDIA devices; with 1 there are none."""
    hardware: Hardware = field(init=False)
    stack: Stack = field(init=False)
    limit: int = field(init=False)
    """Device memory in bytes that a trial may use unless a check sets another limit."""
    findings: dict[str, Finding] = field(default_factory=dict)
    """By the check's name."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Those trained so far, by the workload's key."""
    _runners: dict[int, GroupRunner] = field(default_factory=dict)
    _prediction_process: PredictionProcess = field(default_factory=PredictionProcess)
    """A trace that crashes or hangs costs one figure, and touches no device."""

    def __post_init__(self) -> None:
        self.hardware, self.stack = detect(self.device)
        check_devices(self.hardware, self.ranks)
        if self.hardware.is_nvidia and self.ranks == 1:
            with suppress(EnvironmentLacks):  # one card, or cards that differ: sharding is not checked
                check_devices(self.hardware, 2)
                self.ranks = 2
        self.limit = memory_limit_here(None, self.hardware)

    def start(self) -> None:
        """Start the processes now, so that their imports overlap."""
        self._runner(1).start()
        self._prediction_process.warm()

    def _runner(self, ranks: int) -> GroupRunner:
        if ranks not in self._runners:
            self._runners[ranks] = GroupRunner(kind=self.hardware.kind, ranks=ranks)
        return self._runners[ranks]

    def job(self, *, devices: int = 1) -> Job:
        """The job that trains the tiny model."""
        workload = Workload(
            model=TINY.name,
            model_digest=TINY.digest,
            seq_len=TINY_SEQ_LEN,
            global_batch=TINY_BATCH,
            devices=devices,
        )
        return Job(model=TINY, workload=workload, hardware=self.hardware, stack=self.stack)

    @property
    def plain(self) -> Config:
        """The plain recipe, in the first precision that works here without being emulated."""
        best = next((p for p in PLAIN_PRECISIONS if self._trains_plainly(f"precision={p}")), PLAIN_PRECISIONS[-1])
        return complete({"precision": best})

    def _trains_plainly(self, check: str) -> bool:
        """Whether a check's trial has trained as it should, without emulation: also where it was not predicted."""
        return self.fitted(check) is not None and self.findings[check].verdict in (Verdict.WORKS, Verdict.FAILED)

    def fitted(self, check: str) -> Trial | None:
        """The last trial of an earlier check; None where that did not fit, or the check did not run."""
        finding = self.findings.get(check)
        trial = finding.trials[-1] if finding is not None and finding.trials else None
        return trial if trial is not None and isinstance(trial.outcome, Fits) else None

    def emulation(self, precision: str) -> str | None:
        """Why a precision counts as emulated here, as the probe or the data sheet says; None if it does not."""
        number_format = precision.partition("-")[0]
        probe_finding = self.findings.get("probe")
        reasons = dict(probe_finding.measured.get(EMULATED, {})) if probe_finding is not None else {}
        if number_format == "bf16" and not self.hardware.bf16:
            reasons.setdefault("bf16", f"{self.hardware.name} has no bf16 arithmetic")
        return reasons.get(number_format)

    def trial(self, job: Job, config: Config, *, until: float, limit: int | None = None) -> Trial:
        """Run `config` until that time at most, or say why it cannot work here. Raises `NoTimeLeft`."""
        self.jobs[job.workload.key] = job
        seconds, reason = until - time.monotonic(), why_not_trainable(config, job)
        request = TrialRequest(
            job=job,
            config=config,
            memory_limit_bytes=self.limit if limit is None else limit,
            deadline_seconds=seconds,
            wait_seconds=seconds,
            timing_seconds=0.5,  # the self-test compares formats, not configs
            compares_gradient=True,
        )
        if reason is not None:
            attempt = Attempt(outcome=Unsupported(reason=reason), seconds=0.0)
        elif seconds < 2.0:
            raise NoTimeLeft("the time limit was reached")
        else:
            attempt = self._runner(job.workload.devices).attempt(request)
            if isinstance(attempt.outcome, Crashed) and device_lock.NOT_BEGUN in attempt.outcome.reason:
                raise NoTimeLeft(attempt.outcome.reason)
        return request.trial(attempt)

    def predicted(self, job: Job, config: Config, *, until: float) -> dict[str, Any]:
        """The estimate of `config`, or `{"error": why there is none, "defect": whether autofit is to blame}`."""
        if not (self.hardware.kind == "cpu" or self.hardware.is_nvidia):
            reason = f"estimates are for NVIDIA cards and processors; {self.hardware.name} is neither"
            return {"error": reason, "defect": False}
        probe_finding = self.findings.get("probe")
        if probe_finding is not None and "probe" in probe_finding.measured:
            job = as_probed(job, Probe.from_json(probe_finding.measured["probe"]))
        seconds = max(0.0, min(until - time.monotonic(), PREDICTION_SECONDS))
        try:
            return self._prediction_process.call(_estimated, job, config, self.limit, seconds=seconds)
        except TooLate:
            self._prediction_process.close()
            return {"error": f"no estimate after {seconds:.0f} s", "defect": False}
        except Overloaded:  # it died, or takes more memory than it may
            return {"error": "the estimator's process ended", "defect": True}
        except Exception as error:  # whatever a trace raises
            return {"error": in_one_line(error), "defect": True}

    def close(self) -> None:
        """End every process, so that whatever hangs in one ends, too; a further check starts them anew."""
        runners, self._runners = self._runners, {}
        for runner in runners.values():
            runner.close()
        self._prediction_process.close()


_ESTIMATORS: dict[str, Estimator] = {}
"""By the workload's key, in the prediction process."""


def _estimated(job: Job, config: Config, memory_limit_bytes: int) -> dict[str, Any]:
    """The estimate of a config under a limit, as JSON; runs in the prediction process."""
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.time.guessed_rates import prior

    if not _ESTIMATORS:
        os.environ["HF_HUB_OFFLINE"] = "1"
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)  # what libraries print must not mix with the command's own output
        os.dup2(silent, 2)
    estimator = _ESTIMATORS.setdefault(job.workload.key, Estimator(job, prior(job.hardware)))
    return estimator.estimate(config, memory_limit_bytes=memory_limit_bytes).to_json()
