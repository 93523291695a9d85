"""The HTTP face: paths and parameters of the OpenAPI document, against a snapshot and against the design."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import snapshot_file

from autofit.api.app import create_app
from autofit.store import Store

PROSE = {"description", "summary", "title", "operationId", "example", "examples"}

WORKLOAD = {"model", "seq_len", "global_batch", "lora_dropout", "devices", "seed"}
GOAL = {"method", "min_rank", "allow"}
DESIGN = {
    "/healthz": set(),
    "/v1/recommendation": {*WORKLOAD, *GOAL, "hardware", "memory_limit"},
    "/v1/frontier": {*WORKLOAD, *GOAL, "hardware", "memory_limit"},
    "/v1/trials": {*WORKLOAD, "hardware", "outcome", "limit", "offset"},
}
"""Paths that exist so far, with the command line's options as query parameters."""


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """The OpenAPI document of the application."""
    with Store.open(str(tmp_path / "store.db")) as store:
        return create_app(store).openapi()


def without_prose(value: Any) -> Any:
    """`value` without what only people read."""
    if isinstance(value, list):
        return [without_prose(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: without_prose(inner) for key, inner in value.items() if key not in PROSE}


def face(document: dict[str, Any]) -> dict[str, Any]:
    """What a client's request relies on: verbs, paths and parameters, each parameter by its name."""
    return {
        f"{verb.upper()} {path}": {
            parameter["name"]: {key: without_prose(value) for key, value in parameter.items() if key != "name"}
            for parameter in operation.get("parameters", [])
        }
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
    }


def test_nothing_of_the_api_has_changed(document: dict[str, Any]) -> None:
    snapshot_file.check("openapi.json", face(document))


def test_paths_and_parameters_are_the_designs(document: dict[str, Any]) -> None:
    found = {
        path: {parameter["name"] for parameter in operations["get"].get("parameters", [])}
        for path, operations in document["paths"].items()
    }
    assert found == DESIGN


def test_everything_only_reads(document: dict[str, Any]) -> None:
    assert {verb for operations in document["paths"].values() for verb in operations} == {"get"}


def test_parameters_have_the_command_lines_defaults(document: dict[str, Any]) -> None:
    from test_cli_snapshot import face as command_line

    options = command_line()["recommend"]
    for parameter in document["paths"]["/v1/recommendation"]["get"]["parameters"]:
        option = options["--" + parameter["name"].replace("_", "-")]
        assert parameter["required"] == option["required"]
        assert parameter["schema"].get("default") == option["default"], parameter["name"]


def test_title_and_version(document: dict[str, Any]) -> None:
    from autofit import __version__

    assert document["info"]["title"] == "autofit"
    assert document["info"]["version"] == __version__


def test_errors_are_documented_as_problems(document: dict[str, Any]) -> None:
    wrong = [
        f"{path} {status}"
        for path, operations in document["paths"].items()
        for status, response in operations["get"]["responses"].items()
        if status != "200" and set(response.get("content", {})) - {"application/problem+json"}
    ]
    assert wrong == []
