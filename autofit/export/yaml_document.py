"""YAML for trainers that read one flat file: comments, then a titled block of keys for each section."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from autofit.export.document import Settings

CHOOSE = "CHOOSE"
"""A word where a trainer expects a number, for what only the user can choose: the trainer refuses to start with it."""


def blocks(made: Settings, titles: Mapping[str, str]) -> list[str]:
    """The sections of `made` as YAML, in the order of `titles`, each below its title; empty ones are left out."""
    return [f"# {title}\n{lines(made.sections[name])}" for name, title in titles.items() if made.sections.get(name)]


def lines(values: Mapping[str, object]) -> str:
    """`values` as block-style YAML."""
    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    return text
