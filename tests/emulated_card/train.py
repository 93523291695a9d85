"""Trains configs on this machine's emulated card as trials do, all from one process: libraries take long to import."""

from __future__ import annotations

import json
import sys

from autofit.planning.requests import WorkloadOptions
from autofit.techniques import complete
from autofit.trial.machine.detection import detect
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.request import TrialRequest


def main() -> None:
    """Standard input has pairs of workload options and a config. Prints the outcome of each, a line of JSON."""
    site = detect("cuda")
    with GroupRunner(kind="cuda", ranks=1) as runner:
        for options, config in json.load(sys.stdin):
            request = TrialRequest(
                job=WorkloadOptions.of(**options).job(site),
                config=complete(config),
                memory_limit_bytes=site[0].memory_bytes,
                timing_seconds=0.0,
            )
            print(json.dumps(runner.attempt(request).outcome.to_json()), flush=True)


if __name__ == "__main__":
    main()
