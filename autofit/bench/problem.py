"""What a search method is told before it starts: everything that a user of the machine would know, but no outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.lattice import Axis, Config, Value
from autofit.core.workload import METHODS, Workload
from autofit.prediction.predictions import Predictions
from autofit.techniques import AXES, TECHNIQUES

ANY = "any"
"""The method of a problem that has all configs of a table: they are searched side by side."""


@dataclass(frozen=True, kw_only=True)
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
    predictions: Predictions = field(default_factory=Predictions, compare=False)
    """The estimator's predictions for the configs, learnt from no trial."""

    @property
    def name(self) -> str:
        """The table's name and the method's."""
        return f"{self.table}/{self.method}"

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The training methods of its configs, the most faithful first."""
        present = {config.text("method") for config in self.configs}
        return tuple(method for method in METHODS if method in present)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in AXES if len(self.values[axis.name]) > 1)

    @cached_property
    def values(self) -> Mapping[str, tuple[Value, ...]]:
        """The values that the configs have on each axis, lightest first; none where it does not apply."""
        present = [(axis, {v for c in self.configs if (v := axis.of(c)) is not None}) for axis in AXES]
        return {axis.name: tuple(sorted(some, key=axis.place)) for axis, some in present}

    def config(self, chosen: Mapping[str, Value]) -> Config:
        """The config with these values on `axes`, which need not be recorded; on every other axis it has the value that
        all configs have. An axis that does not apply to its method is left out."""
        every = {axis.name: chosen.get(axis.name, values[0]) for axis in AXES if (values := self.values[axis.name])}
        config = Config.of(every)
        applying = [t.axis for t in TECHNIQUES if t.axis.name in every and t.applies(config)]
        return Config.of({axis.name: every[axis.name] for axis in applying if axis.is_stated(every[axis.name])})

    def merit(self, config: Config, tokens_per_second: float) -> float:
        """The one figure to be made as large as possible, for methods that want one: tokens per second, ten times as
        many for every less faithful training method that is searched, too. That is enough for any of them to come
        before what is faster but less faithful, as `--method any` wants it."""
        less_faithful = len(self.methods) - 1 - self.methods.index(config.text("method"))
        return tokens_per_second * 10.0**less_faithful

    def nearest(self, config: Config) -> Config:
        """The recorded config that differs from `config` on the fewest axes; of several, one that trains the same (a
        chunked loss that is one chunk is recorded as the full loss), then the one with the nearest numbers, and of
        those the first. `config` itself, if it is recorded."""
        return min(self.configs, key=lambda recorded: _distance(recorded, config))


def _distance(a: Config, b: Config) -> tuple[int, int, float]:
    """The number of axes on which two configs differ, how many of these change the training, and by how many doublings
    their numbers differ."""
    differing = [(axis, x, y) for axis in AXES if (x := a.get(axis.name)) != (y := b.get(axis.name))]
    inexact = sum(not axis.exact for axis, _, _ in differing)
    doublings = sum(abs(math.log2(int(x) / int(y))) for axis, x, y in differing if axis.numeric and x and y)
    return len(differing), inexact, doublings
