"""A change of axes as edits of the user's own keys: what the trainer's export writes differently with the change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from autofit.core.lattice import Config
from autofit.export.document import Task
from autofit.export.trainer_arguments import LIGER_LAYERS
from autofit.trainers.keys import known_keys
from autofit.trainers.trainer import TrainerFiles

KeyPath = tuple[str, ...]
"""A key, and the keys within it."""
Edits = Mapping[KeyPath, Any]
"""What each key becomes; `REMOVED` for one that goes."""
REMOVED = object()
_DEEPSPEED = frozenset({"sharding", "offload", "precision"})
"""Axes that are said in DeepSpeed's own settings. Of the batch it takes Trainer's word (`auto`)."""


def edits_for(
    trainer: TrainerFiles,
    values: Mapping[str, Any],
    before: Task,
    after: Task,
    read: Callable[[Mapping[str, Any]], Config],
    deepspeed: Mapping[str, Any] | None = None,
) -> dict[KeyPath, Any]:
    """The fewest edits by which a file's keys ask for the config of `after` in place of that of `before`, or for what
    comes nearest in the trainer's words.

    `read` tells what keys ask for. What the exports write alike for both stays as the user has it, and so do keys that
    change neither memory nor speed. `deepspeed` is what the file that the key of this name says has in it: whatever
    takes its place goes on with that.
    """
    if deepspeed is not None and isinstance(values.get("deepspeed"), str):
        whole = {**values, "deepspeed": dict(deepspeed)}
        edits = edits_for(trainer, whole, before, after, read)
        if not any(path[0] == "deepspeed" for path in edits):
            return edits
        changed = applied(whole, edits).get("deepspeed")
        beside = {path: value for path, value in edits.items() if path[0] != "deepspeed"}
        return beside | (dict(_leaves(changed, ("deepspeed",))) if changed else {("deepspeed",): REMOVED})
    differ = {axis for axis in trainer.table if before.config.get(axis) != after.config.get(axis)}
    then, now = (_written(trainer, task, values) for task in (before, after))
    edits = _edits(trainer, values, then, now, differ)
    found = read(applied(values, edits))
    if others := {axis for axis in after.config if found.get(axis) != after.config[axis]} - differ:
        # What the user has in other words means something else with the change.
        more = _edits(trainer, values, then, now, differ | others)
        if read(applied(values, more)) == after.config:
            edits, found = more, after.config
    doubtful = {path for path, (_, value) in now.items() if path in then and then[path][1] == value}
    return _without_idle(values, edits, doubtful | (then.keys() - now.keys()), found, read)


def _edits(
    trainer: TrainerFiles,
    values: Mapping[str, Any],
    then: Mapping[KeyPath, tuple[str, Any]],
    now: Mapping[KeyPath, tuple[str, Any]],
    changed: Collection[str],
) -> dict[KeyPath, Any]:
    """What the export writes differently, and of the axes that have `changed` whatever the user has otherwise."""
    edits: dict[KeyPath, Any] = {}
    irrelevant = known_keys(trainer.name).irrelevant
    older = {axis: [key for key in trainer.other_spellings.get(axis, ()) if key in values] for axis in changed}
    added = {axis for axis, _ in now.values()} - {axis for axis, _ in then.values()}
    for path, (axis, value) in now.items():
        has = _has(values, path)
        differs = path not in then or then[path][1] != value or (has and axis in changed) or older.get(axis)
        idle = path[0] in irrelevant and (has or axis not in added)
        by_deepspeed = path[0] != "deepspeed" or not _DEEPSPEED.isdisjoint(changed)
        if differs and not idle and by_deepspeed and not (has and _at(values, path) == value):
            edits[path] = value
    edits |= {path: REMOVED for path in then if path not in now and _has(values, path)}
    edits |= {(key,): REMOVED for keys in older.values() for key in keys}
    return _whole(values, edits, now)


def applied(values: Mapping[str, Any], edits: Edits) -> dict[str, Any]:
    """The file's keys with the edits made; what is not edited is shared with `values`."""
    made = dict(values)
    for path, value in edits.items():
        inside = made
        for key in path[:-1]:
            within = inside.get(key)
            copied = dict(within) if isinstance(within, dict) else {}
            inside[key] = copied
            inside = copied
        if value is REMOVED:
            inside.pop(path[-1], None)
        else:
            inside[path[-1]] = value
    return made


def _written(trainer: TrainerFiles, task: Task, values: Mapping[str, Any]) -> dict[KeyPath, tuple[str, Any]]:
    """What the export writes: each key, as the user spells it, with its axis and value."""
    found: dict[KeyPath, tuple[str, Any]] = {}
    for axis, emit in trainer.table.items():
        if axis in task.config:
            for section in emit(task.config[axis], task).sections.values():
                found |= {_spelled(trainer, values, path): (axis, value) for path, value in _leaves(section)}
    return found


def _spelled(trainer: TrainerFiles, values: Mapping[str, Any], path: KeyPath) -> KeyPath:
    """A key by the name that the user's version of the trainer has for it."""
    alias = trainer.aliases.get(path[0])
    if alias is not None and (alias in values or alias.removesuffix("_kwargs") in values):
        return (alias, *path[1:])
    if path[0] == "fsdp_config" and len(path) == 2 and _has(values, ("fsdp_config", f"fsdp_{path[1]}")):
        return path[0], f"fsdp_{path[1]}"
    return path


def _leaves(values: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _has(values: Mapping[str, Any], path: KeyPath) -> bool:
    return _at(values, path) is not None


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _whole(
    values: Mapping[str, Any], edits: dict[KeyPath, Any], now: Mapping[KeyPath, tuple[str, Any]]
) -> dict[KeyPath, Any]:
    """A list of plugins keeps the user's own. A mapping that the user has as something else, such as the name of a
    file, is written as a whole, and so are DeepSpeed's settings where there are none: it starts with all of them only.
    """
    made: dict[KeyPath, Any] = {}
    for path, value in edits.items():
        own = values.get(path[0])
        if path == ("plugins",) and isinstance(own, list) and isinstance(value, list):
            made[path] = [*own, *(name for name in value if name not in own)]
        elif len(path) > 1 and not isinstance(own, dict) and (own is not None or path[0] == "deepspeed"):
            made |= {inner: said for inner, (_, said) in now.items() if inner[0] == path[0]}
        else:
            made[path] = value
    return made


def _without_idle(
    values: Mapping[str, Any],
    edits: dict[KeyPath, Any],
    doubtful: Collection[KeyPath],
    wanted: Config,
    read: Callable[[Mapping[str, Any]], Config],
) -> dict[KeyPath, Any]:
    """The edits but for those that change nothing: switches that are off anyway, and `doubtful` ones: what the export
    writes alike before and after, which the user has in words of their own, and what it no longer writes."""
    whole = set() if isinstance(values.get("deepspeed"), dict) else {"deepspeed"}
    of_layers = {("liger_kernel_config", name) for name in LIGER_LAYERS}  # which a model has is not known here
    idle = [
        path
        for path, value in edits.items()
        if path[0] not in whole
        and path not in of_layers
        and (path in doubtful or (value is False and not _has(values, path)))
    ]
    for path in idle:
        fewer = {other: value for other, value in edits.items() if other != path}
        if read(applied(values, fewer)) == wanted:
            edits = fewer
    return edits
