"""What an estimate depends on, as a key under which it can be stored."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from autofit.core.lattice import Config
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.techniques import Job
from autofit.techniques.job import ranks_per_host


class EstimateKeys:
    """Keys of one job's estimates: equal where every figure of the estimates is, but for borrowed fragmentation.

    The memory limit and the context are the caller's (`Footprint.under`), and what a store keeps is timed when it is
    read: so these are not part of the keys, nor are the rates, the model's name, the seed and the memory present.
    """

    def __init__(self, job: Job, *, replayed: bool = False) -> None:
        """`replayed` as for `Estimator.footprint`."""
        workload, hardware = job.workload, job.hardware
        trainer = () if workload.trainer is None else (workload.trainer,)
        evaluated = () if workload.eval_batch is None else ({"eval_batch": workload.eval_batch},)
        lengths = () if workload.lengths is None else (list(workload.lengths),)
        masked = ("padding is masked",) if workload.masks_padding else ()
        self._begun = hashlib.sha256(
            _canonical(
                {
                    "estimator": ESTIMATOR_VERSION,
                    "model": workload.model_digest,
                    "workload": [
                        *(workload.seq_len, workload.global_batch, workload.devices, workload.lora_dropout),
                        *(*trainer, *lengths, *masked, *evaluated),
                    ],
                    "hardware": [
                        *(hardware.name, hardware.kind, hardware.cores),
                        *(hardware.capability, hardware.bf16, hardware.peak_flops),
                    ],
                    "ranks_per_host": ranks_per_host(job),
                    "stack": job.stack.key,
                    "expandable_segments": job.expandable_segments is not False,
                    "replayed": replayed,
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
