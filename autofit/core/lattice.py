"""Axes, configs, and the partial order of memory that lets one out-of-memory trial rule out many others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.errors import UsageError, spelled, unknown
from autofit.core.lengths import LARGEST_COUNT
from autofit.core.workload import Effect, check_count, digest

Value = str | int | bool
Pairs = frozenset[tuple[Value, Value]]


def closure(pairs: Iterable[tuple[Value, Value]]) -> Pairs:
    closed = set(pairs)
    while True:
        more = {(a, d) for a, b in closed for c, d in closed if b == c} - closed
        if not more:
            return frozenset(closed)
        closed |= more


def chain(*values: Value) -> Pairs:
    """Every pair (earlier, later) of a totally ordered sequence."""
    return frozenset((a, b) for i, a in enumerate(values) for b in values[i + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One memory lever, with its ordered values."""

    name: str
    values: tuple[Value, ...]
    """Every valid value, lightest in memory first; empty where any integer from 1 to LARGEST_COUNT is valid."""
    effects: Mapping[Value, Effect] = field(default_factory=dict)
    """What a value changes relative to the plain recipe; a value not listed is `Effect.EXACT`."""
    recipe: Value | None = None
    """The value of the plain recipe, and of a config that does not name the axis."""
    leaves_out_recipe: bool = False
    """Whether configs leave out the recipe's value, as those do that were stored before there was the axis."""
    lighter: Pairs = frozenset()
    """Pairs (a, b) where a is claimed to need no more memory than b, all else equal; only these rule configs out."""
    slower: Pairs = frozenset()
    """Pairs (a, b) where a step with a is claimed to do all the work of one with b and more, all else equal, so that it
    cannot be faster."""
    of_whole_batch: frozenset[Value] = frozenset()
    """Values with which nothing is accumulated: the micro-batch is the whole batch of a device."""
    does: str = ""
    """A sentence on what the axis decides."""
    meanings: Mapping[Value, str] = field(default_factory=dict)
    """What each value does and what it needs; empty where values are numbers."""
    where: str = "everywhere"
    """Where the axis's values are valid: the condition that all of them share."""

    @property
    def numeric(self) -> bool:
        """Whether values are positive integers, compared as numbers."""
        return not self.values

    def of(self, config: Config) -> Value | None:
        """The config's value, even if the config leaves it out; None where the axis does not apply."""
        value = config.get(self.name)
        return self.recipe if value is None and self.leaves_out_recipe else value

    def is_stated(self, value: Value) -> bool:
        """Whether a config names the axis where it has this value."""
        return not self.leaves_out_recipe or value != self.recipe

    @property
    def exact(self) -> bool:
        """Whether every value with a stated effect leaves the mathematics unchanged. Numbers have none stated."""
        return all(effect is Effect.EXACT for effect in self.effects.values())

    def check(self, value: object) -> Value:
        """`value` if it is valid; raises `UsageError` with the nearest valid values otherwise."""
        if self.numeric:
            if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                check_count(f"value of {self.name}", value)
                return value
            if isinstance(value, str) and value.isdecimal():
                raise UsageError(f"the value of {self.name} is text: write the number {value}, not '{value}'")
            raise unknown(f"value of {self.name}", value, ["a whole number of at least 1"])
        for valid in self.values:
            if type(valid) is type(value) and valid == value:
                return valid
        raise unknown(f"value of {self.name}", value, self.values)

    def parse(self, text: str) -> Value:
        """The value that `text` spells (from a command line); raises `UsageError`."""
        if self.numeric:
            if text.isdecimal() and len(text) > len(str(LARGEST_COUNT)):
                raise UsageError(f"value of {self.name} is too long for a number")
            return self.check(int(text) if text.isdecimal() else text)
        for value in self.values:
            if spelled(value) == text.strip().lower():
                return value
        raise unknown(f"value of {self.name}", text, self.values)

    def effect(self, value: Value) -> Effect:
        """What `value` changes relative to the plain recipe."""
        return self.effects.get(value, Effect.EXACT)

    def place(self, value: Value | None) -> int:
        """The value's place in `values`, lightest first, or the number itself; -1 for None, the last if unknown."""
        if value is None:
            return -1
        if self.numeric:
            return int(value)
        return self.values.index(value) if value in self.values else len(self.values)

    def is_lighter_or_equal(self, a: Value | None, b: Value | None) -> bool:
        """Whether `a` is sure to need no more memory than `b`; None stands for an axis that does not apply."""
        if a == b:
            return True
        if a is None or b is None:
            return False
        if self.numeric:
            return int(a) <= int(b)
        return (a, b) in self.lighter


