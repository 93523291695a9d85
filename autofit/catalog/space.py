"""Turns a search space file into a lattice of valid configs; an error in the file is reported with its line."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from autofit.core.errors import UsageError, spelled, unknown
from autofit.core.lattice import Axis, Config, Value
from autofit.core.workload import Goal

EVERY_DIVISOR: tuple[Value, ...] = ()
"""The values of `micro_batch` where the file says `divisors`: every divisor of the batch of one device."""

ADAPTER_AXES = frozenset({"rank", "targets"})
"""Axes that configs of method `full` do not have."""
_SECTIONS = ("purpose", "axes", "defaults", "rules")
_RULE_KEYS = ("when", "only", "never", "because")
_AxisValues = dict[str, tuple[Value, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """For configs that match `when`: the values that they must have, and those that they must not have."""

    when: Mapping[str, tuple[Value, ...]]
    """Axis to values: the rule applies to configs that have one of the values on each of these axes."""
    only: Mapping[str, tuple[Value, ...]]
    """Axis to the values that remain allowed."""
    never: Mapping[str, tuple[Value, ...]]
    """Axis to the values that are excluded; with several axes, each excludes on its own."""

    def excludes(self, config: Mapping[str, Value]) -> bool:
        """Whether the rule excludes `config`. An axis that the config lacks neither matches `when` nor violates it."""
        if not all(config.get(axis) in values for axis, values in self.when.items()):
            return False
        if any(config.get(axis) in values for axis, values in self.never.items()):
            return True
        return any(axis in config and config[axis] not in values for axis, values in self.only.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A search space: the values to search on each axis, the fixed ones, and conditional rules."""

    name: str
    """The built-in's name, or the file's name without its extension."""
    purpose: str
    """A one-line description; empty where the file gives none."""
    path: str
    """The file it was read from."""
    axes: Mapping[str, tuple[Value, ...]]
    """The values to search, lightest in memory first; `micro_batch` may have `EVERY_DIVISOR`."""
    defaults: Mapping[str, Value]
    """The value that every config has, of axes that are not searched."""
    rules: tuple[Rule, ...]
    """A config is left out if any rule excludes it."""
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Axis to the line of the file that gives its values; axes that the file leaves out are absent."""

    def configs(self, axes: Sequence[Axis], *, batch: int) -> Iterator[Config]:
        """Every config that the space describes, each complete, in an order that depends only on values.

        Those of all `axes` that the file does not name take their recipe's value (`rank`: 8; `micro_batch`: every
        divisor). `batch` is the number of sequences per optimizer step on one device. Raises `UsageError` if it is
        below 1, or if no value of `micro_batch` divides it.
        """
        return self._combinations(self._all_values(axes, batch), axes, batch)

    def _all_values(self, axes: Sequence[Axis], batch: int) -> _AxisValues:
        if batch < 1:
            raise UsageError(f"the batch is {batch}: it must be at least 1")
        values = {axis.name: self._values(axis, batch) for axis in axes}
        if not values["micro_batch"]:
            listed = ", ".join(map(str, self.axes.get("micro_batch") or [self.defaults["micro_batch"]]))
            place = f"{self.path}:{self.lines.get('micro_batch', 1)}"
            raise UsageError(f"{place}: none of its micro_batch values ({listed}) divides the batch of {batch}")
        return values

    def with_ranks_from(self, lowest: int) -> Space:
        """This space with every rank below `lowest` raised to it, so that rules apply to the ranks that are run."""
        listed = self.axes.get("rank") or (self.defaults.get("rank", Goal().min_rank),)
        ranks = tuple(sorted({max(int(rank), lowest) for rank in listed}))
        defaults = {name: value for name, value in self.defaults.items() if name != "rank"}
        return replace(self, axes={**self.axes, "rank": ranks}, defaults=defaults)

    def with_all_of(self, axis: Axis) -> Space:
        """This space with every value of `axis`, if the file does not name it."""
        is_in_file = axis.name in self.axes or axis.name in self.defaults
        return self if is_in_file else replace(self, axes={**self.axes, axis.name: axis.values})

    def count(self, axes: Sequence[Axis], *, batch: int) -> int:
        """How many configs the space has; arguments and errors as for `configs`."""
        values = self._all_values(axes, batch)
        parts = [part.get("micro_batch", ()) for rule in self.rules for part in (rule.when, rule.only, rule.never)]
        named = {batch, *(value for part in parts for value in part)}  # the whole batch is another matter
        # Micro-batches that no rule names are alike, and a batch may have hundreds of divisors.
        alike = [value for value in values["micro_batch"] if value not in named]
        others = [value for value in values["micro_batch"] if value in named]
        counted = [(1, (value,)) for value in others] + [(len(alike), tuple(alike[:1]))]
        return sum(
            times * sum(1 for _ in self._combinations({**values, "micro_batch": micro_batch}, axes, batch))
            for times, micro_batch in counted
        )

    def _values(self, axis: Axis, batch: int) -> tuple[Value, ...]:
        if axis.name in self.defaults:
            values: tuple[Value, ...] = (self.defaults[axis.name],)
        elif axis.name in self.axes:
            values = self.axes[axis.name]
        else:
            values = _plain(axis)
        if axis.name != "micro_batch":
            return values
        return tuple(d for d in _divisors(batch) if values == EVERY_DIVISOR or d in values)

    def _combinations(self, values: _AxisValues, axes: Sequence[Axis], batch: int) -> Iterator[Config]:
        is_stated = {axis.name: axis.is_stated for axis in axes}
        for method in values["method"]:
            absent = ADAPTER_AXES if method == "full" else frozenset()
            searched = {name: options for name, options in values.items() if name not in absent}
            searched["method"] = (method,)
            for chosen in itertools.product(*searched.values()):
                config = dict(zip(searched, chosen, strict=True))
                if any(rule.excludes(config) for rule in self.rules):
                    continue
                is_whole_batch = config["micro_batch"] == batch
                if is_whole_batch or not any(config.get(axis.name) in axis.of_whole_batch for axis in axes):
                    yield Config.of({name: value for name, value in config.items() if is_stated[name](value)})


def names() -> tuple[str, ...]:
    """The built-in search spaces, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load(name_or_path: str, axes: Sequence[Axis]) -> Space:
    """The built-in search space of that name, else the one in that file (`*.yaml`, `*.yml`, or any existing path). It
    may name no other axes. Raises `UsageError`, for errors inside a file as `FILE:LINE: what is wrong`."""
    if name_or_path in names():
        path = _folder() / f"{name_or_path}.yaml"
    elif name_or_path.endswith((".yaml", ".yml")) or (name_or_path and os.path.exists(name_or_path)):
        path = Path(name_or_path)
    else:
        raise unknown("search space", name_or_path, names())
    root = _compose(path)
    return _File(str(path), {axis.name: axis for axis in axes}).space(root)


