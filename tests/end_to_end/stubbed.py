"""Parts of a service whose trials are a stub: everything is real but the training.

python stubbed.py runner ...        `autofit runner ...`, whose drivers' trials are the stub
python stubbed.py node PORT FOLDER  a node of a Ray cluster that ends, as a pod does, when any part of it does
python stubbed.py head PORT FOLDER  its head, which runs no trial
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

REAL = "AUTOFIT_TEST_REAL"
"""Set where trials train."""
EFFECTS = {("method", "lora"): 1.1, ("micro_batch", 2): 1.4, ("checkpointing", "none"): 1.2}
"""Speed factors of the stub, by which every config may be on the frontier."""
BYTES = 2**28
"""What a stub that checkpoints nothing and has one sequence takes, but for its number."""
TRIAL_SECONDS = 1.0


def tokens_per_second(config: Mapping[str, Any]) -> float:
    """The stub's speed of a config."""
    speed = 2000.0
    for (axis, value), factor in EFFECTS.items():
        speed *= factor if config[axis] == value else 1.0
    return speed


def run(data: Mapping[str, Any], descriptor: int, asked_at: float) -> None:
    """In place of `autofit.trial.process.child.run`: takes a moment and reports the formula's speed. Each execution has
    a number of its own, which its bytes tell: two trials with the same one are one execution that was stored twice."""
    from autofit.core.outcome import Fits, Measurement, StepSeconds
    from autofit.trial.process.events import Event, EventPipe
    from autofit.trial.request import TrialRequest

    request = TrialRequest.from_json({name: value for name, value in data.items() if name != "listener"})
    number, config = execution(Path(os.environ["AUTOFIT_TEST_FOLDER"])), request.config
    time.sleep(TRIAL_SECONDS)
    speed = tokens_per_second(config)
    seconds = request.job.workload.tokens_per_step / speed
    heavy = 1 + (config["checkpointing"] == "none") + (config["micro_batch"] == 2) + (config["method"] == "full")
    bytes_ = heavy * BYTES + number
    measured = Measurement(
        tokens_per_second=speed,
        step_seconds=StepSeconds(median=seconds, p95=seconds, relative_spread=0.0),
        mfu=None,
        peak_allocated_bytes=bytes_,
        peak_reserved_bytes=bytes_,
        device_bytes=bytes_,
        host_peak_bytes=bytes_,
        host_baseline_bytes=0,
        phase_peaks={"forward": bytes_},
        losses=(6.0, 5.0, 4.0),
        reference_loss=6.0,
        steps=3,
        setup_seconds=0.1,
        overhead_seconds=0.1,
        gradient_norms=(1.0, 1.0, 1.0),
        plain_gradient_norm=1.0 if request.compares_gradient else None,
    )
    EventPipe(descriptor).send(Event(result=Fits(measurement=measured)))


def execution(folder: Path) -> int:
    """The number of one more execution: the first that nobody has."""
    for number in count(len(list(folder.glob("execution-*")))):
        try:
            (folder / f"execution-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError("numbers do not end")


def stub_actor() -> type:
    """In place of `TrialActor`, on the workers: its fork server's children run the stub, and no device is measured."""
    from autofit.workers.slots.trial_actor import TrialActor

    class StubActor(TrialActor):
        def site(self, measures: bool = False, starts: bool = True) -> dict[str, Any]:
            from functools import partial
            from unittest.mock import patch

            from autofit.trial.process import runner

            stubbed = partial(runner.TrialRunner, entry="stubbed:run")
            with patch.object(runner, "TrialRunner", stubbed):
                return super().site(False, starts)

    return StubActor


def drive() -> None:
    """The driver, which trusts every trial however busy the machine is; unless they train, trials are the stub, and
    every config counts as worth one."""
    from quiet_machine import never_too_busy

    from autofit.operations.service import driver

    never_too_busy()
    if REAL not in os.environ:
        from autofit.search.acquisition import acquisition as advice
        from autofit.workers.slots import worker_starter

        worker_starter.TrialActor = stub_actor()  # type: ignore[misc]
        advice.WORTHWHILE_GAIN = advice.LUCKY_HALF_WIDTHS = 0.0
    driver.main()


def node(port: int, folder: str, *, head: bool) -> None:
    """Runs until a part of it ends, and then ends the rest; Ray's own `ray start --block` refuses a second head at the
    address of one that was killed, as long as a node of that one is on the same machine."""
    import ray
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    address = f"{ray.util.get_node_ip_address()}:{port}"
    options: dict[str, Any] = (
        {"gcs_server_port": port, "num_cpus": 0} if head else {"gcs_address": address, "num_cpus": 1}
    )
    params = RayParams(
        **options,
        object_store_memory=80 * 2**20,
        temp_dir=folder,
        include_dashboard=False,
        include_log_monitor=False,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
    )
    running = Node(params, head=head, shutdown_at_exit=True, spawn_reaper=True)
    print(json.dumps({"address": running.gcs_address}), flush=True)
    while running.remaining_processes_alive():
        time.sleep(0.2)
    running.kill_all_processes(check_alive=False, allow_graceful=False)
    sys.exit(1)


def main() -> None:
    """What the first argument names."""
    role = sys.argv.pop(1)
    if role == "driver":
        drive()
    elif role == "runner":
        from autofit.cli import main as program
        from autofit.operations.service import runner

        runner.DRIVER = (__file__, "driver")
        sys.argv.insert(1, role)
        program.main()
    else:
        node(int(sys.argv[1]), sys.argv[2], head=role == "head")


if __name__ == "__main__":
    main()
