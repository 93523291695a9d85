"""A SQLite store of 100,000 trials, written directly to the database: through the store it would take minutes."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

from autofit.lattice import Config
from autofit.outcome import Fits, OutOfMemory, outcome_to_json
from autofit.techniques import family
from autofit.workload import METHODS

COPY = """
    INSERT INTO trials (hardware_digest, hardware_key, stack_key, workload_key, memory_limit_bytes, attempt,
        seconds, recorded_at, config_key, method, family, outcome, device_bytes, tokens_per_second, config, evidence)
    SELECT hardware_digest, hardware_key, stack_key, workload_key, memory_limit_bytes, 1,
        seconds, recorded_at, ?, ?, ?, ?, ?, ?, ?, ?
    FROM trials WHERE id = 1
"""


def fill(path: Path, count: int, fitting: Fits) -> dict[int, tuple[str, int, float]]:
    """Copy the first trial `count` times with other configs and results.

    Returns the method, bytes and tokens per second of each that fits, by id.
    """
    chance = random.Random(0)
    failed = json.dumps(outcome_to_json(OutOfMemory(reason="")))
    evidence = outcome_to_json(fitting)
    rows, results = [], {}
    for number in range(2, count + 2):
        method, memory = chance.choice(METHODS), chance.randrange(2**30, 80 * 2**30)
        # Faster with more memory, up to a point, as techniques trade one for the other.
        speed = 1e4 * min(1.0, memory / 2**35) * chance.betavariate(2, 2)
        fit = chance.random() < 0.8
        config = Config.of({"method": method, "precision": chance.choice(("bf16", "fp32")), "micro_batch": number})
        evidence["measurement"] |= {"device_bytes": memory, "tokens_per_second": speed}
        rows.append(
            (
                config.key,
                method,
                family(config),
                "fits" if fit else "out_of_memory",
                memory if fit else None,
                speed if fit else None,
                json.dumps(config.to_json()),
                json.dumps(evidence) if fit else failed,
            )
        )
        if fit:
            results[number] = (method, memory, speed)
    connection = sqlite3.connect(path)
    with connection:
        connection.executemany(COPY, rows)
    connection.close()
    return results
