"""What every exporter is built from: a table from axis to settings, and the text that results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from autofit.catalog.architecture_file import is_path
from autofit.catalog.models import Model, architecture, load, names
from autofit.catalog.space import ADAPTER_AXES
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.frontier import Recommendation
from autofit.core.lattice import Config, Value
from autofit.core.lengths import mean
from autofit.core.units import counted, format_bytes
from autofit.core.workload import Workload
from autofit.techniques import AXES
from autofit.techniques.axes.batching import packs, rows_per_sequence
from autofit.techniques.habits.known_trainers import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What axes are translated for: a config, what it trains and where, and where the weights are loaded from."""

    config: Config
    workload: Workload
    hardware: Hardware
    stack: Stack
    source: str
    """Hub id or folder of the weights."""

    @property
    def packs(self) -> bool:
        """Whether every row was full, as packing makes them; otherwise sequences were padded."""
        return self.workload.lengths is None or packs(self.config)

    def model(self) -> Model:
        """The architecture that was measured; raises what `catalog.models.load` raises."""
        # A folder may have the same name as a model of the catalog.
        of_catalog = self.workload.model in names() and not is_path(self.source)
        return load(self.workload.model if of_catalog else self.source)

    def meta_model(self) -> Any:
        """The model on the meta device; not to be modified. Imports torch and transformers, which takes seconds."""
        return _meta_model(self.model())


@lru_cache(maxsize=1)  # several axes of one export need it
def _meta_model(model: Model) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended(Task):
    """What is exported: a recommendation."""

    recommendation: Recommendation

    @classmethod
    def of(cls, recommendation: Recommendation, source: str) -> Recommended:
        """`recommendation`, for the weights at `source`."""
        return cls(
            config=recommendation.point.config,
            workload=recommendation.workload,
            hardware=recommendation.hardware,
            stack=recommendation.stack,
            source=source,
            recommendation=recommendation,
        )


class Near(str):
    """A note on another implementation of the same technique: memory and speed are close to what was measured."""


class NeedsMore(str):
    """A note on what is known to need more memory than was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A recommendation in the format that a trainer reads."""

    text: str
    notes: tuple[str, ...] = ()
    """What the format cannot express, or does differently from what was measured; one sentence each. `Near` and
    `NeedsMore` say more of what they are."""

    @property
    def needs_more(self) -> tuple[str, ...]:
        """The notes on what is known to need more memory than was measured."""
        return tuple(note for note in self.notes if isinstance(note, NeedsMore))


def fidelity(config: Config, notes: Sequence[str]) -> dict[str, str]:
    """Axis -> how close its technique comes to what was measured: `same`, `near` or `differs`."""
    words = {axis: "same" for axis in config}
    for note in notes:
        for axis in note.partition(":")[0].split(", "):
            name = axis.partition("=")[0]
            if name in words and words[name] != "differs":
                words[name] = "near" if isinstance(note, Near) else "differs"
    return words


class Code(str):
    """Python source that stands for a value: its repr is the source itself."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one or several axes translate to in a target format."""

    sections: Mapping[str, Mapping[str, object]]
    """Keys and values of each section of the document."""
    notes: tuple[str, ...] = ()


Emit = Callable[[Value, Task], Settings]
"""Translates the value of an axis; the task gives the workload, the architecture and the other axes."""


def settings(*notes: str, **sections: Mapping[str, object]) -> Settings:
    """Settings of the named sections, with notes on what they cannot express."""
    return Settings(sections=sections, notes=notes)


def merge(*parts: Settings) -> Settings:
    """All settings of `parts`; asserts that no key is set twice to different values."""
    sections: dict[str, dict[str, object]] = {}
    for part in parts:
        for section, values in part.sections.items():
            merged = sections.setdefault(section, {})
            for key, value in values.items():
                assert merged.get(key, value) == value, f"{section}.{key} is set to two values"
                merged[key] = value
    return Settings(sections=sections, notes=tuple(note for part in parts for note in part.notes))


_MAY_LACK = ADAPTER_AXES | {axis.name for axis in AXES if axis.leaves_out_recipe}
"""Axes that a whole config may not name."""


_CLASS_AND_ENDING: Mapping[str, tuple[type[str], str]] = {
    "more": (NeedsMore, ": more memory than was measured"),
    "less": (str, ": less memory and more recomputation than was measured"),
    "near": (Near, ""),
    "differs": (str, ""),
}
"""Of a note, by `Instead.effect`."""


def _notes_on_what_it_cannot(trainer: Trainer, config: Config) -> list[str]:
    notes = []
    for axis, (does, effect) in trainer.instead(config).items():
        if effect is not None:
            note_class, ending = _CLASS_AND_ENDING[effect]
            notes.append(note_class(f"{axis}={config[axis]}: {trainer.title} {does}{ending}"))
    return notes


