"""A change of axes as edits of the user's own keys: what the trainer's export writes differently with the change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from autofit.core.lattice import Config
from autofit.export.document import Task
from autofit.export.trainer_arguments import LIGER_LAYERS
from autofit.trainers.keys import known_keys
from autofit.trainers.trainer import TrainerFiles
from autofit.trainers.training_arguments import OF_TRANSFORMERS_5_17

KeyPath = tuple[str, ...]
"""A key, and the keys within it."""
Edits = Mapping[KeyPath, Any]
"""What each key becomes; `REMOVED` for one that goes."""
REMOVED = object()
_DEEPSPEED = frozenset({"sharding", "offload", "precision"})
"""Axes that DeepSpeed's own settings state. The batch is Trainer's (`auto`)."""


def edits_for(
    trainer: TrainerFiles,
    values: Mapping[str, Any],
    before: Task,
    after: Task,
    read: Callable[[Mapping[str, Any]], Config],
    in_text: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[KeyPath, Any]:
    """The fewest edits by which a file's keys ask for the config of `after` in place of that of `before`, or for the
    nearest that the trainer can express.

    `read` tells what keys ask for. What the exports write alike for both stays as the user has it, and so do keys that
    change neither memory nor speed. `in_text` holds the settings of keys whose value is text (`settings_in_text`): what
    replaces the text starts from them.
    """
    if in_text:
        inlined = {**values, **{name: dict(settings) for name, settings in in_text.items()}}
        edits = edits_for(trainer, inlined, before, after, read)
        changed = applied(inlined, edits)
        replaced = {path[0] for path in edits} & in_text.keys()
        edits = {path: value for path, value in edits.items() if path[0] not in replaced}
        for name in sorted(replaced):
            edits |= dict(_leaves(changed[name], (name,))) if changed.get(name) else {(name,): REMOVED}
        return edits
    changed_axes = {axis for axis in trainer.table if before.config.get(axis) != after.config.get(axis)}
    keys_before, keys_after = (_exported_keys(trainer, task, values) for task in (before, after))
    edits = _edits(trainer, values, keys_before, keys_after, changed_axes)
    config = read(applied(values, edits))
    if missed_axes := {axis for axis in after.config if config.get(axis) != after.config[axis]} - changed_axes:
        # Keys that the user spells differently mean something else after the change.
        wider_edits = _edits(trainer, values, keys_before, keys_after, changed_axes | missed_axes)
        if read(applied(values, wider_edits)) == after.config:
            edits, config = wider_edits, after.config
    doubtful = {
        path for path, (_, value) in keys_after.items() if path in keys_before and keys_before[path][1] == value
    }
    doubtful |= {path for path, (axis, _) in keys_after.items() if config.get(axis) == before.config.get(axis)}
    return _without_idle(values, edits, doubtful | (keys_before.keys() - keys_after.keys()), config, read)


def _edits(
    trainer: TrainerFiles,
    values: Mapping[str, Any],
    keys_before: Mapping[KeyPath, tuple[str, Any]],
    keys_after: Mapping[KeyPath, tuple[str, Any]],
    changed: Collection[str],
) -> dict[KeyPath, Any]:
    """What the export writes differently. For the axes that `changed`, also every key that the user sets otherwise."""
    edits: dict[KeyPath, Any] = {}
    irrelevant = known_keys(trainer.name).irrelevant
    older = {axis: [key for key in trainer.other_spellings.get(axis, ()) if key in values] for axis in changed}
    added = {axis for axis, _ in keys_after.values()} - {axis for axis, _ in keys_before.values()}
    for path, (axis, value) in keys_after.items():
        is_set = _has(values, path)
        differs = (
            path not in keys_before or keys_before[path][1] != value or (is_set and axis in changed) or older.get(axis)
        )
        idle = path[0] in irrelevant and (is_set or axis not in added)
        by_deepspeed = path[0] != "deepspeed" or not _DEEPSPEED.isdisjoint(changed)
        if differs and not idle and by_deepspeed and not (is_set and _at(values, path) == value):
            edits[path] = value
    edits |= {path: REMOVED for path in keys_before if path not in keys_after and _has(values, path)}
    edits |= {(key,): REMOVED for keys in older.values() for key in keys}
    return _completed(values, edits, keys_after)


def applied(values: Mapping[str, Any], edits: Edits) -> dict[str, Any]:
    """The file's keys with the edits made; what is not edited is shared with `values`."""
    edited = dict(values)
    for path, value in edits.items():
        mapping = edited
        for key in path[:-1]:
            child = mapping.get(key)
            copy = dict(child) if isinstance(child, dict) else {}
            mapping[key] = copy
            mapping = copy
        if value is REMOVED:
            mapping.pop(path[-1], None)
        else:
            mapping[path[-1]] = value
    return edited