@dataclass(frozen=True, slots=True)
class Config:
    """How a workload is trained: one value per axis, as a flat JSON object with sorted keys."""

    items: tuple[tuple[str, Value], ...]
    _hash: int = field(init=False, repr=False, compare=False)
    """Cached: a search looks up its thousands of configs at every step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.items))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Config], tuple[Any, ...]]:
        return Config, (self.items,)  # not the hash: string hashes are salted per process

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Config:
        """A config of checked values."""
        return cls(tuple(sorted(values.items())))

    def __getitem__(self, name: str) -> Value:
        for key, value in self.items:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str) -> Value | None:
        """The axis's value, or None where the axis does not apply."""
        for key, value in self.items:
            if key == name:
                return value
        return None

    def text(self, name: str) -> str:
        """The value of an axis whose values are names."""
        return str(self[name])

    def number(self, name: str) -> int:
        return int(self[name])

    def replace(self, **changes: Value) -> Config:
        return Config.of({**dict(self.items), **changes})

    def without(self, *axes: str) -> Config:
        """The config without its values of these axes."""
        return Config(tuple(item for item in self.items if item[0] not in axes))

    def __iter__(self) -> Iterator[str]:
        return (key for key, _ in self.items)

    @property
    def key(self) -> str:
        return digest(self.to_json())

    def to_json(self) -> dict[str, Value]:
        return dict(self.items)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """The inverse of `to_json`, for data that was checked before it was written."""
        return cls.of(dict(data))

    def __str__(self) -> str:
        return ",".join(f"{k}={spelled(v)}" for k, v in self.items)


def values_in(text: str) -> dict[str, str]:
    """The value that a config's text, `axis=value,axis=value`, gives each name; a comma may end it. Raises `UsageError`
    naming what is not understood."""
    parts = [part.strip() for part in text.split(",")]
    if not parts[-1]:
        parts.pop()
    values: dict[str, str] = {}
    for part, after in zip(parts, [None, *parts], strict=False):
        name, value = _pair(part, after)
        if name in values:
            raise UsageError(f"config names {name} twice")
        values[name] = value
    return values


def _pair(part: str, after: str | None) -> tuple[str, str]:
    if not part:
        where = "before its first comma" if after is None else f"between two commas, after {after!r}"
        raise UsageError(f"config has nothing {where}")
    name, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals:
        raise UsageError(f"config {part!r} is not understood: write axis=value, such as micro_batch=4")
    if "=" in value:
        raise UsageError(f"config {part!r} is not understood: separate with commas, as in {_with_commas(part)}")
    return name, value


def _with_commas(text: str) -> str:
    """Pairs that something else separates, as they should have been written."""
    return re.sub(r"[\s;]+(?=[^\s;=]+=)", ",", re.sub(r"\s*=\s*", "=", text))


def no_exception(lighter: Config, heavier: Config) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """The valid configs of a search, with the partial order induced by the orders of the axes."""

    axes: tuple[Axis, ...]
    configs: tuple[Config, ...]
    holds: Callable[[Config, Config], bool] = no_exception
    """Whether the order that the axes claim for two configs, the lighter one first, holds for this workload."""
    row_of: Mapping[Config, int] = field(init=False, repr=False, compare=False)
    """The place of each config."""
    values: tuple[tuple[tuple[str, Value], ...], ...] = field(init=False, repr=False, compare=False)
    """The axes' values of each config, as `values_of` gives them."""
    _all_values: frozenset[tuple[str, Value]] = field(init=False, repr=False, compare=False)
    """Every axis value of any config."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_of", {config: row for row, config in enumerate(self.configs)})
        object.__setattr__(self, "values", tuple(map(self.values_of, self.configs)))
        object.__setattr__(self, "_all_values", frozenset(value for values in self.values for value in values))

    def values_of(self, config: Config) -> tuple[tuple[str, Value], ...]:
        """Axis and value of each axis of a config, including the values that it leaves out."""
        left_out = ((a.name, a.recipe) for a in self.axes if a.leaves_out_recipe and a.recipe is not None)
        return (*config.items, *(item for item in left_out if item[0] not in config))

    def is_lighter_or_equal(self, a: Config, b: Config) -> bool:
        """Whether `a` is sure to need no more memory than `b` (reflexive, antisymmetric, transitive)."""
        claimed = all(axis.is_lighter_or_equal(axis.of(a), axis.of(b)) for axis in self.axes)
        return claimed and self.holds(a, b)

    def above(self, config: Config) -> tuple[Config, ...]:
        """The configs that need at least as much memory as `config`, not including itself."""
        values = dict(self.values_of(config))
        heavier = self._with(config, lambda axis, value: axis.is_lighter_or_equal(values.get(axis.name), value))
        return tuple(c for c in heavier if self.holds(config, c))

    def below(self, config: Config) -> tuple[Config, ...]:
        """The configs that need no more memory than `config`, not including itself."""
        values = dict(self.values_of(config))
        lighter = self._with(config, lambda axis, value: axis.is_lighter_or_equal(value, values.get(axis.name)))
        return tuple(c for c in lighter if self.holds(c, config))

    def _with(self, config: Config, accepts: Callable[[Axis, Value], bool]) -> Iterator[Config]:
        """The configs other than `config`, on the same axes, all of whose values are accepted. Every axis value is
        judged once: a lattice has tens of thousands of configs, but few values."""
        axes = {axis.name: axis for axis in self.axes}
        accepted = {(name, value) for name, value in self._all_values if name not in axes or accepts(axes[name], value)}
        count = len(self.values_of(config))
        return (
            c
            for c, values in zip(self.configs, self.values, strict=True)
            if accepted.issuperset(values) and len(values) == count and c != config
        )
