"""What every sharding library changes in a step, as seen by one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofit.core.lattice import Config
from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.sharding.edit import plain
from autofit.techniques.axes.precision import product_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The sizes of a model's parameters and states, over all ranks together."""

    trained: float
    """Number of parameters that the optimizer updates."""
    trained_bytes: int
    """Bytes of the trained parameters in the format that matrix products take."""
    sizes: tuple[int, ...]
    """Bytes of each trained parameter in that format, in the order of the model."""
    frozen_bytes: int
    """Bytes of all other parameters, in the format that they are kept in."""
    stored_bytes: int
    """Bytes of the trained parameters in the format that the optimizer updates."""
    states_bytes: int
    """Bytes of the optimizer's states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one rank moves in an optimizer step, apart from what its own kernels read and write; and the host's
    work for that."""

    linked: float = 0.0
    """To other ranks."""
    overlapped: bool = False
    """Whether arithmetic continues meanwhile."""
    hosted: float = 0.0
    """Between device and host memory."""
    disk_read: float = 0.0
    disk_written: float = 0.0
    updated_on_host: float = 0.0
    """Read and written by an optimizer that runs on the CPU."""
    dispatched: float = 0.0
    """Number of operations whose launch takes the host as long as the library's own code does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """Bytes of host memory that one rank's share takes."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    """States, and what the optimizer updates in the parameters' place."""
    passing: float = 0.0
    """Buffers through which these pass, and what an update makes and frees again."""

    @property
    def total(self) -> int:
        return int(self.parameters + self.gradients + self.optimizer + self.passing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library(ABC):
    """One sharding library at one value of `sharding` and `offload`."""

    ranks: int
    offload: str = "none"
    """Value of the `offload` axis."""
    mixed: bool = False
    """Whether the library keeps fp32 masters of weights that are 16-bit."""

    @property
    def masters(self) -> int:
        """Size of a master weight, as a multiple of the trained weight's."""
        return 2 if self.mixed else 1

    @property
    def updaters(self) -> int:
        """Number of devices that share the update's work; 0 where it is done on the host."""
        return self.ranks if self.offload == "none" else 0

    @property
    def flat(self) -> float | None:
        """Elements, over all ranks, of the largest flat buffer that the optimizer updates in place of parameters; None
        where it updates these themselves."""
        return None

    @property
    def keeps_inputs(self) -> bool:
        """Whether every linear layer keeps its input for the backward, though its weight may be frozen."""
        return False

    @property
    def extremes(self) -> Sequence[Library]:
        """This library as seen by the ranks of which one holds the most; by any, where all hold the same."""
        return (self,)

    @property
    def converts(self) -> bool:
        """Whether the library gives the weights number formats of its own."""
        return True

    def traced(self, config: Config) -> Config:
        """The single-device config whose step a rank runs between its collectives, all in 16 bits where precision is
        mixed: no autocast remains."""
        return plain(config).replace(precision=product_format(config))

    @abstractmethod
    def micro_steps(self, trace: MemoryTrace, *, accumulates: bool) -> MemoryTrace:
        """The decoder's trace on one rank; `accumulates` says whether a second micro-step follows the first."""

    def update(self, trace: MemoryTrace, holdings: Holdings) -> MemoryTrace:
        """The optimizer's trace on one rank, which updates its share of each parameter."""
        if not self.updaters:
            return MemoryTrace()
        storages = [replace(storage, shares=storage.shares * self.ranks) for storage in trace.storages]
        return replace(trace, storages=storages)

    def hosted(self, holdings: Holdings, *, accumulates: bool) -> Hosted:
        """What one rank's share takes of the host's memory; `accumulates` as for `micro_steps`."""
        return Hosted()

    @abstractmethod
    def traffic(self, holdings: Holdings, micro_steps: int) -> Traffic:
        """The traffic of one optimizer step with this many micro-steps."""


def passes(holdings: Holdings, ranks: int) -> float:
    """Bytes that an update on the CPU reads and writes for a rank's share: weights and states both ways, gradients
    once."""
    return (2.0 * (holdings.stored_bytes + holdings.states_bytes) + holdings.stored_bytes) / ranks
