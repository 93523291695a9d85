"""The host memory that offloading takes, by formula: what is known of it where no step is traced."""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.estimate.memory.lower_bound import floor_parts
from autofit.estimate.sharding import Holdings, library
from autofit.estimate.sharding.edit import plain
from autofit.techniques import Job
from autofit.techniques.job import ranks_per_host


def host_short_bytes(config: Config, job: Job) -> int:
    """By how much the host lacks memory for what all ranks on it offload; 0 where it is enough or unknown, and on a
    processor, whose memory limit is about the same memory."""
    host_memory = job.hardware.host_memory_bytes
    if config["offload"] == "none" or not host_memory or job.hardware.kind == "cpu":
        return 0
    return max(0, ranks_per_host(job) * hosted_bytes(config, job) - host_memory)


def hosted_bytes(config: Config, job: Job) -> int:
    """Host memory of what one rank offloads; adapters are left out, as in the floor."""
    sharding_library = library(config, job)
    if sharding_library is None:
        return 0
    model, full = shape(job.model), config["method"] == "full"
    stored, computed = floor_parts(plain(config), job), floor_parts(sharding_library.traced(config), job)
    trained = computed["weights"] if full else 0
    embeddings = trained * model.embedding_parameters // model.parameters
    return sharding_library.hosted(
        Holdings(
            trained=float(model.parameters) if full else 0.0,
            trained_bytes=trained,
            sizes=(embeddings, *[(trained - embeddings) // model.layers] * model.layers),
            frozen_bytes=0 if full else computed["weights"],
            stored_bytes=stored["weights"] if full else 0,
            states_bytes=stored["optimizer"],
        ),
        accumulates=job.workload.batch_per_device > config.number("micro_batch"),
    ).total
