"""The measured rates of devices, one probe for each hardware, stack and model's shapes: the newest."""

from __future__ import annotations

from sqlalchemy import select

from autofit.core.device.probe import PROBE_VERSION, Probe
from autofit.store.database.engine import Database, to_text
from autofit.store.rows import put
from autofit.store.tables import ProbeRow


class Probes:
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
        body = probe.to_json()
        to_text(body)
        row = {
            "hardware_key": probe.hardware.key,
            "stack_key": probe.stack.key,
            "shapes_key": probe.shapes_key,
            "body": body,
            "recorded_at": probe.recorded_at,
        }
        self._database.commit(lambda c: put(c, ProbeRow, [row]))
