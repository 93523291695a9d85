"""A change of axes as edits of the user's own keys: what the trainer's export writes differently with the change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from autofit.core.lattice import Config
from autofit.export.document import Task
from autofit.trainers.keys import known_keys
from autofit.trainers.run import Where
from autofit.trainers.trainer import Trainer

Path = tuple[str, ...]
"""A key, and the keys within it."""
Edits = Mapping[Path, Any]
"""What each key becomes; `REMOVED` for one that goes."""


class _Removed:
    """The type of `REMOVED`."""

    def __repr__(self) -> str:
        return "REMOVED"


REMOVED = _Removed()
_DEEPSPEED = frozenset({"sharding", "offload", "precision"})
"""Axes that are said in DeepSpeed's own settings. Of the batch it takes Trainer's word (`auto`)."""


def edits_for(trainer: Trainer, values: Mapping[str, Any], before: Task, after: Task, where: Where) -> dict[Path, Any]:
    """The fewest edits by which a file's keys ask for the config of `after` in place of that of `before`.

    What the exports write alike for both stays as the user has it. So do keys that change neither memory nor speed.
    """
    changed = {axis for axis in trainer.table if before.config.get(axis) != after.config.get(axis)}
    then, now = _written(trainer, before), _written(trainer, after)
    edits: dict[Path, Any] = {}
    irrelevant = known_keys(trainer.keys).irrelevant
    for path, (axis, value) in now.items():
        has = _has(values, path)
        differs = path not in then or then[path][1] != value or (has and axis in changed)
        if not differs or (has and _at(values, path) == value) or (has and path[0] in irrelevant):
            continue
        if path[0] != "deepspeed" or changed & _DEEPSPEED:
            edits[path] = value
    gone = [path for path in then if path not in now and _has(values, path)]
    other = [(key,) for axis in changed for key in trainer.other_spellings.get(axis, ()) if key in values]
    edits |= {path: REMOVED for path in (*gone, *other) if path not in edits}
    return _without_idle(trainer, values, _whole(values, edits, now), after.config, where)


def applied(values: Mapping[str, Any], edits: Edits) -> dict[str, Any]:
    """The file's keys with the edits made."""
    made = copy.deepcopy(dict(values))
    for path, value in edits.items():
        inside = made
        for key in path[:-1]:
            if not isinstance(inside.get(key), dict):
                inside[key] = {}
            inside = inside[key]
        if value is REMOVED:
            inside.pop(path[-1], None)
        else:
            inside[path[-1]] = copy.deepcopy(value)
    return made


def _written(trainer: Trainer, task: Task) -> dict[Path, tuple[str, Any]]:
    """What the export writes: each key with its axis and value."""
    found: dict[Path, tuple[str, Any]] = {}
    for axis, emit in trainer.table.items():
        if axis in task.config:
            for section in emit(task.config[axis], task).sections.values():
                found |= {path: (axis, value) for path, value in _leaves(section)}
    return found


def _leaves(values: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _has(values: Mapping[str, Any], path: Path) -> bool:
    return _at(values, path) is not None


def _at(values: Any, path: Path) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _whole(values: Mapping[str, Any], edits: dict[Path, Any], now: Mapping[Path, tuple[str, Any]]) -> dict[Path, Any]:
    """A list of plugins keeps the user's own. A mapping that the user has as something else, such as the name of a
    file, is written as a whole."""
    made: dict[Path, Any] = {}
    for path, value in edits.items():
        own = values.get(path[0])
        if path == ("plugins",) and isinstance(own, list) and isinstance(value, list):
            made[path] = [*own, *(name for name in value if name not in own)]
        elif len(path) > 1 and own is not None and not isinstance(own, dict):
            made |= {inner: said for inner, (_, said) in now.items() if inner[0] == path[0]}
        else:
            made[path] = value
    return made


def _without_idle(
    trainer: Trainer, values: Mapping[str, Any], edits: dict[Path, Any], wanted: Config, where: Where
) -> dict[Path, Any]:
    """The edits but for switches that the user's file lacks and that are off anyway."""
    for path in [path for path, value in edits.items() if value is False and not _has(values, path)]:
        fewer = {other: value for other, value in edits.items() if other != path}
        if trainer.read(applied(values, fewer), where).config == wanted:
            edits = fewer
    return edits
