"""What the README and docs/ say can be read, followed and run: short sentences, files that are there, real outputs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import readme_table
import typer
from documents import PAGES, README, ROOT, TIMES, Shown, cells, commands, examples, prose, without_blocks
from snapshot_file import UPDATE

from autofit.cli.main import app
from autofit.techniques.habits.known_trainers import AXOLOTL, LLAMAFACTORY, Trainer
from tests.here import run_here

EVERY = [README, *PAGES]
RUN = [example for page in EVERY for example in examples(page) if not example.measured]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_readme_is_short() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 1500


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_sentences_are_short(page: Path) -> None:
    assert median(len(sentence.split()) for sentence in prose(page)) <= 15
    assert [sentence for sentence in prose(page) + cells(page) if len(sentence.split()) > 40] == []


@pytest.mark.parametrize("page", [*EVERY, ROOT / "benchmarks/README.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_files_that_are_linked_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", without_blocks(page.read_text()))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_the_command_line_takes_what_is_written(page: Path) -> None:
    """Commands are parsed, not run: a command or an option that does not exist fails."""
    for words in commands(page):
        rest, command = list(words), typer.main.get_command(app)
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands, " ".join(words)
            command = command.commands[rest.pop(0)]
        command.make_context("autofit", rest)


@pytest.mark.parametrize("trainer", [AXOLOTL, LLAMAFACTORY], ids=lambda trainer: trainer.name)
def test_a_trainers_version_is_stated_once_and_pages_agree(trainer: Trainer) -> None:
    """These trainers are not installed here: the version is that of the source that was read."""
    named = re.compile(
        rf"(?:{trainer.version.split()[0]}|`{trainer.name}(?:-cli)? train`),? (\d[\d.]*\d)", re.IGNORECASE
    )
    stated = {page: set(named.findall(page.read_text())) for page in EVERY}
    assert {page for page, numbers in stated.items() if numbers - {trainer.release}} == set()
    assert len([page for page, numbers in stated.items() if numbers]) >= 3
    code = [*(ROOT / "autofit").rglob("*.py"), *(ROOT / "autofit").rglob("*.yaml")]
    assert [file.name for file in code if named.search(file.read_text())] == ["known_trainers.py"]


def test_the_readme_names_the_test_command() -> None:
    assert re.search(r"^make test\b", README.read_text(), re.MULTILINE)


def printed_by(command: str) -> str:
    """What a process of the program prints. Through a shell: the command is piped into another."""
    program = shlex.join([sys.executable, "-m", "autofit"]) + command.removeprefix("autofit")
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


def printed_here(command: str, capfd: pytest.CaptureFixture[str]) -> str:
    """The same of a command that no pipe follows, in this process."""
    code, out, err = run_here(shlex.split(command.replace("\\\n", " "))[1:], capfd)
    assert code in (0, 3), err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("example", RUN, ids=lambda example: f"{name(example.page)}: {example.command[:60]}")
def test_a_command_prints_what_is_written_below_it(
    example: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert example.command.startswith("autofit ")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    command = example.command
    out = printed_by(command) if "|" in shlex.split(command) else printed_here(command, capfd)
    if os.environ.get(UPDATE):
        text = example.page.read_text()
        example.page.write_text(text.replace(f"{example.command}\n{example.output}", f"{example.command}\n{out}"))
        return
    assert TIMES.sub(r"\1", out) == TIMES.sub(r"\1", example.output)


@pytest.mark.slow
def test_the_readmes_memory_is_what_its_script_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have measured, and one row of the predictions: all of them take a minute."""
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    text = README.read_text()
    assert "\n".join(readme_table.measured()) in text
    assert readme_table.row(*readme_table.ROWS[-1]) in text
    assert all(f"| {words} |" in text for words, _ in readme_table.ROWS)
