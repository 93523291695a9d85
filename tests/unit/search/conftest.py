"""Worlds to search in: the built-in space `cpu`, for a model of the catalog, on an invented machine."""

from __future__ import annotations

import pytest
from unit.operations.made_trials import STACK
from unit.search.made_truth import Truth, cpu_lattice, make_job

from autofit.catalog.models import load
from autofit.core.device.hardware import Hardware
from autofit.core.lattice import Lattice
from autofit.core.units import GIB
from autofit.techniques import Job

MACHINE = Hardware(name="cpu-of-tests", kind="cpu", device_name="Some CPU", memory_bytes=32 * GIB, cores=4)


@pytest.fixture(scope="session")
def job() -> Job:
    """A job of a real model."""
    return make_job(MACHINE, STACK, model=load("smollm2-135m"))


@pytest.fixture(scope="session")
def lattice(job: Job) -> Lattice:
    """The lattice of the space `cpu`: 264 configs."""
    return cpu_lattice(job)


@pytest.fixture(scope="session")
def truth(job: Job, lattice: Lattice) -> Truth:
    """One world."""
    return Truth(job, lattice, seed=0)
