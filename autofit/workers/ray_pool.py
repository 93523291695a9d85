"""Trials on Ray actors, one per device, on this machine or on a cluster; a trial of several ranks takes a group."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.core.hardware import Hardware, Stack
from autofit.core.lattice import Config, Value
from autofit.core.outcome import Crashed
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.techniques import Job, unsupported
from autofit.training.prerequisites.requirements import asks
from autofit.trial.attempt import Attempt
from autofit.trial.machine.detection import check_even
from autofit.trial.process.group import Gathering
from autofit.trial.process.group_runner import tell_of_waiting
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed
from autofit.workers.ray_connection import connect, cpus_per_gpu, cpus_per_node, gpus, wait_for_nodes
from autofit.workers.trial_actor import TrialActor

START_SECONDS = 300.0
"""A worker that has not started by then never will: its node is gone, or the resources it needs are."""
ASK_SECONDS = 5.0
"""Time between two questions whether a trial waits for its device."""
GRACE_SECONDS = 60.0
"""A worker kills its trial at the deadline and reports that; one that is silent for this much longer is itself gone."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """The workers of one trial: one, or one per rank."""

    actors: list[Any]
    placement: Any = None
    """Ray's placement group, which reserves their resources together; None for a single worker."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A request that a group is running."""

    worker: int
    """The group's number."""
    request: TrialRequest
    is_retry: bool
    """Whether the trial was begun before by a worker that was lost (a preempted node)."""
    place: Any
    """Ray's reference to the place where the ranks meet; None for a single worker."""
    answers: dict[Any, int]
    """Ray's references to the answers still to come, with the rank of each."""
    gathering: Gathering
    since: float = field(default_factory=time.monotonic)
    waits: Any = None
    """Ray's reference to the answer to what it waits for; None before that is asked."""
    asked: float = field(default_factory=time.monotonic)
    """When that was asked last, or else when it began."""

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.since > self.request.deadline_seconds + GRACE_SECONDS


