"""What a server can be asked, by the names and with the defaults of `autofit.search` and its like."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from autofit.client.connection import Connection
from autofit.client.search import RemoteSearch
from autofit.core.lattice import values_in
from autofit.core.lengths import Lengths
from autofit.core.workload import WorkloadKeywords, spelled_out

NOT_SENT = ("self", "workload", "wait", "report", "key")
"""Parameters that are the client's own; what is in `workload` is sent by itself."""


class Client:
    """A server's answers, as the JSON objects that it gives.

    The functions of the same names run here; these run there. Errors are the same classes, with the server's words;
    a server that cannot be reached raises `EnvironmentLacks`. Threads may share a client.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        """`url` defaults to $AUTOFIT_URL, then to this machine's port 8000; `token` to $AUTOFIT_TOKEN."""
        self._connection = Connection(
            url or os.environ.get("AUTOFIT_URL") or "http://127.0.0.1:8000",
            (token or os.environ.get("AUTOFIT_TOKEN") or "").strip() or None,  # of a file, it ends with a line break
        )

    @spelled_out
    def search(
        self,
        model: str,
        *,
        method: str = "any",
        min_rank: int = 8,
        allow: str = "numerics",
        space: str | None = None,
        hardware: str = "auto",
        memory_limit: str | int | None = None,
        max_trials: int | None = None,
        time_budget: str | float = "10m",
        fresh: bool = False,
        thorough: bool = False,
        predict: bool = True,
        wait: bool = True,
        report: Callable[[dict[str, Any]], object] = lambda event: None,
        key: str | None = None,
        **workload: Unpack[WorkloadKeywords],
    ) -> Any:
        """Start a search, or join the same one, and return its result; `report` is called with each event.

        Without `wait`, returns its `RemoteSearch` at once. An interruption leaves it running: the same call joins it. A
        `key` never starts a second search. Needs a token that may run. Raises as `RemoteSearch.result` does.
        """
        body, headers = _in_body(_fields(locals())), {} if key is None else {"Idempotency-Key": key}
        answer = self._connection.ask("POST", "/v1/searches", body=body, headers=headers)
        started = RemoteSearch(self._connection, answer["search_id"])
        if not wait:
            return started
        for event in started.events():
            report(event)
        return started.result()

    @spelled_out
    def estimate(
        self,
        model: str,
        config: Mapping[str, object] | str,
        *,
        hardware: str = "auto",
        memory_limit: str | int | None = None,
        advice: bool = True,
        **workload: Unpack[WorkloadKeywords],
    ) -> dict[str, Any]:
        """What a config needs and how fast it is, predicted: up to five minutes if nobody has asked before."""
        return dict(self._connection.ask("POST", "/v1/estimates", body=_in_body(_fields(locals()))))

    @spelled_out
    def recommend(
        self,
        model: str,
        *,
        hardware: str = "auto",
        memory_limit: str | int | None = None,
        method: str = "any",
        min_rank: int = 8,
        allow: str = "numerics",
        provenance: str = "measured",
        **workload: Unpack[WorkloadKeywords],
    ) -> dict[str, Any]:
        """The fastest config that fits. `provenance` is `measured`, `predicted`, or `any`: predicted only where nothing
        was measured."""
        return dict(self._connection.ask("GET", "/v1/recommendation", query=_in_query(_fields(locals()))))

    @spelled_out
    def frontier(
        self,
        model: str,
        *,
        hardware: str = "auto",
        memory_limit: str | int | None = None,
        method: str = "any",
        min_rank: int = 8,
        allow: str = "numerics",
        **workload: Unpack[WorkloadKeywords],
    ) -> dict[str, Any]:
        """The measured configs that no other of their method beats in both memory and speed."""
        return dict(self._connection.ask("GET", "/v1/frontier", query=_in_query(_fields(locals()))))

    def trials(
        self,
        *,
        model: str | None = None,
        seq_len: int | None = None,
        global_batch: int | None = None,
        lora_dropout: float | None = None,
        devices: int | None = None,
        seed: int | None = None,
        trainer: str | None = None,
        eval_batch: int | None = None,
        lengths: str | Path | Sequence[int] | None = None,
        hardware: str | None = None,
        outcome: str | None = None,
        limit: int = 100,
    ) -> Iterator[dict[str, Any]]:
        """Every stored trial that meets the given conditions, newest first; `limit` of them are asked for at a time."""
        query = _in_query(_fields(locals()))
        while True:
            page = self._connection.ask("GET", "/v1/trials", query=query)
            yield from page["trials"]
            if page["next"] is None:
                return
            query["before"] = page["next"]

    def models(self) -> list[dict[str, Any]]:
        """The models of the catalog."""
        return list(self._connection.ask("GET", "/v1/models"))

    def hardware(self) -> dict[str, Any]:
        """The catalog's `cards`, and what trials have run on: `measured`."""
        return dict(self._connection.ask("GET", "/v1/hardware"))

    def spaces(self, global_batch: int = 64) -> list[dict[str, Any]]:
        """The built-in search spaces, with their sizes at this many sequences per optimizer step."""
        return list(self._connection.ask("GET", "/v1/spaces", query={"global_batch": global_batch}))


def _fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A method's parameters as the server takes them, those that are None left out."""
    parameters = {**parameters, **parameters.get("workload", {})}
    fields = {name: value for name, value in parameters.items() if name not in NOT_SENT and value is not None}
    for name, unit in (("memory_limit", "B"), ("time_budget", "s")):
        if isinstance(fields.get(name), int | float):
            fields[name] = f"{fields[name]:.3f}".rstrip("0").rstrip(".") + unit
    if "trainer" in fields:
        fields["for"] = fields.pop("trainer")
    if isinstance(fields.get("config"), str):
        fields["config"] = {name: _value(value) for name, value in values_in(fields["config"]).items()}
    return fields


def _in_body(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as a request's body takes them: lengths summed up."""
    if lengths := Lengths.given(fields.get("lengths")):
        fields["lengths"] = {"tokens": list(lengths.tokens), "longest": lengths.longest}
    return fields


def _in_query(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as a query takes them: lengths as a workload states them."""
    if lengths := Lengths.given(fields.get("lengths")):
        lengths = lengths.cut(fields.get("seq_len", lengths.longest))
        fields |= {"lengths": ",".join(map(str, lengths.tokens)), "seq_len": lengths.longest}
    return fields


def _value(text: str) -> object:
    """The value that `text` spells; whether an axis has it is for the server to say."""
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdecimal() else text)
