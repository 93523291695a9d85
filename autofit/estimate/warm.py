"""Processes that begin with the libraries loaded, because one server loads them for all that it forks."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    """Makes processes that a server forks: this process itself may have threads."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["autofit.estimate.preloaded"])
    return found