def newest_keys(edits: Edits) -> set[str]:
    """The keys that edits set and that not every version of transformers has."""
    names = {".".join(path) for path, value in edits.items() if value not in (None, REMOVED)}
    return names & set(OF_TRANSFORMERS_5_17)


def _exported_keys(trainer: TrainerFiles, task: Task, values: Mapping[str, Any]) -> dict[KeyPath, tuple[str, Any]]:
    """Each key that the export writes, as the user spells it, with its axis and value."""
    exported: dict[KeyPath, tuple[str, Any]] = {}
    for axis, emit in trainer.table.items():
        if axis in task.config:
            for title, section in emit(task.config[axis], task).sections.items():
                if title != "data":  # which stays as the user has it
                    exported |= {_spelled(trainer, values, path): (axis, value) for path, value in _leaves(section)}
    return exported


def spelled_option(values: Mapping[str, Any], name: str) -> KeyPath:
    """A key of `fsdp_config`, with the prefix if the user has it so."""
    return "fsdp_config", f"fsdp_{name}" if _has(values, ("fsdp_config", f"fsdp_{name}")) else name


def _spelled(trainer: TrainerFiles, values: Mapping[str, Any], path: KeyPath) -> KeyPath:
    """A key by the name that the user's version of the trainer has for it."""
    alias = trainer.aliases.get(path[0])
    if alias is not None and (alias in values or alias.removesuffix("_kwargs") in values):
        return (alias, *path[1:])
    return spelled_option(values, path[1]) if path[0] == "fsdp_config" and len(path) == 2 else path


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


def _completed(
    values: Mapping[str, Any], edits: dict[KeyPath, Any], keys_after: Mapping[KeyPath, tuple[str, Any]]
) -> dict[KeyPath, Any]:
    """The edits, completed. A list of plugins keeps the user's own. A mapping that the user has as something else, such
    as the name of a file, is written as a whole. So are DeepSpeed's settings where there are none: it needs them all.
    """
    completed: dict[KeyPath, Any] = {}
    for path, value in edits.items():
        user_value = values.get(path[0])
        if path == ("plugins",) and isinstance(user_value, list) and isinstance(value, list):
            completed[path] = [*user_value, *(name for name in value if name not in user_value)]
        elif len(path) > 1 and not isinstance(user_value, dict) and (user_value is not None or path[0] == "deepspeed"):
            completed |= {inner: exported for inner, (_, exported) in keys_after.items() if inner[0] == path[0]}
        else:
            completed[path] = value
    return completed


def _without_idle(
    values: Mapping[str, Any],
    edits: dict[KeyPath, Any],
    doubtful: Collection[KeyPath],
    config: Config,
    read: Callable[[Mapping[str, Any]], Config],
) -> dict[KeyPath, Any]:
    """The edits without those that change nothing: switches that are off anyway, and `doubtful` ones. Doubtful are keys
    that the export writes alike before and after but the user spells otherwise, keys that it no longer writes, and
    those of axes that stay as they were."""
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
        fewer = {key: value for key, value in edits.items() if key != path}
        if read(applied(values, fewer)) == config:
            edits = fewer
    return edits
