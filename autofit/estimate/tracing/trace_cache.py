"""Traces kept between processes: the same model with another micro-batch, rank or card need not be traced again."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Hashable
from hashlib import sha256
from pathlib import Path
from typing import Any

from autofit.catalog.answer_cache import cache_folder, installed, write_cache_file
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.techniques import Job
from autofit.techniques.attention_kernels import generation

_log = logging.getLogger(__name__)

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
"""Whose code is traced."""
MAX_BYTES = 512 * 1024**2
"""The oldest traces go once all take more. Those of one model, with every technique, take some 50 MiB."""


class TraceCache:
    """A folder with one pickle per trace, readable by its user alone. Whatever fails costs a trace, never an answer."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when the first trace is kept."""
        self._folder = folder

    @classmethod
    def of_user(cls) -> TraceCache:
        """In `AUTOFIT_CACHE` or, without it, in the user's cache folder."""
        return cls(cache_folder() / "traces")

    def get(self, key: str) -> Any | None:
        file = self._folder / key
        try:
            trace = pickle.loads(file.read_bytes())
            os.utime(file)
        except FileNotFoundError:
            return None
        except Exception as error:  # cut off, or pickled by other code: unpickling may raise anything
            _log.debug("the trace %s cannot be read: %s", file, error)
            return None
        return trace

    def put(self, key: str, trace: object) -> None:
        """Keep a trace, in place of any under this key."""
        try:
            write_cache_file(self._folder / key, pickle.dumps(trace, protocol=pickle.HIGHEST_PROTOCOL))
            self._drop_oldest()
        except Exception as error:  # a full disk, a folder of another user, or what cannot be pickled
            _log.debug("the trace %s cannot be kept: %s", key, error)

    def _drop_oldest(self) -> None:
        files = [(entry.stat(), entry) for entry in self._folder.iterdir()]
        taken = sum(stat.st_size for stat, _ in files)
        for stat, entry in sorted(files, key=lambda file: file[0].st_mtime):
            if taken <= MAX_BYTES:
                break
            entry.unlink(missing_ok=True)
            taken -= stat.st_size


def trace_key(job: Job, part: str, *details: Hashable) -> str:
    """What the trace of a part of `job`'s step depends on, as 64 hexadecimal digits; `details` are the part's own. The
    card counts only for which kernels run on it; the number of devices and the batch do not count, and for an update
    no sequences. The libraries here count beside the job's: blocks are freed in the order in which they drop them."""
    hardware, workload = job.hardware, job.workload
    device = generation(hardware.capability) if hardware.kind == "cuda" else hardware.key
    whole = (
        ESTIMATOR_VERSION,
        job.stack.key,
        *map(installed, LIBRARIES),
        *(hardware.kind, device),
        *(workload.model_digest, None if part == "update" else workload.seq_len),
        *(workload.lora_dropout, workload.trainer, part, *details),
    )
    return sha256(repr(whole).encode()).hexdigest()
