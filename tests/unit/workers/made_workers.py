"""Real Ray clusters of several nodes on this machine, whose workers have invented devices and run invented trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import tiny_job, tiny_request
from ray.cluster_utils import Cluster

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe, ProbePart
from autofit.core.units import GIB, MIB
from autofit.techniques import complete
from autofit.trial.attempt import Attempt
from autofit.trial.request import TrialRequest
from autofit.workers.ray_pool import RayPool


def made_probe() -> Probe:
    """Of a device that is as fast as its type."""
    return Probe(
        hardware=Hardware(name="h100-80g", kind="cuda", device_name="a card", memory_bytes=80 * GIB),
        stack=Stack(python="3.11", torch="2.13", transformers="5.17"),
        model="any",
        shapes_key="any",
        parts=(ProbePart(name="products in bf16", seconds=1.0, seconds_per={"product/bf16/nt": 1e-15}),),
        steps=(),
        seconds=1.0,
        recorded_at="2026-01-01T00:00:00+00:00",
    )


def made_actor(folder: Path) -> type:
    """A class in place of `TrialActor`, which is pickled with its code. What it is about to run is told by a file in
    the folder, and its trial ends when another file lets it."""

    usual = made_probe().to_json()

    class MadeActor:
        def __init__(self, device: str, driver: int | None, threads: str | None, version: str) -> None:
            import ray

            self.labels = next(
                node["Labels"] for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()
            )

        def site(self, measures: bool, starts: bool) -> dict[str, Any]:
            from autofit.core.device.hardware import Hardware, Stack
            from autofit.core.errors import EnvironmentLacks

            if "broken" in self.labels:
                raise EnvironmentLacks("torch is not installed", remedy="install it")
            hardware = Hardware(
                name=self.labels.get("has", "h100-80g"),
                kind="cuda",
                device_name="a card",
                memory_bytes=80 * 2**30,
                host_memory_bytes=int(self.labels.get("host-gib", "64")) * 2**30,
            )
            stack = Stack(
                python="3.11",
                torch=self.labels.get("torch", "2.13"),
                transformers="5.17",
                driver=self.labels.get("driver"),
            )
            answer: dict[str, Any] = {"hardware": hardware.to_json(), "stack": stack.to_json()}
            if measures and "speed" in self.labels:  # as a share of its type's
                (part,) = usual["parts"]
                rates = {kind: rate / float(self.labels["speed"]) for kind, rate in part["seconds_per"].items()}
                answer["probe"] = {**usual, "parts": [{**part, "seconds_per": rates}]}
            elif measures:
                answer["unmeasured"] = "the driver hangs"
            return answer

        def end(self) -> None:
            import threading

            threading.Event().wait()

        def lacks(self, config: object, job: object) -> str | None:
            import os

            if self.labels.get("lacks") == "dies":
                os._exit(1)
            return "on that machine: nothing is compiled" if "lacks" in self.labels else None

        def waits_for(self) -> None:
            return None

        def where(self) -> str:
            return ""

        def listen(self, wait_seconds: float, *ranks: str) -> str:
            return ""

        def run(self, request: dict[str, Any], place: object = None, rank: int = 0) -> dict[str, Any]:
            import os
            import time

            from autofit.core.outcome import OutOfMemory
            from autofit.trial.attempt import Attempt

            size = request["config"]["micro_batch"]
            (folder / f"began-{size}-{os.getpid()}").touch()
            while not (folder / f"end-{size}").exists():
                time.sleep(0.02)
            reason = f"sharing {request['sharing']}"
            return Attempt(outcome=OutOfMemory(reason=reason), seconds=1.0).to_json()

    return MadeActor


@dataclass
class MadeCluster:
    """A head that runs nothing, and the nodes that a test adds."""

    ray_cluster: Cluster
    folder: Path
    nodes: list[Any]
    pools: list[RayPool]

    def add(
        self, *, gpus: int = 1, cpus: float = 4, kind: str | None = None, address: str | None = None, **labels: str
    ) -> Any:
        """A node; `kind` is what Ray calls its accelerators, `address` its machine's, else that of all others."""
        node = self.ray_cluster.add_node(
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=80 * MIB,
            resources={} if kind is None else {f"accelerator_type:{kind}": 1},
            labels={name.replace("_", "-"): value for name, value in labels.items()},
            **({} if address is None else {"node_ip_address": address}),
        )
        self.nodes.append(node)
        return node

    def remove(self, node: Any) -> None:
        self.nodes.remove(node)
        self.ray_cluster.remove_node(node)

    def open(self, **options: Any) -> RayPool:
        pool = RayPool(address=self.ray_cluster.address, **options)
        self.pools.append(pool)
        return pool

    def clear(self) -> None:
        """Without pools and nodes, as at first."""
        for pool in self.pools:
            pool.close()
        for node in list(self.nodes):
            self.remove(node)
        self.pools.clear()

    def let_end(self, *sizes: int) -> None:
        for size in sizes:
            (self.folder / f"end-{size}").touch()

    def began(self, size: int) -> int:
        """How many workers have begun the trial of this micro-batch."""
        return len(list(self.folder.glob(f"began-{size}-*")))


@contextmanager
def made_cluster(folder: Path) -> Iterator[MadeCluster]:
    """A cluster without a node that could run anything."""
    cluster = with_head()
    try:
        yield MadeCluster(cluster, folder, [], [])
    finally:
        cluster.shutdown()


def with_head(tries: int = 3) -> Cluster:
    """A head that has no CPU. On a busy machine Ray may give its own server up before that has started."""
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=80 * MIB)
    except Exception:
        cluster.shutdown()
        if tries == 1:
            raise
        return with_head(tries - 1)
    return cluster


def request_of(size: int, **request: Any) -> TrialRequest:
    """A request of which the micro-batch says which it is."""
    job = tiny_job(global_batch=64)
    config = complete({"micro_batch": size})
    return tiny_request(config, job=job, memory_limit_bytes=2 * GIB, **request)


def size_of(request: TrialRequest) -> int:
    return request.config.number("micro_batch")


def until(true: Callable[[], object], pool: RayPool | None = None) -> list[tuple[TrialRequest, Attempt]]:
    """Wait for as long as it takes; what the pool's trials came to meanwhile."""
    ended: list[tuple[TrialRequest, Attempt]] = []
    while not true():
        if pool is None:
            time.sleep(0.05)
        else:
            ended += pool.wait(0.05)
    return ended


def collected(pool: RayPool, count: int = 1) -> list[tuple[TrialRequest, Attempt]]:
    """The next trials that end."""
    ended: list[tuple[TrialRequest, Attempt]] = []
    while len(ended) < count:
        ended += pool.wait(0.5)
    return ended
