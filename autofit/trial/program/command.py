"""A command with placeholders for a config's values, and the words that it comes to for one config."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from string import Formatter
from typing import Self

from autofit.catalog.models import Model
from autofit.core.errors import UsageError, spelled, unknown
from autofit.core.lattice import Config
from autofit.core.workload import Workload
from autofit.techniques import AXES

OF_WORKLOAD = ("accumulation", "seq_len", "global_batch", "model")
"""Placeholders beside the axes: micro-steps of an optimizer step, the workload's figures, and where its weights are."""
ABSENT = {"rank": "0", "targets": "none"}
"""What stands for axes that full training does not have."""
OF_SHELLS = frozenset({"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"})
"""Words that mean something to a shell, and would be arguments here."""


@dataclass(frozen=True, slots=True)
class Command:
    """What starts a user's training. No shell takes part: each word is one argument, whatever a value holds."""

    words: tuple[str, ...]
    """As format strings; the first, the program, has no placeholder."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The command that `text` spells; raises `UsageError` for a placeholder that does not exist, and for what only
        a shell understands."""
        try:
            command = cls(tuple(shlex.split(text)))
        except ValueError as error:
            raise UsageError(f"--command is not understood: {str(error).lower()}") from None
        if not command.words:
            raise UsageError("--command is empty: write the command that starts your training")
        for word in command.words:
            if word in OF_SHELLS:
                raise UsageError(f"--command runs without a shell, and {word} is a shell's: put it into a script")
        command._check_placeholders()
        return command

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(name for word in self.words for name, _ in _fields(word))

    def arguments(self, config: Config, workload: Workload, source: str) -> list[str]:
        """The words for a config; `source` is where the program finds the model's weights: a hub id or a folder."""
        values = {axis.name: ABSENT.get(axis.name, str(axis.recipe)) for axis in AXES}
        values |= {name: spelled(value) for name, value in config.items}
        values |= {
            "accumulation": str(workload.batch_per_device // config.number("micro_batch")),
            "seq_len": str(workload.seq_len),
            "global_batch": str(workload.global_batch),
            "model": source,
        }
        return [word.format_map(values) for word in self.words]

    def line(self, config: Config, workload: Workload, source: str) -> str:
        """The command for a config as a user types it into a shell."""
        return shlex.join(self.arguments(config, workload, source))

    def check_found(self) -> None:
        """Raise `UsageError` if this machine does not have the program."""
        program = self.words[0]
        if shutil.which(program) is None:
            hint = f" (for a variable: env {program} ...)" if "=" in program else ""
            raise UsageError(f"--command cannot be started: {program} is not found{hint}")

    def check_takes(self, configs: Iterable[Config]) -> None:
        """Raise `UsageError` if configs differ on an axis of which the command says nothing to the program."""
        configs, placeholders = list(configs), self.placeholders
        for axis in AXES:
            values = {axis.of(config) for config in configs} - {None}
            # A program can derive either of these from the other and the global batch.
            follows = axis.name == "micro_batch" and "accumulation" in placeholders
            if len(values) > 1 and axis.name not in placeholders and not follows:
                raise UsageError(
                    f"the space varies {axis.name}, which the command ignores: "
                    f"add {{{axis.name}}} to it, or keep one value"
                )

    def _check_placeholders(self) -> None:
        valid = [*(axis.name for axis in AXES), *OF_WORKLOAD]
        for word in self.words:
            for name, is_plain in _fields(word):
                if name not in valid:
                    raise UsageError(
                        f"--command: {unknown('placeholder', name, valid)} (for a brace that means itself, write two)"
                    )
                if not is_plain:
                    raise UsageError(f"--command: write {{{name}}} without a format")
        if any(_fields(self.words[0])):
            raise UsageError(f"--command must begin with the program itself, not with {self.words[0]}")


def source_of(model: Model) -> str:
    """Where a program finds a model's weights: its hub id, or the folder of its config.json."""
    return model.source.rpartition(", ")[0] or model.name


def _fields(word: str) -> Iterator[tuple[str, bool]]:
    """The placeholders of a word, and whether each stands without a conversion and a format."""
    try:
        for _, name, form, conversion in Formatter().parse(word):
            if name is not None:
                yield name, not form and conversion is None
    except ValueError as error:
        message = str(error).lower()
        raise UsageError(f"--command: {message} in {word!r} (for a brace that means itself, write two)") from None
