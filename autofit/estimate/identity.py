"""What an estimate depends on, as a key under which it can be kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autofit.estimate.estimate import ESTIMATOR_VERSION
from autofit.lattice import Config
from autofit.techniques import Job

if TYPE_CHECKING:
    from autofit.estimate.speed import Rates


class EstimateKeys:
    """Keys of the estimates of one job at given rates: equal exactly where every figure of the estimates is.

    The memory limit is no part of them, because it is the asker's; nor are the model's name, the seed, and the bytes of
    memory that are there. Without rates the keys are of estimates whose time is absent or worked out on reading.
    """

    def __init__(self, job: Job, rates: Rates | None = None) -> None:
        workload, hardware = job.workload, job.hardware
        self._begun = hashlib.sha256(
            _canonical(
                {
                    "estimator": ESTIMATOR_VERSION,
                    "model": workload.model_digest,
                    "workload": [workload.seq_len, workload.global_batch, workload.devices, workload.lora_dropout],
                    "hardware": [
                        hardware.name,
                        hardware.kind,
                        hardware.cores,
                        hardware.capability,
                        hardware.bf16,
                        hardware.peak_flops,
                    ],
                    "stack": job.stack.key,
                    "rates": None if rates is None else asdict(rates),
                }
            )
        )

    def of(self, config: Config) -> str:
        """The key of one config's estimate, as 64 hexadecimal digits."""
        whole = self._begun.copy()
        whole.update(_canonical(config.to_json()))
        return whole.hexdigest()


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
