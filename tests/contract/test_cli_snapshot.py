"""The command line's face: every command with its options, against a snapshot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import snapshot_file
import typer

from autofit.cli.main import app
from tests.here import run_here

PROGRAM = str(Path(sys.executable).with_name("autofit"))

SHARED = {
    *("--model", "--seq-len", "--global-batch", "--lora-dropout", "--devices", "--seed", "--method", "--allow"),
    *("--min-rank", "--store", "--json", "--hardware"),
}
"""Options that several commands take."""
OPTIONAL = {
    *(("probe", "--model"), ("track", "--model"), ("track", "--hardware")),
    *(("diagnose", option) for option in ("--model", "--seq-len", "--devices")),
}
"""Options without their default: a device is probed at the shapes of whatever model, a tracker takes the trials of all,
and a file says them itself."""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that runs something, with its full name."""
    waiting: list[tuple[str, Any]] = [("", typer.main.get_command(app))]
    while waiting:
        name, found = waiting.pop()
        if hasattr(found, "commands"):
            waiting += [(f"{name} {inner}".strip(), command) for inner, command in found.commands.items()]
        if name == "" or not hasattr(found, "commands") or found.invoke_without_command:
            yield name, found


def parameters(command: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter of a command with the names that a user writes; for an argument its metavariable."""
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        if parameter.param_type_name == "argument":
            names = [str(parameter.name).upper()]
        yield " ".join(sorted(names)), parameter


def described(command: Any, parameter: Any) -> dict[str, Any]:
    """What a script that uses a parameter relies on."""
    default = parameter.default
    return {
        "required": parameter.required,
        "default": default if isinstance(default, str | int | float | bool) else None,
        "type": type_of(command, parameter),
        "range": [parameter.min, parameter.max],
        "flag": getattr(parameter, "is_flag", False),
        "many": parameter.multiple or parameter.nargs != 1,
    }


def type_of(command: Any, parameter: Any) -> str:
    """The annotation of the function's parameter; empty for typer's own options."""
    hint = get_type_hints(command.callback).get(parameter.name, "")
    return getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)


def face() -> dict[str, Any]:
    """The whole command line as JSON."""
    return {
        name or "autofit": {n: described(command, p) for n, p in parameters(command)} for name, command in commands()
    }


def test_nothing_of_the_command_line_has_changed() -> None:
    snapshot_file.check("cli.json", face())


def test_a_difference_is_named() -> None:
    before = {"search": {"--seed": {"default": 0}}}
    after = {"search": {"--seed": {"default": 1}, "--new": {"default": None}}}
    assert snapshot_file.differences(before, after) == [
        'search > --new: "absent" -> {"default": null}',
        "search > --seed > default: 0 -> 1",
    ]


def test_an_option_means_the_same_everywhere() -> None:
    shared: dict[str, dict[str, Any]] = {}
    for name, command in commands():
        for option, parameter in parameters(command):
            if (name, option) in OPTIONAL:
                continue
            if option in SHARED:
                shared.setdefault(option, {})[name] = described(command, parameter)
    assert {option: uses for option, uses in shared.items() if len(set(map(str, uses.values()))) > 1} == {}


def test_formats_of_a_recommendation() -> None:
    from autofit import export

    form = dict(parameters(dict(commands())["recommend"]))["--format"]
    assert form.help == f"{', '.join(export.FORMATS)}; default: text."


def test_the_help_names_every_trainer() -> None:
    from autofit.techniques.habits import TRAINERS

    options = {name: dict(parameters(command)).get("--for") for name, command in commands()}
    assert all(name in option.help for option in options.values() if option is not None for name in TRAINERS)


@pytest.mark.parametrize("command", [*(name for name, _ in commands()), "db", "bench", "token"])
def test_help_fits_a_terminal_and_gives_examples(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run_here([*command.split(), "--help"], capfd)
    assert (code, err) == (0, "")
    if command in face():
        assert "Examples:\n" in out
        assert f"  autofit {command}" in out


def completed(words: str, shell: str = "bash") -> list[str]:
    """What the shell offers after `words`, the last of which is being typed."""
    typed = words.split(" ")
    environment = {
        **os.environ,
        "_AUTOFIT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(typed) - 1),
    }
    done = subprocess.run([PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_script_for_bash() -> None:
    # The shell is found among the processes above: bash would put its last command in its own place.
    shell = ["bash", "-c", f"{PROGRAM} --show-completion; exit $?"]
    by_option = subprocess.run(shell, capture_output=True, text=True, check=True)
    environment = {**os.environ, "_AUTOFIT_COMPLETE": "source_bash"}
    by_variable = subprocess.run([PROGRAM], capture_output=True, text=True, check=True, env=environment)
    assert "complete -o default -F _autofit_completion autofit" in by_option.stdout
    assert by_option.stdout.strip() == by_variable.stdout.strip()
    subprocess.run(["bash", "-n"], input=by_option.stdout, text=True, check=True)


def test_completion_of_models() -> None:
    assert completed("autofit search --model smol") == ["smollm2-1.7b", "smollm2-135m", "smollm2-360m"]
    assert "llama-3.1-8b" in completed("autofit recommend --model ")


def test_completion_of_hardware_spaces_and_commands() -> None:
    assert "h100-80g" in completed("autofit frontier --hardware h1")
    assert completed("autofit search --space smo") == ["smoke"]
    assert completed("autofit search --method l") == ["lora"]
    assert completed("autofit frontier --allow ") == ["exact", "numerics", "training"]
    assert completed("autofit trial --device c") == ["cpu", "cuda"]
    assert completed("autofit recommend --format tr") == ["transformers", "trl"]
    assert set(completed("autofit s")) == {"search", "serve", "spaces"}
    assert completed("autofit axes mi") == ["micro_batch"]
    assert completed("autofit spaces show smo") == ["smoke"]