def collect(
    table: Mapping[str, Emit], task: Task, *, starts_a_script: bool = False, trainer: Trainer | None = None
) -> Settings:
    """The table applied to the config. An axis missing from either becomes a note, so that none is lost, and so does
    what the `trainer` is known to do otherwise.

    With `starts_a_script`, for a format that only launches a training script, one note lists what the script must set.
    Raises `UsageError` for a value that its axis does not have.
    """
    config = task.config
    for axis in AXES:
        if axis.name in table and axis.name in config:
            axis.check(config[axis.name])
    parts = [] if trainer is None else [settings(*_notes_on_what_it_cannot(trainer, config))]
    for name, emit in table.items():
        if name in config:
            parts.append(emit(config[name], task))
        elif name not in _MAY_LACK:
            parts.append(settings(f"{name}: the config does not name it; the trainer's own default applies"))
    missing_axes = [f"{name}={config[name]}" for name in config if name not in table]
    if missing_axes and starts_a_script:
        parts.append(
            settings(f"{', '.join(missing_axes)}: this format has no line for them; the training script sets them")
        )
    else:
        parts += [settings(f"{missing}: this format has no line for it; set it by hand") for missing in missing_axes]
    return merge(*parts)


def header(task: Recommended, *, needs: Sequence[str], launch: str, notes: Sequence[str]) -> str:
    """Comment lines (`# ...`) that say what was measured, where, and what the file cannot express; `needs` names the
    packages that read it."""
    recommendation, workload = task.recommendation, task.workload
    hardware = recommendation.hardware
    unequal = [f"{axis} {word}" for axis, word in fidelity(task.config, notes).items() if word != "same"]
    rows = [
        ("Model", f"{workload.model}, loaded from {task.source}"),
        ("Workload", _workload(workload, task.config)),
        ("Config", str(recommendation.point.config)),
        (
            recommendation.provenance.capitalize(),
            _measurement(recommendation, rows_per_sequence(task.config, workload)),
        ),
        ("Hardware", f"{hardware.name} ({hardware.device_name}, {format_bytes(hardware.memory_bytes)})"),
        ("Stack", ", ".join(f"{k} {v}" for k, v in recommendation.stack.to_json().items() if v)),
        ("Needs", ", ".join(needs)),
        ("Launch", launch),
        ("Fidelity", f"{', '.join(unequal)}; all else same" if unequal else "all same"),
        *(("Changes", change) for change in recommendation.changes_training),
        *(("Differs", note) for note in notes),
    ]
    lines = ["Written by autofit. Data, learning rate and schedule are yours; they do not change memory or speed."]
    lines += [f"{name + ':':<10} {text}" for name, text in rows]
    # An untrusted name must not break out of the comment.
    printable = ("".join(character if character.isprintable() else " " for character in line) for line in lines)
    return "".join(f"# {line}\n" for line in printable)


def _workload(workload: Workload, config: Config) -> str:
    devices = counted(workload.devices, "device")
    devices += "" if workload.trainer is None else f", as {workload.trainer} trains"
    lengths = (
        "" if workload.lengths is None else f"up to {workload.seq_len} and {mean(workload.lengths):.0f} in the mean"
    )
    sequences = f"{workload.global_batch} sequences of {lengths or workload.seq_len} tokens"
    if packs(config):
        share = workload.global_batch / rows_per_sequence(config, workload)
        sequences = f"{workload.global_batch} rows of {workload.seq_len} tokens, {share:.0f} sequences,"
    evaluation = "" if workload.eval_batch is None else f"; {workload.eval_batch} evaluated at a time"
    return f"{sequences} per optimizer step, on {devices}{evaluation}"


def _measurement(recommendation: Recommendation, rows: float) -> str:
    """`rows` for each sequence: a step of the trainer has as many as the global batch."""
    point = recommendation.point
    measured = point.measurement
    trial = "" if point.trial_id is None else f", trial {point.trial_id}"
    return (
        f"{measured.tokens_per_second:,.0f} tokens/s, {measured.step_seconds.median / rows:.3g} s a step, "
        f"{format_bytes(measured.device_bytes)} of device memory "
        f"({format_bytes(recommendation.headroom_bytes)} below the limit of "
        f"{format_bytes(recommendation.memory_limit_bytes)}){trial}"
    )


def as_yaml(
    task: Recommended, merged: Settings, *, titles: Mapping[str, str], needs: Sequence[str], launch: str
) -> Export:
    """For a trainer that reads one flat YAML file: the header, then the keys of each section of `merged` below its
    title. Sections come in the order of `titles`; empty ones are left out."""
    parts = [header(task, needs=needs, launch=launch, notes=merged.notes)]
    for section, title in titles.items():
        if values := merged.sections.get(section):
            keys = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
            parts.append(f"# {title}\n{keys}" if title else keys)
    return Export(text="\n".join(parts), notes=merged.notes)
