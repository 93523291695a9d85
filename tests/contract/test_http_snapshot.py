"""The HTTP face: paths and parameters of the OpenAPI document, against a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import snapshot_file

from autofit.api.app import create_app
from autofit.store import Store

PROSE = {"description", "summary", "title", "operationId", "example", "examples"}

BODIES = (
    *("AskedSearch", "SearchState", "AskedEstimate", "EstimateAnswer", "RecommendationAnswer", "FrontierAnswer"),
    *("TrialsAnswer", "TrialAnswer", "HardwareAnswer", "ModelAnswer", "SpaceAnswer", "Audited"),
    *("HealthAnswer", "ReadyAnswer", "EventAnswer"),
)
NOT_OVER_HTTP = {
    *("--store", "--json", "--workers", "--ray-address", "--in-place", "--device", "--dry-run", "--fewer-devices"),
    *("--price", "--prices"),
    "--no-predict",
    "--command",
}
"""Options of a search that are its runner's business, or the command line's, as a command is, which nobody may have a
server run; and the one that is `predict` here."""


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
    """What a client's request relies on: verbs, paths, parameters, each by its name, and bodies."""
    requests = {
        f"{verb.upper()} {path}": {
            parameter["name"]: {key: without_prose(value) for key, value in parameter.items() if key != "name"}
            for parameter in operation.get("parameters", [])
        }
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
    }
    bodies = document["components"]["schemas"]
    return requests | {name: properties(bodies[name]) for name in BODIES}


def properties(schema: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body; `title` is prose only outside of them."""
    return {name: without_prose(field) for name, field in schema["properties"].items()}


def test_nothing_of_the_api_has_changed(document: dict[str, Any]) -> None:
    snapshot_file.check("openapi.json", face(document))


def test_a_search_has_the_command_lines_options_and_defaults(document: dict[str, Any]) -> None:
    from test_cli_snapshot import face as command_line

    options = {name: option for name, option in command_line()["search"].items() if name not in NOT_OVER_HTTP}
    body = document["components"]["schemas"]["AskedSearch"]["properties"]
    assert {"--" + name.replace("_", "-") for name in body} - {"--predict"} == set(options)
    for name, option in options.items():
        assert body[name[2:].replace("-", "_")].get("default") == option["default"], name


def test_an_estimate_has_the_command_lines_options_and_defaults(document: dict[str, Any]) -> None:
    from test_cli_snapshot import face as command_line

    only_here, only_there = (
        {"advice"},
        {
            *("--price", "--prices", "--tokens", "--explain", "--longest", "--exact", "--no-advice"),
            *("--html", "--verbose -v", "--json"),
        },
    )
    options = command_line()["estimate"]
    body = document["components"]["schemas"]["AskedEstimate"]["properties"]
    assert {"--" + name.replace("_", "-") for name in set(body) - only_here} == set(options) - only_there
    for name in set(body) - {*only_here, "config"}:
        assert body[name].get("default") == options["--" + name.replace("_", "-")]["default"], name


def test_parameters_have_the_command_lines_defaults(document: dict[str, Any]) -> None:
    from test_cli_snapshot import face as command_line

    options = command_line()["recommend"]
    for parameter in document["paths"]["/v1/recommendation"]["get"]["parameters"]:
        if parameter["name"] in ("format", "provenance"):
            continue  # a program reads JSON where a person reads text
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
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if not status.startswith("2") and set(response.get("content", {})) - {"application/problem+json"}
    ]
    assert wrong == []
