"""The API's description has an example of every body, and each is as its schema says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from unit.store.conftest import PREDICTION, SHARED, a_trial

from autofit.api.app import create_app
from autofit.api.schema.documents import TrialAnswer
from autofit.api.schema.examples import EXAMPLES
from autofit.store import Store


def test_a_trial_is_described_with_all_its_fields() -> None:
    """But for the evidence of other outcomes, which stands beside their reason."""
    trial = a_trial(prediction=PREDICTION, device_state=SHARED)
    assert TrialAnswer.model_fields.keys() == trial.to_json().keys() | {"reason"}


@pytest.fixture
def document(store: Store) -> dict[str, Any]:
    """The OpenAPI document of the application."""
    return create_app(store).openapi()


def bodies(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of all JSON bodies that are sent, or answered to a request that succeeds."""
    for operations in document["paths"].values():
        for operation in operations.values():
            answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            for body in [*answers, operation.get("requestBody", {})]:
                if "application/json" in body.get("content", {}):
                    yield body["content"]["application/json"]["schema"]


def test_every_body_has_an_example_that_its_schema_allows(document: dict[str, Any]) -> None:
    named = set()
    for schema in bodies(document):
        name = schema.get("items", schema)["$ref"].rpartition("/")[2]
        (example,) = document["components"]["schemas"][name]["examples"]
        body = [example] if "items" in schema else example
        Draft202012Validator({**schema, "components": document["components"]}).validate(body)
        named.add(name)
    assert named == set(EXAMPLES)