def _folder() -> Path:
    """The folder of the built-in files: in the installed package, else next to it in the repository."""
    installed = Path(__file__).parents[1] / "search_spaces"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "search_spaces"


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _plain(axis: Axis) -> tuple[Value, ...]:
    """The values of an axis that the file does not name; raises `UsageError` if it has no default."""
    if axis.name == "micro_batch":
        return EVERY_DIVISOR
    if axis.recipe is not None and axis.name != "method":
        return (axis.recipe,)
    if axis.name == "rank":
        return (Goal().min_rank,)
    raise UsageError(f"axis {axis.name!r} is missing: list its values under axes, or fix it under defaults")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read((1 << 20) + 1)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; built-in search spaces: {', '.join(names())}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: the search space cannot be read: {reason}") from None
    if len(data) > 1 << 20:
        raise UsageError(f"{path}: over 1 MiB, too large for a search space")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not text in UTF-8, so not a search space") from None


def _compose(path: Path) -> Node:
    """The file's YAML as nodes, which know their lines; nothing in it is constructed or executed."""
    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(f"{path}:{line}: not text: it has a character #x{error.character:04x}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "it cannot be read"
        if error.context and error.context_mark and mark and error.context_mark.line != mark.line:
            problem = f"{error.context} of line {error.context_mark.line + 1}, {problem}"
        hint = "; indent with spaces, not tabs" if "\\t" in problem else ""
        raise UsageError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}{hint}") from None
    except RecursionError:
        raise UsageError(f"{path}:1: not a search space: nested too deeply") from None
    if root is None:
        raise UsageError(f"{path}:1: the file is empty: a search space needs at least axes with a method")
    return root


