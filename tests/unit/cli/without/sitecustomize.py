"""Run at Python's start where this folder is on PYTHONPATH: hides the packages that AUTOFIT_TEST_WITHOUT names, and
their metadata, as if they were not installed; in child processes too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

HIDDEN = os.environ["AUTOFIT_TEST_WITHOUT"].split(",")


class Without(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, *more: Any, **options: Any) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, *more, **options)

    @classmethod
    def find_distributions(cls, *more: Any, **options: Any) -> Iterator[metadata.Distribution]:
        return (found for found in super().find_distributions(*more, **options) if found.name not in HIDDEN)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
