"""The README and the pages of docs/ as data: their sentences, their links, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"\$ ((?:[^\n]*\\\n)*[^\n]*)\n(.*)", re.DOTALL)
"""A command, continued after backslashes, and its output."""
MEASURED = "<!-- measured"
"""Begins the comment above a block whose figures a machine has measured, so that no other run gives them again."""
TIMES = re.compile(r"^((?:estimated|predicted) in +).*$", re.MULTILINE)
"""What a command says of its own running time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command in a `console` block, and the output below it."""

    page: Path
    command: str
    output: str
    measured: bool


def without_blocks(text: str) -> str:
    """A page without its code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text), flags=re.DOTALL)


def prose(page: Path) -> list[str]:
    """The sentences of a page's paragraphs and list items."""
    text = "\n".join(line for line in without_blocks(page.read_text()).splitlines() if not line.startswith(("|", "#")))
    sentences: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>]|\d+\.) )", text):
        words = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block).split())
        sentences += [sentence for sentence in re.split(r"(?<=[.!?])[*_`\")]*\s+", words) if re.search(r"\w", sentence)]
    return sentences


def cells(page: Path) -> list[str]:
    """The cells of a page's tables."""
    lines = without_blocks(page.read_text()).splitlines()
    return [cell for line in lines if line.startswith("|") for cell in line.split("|")]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every `autofit` command in a page's code blocks."""
    for block in FENCE.finditer(page.read_text()):
        for line in block[3].replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if words.startswith("autofit "):
                yield list(takewhile(lambda word: word not in ("|", "&"), shlex.split(words, comments=True)[1:]))


def examples(page: Path) -> list[Shown]:
    """Every command whose output a page shows."""
    text, blocks = page.read_text(), []
    for block in FENCE.finditer(text):
        if block[2] != "console":
            continue
        before = text[: block.start()].rstrip().rsplit("\n", 1)[-1]
        command, output = EXAMPLE.fullmatch(block[3]).groups()  # type: ignore[union-attr]
        blocks.append(Shown(page=page, command=command, output=output, measured=before.startswith(MEASURED)))
    return blocks
