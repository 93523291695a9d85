"""Trials as JSON lines, to carry them from one store to another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from autofit import __version__
from autofit.core.errors import UsageError, unknown
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Outcome, Trial
from autofit.store.database.engine import to_text
from autofit.store.rows import storable, trial_values
from autofit.store.store import Store

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA = 1
"""Format version of the lines, given in the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import did."""

    added: int
    """Trials that were not in the store."""
    repeated: int
    """Trials that were there already, with the same time and outcome."""


def export_lines(store: Store) -> Iterator[str]:
    """The store as JSON lines, each with its newline: a header, then one trial per line, oldest first.

    The trials' numbers are left out, because another store assigns its own; searches are not exported.
    Raises `StoreError`.
    """
    yield opening_line()
    for trial in store.stream():
        yield line_of(trial)


def opening_line() -> str:
    """The first line of an export."""
    return to_text({"schema": SCHEMA, "autofit": __version__}) + "\n"


def line_of(trial: Trial) -> str:
    """A trial as a line of an export."""
    body = storable(trial).to_json()
    del body["trial_id"]
    return to_text(body) + "\n"


def import_lines(store: Store, lines: Iterable[str]) -> ImportReport:
    """Adds the trials of `lines` that the store does not hold yet, as far as a line that is bad (`Store.add_new`):
    who mends that one may import all of them again.

    Blank lines are skipped. Raises `UsageError` with the number of a bad line and what is wrong with it,
    and `StoreError`.
    """
    added, repeated = store.add_new(read_lines(lines))
    return ImportReport(added=added, repeated=repeated)


def read_lines(lines: Iterable[str]) -> Iterator[Trial]:
    """The trials of an export, one after another; blank lines are skipped.

    Raises `UsageError` with the number of a bad line and what is wrong with it.
    """
    begun = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line, parse_constant=_no_constant)
            if not isinstance(body, dict):
                raise ValueError("it is not a JSON object")
            if begun:
                yield _trial(body)
            else:
                _check_header(body)
        except (ValueError, UsageError) as error:
            raise UsageError(f"line {number} cannot be imported: {error}") from None
        except RecursionError:
            raise UsageError(f"line {number} cannot be imported: it is nested too deeply") from None
        begun = True
    if not begun:
        raise UsageError('there is nothing to import: the first line must be {"schema": 1, ...}')


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_header(body: dict[str, Any]) -> None:
    if "schema" not in body:
        raise ValueError('the first line must be {"schema": 1, ...}, as `autofit db export` writes it')
    if body["schema"] != SCHEMA:
        raise ValueError(f"its schema is {body['schema']!r}, this autofit {__version__} reads {SCHEMA}")


def _trial(body: dict[str, Any]) -> Trial:
    """The trial on one line, each field checked to be of its declared type; raises `ValueError` or `UsageError`."""
    given = {key: value for key, value in body.items() if key != "trial_id"}
    kinds: dict[str, type[Any]] = {kind.kind: kind for kind in get_args(Outcome)}
    outcome = given.get("outcome")
    if not isinstance(outcome, str) or outcome not in kinds:
        raise unknown("outcome", outcome, kinds)
    of = get_type_hints(Trial)
    present = [field.name for field in fields(Trial) if field.name in given or field.default is MISSING]
    others = [name for name in present if name not in ("config", "outcome")]
    trial = Trial(
        config=_config(given),
        outcome=_checked(kinds[outcome], {"": given}, ""),
        **{name: _checked(of[name], given, name) for name in others},
    )
    own = {field.name for value in (trial, trial.outcome) for field in fields(value)}
    for name in given.keys() - own:
        raise ValueError(f"{name!r} is not a field of a trial that ends with {outcome}")
    try:
        # The types are right by now; this rejects keys that no field would hold.
        Trial.from_json(given)
    except TypeError as error:
        said = str(error).replace(".__init__() got an unexpected keyword argument", " has no field")
        raise ValueError(said) from None
    by_autofit = trial.workload.program is None
    if by_autofit and isinstance(trial.outcome, Fits) and not trial.outcome.measurement.losses:
        raise ValueError("measurement.losses is empty: a trial that fits has a loss for every step")
    trial_values(trial)
    return trial


def _config(given: dict[str, Any]) -> Config:
    values = _checked(dict[str, Any], given, "config")
    for name, value in values.items():
        if not isinstance(value, str | int):
            raise ValueError(f"config.{name} is {value!r}: not a name, a whole number, true or false")
    return Config.of(values)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # slow to load, and needed only where trials are imported

    return TypeAdapter(kind)


def _checked(kind: Any, given: dict[str, Any], name: str) -> Any:
    """The field as a value of `kind`, with JSON types checked strictly; raises `ValueError`, naming the place."""
    if name not in given:
        raise ValueError(f"{name} is missing")
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(to_text(given[name]), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (name, *first["loc"]) if part != "")
        raise ValueError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
