"""`import autofit`: the commands as functions, with the command line's names and defaults."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.operations.made_trials import HARDWARE, MODEL

import autofit
from autofit import operations
from autofit.cli.commands import answer, run
from autofit.cli.commands import diagnose as diagnose_command
from autofit.cli.commands import estimate as estimate_command
from autofit.client import Client, RemoteSearch
from autofit.core.errors import NothingFits, NotMeasured, StoreError, UsageError
from autofit.core.units import GIB, as_bytes, as_seconds
from autofit.trial.machine.detection import detect
from tests.made_stores import put

ASKED: dict[str, Any] = {"model": MODEL, "seq_len": 128, "global_batch": 4}
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "search": (autofit.search, run.search, Client.search),
    "estimate": (autofit.estimate, estimate_command.estimate, Client.estimate),
    "recommend": (autofit.recommend, answer.recommend, Client.recommend),
    "frontier": (autofit.frontier, answer.frontier, Client.frontier),
}
"""Each function with its command, and the client's method."""
COMMANDS_OWN = {"context", "as_json", "form", "out", "html", "png", "verbose", "explain", "dry_run", "fewer_devices"}
COMMANDS_OWN |= {"price", "prices_file", "tokens", "anyway", "longest"}
"""What the command line prints and writes, and some that have functions of their own in `autofit.operations`."""
NEGATED = {"no_predict": "predict", "no_advice": "advice"}
RUNNERS_OWN = {"device", "workers", "ray_address", "in_place", "store", "exact", "command"}
"""What is not for a client to say; a command least of all, which would run on the server."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The place of a store with ten trials."""
    put(tmp_path / "store.db", filled=True)
    return str(tmp_path / "store.db")


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> default; `inspect.Parameter.empty` where one must be given."""
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", PAIRS)
def test_a_function_has_the_options_and_defaults_of_its_command(name: str) -> None:
    function, command, _ = map(defaults, PAIRS[name])
    options = {option: default for option, default in command.items() if option not in COMMANDS_OWN}
    for option, positive in NEGATED.items():
        if option in options:
            options[positive] = not options.pop(option)
    further = {"search": {"report"}, "estimate": {"store"}}.get(name, set())
    assert {option: default for option, default in function.items() if option not in further} == options


@pytest.mark.parametrize("name", PAIRS)
def test_the_client_has_the_signature_of_the_function(name: str) -> None:
    function, _, method = PAIRS[name]
    expected = {option: default for option, default in defaults(function).items() if option not in RUNNERS_OWN}
    actual = defaults(method)
    further = {"search": {"wait", "key"}, "recommend": {"provenance"}}.get(name, set())
    assert set(actual) - {"self"} == set(expected) | further
    assert {option: actual[option] for option in expected if option != "report"} == {
        option: default for option, default in expected.items() if option != "report"
    }


def test_a_diagnosis_has_the_options_of_its_command() -> None:
    """The command can do without a file, for an error alone; there the function is `operations.read_traceback`."""
    function, command = defaults(autofit.diagnose), defaults(diagnose_command.diagnose)
    options = {option: default for option, default in command.items() if option not in COMMANDS_OWN}
    assert function == {**options, "config": inspect.Parameter.empty}


def test_every_name_is_found_and_no_other() -> None:
    assert set(autofit.__all__) <= set(dir(autofit))
    assert all(hasattr(autofit, name) for name in autofit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'serch'"):
        autofit.serch  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", ["estimate", "search"])
def test_a_function_is_not_hidden_by_the_package_of_its_name(name: str) -> None:
    code = (
        f"import importlib; importlib.import_module('autofit.{name}.{'budget' if name == 'search' else 'version'}');"
        f"import autofit; from autofit import {name}; assert callable(autofit.{name}) and callable({name})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_recommendation_comes_from_the_store(store: str) -> None:
    recommendation = autofit.recommend(MODEL, seq_len=128, global_batch=4, memory_limit="24GiB", store=store)
    assert (recommendation.point.config["method"], recommendation.point.measurement.device_bytes) == ("full", 20 * GIB)
    assert recommendation == autofit.recommend(**ASKED, memory_limit=24 * GIB, store=store)
    lora = autofit.recommend(**ASKED, memory_limit="24GiB", method="lora", min_rank=64, store=store)
    assert lora.point.config["rank"] == 64


def test_a_frontier_is_within_the_goal(store: str) -> None:
    frontier = autofit.frontier(**ASKED, method="lora", store=store)
    assert {point.config["method"] for point in frontier.points} == {"lora"}


@pytest.mark.parametrize("config", [{"method": "lora", "micro_batch": 1}, "method=lora,micro_batch=1"])
def test_a_config_is_estimated(config: dict[str, object] | str, tmp_path: Path) -> None:
    estimate = autofit.estimate(**ASKED, config=config, hardware="h100-80g", advice=False, store=str(tmp_path / "s.db"))
    assert (estimate.config["method"], estimate.config["precision"]) == ("lora", "bf16-mixed")
    assert estimate.likely_fits


@pytest.mark.skipif(detect()[0].kind != "cpu", reason="there is a GPU")
def test_an_estimate_for_the_processor_says_that_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    autofit.estimate(**ASKED, config={}, advice=False, store=str(tmp_path / "s.db"))
    assert "there is no GPU here, so this is for the processor: name a card with hardware=" in caplog.text


def test_what_a_device_lacks_is_left_out_of_the_plain_recipe(tmp_path: Path) -> None:
    estimate = autofit.estimate(**ASKED, config={}, hardware="t4", advice=False, store=str(tmp_path / "s.db"))
    assert estimate.config["precision"] == "fp16-mixed"


def test_a_search_is_asked_for_in_the_commands_words(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[operations.SearchRequest] = []
    monkeypatch.setattr(operations, "search", lambda request, report: requests.append(request))
    autofit.search(**ASKED, method="lora", allow="exact", memory_limit="2GiB", time_budget=90, predict=False, seed=7)
    autofit.search(MODEL)
    (request, plain) = requests
    assert (request.workload.seq_len, request.workload.seed, request.goal.allow.label) == (128, 7, "exact")
    assert (request.memory_limit_bytes, request.time_budget_seconds, request.predict) == (2 * GIB, 90.0, False)
    assert plain == operations.SearchRequest(workload=operations.WorkloadOptions(model=MODEL))


def test_an_option_that_there_is_not_is_refused_by_name() -> None:
    """Of the workload's, too, which a type checker knows as well: mypy needs what it is told to ignore here."""
    with pytest.raises(TypeError, match=r"^recommend\(\): got an unexpected keyword argument 'seqlen'$"):
        autofit.recommend(MODEL, seqlen=128)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'seqlen'"):
        Client().frontier(MODEL, seqlen=128)  # type: ignore[call-arg]


