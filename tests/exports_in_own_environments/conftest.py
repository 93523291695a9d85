"""Paths of what these tests share with others."""

from __future__ import annotations

import sys
from pathlib import Path

UNIT = Path(__file__).parents[1] / "unit"
sys.path += [str(Path(__file__).parent), str(UNIT / "export"), str(UNIT / "techniques")]
