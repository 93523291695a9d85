"""What a search method is told before it starts: everything that a user of the machine would know, but no outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from autofit.hardware import Hardware, Stack
from autofit.lattice import Axis, Config, Value
from autofit.search.foresight import Foresight
from autofit.techniques import AXES, TECHNIQUES
from autofit.workload import METHODS, Workload

ANY = "any"
"""The method of a problem that has all configs of a table: they are searched side by side."""
FAITHFUL = 10.0
"""Times as fast as it is that a config of the next more faithful method counts, where methods are searched side by
side: enough for any of them to come before what is faster but less faithful, as `--method any` wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`autofit search --method METHOD` on one table: its configs of that method, under one memory limit.

    What is looked for is the fastest config of the most faithful training method of which something fits.
    """

    table: str
    method: str
    """`full`, `lora`, `qlora` or `any`."""
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
    others: tuple[str, ...] = ()
    """Digests of the other tables, of whatever hardware."""
    _values: Mapping[str, tuple[Value, ...]] = field(init=False, repr=False, compare=False)
    """By axis, `values`: rivals look them up at every trial."""

    def __post_init__(self) -> None:
        values = {axis.name: self._values_of(axis) for axis in AXES}
        object.__setattr__(self, "_values", values)

    def _values_of(self, axis: Axis) -> tuple[Value, ...]:
        found = {value for config in self.configs if (value := config.get(axis.name)) is not None}
        return tuple(sorted(found, key=partial(place, axis)))

    @property
    def name(self) -> str:
        """The table's name and the method's."""
        return f"{self.table}/{self.method}"

    @property
    def methods(self) -> tuple[str, ...]:
        """The training methods of its configs, the most faithful first."""
        found = {config.text("method") for config in self.configs}
        return tuple(method for method in METHODS if method in found)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes on which the configs differ."""
        return tuple(axis for axis in AXES if len(self.values(axis)) > 1)

    def values(self, axis: Axis) -> tuple[Value, ...]:
        """The values that the configs have on an axis, lightest first; none where it does not apply."""
        return self._values[axis.name]

    def config(self, chosen: Mapping[str, Value]) -> Config:
        """The config with these values on `axes`, which need not be recorded; on every other axis it has the value that
        all configs have. An axis that does not apply to its method is left out."""
        every = {axis.name: chosen.get(axis.name, known[0]) for axis in AXES if (known := self.values(axis))}
        config = Config.of(every)
        return Config.of(
            {name: every[name] for t in TECHNIQUES if (name := t.axis.name) in every and t.applies(config)}
        )

    def merit(self, config: Config, tokens_per_second: float) -> float:
        """The one figure to be made as large as possible, for methods that want one: tokens per second, times
        `FAITHFUL` for every less faithful training method that is searched, too."""
        less_faithful = len(self.methods) - 1 - self.methods.index(config.text("method"))
        return tokens_per_second * FAITHFUL**less_faithful

    def nearest(self, config: Config) -> Config:
        """The recorded config that differs from `config` on the fewest axes; of several, one that trains the same (a
        chunked loss that is one chunk is recorded as the full loss), then the one with the nearest numbers, and of
        those the first. `config` itself, if it is recorded."""
        differing = [len({axis for axis, _ in set(known.items) ^ set(config.items)}) for known in self.configs]
        fewest = min(differing)
        near = (known for known, many in zip(self.configs, differing, strict=True) if many == fewest)
        return min(near, key=lambda known: _distance(known, config))


def listed(configs: tuple[Config, ...]) -> tuple[Config, ...]:
    """The configs as a loop over the axes lists them: the first axis changes slowest, lightest values first."""
    return tuple(sorted(configs, key=lambda config: [place_in(axis, config) for axis in AXES]))


def place(axis: Axis, value: Value) -> int:
    """Where a value stands among those of its axis, lightest first."""
    return int(value) if axis.numeric else axis.values.index(value)


def place_in(axis: Axis, config: Config) -> int:
    """The same of a config's value; -1 where the axis does not apply."""
    value = config.get(axis.name)
    return -1 if value is None else place(axis, value)


def _distance(a: Config, b: Config) -> tuple[int, float]:
    """On how many axes that change the training they differ, and by how many doublings their numbers do."""
    differing = [(axis, a.get(axis.name), b.get(axis.name)) for axis in AXES]
    differing = [(axis, x, y) for axis, x, y in differing if x != y]
    inexact = [axis for axis, _, _ in differing if not axis.exact]
    numbers = [abs(math.log2(int(x) / int(y))) for axis, x, y in differing if axis.numeric and x and y]
    return len(inexact), sum(numbers)