class RayPool:
    """Workers on Ray: a private single-machine Ray without dashboard, on loopback, unless an address is given."""

    def __init__(
        self,
        *,
        address: str | None = None,
        workers: int | None = None,
        devices: int = 1,
        device: str = "auto",
        accelerator: str | None = None,
    ) -> None:
        """For trials of `devices` ranks, `workers` of them at a time; by default as many as there is room for."""
        self._connection = connect(address)
        self._ray = self._connection.ray
        self.devices = devices
        self._device = device
        # In a cluster the driver may be on another machine; there Ray itself ends a lost driver's workers.
        self._driver = os.getpid() if address is None else None
        self._accelerator = accelerator
        self._running: list[_Running] = []
        self._lacking: dict[tuple[Workload, tuple[Value | None, ...]], str | None] = {}
        """What the workers' machines lack, keyed by what is asked of them."""
        self._told = False  # whether it was said that a trial waits for another process's
        self._starting: dict[int, tuple[Any, float]] = {}
        """Groups that replace lost ones: the answers that will show they are up, and since when those are awaited."""
        try:
            if address is not None:
                wait_for_nodes(self._ray)
            self._uses_gpus = device != "cpu" and self._ray.cluster_resources().get("GPU", 0) >= 1
            self.size = self._size(workers)
            self._groups = [self._new_group() for _ in range(self.size)]
            self._idle = list(range(self.size))
            self._site: tuple[Hardware, Stack] | None = None
        except BaseException:
            self._connection.close()
            raise

    def _size(self, workers: int | None) -> int:
        if self._uses_gpus:
            available = gpus(self._ray, self._accelerator)
            what = f"{self._accelerator or ''} GPUs".lstrip()
        else:
            available = len(cpus_per_node(self._ray))
            what = "machines (on CPUs a trial takes a whole machine)"
        if available == 0:
            raise EnvironmentLacks(f"Ray has no {what}", remedy="check `ray status`, and --hardware")
        # On CPUs the ranks of a trial share its machine's cores.
        ranks, each = (available, self.devices) if self._uses_gpus else (int(min(cpus_per_node(self._ray))), 1)
        if self.devices > ranks:
            raise EnvironmentLacks(
                f"--devices {self.devices} asks for more than the {ranks} {what if self._uses_gpus else 'cores'} that "
                f"{'Ray' if self._uses_gpus else 'a machine of Ray'} has",
                remedy=f"use --devices {ranks} or add nodes",
            )
        groups = available // each
        if workers is not None and workers > groups:
            of = f" of {self.devices} devices each" if self.devices > 1 else ""
            raise EnvironmentLacks(
                f"--workers {workers}{of} asks for more than the {available} {what} that Ray has",
                remedy=f"use --workers {groups} or add nodes",
            )
        return workers or groups

    def _new_group(self) -> _Group:
        if self.devices == 1:
            return _Group(actors=[self._new_actor()])
        bundle = self._resources()
        # Ranks on CPUs divide one machine's cores.
        strategy = "PACK" if self._uses_gpus else "STRICT_PACK"
        placement = self._ray.util.placement_group([dict(bundle) for _ in range(self.devices)], strategy=strategy)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        places = [strategy(placement, placement_group_bundle_index=number) for number in range(self.devices)]
        return _Group(actors=[self._new_actor(scheduling_strategy=p) for p in places], placement=placement)

    def _resources(self) -> dict[str, float]:
        """The resources that one rank takes."""
        if self._uses_gpus:
            # The type too: otherwise a group could be given cards of another type, whose workers would wait for ever.
            kind = {f"accelerator_type:{self._accelerator}": 0.001} if self._accelerator is not None else {}
            return {"GPU": 1, "CPU": cpus_per_gpu(self._ray, self._accelerator), **kind}
        # Each trial gets a whole machine, so that trials do not take cores from one another.
        return {"CPU": min(cpus_per_node(self._ray)) // self.devices}

    def _new_actor(self, **placed: Any) -> Any:
        resources = self._resources()
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 3,  # a trial, the call that stops it, and one that asks what it waits for
            "num_cpus": resources["CPU"],
        }
        if self._uses_gpus:
            options["num_gpus"] = 1
            if self._accelerator is not None:
                options["accelerator_type"] = self._accelerator
        else:
            options["scheduling_strategy"] = "SPREAD"
        threads = None if self._driver is None else os.environ.get("OMP_NUM_THREADS")
        actor = self._ray.remote(TrialActor).options(**{**options, **placed})
        return actor.remote(self._device, self._driver, threads)

    def site(self) -> tuple[Hardware, Stack]:
        """The first worker's device and versions, with as many devices as a trial has on one machine; raises
        `EnvironmentLacks` if workers differ or none comes up."""
        if self._site is None:
            sites = self._of_all("site")
            found = [(Hardware.from_json(s["hardware"]), Stack.from_json(s["stack"])) for s in sites]
            if self._uses_gpus:
                for first in range(0, len(found), self.devices):
                    check_even([_card(hardware) for hardware, _ in found[first : first + self.devices]])
            if len({(h.key, s.key) for h, s in found}) > 1:
                kinds = ", ".join(sorted({h.name for h, _ in found}))
                raise EnvironmentLacks(
                    f"Ray's workers differ in hardware or library versions ({kinds}): their trials are not comparable",
                    remedy="use --workers 1, or let CUDA_VISIBLE_DEVICES name devices of one kind"
                    if self._driver is not None
                    else "name one with --hardware, use --workers 1, or use one image on all nodes",
                )
            hardware, stack = found[0]
            self._site = replace(hardware, count=self._together()) if self._uses_gpus else hardware, stack
        return self._site

    def _together(self) -> int:
        """The most ranks of one trial that are on one machine: each worker sees only the device that it was given."""
        if self.devices == 1:
            return 1
        addresses = self._of_all("address")
        groups = [addresses[first : first + self.devices] for first in range(0, len(addresses), self.devices)]
        return max(group.count(address) for group in groups for address in group)

    def cannot(self, config: Config, job: Job) -> str | None:
        """Why `config` cannot be trained on one of the workers' machines, with its address: a trial may run on any.

        They are asked once for all configs that ask the same of them. Raises `EnvironmentLacks` if one does not answer.
        """
        reason = unsupported(config, job)
        if reason is not None or not asks(config):
            return reason
        asked = (job.workload, asks(config))
        if asked not in self._lacking:
            self._lacking[asked] = next(filter(None, self._of_all("lacks", config, job)), None)
        return self._lacking[asked]

    def _of_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all workers; raises `EnvironmentLacks` if one does not answer."""
        asked = [getattr(actor, method).remote(*arguments) for group in self._groups for actor in group.actors]
        try:
            answers: list[Any] = self._ray.get(asked, timeout=START_SECONDS)
        except self._ray.exceptions.GetTimeoutError as error:
            raise EnvironmentLacks(
                "Ray started no worker within 5 minutes", remedy="check `ray status` for resources"
            ) from error
        except self._ray.exceptions.RayError as error:
            if isinstance(lacks := getattr(error, "cause", None), EnvironmentLacks):
                raise lacks from error
            raise EnvironmentLacks(
                f"Ray's worker failed: {lines_of(error)[-1]}", remedy="run `autofit doctor` on that machine"
            ) from error
        return answers

    def submit(self, request: TrialRequest, *, is_retry: bool = False) -> None:
        """Start `request` on an idle worker."""
        worker = self._idle.pop()
        actors = self._groups[worker].actors
        asked, ranks, place = request.to_json(), len(actors), None
        if ranks > 1:
            # Nothing blocks here: Ray passes each answer on as the next call's argument.
            place = actors[0].listen.remote(request.wait_seconds, *[actor.where.remote() for actor in actors])
        answers = {actor.run.remote(asked, place, rank): rank for rank, actor in enumerate(actors)}
        self._running.append(
            _Running(
                worker=worker,
                request=request,
                is_retry=is_retry,
                place=place,
                answers=answers,
                gathering=Gathering(ranks=ranks),
            )
        )

    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended. Raises `EnvironmentLacks` when no worker is left."""
        if not self._running:
            return []
        awaited = {reference: running for running in self._running for reference in running.answers}
        self._ray.wait(list(awaited), timeout=timeout)
        done, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        answered = [self._take(awaited[reference], reference) for reference in done]
        for running in self._running:
            for rank in running.gathering.overdue():
                self._groups[running.worker].actors[rank].stop.remote(running.place)
            self._note_waiting(running)
        return [c for c in answered if c is not None] + self._given_up()

    def _note_waiting(self, running: _Running) -> None:
        """Ask now and then whether a trial waits for its device: then it is told once, and nothing is overdue."""
        if running.waits is None:
            if time.monotonic() - running.asked >= ASK_SECONDS:
                running.asked = time.monotonic()
                running.waits = self._groups[running.worker].actors[0].waits_for.remote()
            return
        if not self._ray.wait([running.waits], timeout=0)[0]:
            return
        with suppress(self._ray.exceptions.RayError):  # it was lost, as its trial will show
            if (holder := self._ray.get(running.waits)) is not None:
                running.since = time.monotonic()
                self._told = self._told or tell_of_waiting(holder or None)
        running.waits = None

    def _take(self, running: _Running, reference: Any) -> Completed | None:
        """The trial that a worker's answer completes; None if other ranks go on, or if the worker was lost for the
        first time and the trial is run again on another."""
        if running not in self._running:
            return None  # another of its workers was lost
        rank = running.answers.pop(reference)
        attempt = self._answer(reference)
        if attempt is None:
            self._running.remove(running)
            self._replace(running.worker)
            if running.is_retry:
                return _unanswered(running, "the Ray worker that ran the trial was lost, twice")
            self.submit(running.request, is_retry=True)
            return None
        running.gathering.take(rank, attempt)
        if not running.gathering.complete:
            return None
        self._running.remove(running)
        self._idle.append(running.worker)
        return running.request, running.gathering.attempt()

    def _replace(self, worker: int) -> None:
        """Rebuild a group: the ranks of one that has lost a worker cannot go on without it."""
        self._end(self._groups[worker])
        self._groups[worker] = group = self._new_group()
        self._starting[worker] = ([actor.site.remote() for actor in group.actors], time.monotonic())
        self._idle.append(worker)

    def _end(self, group: _Group) -> None:
        for actor in group.actors:
            with suppress(Exception):  # it may be gone already
                self._ray.kill(actor)
        if group.placement is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(group.placement)

    def _given_up(self) -> list[Completed]:
        """The trials whose workers no longer answer, or never started. Without this, a lost node would be waited for
        until it came back."""
        given_up = []
        for running in list(self._running):
            if running.worker in self._starting:
                if self._is_starting(running.worker):
                    running.since = time.monotonic()
                elif running.worker in self._starting:
                    self._running.remove(running)
                    self._retire(running.worker)
                    given_up.append(_unanswered(running, "its Ray worker was lost, and no other could be started"))
            elif running.overdue:
                self._running.remove(running)
                self._replace(running.worker)
                given_up.append(_unanswered(running, "its Ray worker did not answer after the trial's deadline"))
        return given_up

    def _is_starting(self, worker: int) -> bool:
        """Whether a group may still come up; one that is up and matches the others is taken off the list."""
        references, since = self._starting[worker]
        up, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        if len(up) == len(references):
            if self._are_as_before(references):
                del self._starting[worker]
            return False
        return time.monotonic() - since < START_SECONDS

    def _are_as_before(self, references: Sequence[Any]) -> bool:
        """Whether workers that have come up have the cards and versions of the first ones: otherwise their trials would
        be stored as if run on those."""
        if self._site is None:
            return True
        try:
            sites = self._ray.get(list(references))
        except self._ray.exceptions.RayError:
            return True  # lost again, as their next call will show
        found = {(Hardware.from_json(s["hardware"]).key, Stack.from_json(s["stack"]).key) for s in sites}
        return found == {(self._site[0].key, self._site[1].key)}

    def _retire(self, worker: int) -> None:
        """Go on with one worker fewer."""
        del self._starting[worker]
        self._end(self._groups[worker])
        self.size -= 1
        if self.size == 0:
            raise EnvironmentLacks(
                "Ray has lost its last worker and started no other within 5 minutes",
                remedy="check `ray status`, and run the same command when there are nodes again: it resumes",
            )

    def _answer(self, reference: Any) -> Attempt | None:
        """The attempt that a worker answered with; None if it was lost."""
        lost = self._ray.exceptions.RayActorError
        try:
            data = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error, lost) or isinstance(error.cause, lost):
                return None  # the call waited for another worker, which was lost
            reason = f"the worker failed: {lines_of(error)[-1]}"
            return Attempt(outcome=Crashed(reason=reason, transient=True), seconds=0.0)
        except self._ray.exceptions.RayError:
            return None
        return Attempt.from_json(data)

    def close(self) -> None:
        """Kill the workers and leave Ray. A trial's processes end with their worker, because its pipe closes."""
        groups, self._groups = self._groups, []
        if groups:
            for group in groups:
                self._end(group)
            self._connection.close()


def _card(hardware: Hardware) -> str:
    return f"{hardware.device_name} ({round(hardware.memory_bytes / GIB)} GiB)"


def _unanswered(running: _Running, reason: str) -> Completed:
    outcome = Crashed(reason=reason, transient=True)
    return running.request, Attempt(outcome=outcome, seconds=time.monotonic() - running.since)