def test_errors_are_the_commands(store: str, tmp_path: Path) -> None:
    with pytest.raises(NothingFits):
        autofit.recommend(**ASKED, memory_limit="1GiB", store=store)
    with pytest.raises(NotMeasured):
        autofit.recommend(MODEL, hardware=HARDWARE.name, store=store)
    with pytest.raises(StoreError):
        autofit.recommend(MODEL, store=str(tmp_path / "none.db"))
    with pytest.raises(UsageError, match="unknown value of allow 'exakt': did you mean exact"):
        autofit.recommend(**ASKED, allow="exakt", store=store)
    with pytest.raises(UsageError, match="did you mean 24GiB"):
        autofit.frontier(**ASKED, memory_limit="24", store=store)
    with pytest.raises(UsageError, match="did you mean lora"):
        autofit.search(**ASKED, method="lara")
    with pytest.raises(UsageError, match="micro_batch"):
        autofit.estimate(**ASKED, config="micro_bach=4", hardware="h100-80g")


def test_sizes_and_durations_are_text_or_numbers() -> None:
    assert (as_bytes(None), as_bytes("1KiB"), as_bytes(7)) == (None, 1024, 7)
    assert (as_seconds("2m"), as_seconds(7), as_seconds(0.5)) == (120.0, 7.0, 0.5)
    for wrong in (0, -1):
        with pytest.raises(UsageError, match="not positive"):
            as_bytes(wrong)
        with pytest.raises(UsageError, match="not positive"):
            as_seconds(wrong)
    with pytest.raises(UsageError, match="not positive"):
        as_seconds(float("nan"))


def test_a_script_that_is_not_guarded_runs_once(tmp_path: Path) -> None:
    """A search starts processes, in which Python would run the script anew."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('script', flush=True)\n"
        "from autofit.estimate.warm import context\n"
        "process = context().Process(target=print, args=('process',), kwargs={'flush': True})\n"
        "process.start(); process.join()\n"
        "import __main__; assert __main__.process is process\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["script", "process"]), done.stderr


def test_the_pages_examples_call_what_there_is() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/python.md").read_text()
    owners = {"autofit": autofit, "client": Client, "search": RemoteSearch}
    called = 0
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if owner in owners:
                    itself = [] if owner == "autofit" else [None]
                    keywords = {str(keyword.arg): None for keyword in node.keywords}
                    inspect.signature(getattr(owners[owner], name)).bind(*itself, *node.args, **keywords)
                    called += 1
    assert called > 5
