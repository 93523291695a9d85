"""The link between the machines that a trial's ranks are spread over: measured once by workers, kept in the store."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from autofit.core.device.probe import ProbePart, between, link_rate
from autofit.core.device.probe_findings import link_finding
from autofit.core.device.work_kinds import LINK
from autofit.prediction.probing import stored_probe, transfers_of
from autofit.store import Store
from autofit.techniques import Job
from autofit.workers.pool import Pool

if TYPE_CHECKING:
    from autofit.estimate.time.roofline import Rates

_log = logging.getLogger(__name__)


def make_sure(job: Job, store: Store, pool: Pool, *, fresh: bool = False) -> None:
    """Have workers measure the link between the machines that the job's ranks are spread over, unless the store has it
    or they share one, and say what it does. An emulated card's time is of no device. A failure costs only what the
    link would have shown. Raises `StoreError`."""
    if not job.hardware.spans_machines(job.workload.devices) or job.hardware.is_emulated:
        return
    link = None if fresh else _stored(job, store)
    if link is None:
        link = pool.link()
        if link is None:
            return
        if link.failure is not None:
            _log.warning("autofit: the link between machines could not be measured: %s", link.failure)
            return
        store.probes.keep_link(link, job.hardware, job.stack)
    _log.warning("autofit: %s", _finding(link, job, store))


def _finding(link: ProbePart, job: Job, store: Store) -> str:
    from autofit.estimate.time.transfers import seconds_per_byte

    probe = stored_probe(job.hardware, job.stack, store, job.model.digest)
    measured = {} if probe is None else transfers_of(probe)
    within = 1.0 / {**seconds_per_byte(job.hardware), **measured}[LINK]
    return link_finding(_rate(link), within, measured=LINK in measured)


def with_link(rates: Rates, job: Job, store: Store) -> Rates:
    """`rates` with the link between machines where the job's ranks are spread over several and the store has it: else
    it is taken for one within a machine."""
    link = _stored(job, store)
    return rates if link is None else replace(rates, transfers={**rates.transfers, LINK: 1.0 / _rate(link)})


def _stored(job: Job, store: Store) -> ProbePart | None:
    if not job.hardware.spans_machines(job.workload.devices):
        return None
    name = between(job.hardware, job.workload.devices)
    return store.probes.find_link(name, hardware_key=job.hardware.key, stack_key=job.stack.key)


def _rate(link: ProbePart) -> float:
    rate = link_rate(link.figures, link.name)
    assert rate is not None, "it has not failed"
    return rate
