"""What a search method is told before it starts: everything that a user of the machine would know, but no outcome."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from autofit.hardware import Hardware, Stack
from autofit.lattice import Axis, Config, Value
from autofit.search.foresight import Foresight
from autofit.techniques import AXES
from autofit.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`autofit search --method METHOD` on one table: its configs of that method, under one memory limit."""

    table: str
    method: str
    """`full`, `lora` or `qlora`."""
    configs: tuple[Config, ...]
    """The recorded configs of the method, each once, as a loop over the axes lists them, lightest values first."""
    workload: Workload
    hardware: Hardware
    stack: Stack
    memory_limit_bytes: int
    foresee: Callable[[], Foresight] = field(default=Foresight, compare=False)
    """The estimator's predictions for the configs, learnt from no trial. The first call may take minutes."""
    foresee_warm: Callable[[], Foresight | None] = field(default=lambda: None, compare=False)
    """The same, corrected by the trials of the other tables of this hardware; None if there are none."""
    foresee_elsewhere: Callable[[], Foresight | None] = field(default=lambda: None, compare=False)
    """The same, with the errors that predictions had in the tables of other hardware of its kind; None if there are
    none."""
    others: tuple[str, ...] = ()
    """Digests of the other tables, of whatever hardware."""

    @property
    def name(self) -> str:
        """The table's name and the method's."""
        return f"{self.table}/{self.method}"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes on which the configs differ."""
        return tuple(axis for axis in AXES if len(self.values(axis)) > 1)

    def values(self, axis: Axis) -> tuple[Value, ...]:
        """The values that the configs have on an axis, lightest first; none where it does not apply."""
        found = {value for config in self.configs if (value := config.get(axis.name)) is not None}
        return tuple(sorted(found, key=lambda value: place(axis, value)))

    def nearest(self, config: Config) -> Config:
        """The recorded config that differs from `config` on the fewest axes; of several, one that trains the same (a
        chunked loss that is one chunk is recorded as the full loss), then the one with the nearest numbers, and of
        those the first. `config` itself, if it is recorded."""
        return min(self.configs, key=lambda known: _distance(known, config))


def listed(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """The configs as a loop over the axes lists them: the first axis changes slowest, lightest values first."""
    return tuple(sorted(configs, key=lambda config: [_place_in(axis, config) for axis in AXES]))


def place(axis: Axis, value: Value) -> int:
    """Where a value stands among those of its axis, lightest first."""
    return int(value) if axis.numeric else axis.values.index(value)


def _place_in(axis: Axis, config: Config) -> int:
    value = config.get(axis.name)
    return -1 if value is None else place(axis, value)


def _distance(a: Config, b: Config) -> tuple[int, int, float]:
    differing = [(axis, a.get(axis.name), b.get(axis.name)) for axis in AXES]
    differing = [(axis, x, y) for axis, x, y in differing if x != y]
    inexact = [axis for axis, _, _ in differing if not axis.exact]
    numbers = [abs(math.log2(int(x) / int(y))) for axis, x, y in differing if axis.numeric and x and y]
    return len(differing), len(inexact), sum(numbers)
