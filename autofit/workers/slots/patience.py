"""How long a pool without a worker waits for one, and what it says meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from autofit.core.errors import EnvironmentLacks
from autofit.workers.cluster.demand import DeviceRequest, check_capacity
from autofit.workers.cluster.nodes import Node

NODES_SECONDS = 120.0
"""How long a cluster may take to have its first suitable node, where no autoscaler says that it can add one."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Patience:
    """Waits for others to end as long as it takes, and for nodes that are not there until it gives up."""

    wanted: DeviceRequest
    is_private: bool
    """Whether no node can join."""
    none_since: float | None = None
    """Since when there is neither a worker, up or starting, nor a node for one; by the monotonic clock."""
    _messages: set[str] = field(default_factory=set)

    def has_none(self, nodes: Collection[Node], refusal: EnvironmentLacks | None, *, had_some: bool) -> None:
        """No worker is up or starting on these nodes. Raises `EnvironmentLacks` once that is waited for in vain: with
        `refusal`, if that says why the last worker that came up was not taken. `had_some`: there were workers before.
        """
        if self.wanted.capacity(nodes):
            self.none_since = None
            if not self.wanted.room(nodes):
                self.say(f"others use all {self.wanted}: this search waits its turn")
            return
        now = time.monotonic()
        self.none_since = self.none_since or now
        if now - self.none_since < self._seconds():
            self.say(f"Ray has no {self.wanted} yet: waiting for a node")
            return
        if refusal is not None:
            raise refusal
        if had_some:
            raise EnvironmentLacks(
                f"Ray has lost its last worker and has no other {self.wanted}",
                remedy="check `ray status`, and run the same command when there are nodes again: it resumes",
            )
        check_capacity(self.wanted, nodes)

    def _seconds(self) -> float:
        """For how long a first suitable node is waited for."""
        if self.is_private:
            return 0.0
        is_coming = self.wanted.addable.get("GPU" if self.wanted.uses_gpus else "CPU")
        return 1800.0 if is_coming else NODES_SECONDS  # a machine is rented and an image of many GB is loaded

    def say(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self._messages:
            self._messages.add(text)
            _log.warning("autofit: %s", text)
