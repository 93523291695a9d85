"""Trials on Ray, on this machine or on a cluster whose nodes come and go."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.catalog.hardware import Card
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe, ProbePart
from autofit.core.lattice import Config
from autofit.core.units import format_duration
from autofit.techniques import Job, unsupported
from autofit.training.prerequisites.requirements import requirement_key
from autofit.trial.machine import nvml
from autofit.trial.machine.device_lock import NOT_BEGUN
from autofit.trial.process.group_runner import not_begun, tell_of_waiting
from autofit.trial.request import TrialRequest
from autofit.workers.cluster import nodes as cluster
from autofit.workers.cluster.connection import connect
from autofit.workers.cluster.demand import DeviceRequest, check_capacity
from autofit.workers.cluster.nodes import Node
from autofit.workers.pool import Completed, Pool
from autofit.workers.slots.machine_link import measured_link
from autofit.workers.slots.missing import MissingRequirements
from autofit.workers.slots.running_trial import RunningTrial
from autofit.workers.slots.slot import Slot, State
from autofit.workers.slots.slot_set import SlotSet
from autofit.workers.slots.worker_starter import WorkerStarter

POLL_SECONDS = 0.5
"""Time between two looks at what has come up, while nothing else is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """A request that waits for a worker."""

    request: TrialRequest
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class RayPool(Pool):
    """Workers on Ray: a private single-machine Ray without dashboard, on loopback, unless an address is given."""

    def __init__(
        self,
        *,
        address: str | None = None,
        workers: int | None = None,
        devices: int = 1,
        device: str = "auto",
        card: Card | None = None,
    ) -> None:
        """A pool for trials of `devices` ranks on cards of one kind, `workers` of them at a time, by default as many as
        there is room for. Raises `EnvironmentLacks` if this machine has no room; a cluster may get it later."""
        connection = connect(address)
        self._leaving = ExitStack()
        self._leaving.callback(connection.close)
        self._ray = connection.ray
        self._queue: deque[_Queued] = deque()
        self._wait_reported = False  # whether it was said that a trial waits for another process's
        try:
            nodes, addable = cluster.nodes(self._ray), cluster.could_be_added(self._ray)
            uses_gpus = _uses_gpus(device, card, nodes, addable)
            wanted = DeviceRequest(ranks=devices, uses_gpus=uses_gpus, card=card, addable=addable)
            if address is None:
                check_capacity(wanted, nodes, workers or 1)
                if uses_gpus and nvml.devices() is None:
                    workers = workers or 1  # without NVML all devices share one lock: trials would wait for each other
            self._slots = SlotSet(
                ray=self._ray,
                wanted=wanted,
                workers=workers,
                is_private=address is None,
                starter=WorkerStarter(
                    ray=self._ray,
                    device=device,
                    driver=os.getpid() if address is None else None,
                ),
                missing=MissingRequirements(ray=self._ray),
            )
            self._slots.renew()
        except BaseException:
            self._leaving.close()
            raise

    @property
    def size(self) -> int:
        """Trials that may be under way now: one per slot that is up, or that may be asked for again."""
        return len(self._slots.up) + self._slots.given_back

    def site(self) -> tuple[Hardware, Stack]:
        """The workers' device and versions, with as many devices as a trial has on one machine, once one is up. Raises
        `EnvironmentLacks` if none can come up."""
        if self._slots.site is None:
            self._wait_for_one()
        assert self._slots.site is not None
        return self._slots.site

    def _wait_for_one(self) -> None:
        while not self._slots.up:
            self._pause(POLL_SECONDS)
            self._slots.renew()

    @property
    def set_aside(self) -> Mapping[str, str]:
        return self._slots.set_aside

    def leave_out(self, worker: str, reason: str) -> bool:
        return self._slots.leave_out(worker, reason)

    def claim(self, search_id: str, epoch: int, usual: Probe | None = None) -> None:
        """As `Pool.claim`; the pool's own workers bear the search's name and measure their device's rates."""
        self._slots.claim(search_id, epoch, usual)

    def link(self) -> ProbePart | None:
        spread = (slot for slot in self._slots.idle if slot.site == self._slots.site and len(set(slot.node_ids)) > 1)
        slot = next(spread, None)
        return None if slot is None else measured_link(self._ray, slot)

    def cannot(self, config: Config, job: Job) -> str | None:
        """Why `config` cannot be trained on one of the workers' machines, with its address: a trial may run on any.
        Raises `EnvironmentLacks` if one does not answer."""
        reason = unsupported(config, job)
        if reason is not None or not requirement_key(config, job):
            return reason
        self._wait_for_one()
        return self._slots.missing.reason(config, job, self._slots.up)

    def submit(self, request: TrialRequest) -> None:
        self._queue.append(_Queued(request=request))
        self._dispatch()

    def _dispatch(self) -> None:
        for slot in self._slots.idle:
            if not self._queue:
                return
            assert slot.site is not None
            queued = self._queue.popleft()
            hardware, stack = slot.site
            request = replace(
                queued.request,
                job=replace(queued.request.job, hardware=hardware, stack=stack),
                sharing=self._slots.sharing(slot),
            )
            slot.state = State.BUSY
            slot.running = RunningTrial(request, slot.actors, worker=slot.name, queued_seconds=queued.seconds)

    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended, each with the hardware and stack of the worker that ran it, or that was lost with it.
        Raises `EnvironmentLacks` when no worker is left and none can be hoped for."""
        if not self._queue and not self._busy:
            return []
        self._slots.renew(len(self._queue))
        self._dispatch()
        self._pause(timeout)
        ended = [*self._answered(), *self._lost(), *self._overdue(), *self._not_begun()]
        for running in self._busy.values():
            running.stop_overdue_ranks()
            running.note_waiting(self._ray, self._report_wait)
        self._dispatch()
        return ended

    @property
    def _busy(self) -> dict[Slot, RunningTrial]:
        return {slot: slot.running for slot in self._slots.slots if slot.running is not None}

    def _report_wait(self, holder: int | None) -> None:
        if not self._wait_reported:
            self._wait_reported = True
            tell_of_waiting(holder)

    def _pause(self, seconds: float) -> None:
        """Wait until something of a slot may have changed, but for at most `seconds`."""
        awaited = [reference for running in self._busy.values() for reference in running.answers]
        for slot in self._slots.slots:
            awaited += slot.ends if slot.is_up else slot.answers if slot.state is State.PENDING else []
        if awaited:
            self._ray.wait(awaited, timeout=seconds)
        else:
            time.sleep(seconds)

    def _ready(self, references: list[Any]) -> list[Any]:
        return list(self._ray.wait(references, num_returns=len(references), timeout=0)[0])

    def _answered(self) -> list[Completed]:
        """The trials whose last rank has answered, or of which one was lost."""
        ended = []
        for slot, running in self._busy.items():
            for reference in self._ready(list(running.answers)):
                rank = running.answers[reference]
                try:
                    attempt = running.take(self._ray, reference)
                except self._ray.exceptions.RayError as error:
                    ended.append(self._lose(slot, running, rank, error))
                    break
                if attempt is not None:
                    self._slots.free(slot)
                    ended.append((running.request, attempt))
        return ended

    def _lost(self) -> list[Completed]:
        """The trials of slots of which a worker has ended; those slots, and idle ones that have, are dropped."""
        ended: list[Completed] = []
        for slot in self._slots.up:
            for reference in self._ready(slot.ends):
                try:
                    self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    if slot.running is not None:
                        ended.append(self._lose(slot, slot.running, slot.ends.index(reference), error))
                    else:
                        self._slots.drop(slot)
                    break
        return ended

    def _lose(self, slot: Slot, running: RunningTrial, rank: int, error: Exception) -> Completed:
        """The trial of a slot that has lost the worker of `rank`, or of another for which that waited."""
        ended = self._ready(slot.ends)
        rank = slot.ends.index(ended[0]) if ended else rank
        host, is_alone = self._slots.host(slot.node_ids[rank]), self._slots.is_alone(slot, rank)
        self._slots.drop(slot)
        # Ray's memory monitor ends any of a machine's workers, whichever of their trials has taken the memory.
        out_of_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError) and is_alone
        return running.request, running.lost(error, host, out_of_memory=out_of_memory)

    def _overdue(self) -> list[Completed]:
        """The trials whose workers no longer answer: a lost node would be waited for until it came back."""
        late = TimeoutError("it did not answer after the trial's deadline")
        overdue = [(slot, running) for slot, running in self._busy.items() if running.is_overdue]
        return [self._lose(slot, running, min(running.answers.values()), late) for slot, running in overdue]

    def _not_begun(self) -> list[Completed]:
        ended = []
        for queued in [queued for queued in self._queue if queued.seconds > queued.request.wait_seconds]:
            self._queue.remove(queued)
            why = f"{NOT_BEGUN}: no worker was free for all of {format_duration(queued.seconds)}"
            ended.append((queued.request, not_begun(why)))
        return ended

    def close(self) -> None:
        """Kill the workers and leave Ray; nothing the second time."""
        self._slots.close()
        self._leaving.close()


def _uses_gpus(device: str, card: Card | None, nodes: Iterable[Node], addable: Mapping[str, float]) -> bool:
    """Whether trials take GPUs: where they are asked for, and where the cluster has or may get any. Else whole
    machines."""
    if device == "cpu":
        return False
    return device == "cuda" or card is not None or any(node.gpus for node in nodes) or bool(addable.get("GPU"))
