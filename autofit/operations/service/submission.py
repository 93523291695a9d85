"""What a search was asked for, as the store keeps it: a request that any runner can read, and its digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from autofit.catalog.hardware import card, card_of, matching_cards
from autofit.core.device.hardware import EMULATED
from autofit.core.errors import UsageError, unknown
from autofit.core.lengths import Lengths
from autofit.core.units import format_bytes
from autofit.core.workload import Goal, Workload, digest
from autofit.planning.requests import SearchRequest, WorkloadOptions
from autofit.store import Store

_PLAIN = (
    *("space", "hardware", "memory_limit_bytes", "max_trials", "time_budget_seconds"),
    *("fresh", "thorough", "predict"),
)
"""Options of a search that mean the same wherever it is driven."""


def to_json(request: SearchRequest) -> dict[str, Any]:
    """The request as a flat JSON object, without what its driver decides. Raises `UsageError` for a user's command."""
    goal = {"method": request.goal.method, "min_rank": request.goal.min_rank, "allow": request.goal.allow.label}
    workload = asdict(request.workload)
    if workload["program"] is not None:
        raise UsageError("a command is run by who gives it: --command has no part in searches that others drive")
    # Options without a value go without saying, as in a workload's own document.
    workload = {name: value for name, value in workload.items() if value is not None}
    return {**workload, **goal, **{name: getattr(request, name) for name in _PLAIN}}


def from_json(document: Mapping[str, Any], **driven: Any) -> SearchRequest:
    """The inverse of `to_json`. Never with a command: whoever may write to a store could run anything."""
    names = [field.name for field in fields(WorkloadOptions) if field.name != "program"]
    named = {name: document[name] for name in names if name in document}
    if isinstance(lengths := named.get("lengths"), Mapping):
        named["lengths"] = Lengths(tuple(lengths["tokens"]), lengths["longest"])
    return SearchRequest(
        workload=WorkloadOptions(**named),
        goal=Goal.of(document["method"], document["min_rank"], document["allow"]),
        **{name: document[name] for name in _PLAIN if name in document},  # an older version may have queued it
        **driven,
    )


def digest_of(request: SearchRequest, workload: Workload, hardware: str) -> str:
    """Equal for searches that ask the same on the same hardware, whoever drives them."""
    plain = replace(request, workload=replace(request.workload, program=None))  # the workload says which
    question = {**to_json(plain), **workload.to_json(), "hardware": hardware}
    if request.space is not None and Path(request.space).is_file():
        question["space"] = Path(request.space).read_text(encoding="utf-8")
    return digest(question)


def hardware_for(name: str | None, store: Store) -> str:
    """The hardware that a search is meant for: a card of the catalog, or what the store or a runner knows by this name;
    for None the only one known. Raises `UsageError`."""
    names = store.queue.hardware_names()
    if name is None or name.lower() == "auto":
        if len(names) == 1 and not names[0].startswith(EMULATED):
            return names[0]
        raise UsageError(f"name the hardware: {', '.join(names) or 'no runner has told of any yet'}")
    if "," in name:
        raise UsageError(f"a search is of one kind of hardware, and not of {name!r}: ask for one on each")
    if name.lower() in names:
        known = None if name.lower().startswith(EMULATED) else card_of(name.lower())
        return name.lower() if known is None else known.name  # at whatever power limit
    if matching_cards(name):
        return card(name).name
    raise unknown("hardware", name, names)


def check_limit(limit_bytes: int | None, hardware: str) -> None:
    """Raises `UsageError` for a limit above the memory of the catalog's card: whoever drives it would refuse it."""
    found = matching_cards(hardware)
    if limit_bytes is not None and len(found) == 1 and limit_bytes > found[0].memory_bytes:
        memory = f"{format_bytes(found[0].memory_bytes)} of {found[0].name}"
        raise UsageError(f"memory-limit {format_bytes(limit_bytes)} is more than the {memory}")


def submit(request: SearchRequest, store: Store, *, key: str | None = None, by: str | None = None) -> str:
    """Queue a search for a runner, and return its id: that of one under way which asks the same, or had the same `key`.

    `by` names the token that asks, for the audit. Raises `UsageError` for what no runner could search.
    """
    hardware = hardware_for(request.hardware, store)
    check_limit(request.memory_limit_bytes, hardware)
    _, workload = request.workload.resolve()
    return store.queue.submit(
        digest=digest_of(request, workload, hardware),
        workload=workload,
        request={"asked": {**to_json(request), "hardware": hardware}},
        hardware_name=hardware,
        key=key,
        by=by,
        campaign_id=request.campaign_id,
    )
