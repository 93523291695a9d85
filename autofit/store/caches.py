"""What can be had again at the price of time: estimates and probes. Their tables may be emptied at any time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, select

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import PROBE_VERSION, Probe, ProbePart, shapes_key
from autofit.store.database.engine import ROWS_AT_ONCE, Database, to_text
from autofit.store.rows import precise_now, put
from autofit.store.tables import Body, EstimateRow, ProbeRow


class Estimates:
    """Estimates by keys that cover everything they depend on, each as the JSON object that was kept."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, keys: Iterable[str]) -> dict[str, Body]:
        unique_keys = list(dict.fromkeys(keys))

        def work(connection: Connection) -> dict[str, Body]:
            estimates: dict[str, Body] = {}
            for start in range(0, len(unique_keys), ROWS_AT_ONCE):
                part = EstimateRow.key.in_(unique_keys[start : start + ROWS_AT_ONCE])
                for key, body in connection.execute(select(EstimateRow.key, EstimateRow.estimate).where(part)):
                    estimates[key] = body
            return estimates

        return self._database.fetch(work)

    def keep(self, estimates: Mapping[str, Mapping[str, Any]]) -> None:
        """Keeps estimates by key, in place of those that have the same keys; raises `ValueError` if one holds NaN or
        infinity."""
        bodies = {key: dict(body) for key, body in estimates.items()}
        to_text(list(bodies.values()))
        recorded_at = precise_now()
        # In the same order for every writer, so that no two deadlock.
        rows = [{"key": key, "estimate": bodies[key], "recorded_at": recorded_at} for key in sorted(bodies)]
        if rows:
            self._database.commit(lambda c: put(c, EstimateRow, rows))


class Probes:
    """The measured rates of devices, one probe for each hardware, stack and model's shapes: the newest. And links
    between machines, for each hardware, stack and way to spread ranks over machines: of no model, and so apart."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, *, hardware_key: str, stack_key: str, shapes_key: str | None = None) -> Probe | None:
        """The probe of this hardware and stack for models of these shapes or, if there is none, the latest whatever its
        shapes. None of another `PROBE_VERSION`."""
        query = select(ProbeRow.body).where(ProbeRow.hardware_key == hardware_key, ProbeRow.stack_key == stack_key)
        newest_first = query.order_by(ProbeRow.recorded_at.desc())
        bodies = self._database.fetch(lambda c: c.scalars(newest_first).all())
        latest = [body for body in bodies if body.get("version") == PROBE_VERSION]
        best = next((body for body in latest if body["shapes_key"] == shapes_key), next(iter(latest), None))
        return None if best is None else Probe.from_json(best)

    def keep(self, probe: Probe) -> None:
        """Keeps a probe in place of one of the same keys; raises `ValueError` if it holds NaN or infinity."""
        self._put(probe.hardware, probe.stack, probe.shapes_key, probe.to_json(), probe.recorded_at)

    def find_link(self, name: str, *, hardware_key: str, stack_key: str) -> ProbePart | None:
        """The part of this name (`core.device.probe.between`). None of another `PROBE_VERSION`."""
        query = select(ProbeRow.body).where(
            ProbeRow.hardware_key == hardware_key,
            ProbeRow.stack_key == stack_key,
            ProbeRow.shapes_key == shapes_key(name),
        )
        body = self._database.fetch(lambda c: c.scalars(query).one_or_none())
        return None if body is None else ProbePart.from_json(body)

    def keep_link(self, link: ProbePart, hardware: Hardware, stack: Stack) -> None:
        """Keeps a link in place of one of the same keys. It has no version of its own, so that `find` passes it by."""
        self._put(hardware, stack, shapes_key(link.name), link.to_json(), precise_now())

    def _put(self, hardware: Hardware, stack: Stack, shapes: str, body: Body, recorded_at: str) -> None:
        to_text(body)
        keys = {"hardware_key": hardware.key, "stack_key": stack.key, "shapes_key": shapes}
        self._database.commit(lambda c: put(c, ProbeRow, [{**keys, "body": body, "recorded_at": recorded_at}]))
