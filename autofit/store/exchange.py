"""Trials as JSON lines, to carry them from one store to another; read strictly, as recorded tables are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, get_type_hints

from autofit import __version__
from autofit.core.document import reader
from autofit.core.errors import AutofitError, UsageError, unknown
from autofit.core.lattice import Config
from autofit.core.outcome import OUTCOMES, Fits, Outcome, Trial
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
    """The store as JSON lines, each with its newline: a header, then one trial per line, oldest first. Trials' numbers
    and searches are left out. Raises `StoreError`."""
    yield opening_line()
    for trial in store.stream():
        yield line_of(trial)


def opening_line() -> str:
    return to_text({"schema": SCHEMA, "autofit": __version__}) + "\n"


def line_of(trial: Trial) -> str:
    """A trial as a line of an export."""
    body = storable(trial).to_json()
    del body["trial_id"]
    return to_text(body) + "\n"


def import_lines(store: Store, lines: Iterable[str]) -> ImportReport:
    """Adds the trials of `lines` that the store does not hold yet, as far as a line that is bad (`Store.add_new`).
    Raises as `read_lines` does, and `StoreError`."""
    added, repeated = store.add_new(read_lines(lines))
    return ImportReport(added=added, repeated=repeated)


def read_lines(lines: Iterable[str]) -> Iterator[Trial]:
    """The trials of an export, one after another; blank lines are skipped. Raises `UsageError` with the number of a bad
    line and what is wrong with it."""
    read = read_values(
        lines,
        chain([_check_header], repeat(_trial)),
        lambda number, reason: UsageError(f"line {number} cannot be imported: {reason}"),
    )
    if next(read, None) is None:
        raise UsageError('there is nothing to import: the first line must be {"schema": 1, ...}')
    for _, trial in read:
        yield trial


def _check_header(body: dict[str, Any]) -> None:
    if "schema" not in body:
        raise ValueError('the first line must be {"schema": 1, ...}, as `autofit db export` writes it')
    if body["schema"] != SCHEMA:
        raise ValueError(f"its schema is {body['schema']!r}, this autofit {__version__} reads {SCHEMA}")


def _trial(body: dict[str, Any]) -> Trial:
    """The trial on one line, each field checked to be of its declared type; raises `ValueError` or `UsageError`."""
    values = {key: value for key, value in body.items() if key != "trial_id"}
    trial_fields = [field for field in fields(Trial) if field.name not in ("config", "outcome")]
    outcome = outcome_of(
        {key: values[key] for key in values.keys() - {"config", *(field.name for field in trial_fields)}}
    )
    of = get_type_hints(Trial)
    present = [field.name for field in trial_fields if field.name in values or field.default is MISSING]
    others = {name: checked(of[name], values, name) for name in present}
    trial = Trial(config=config_of(values), outcome=outcome, **others)
    by_autofit = trial.workload.program is None
    if by_autofit and isinstance(trial.outcome, Fits) and not trial.outcome.measurement.losses:
        raise ValueError("measurement.losses is empty: a trial that fits has a loss for every step")
    trial_values(trial)
    return trial


def read_values(
    lines: Iterable[str], readers: Iterable[Callable[[dict[str, Any]], Any]], wrong: Callable[[int, str], UsageError]
) -> Iterator[tuple[int, Any]]:
    """Each line's number, and what the next of `readers` makes of its JSON object; blank lines are skipped. Raises what
    `wrong` makes of a line's number and the reason, where its reader raises `ValueError` or `AutofitError`."""
    remaining_readers = iter(readers)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line, parse_constant=_no_constant)
            if not isinstance(body, dict):
                raise ValueError("not a JSON object")
            value = next(remaining_readers)(body)
        except json.JSONDecodeError as error:
            raise wrong(number, f"not JSON: {error}") from None
        except (ValueError, AutofitError) as error:
            raise wrong(number, str(error)) from None
        except RecursionError:
            raise wrong(number, "it is nested too deeply") from None
        yield number, value


def config_of(body: dict[str, Any]) -> Config:
    """The field `config`. Raises `ValueError`."""
    values = checked(dict[str, Any], body, "config")
    for name, value in values.items():
        if not isinstance(value, str | int):
            raise ValueError(f"config.{name} is {value!r}: not a name, a whole number, true or false")
    return Config.of(values)


def outcome_of(body: dict[str, Any]) -> Outcome:
    """The outcome whose fields `body` has, and no others. Raises `ValueError` or `UsageError`."""
    outcome = body.get("outcome")
    if not isinstance(outcome, str) or outcome not in OUTCOMES:
        raise unknown("outcome", outcome, OUTCOMES)
    kind = OUTCOMES[outcome]
    evidence = {name: value for name, value in body.items() if name != "outcome"}
    for name in evidence.keys() - {field.name for field in fields(kind)}:
        raise ValueError(f"{name!r} is not a field of a trial that ends with {outcome}")
    parsed: Outcome = checked(kind, {"": evidence}, "")
    return parsed


def checked(kind: Any, body: dict[str, Any], name: str) -> Any:
    """The field as a value of `kind`, with JSON types checked strictly. Raises `ValueError`, naming the place, also for
    a key that no field holds."""
    if name not in body:
        raise ValueError(f"{name} is missing")
    from pydantic import ValidationError

    try:
        value = _adapter(kind).validate_json(to_text(body[name]), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (name, *first["loc"]) if part != "")
        raise ValueError(f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    if isinstance(kind, type) and is_dataclass(kind):
        for field in body[name].keys() - {field.name for field in fields(kind)}:
            raise ValueError(f"{name}: {kind.__name__} has no field {field!r}")
    try:
        if (read := reader(kind)) is not None:
            read(body[name])  # the types are right by now; this rejects keys that no field would hold
    except TypeError as error:
        message = str(error).replace(".__init__() got an unexpected keyword argument", " has no field")
        raise ValueError(message) from None
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # slow to load, and needed only where lines are read

    return TypeAdapter(kind)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
