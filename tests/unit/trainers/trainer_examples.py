"""The thirty example files, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autofit.trainers.run import Run, Where
from autofit.trainers.trainer import READERS, TrainerFiles


@dataclass(frozen=True, kw_only=True)
class Example:
    file: str
    keys: dict[str, Any]
    others: list[str]
    asks: dict[str, Any]
    config: dict[str, Any]
    devices: int | None = None
    beyond: tuple[tuple[str, float], ...] = ()
    not_counted: dict[str, str]
    unknown: list[str]

    @property
    def values(self) -> dict[str, Any]:
        """The file's keys; those of which only the name is kept are blank."""
        return {**self.keys, **dict.fromkeys(self.others)}

    @property
    def trainer(self) -> TrainerFiles:
        return READERS[self.asks["trainer"]]

    @property
    def where(self) -> Where:
        return Where(devices=self.devices)

    def run(self) -> Run:
        return self.trainer.read(self.values, self.where)

    def text(self) -> str:
        """As a user may have written it: in YAML, with comments."""
        lines = yaml.safe_dump(self.values, sort_keys=False, width=10**6).splitlines()
        return "# my file\n\n" + "\n".join(f"{line}  # said" if line[-1].isalnum() else line for line in lines) + "\n"


def _example(row: dict[str, Any]) -> Example:
    beyond = tuple((which, size) for which, size in row.get("beyond", ()))
    kept = {name: row[name] for name in ("file", "keys", "others", "asks", "config")}
    rest = {"not_counted": row.get("not_counted", {}), "unknown": row.get("unknown", [])}
    return Example(**kept, **rest, devices=row.get("devices"), beyond=beyond)


EXAMPLES = [_example(row) for row in yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text())]
