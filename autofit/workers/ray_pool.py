"""Trials on Ray actors: one per device, on this machine or on a cluster."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from typing import Any

from autofit.errors import EnvironmentLacks
from autofit.hardware import Hardware, Stack
from autofit.outcome import Crashed, Outcome
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

OBJECT_STORE_BYTES = 80 * 1024**2
"""Ray's minimum: nothing but small JSON documents passes between driver and workers."""
LOST_WORKER_RETRIES = 1
"""A worker that is lost (a preempted node) costs its trial one more attempt, which is ours to count, not Ray's."""


class TrialActor:
    """One device's worker. The actor's process never touches the device: trials run in children of its warm parent."""

    def __init__(self, device: str) -> None:
        from autofit.trial.runner import TrialRunner
        from autofit.trial.site import detect

        self._hardware, self._stack = detect(device)
        self._runner = TrialRunner(kind=self._hardware.kind)
        self._runner.start()

    def site(self) -> dict[str, Any]:
        """Hardware and stack of this worker, as JSON."""
        return {"hardware": self._hardware.to_json(), "stack": self._stack.to_json()}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request, as JSON, to its outcome and seconds."""
        from autofit.outcome import outcome_to_json

        outcome, seconds = self._runner.run(TrialRequest.from_json(request))
        return {"outcome": outcome_to_json(outcome), "seconds": seconds}


class RayPool:
    """Workers on Ray; a private one-machine Ray without dashboard, on loopback, unless an address is given."""

    def __init__(
        self,
        *,
        address: str | None = None,
        workers: int | None = None,
        device: str = "auto",
        accelerator: str | None = None,
    ) -> None:
        self._ray = _connect(address)
        self._device = device
        self._accelerator = accelerator
        self._running: dict[Any, tuple[int, TrialRequest, int]] = {}
        try:
            self._uses_gpus = device != "cpu" and self._ray.cluster_resources().get("GPU", 0) >= 1
            self.size = self._size(workers)
            self._actors = [self._new_actor() for _ in range(self.size)]
            self._idle = list(range(self.size))
            self._site: tuple[Hardware, Stack] | None = None
        except BaseException:
            self._ray.shutdown()
            raise

    def _size(self, workers: int | None) -> int:
        resources = self._ray.cluster_resources()
        available = int(resources.get("GPU", 0)) if self._uses_gpus else _nodes(self._ray)
        if workers is not None and workers > available:
            what = "GPUs" if self._uses_gpus else "machines (on CPUs a trial takes a whole machine)"
            raise EnvironmentLacks(
                f"--workers {workers} asks for more than the {available} {what} that Ray has",
                remedy=f"use --workers {available} or add nodes",
            )
        return workers or max(1, available)

    def _new_actor(self) -> Any:
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
        if self._uses_gpus:
            options["num_gpus"] = 1
            options["num_cpus"] = 1
            if self._accelerator is not None:
                options["accelerator_type"] = self._accelerator
        else:
            # A whole machine each, so that trials do not take cores from one another.
            options["num_cpus"] = min(_cpus_per_node(self._ray))
            options["scheduling_strategy"] = "SPREAD"
        return self._ray.remote(TrialActor).options(**options).remote(self._device)

    def site(self) -> tuple[Hardware, Stack]:
        """The first worker's device and versions; raises `EnvironmentLacks` if workers differ or none comes up."""
        if self._site is None:
            try:
                sites = self._ray.get([actor.site.remote() for actor in self._actors], timeout=300)
            except self._ray.exceptions.GetTimeoutError as error:
                raise EnvironmentLacks(
                    "Ray started no worker within 5 minutes", remedy="check `ray status` for resources"
                ) from error
            except self._ray.exceptions.RayError as error:
                raise EnvironmentLacks(
                    f"Ray's worker failed: {_cause(error)}", remedy="run `autofit doctor` on that machine"
                ) from error
            found = [(Hardware.from_json(s["hardware"]), Stack.from_json(s["stack"])) for s in sites]
            if len({(h.key, s.key) for h, s in found}) > 1:
                kinds = ", ".join(sorted({h.name for h, _ in found}))
                raise EnvironmentLacks(
                    f"Ray's workers differ in hardware or library versions ({kinds}): their trials are not comparable",
                    remedy="name one with --hardware, or use one image on all nodes",
                )
            self._site = found[0]
        return self._site

    def submit(self, request: TrialRequest) -> None:
        """Start `request` on an idle worker."""
        self._start(request, attempt=0)

    def _start(self, request: TrialRequest, *, attempt: int) -> None:
        index = self._idle.pop()
        reference = self._actors[index].run.remote(request.to_json())
        self._running[reference] = (index, request, attempt)

    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended."""
        if not self._running:
            return []
        done, _ = self._ray.wait(list(self._running), timeout=timeout)
        completed = []
        for reference in done:
            index, request, attempt = self._running.pop(reference)
            outcome, seconds = self._answer(reference)
            if outcome is None:
                self._actors[index] = self._new_actor()
                self._idle.append(index)
                if attempt < LOST_WORKER_RETRIES:
                    self._start(request, attempt=attempt + 1)
                    continue
                outcome = Crashed(reason="the Ray worker that ran the trial was lost, twice")
            else:
                self._idle.append(index)
            completed.append(Completed(request=request, outcome=outcome, seconds=seconds))
        return completed

    def _answer(self, reference: Any) -> tuple[Outcome | None, float]:
        from autofit.outcome import outcome_from_json

        try:
            data = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            return Crashed(reason=f"the worker failed: {_cause(error)}"), 0.0
        except self._ray.exceptions.RayError:
            return None, 0.0
        return outcome_from_json(data["outcome"]), data["seconds"]

    def close(self) -> None:
        """Kill the workers and leave Ray. A trial's processes end with their worker: its pipe closes."""
        actors, self._actors = self._actors, []
        if actors:
            for actor in actors:
                self._ray.kill(actor)
            self._ray.shutdown()


def _connect(address: str | None) -> Any:
    """The `ray` module, connected; raises `EnvironmentLacks` where an address does not answer."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray._private import ray_constants

    # Ray replaces 127.0.0.1 by an address that other machines reach, unless it takes this machine for one that cannot
    # be in a cluster: this alone keeps every port of a private Ray on loopback. It is what the environment variable
    # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER sets, which is read only once, at ray's first import in the process.
    ray_constants.ENABLE_RAY_CLUSTER = address is not None

    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        settings |= {
            "address": "local",
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": os.path.join(tempfile.gettempdir(), f"autofit-ray-{os.getuid()}"),
        }
    else:
        _check_answers(address)
        settings["address"] = address
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise EnvironmentLacks(
            f"Ray cannot be reached: {_cause(error)}",
            remedy="check --ray-address and, for a cluster with token authentication, RAY_AUTH_MODE=token"
            if address
            else "run `autofit doctor`, or use --in-place",
        ) from error
    return ray


def _check_answers(address: str) -> None:
    """Raise `EnvironmentLacks` if nothing listens at `host:port`: Ray itself would end this process.

    Other forms of address (`auto`, `ray://...`, `local`) fail with an exception of Ray's own.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentLacks(
            f"no Ray cluster answers at {address}: {error}",
            remedy="check --ray-address, or leave it out for this machine",
        ) from error


def _nodes(ray: Any) -> int:
    return sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))


def _cpus_per_node(ray: Any) -> list[float]:
    return [node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _cause(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