@dataclass(frozen=True, slots=True)
class _File:
    """Reads one file's nodes; every error names the file and the line."""

    path: str
    axes: Mapping[str, Axis]

    def space(self, root: Node) -> Space:
        sections = self.mapping(root, "a search space", _SECTIONS, "section")
        if "axes" not in sections:
            raise self.error(root, "section axes is missing: list at least the method there")
        sections = {name: pair for name, pair in sections.items() if name == "axes" or not _is_null(pair[1])}
        searched = self.searched(sections["axes"][1])
        defaults = self.defaults(sections["defaults"][1], searched) if "defaults" in sections else {}
        values = searched | {name: (value,) for name, value in defaults.items()}
        try:
            for axis in (axis for axis in self.axes.values() if axis.name not in values):
                _plain(axis)
        except UsageError as error:
            raise self.error(sections["axes"][0], str(error)) from None
        return Space(
            name=Path(self.path).stem,
            purpose=self.text(sections, "purpose"),
            path=self.path,
            axes={name: searched[name] for name in self.axes if name in searched},
            defaults={name: defaults[name] for name in self.axes if name in defaults},
            rules=self.rules(sections["rules"][1], values) if "rules" in sections else (),
            lines=self.lines(sections),
        )

    def lines(self, sections: Mapping[str, tuple[ScalarNode, Node]]) -> dict[str, int]:
        nodes = [sections[name][1] for name in ("axes", "defaults") if name in sections]
        return {key.value: key.start_mark.line + 1 for node in nodes for key, _ in node.value}

    def searched(self, node: Node) -> _AxisValues:
        entries = self.mapping(node, "axes", self.axes, "axis")
        if not entries:
            raise self.error(node, "axes names no axis: list at least the method")
        return {name: self.searched_values(key, value) for name, (key, value) in entries.items()}

    def searched_values(self, key: ScalarNode, node: Node) -> tuple[Value, ...]:
        if not isinstance(node, ScalarNode) or node.value == "":
            return self.values(key, node)
        if key.value == "micro_batch":
            if node.value.strip().lower() == "divisors":
                return EVERY_DIVISOR
            if not node.value.isdecimal():
                raise self.error(node, str(unknown("value of micro_batch", node.value, ["divisors"])))
        raise self.error(node, f"axis {key.value!r} needs a list: write [{node.value}], or move it to defaults")

    def defaults(self, node: Node, searched: _AxisValues) -> dict[str, Value]:
        defaults: dict[str, Value] = {}
        for name, (key, value) in self.mapping(node, "defaults", self.axes, "axis").items():
            if name in searched:
                raise self.error(key, f"axis {name!r} is under axes and under defaults: keep one of them")
            if not isinstance(value, ScalarNode):
                raise self.error(value, f"default of {name} must be one value; to search several, use axes")
            defaults[name] = self.value(self.axes[name], value)
        return defaults

    def rules(self, node: Node, values: _AxisValues) -> tuple[Rule, ...]:
        if not isinstance(node, SequenceNode):
            raise self.error(node, "rules must be a list: start each rule with '- when:'")
        return tuple(self.rule(item, values) for item in node.value)

    def rule(self, node: Node, values: _AxisValues) -> Rule:
        parts = self.mapping(node, "a rule", _RULE_KEYS, "key of a rule")
        if "when" not in parts:
            raise self.error(node, "the rule has no when: say which configs it is for")
        if "only" not in parts and "never" not in parts:
            raise self.error(node, "the rule has neither only nor never: say what it leaves out")
        conditions = {
            name: self.conditions(parts[name][1], name, values) if name in parts else {}
            for name in ("when", "only", "never")
        }
        for axis, allowed in conditions["only"].items():
            if values[axis] and not set(allowed) & set(values[axis]):
                message = f"only leaves nothing of {axis}: the space lacks {', '.join(map(spelled, allowed))}"
                raise self.error(parts["only"][1], message)
        self.text(parts, "because")  # it is for whoever reads the file
        return Rule(**conditions)

    def conditions(self, node: Node, part: str, values: _AxisValues) -> _AxisValues:
        entries = self.mapping(node, part, self.axes, "axis")
        if not entries:
            raise self.error(node, f"{part} names no axis")
        for name, (key, _) in entries.items():
            if name not in values:
                raise self.error(key, f"axis {name!r} is not in this space: add it to axes or defaults")
        return {name: self.values(key, value) for name, (key, value) in entries.items()}

    def values(self, key: ScalarNode, node: Node) -> tuple[Value, ...]:
        """The values of an axis, given as a list or a single value, in the axis's order."""
        axis = self.axes[key.value]
        items = node.value if isinstance(node, SequenceNode) else [] if _is_null(node) else [node]
        if not items:
            raise self.error(key, f"axis {axis.name!r} has no values: list at least one")
        parsed: list[Value] = []
        for item in items:
            value = self.value(axis, item)
            if value in parsed:
                raise self.error(item, f"value {spelled(value)} of {axis.name} is listed twice")
            parsed.append(value)
        return tuple(sorted(parsed, key=int if axis.numeric else axis.values.index))

    def value(self, axis: Axis, node: Node) -> Value:
        """One value, parsed from the text as written: YAML's own reading of `no` or `010` would be a surprise."""
        if not isinstance(node, ScalarNode):
            raise self.error(node, f"a value of {axis.name} must be a word or a number, not {_kind(node)}")
        word = node.value
        if node.tag == "tag:yaml.org,2002:bool" and True in axis.values:
            word = str(yaml.SafeLoader.bool_values.get(word.lower(), word))
        try:
            return axis.parse(word)
        except UsageError as error:
            raise self.error(node, str(error)) from None

    def mapping(
        self, node: Node, place: str, valid: Sequence[str] | Mapping[str, object], kind: str
    ) -> dict[str, tuple[ScalarNode, Node]]:
        """Name to (its node, its value's node); each name is one of `valid` and given once."""
        if not isinstance(node, MappingNode):
            raise self.error(node, f"{place} must be lines of 'name: value', not {_kind(node)}")
        entries: dict[str, tuple[ScalarNode, Node]] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise self.error(key, f"a name in {place} must be a single word, not {_kind(key)}")
            if key.value not in valid:
                raise self.error(key, str(unknown(kind, key.value, valid)))
            if key.value in entries:
                first_line = entries[key.value][0].start_mark.line + 1
                raise self.error(key, f"{kind} {key.value!r} is given twice: first in line {first_line}")
            entries[key.value] = (key, value)
        return entries

    def text(self, parts: Mapping[str, tuple[ScalarNode, Node]], name: str) -> str:
        if name not in parts:
            return ""
        node = parts[name][1]
        if not isinstance(node, ScalarNode):
            raise self.error(node, f"{name} must be a sentence, not {_kind(node)}")
        return "" if _is_null(node) else " ".join(node.value.split())

    def error(self, node: Node, message: str) -> UsageError:
        return UsageError(f"{self.path}:{node.start_mark.line + 1}: {message}")


def _is_null(node: Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _kind(node: Node) -> str:
    if isinstance(node, SequenceNode):
        return "a list"
    if isinstance(node, MappingNode):
        return "a group of names"
    return "nothing" if _is_null(node) else f"{node.value!r}"
