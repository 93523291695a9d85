"""Who may ask over HTTP, and what they have started."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, insert, select, update

from autofit.core.document import Document
from autofit.core.errors import UsageError, unknown
from autofit.store.database.engine import Database
from autofit.store.rows import check_text, precise_now
from autofit.store.tables import AuditRow, TokenRow

SCOPES = {
    "read": "ask for recommendations, frontiers, trials and estimates",
    "run": "also start searches, and cancel those that it has asked for",
    "admin": "also cancel any search, and read the audit",
}
"""What a token allows; each scope includes those before it."""
OPERATOR = "operator"
"""The name under which the token of the server's own environment is audited; no other token may have it."""
PREFIX = "autofit_"
"""What every token begins with, so that scanners for leaked secrets can know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token(Document):
    """A token, without its secret."""

    name: str
    scope: str
    """One of `SCOPES`."""
    created_at: str
    """ISO 8601 in UTC."""
    revoked_at: str | None = None
    """None while it is valid."""

    def allows(self, scope: str) -> bool:
        """Whether it may do what needs `scope`."""
        order = list(SCOPES)
        return order.index(self.scope) >= order.index(scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Document):
    """Something that was started or ended over HTTP, or a refused attempt to end it."""

    number: int
    """Its place among all that is audited."""
    at: str
    """ISO 8601 in UTC."""
    token: str
    """The name of the token that was used."""
    action: Literal["search", "cancel", "refused"]
    """`refused`: the token would have cancelled a search that it had not asked for."""
    search_id: str


class Access:
    """The tokens of a store, and what was done with them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scope: str) -> str:
        """Makes a token and returns it: only its digest is kept. Raises `UsageError` for an unknown scope, and for a
        name that a token has or had."""
        if scope not in SCOPES:
            raise unknown("scope", scope, SCOPES)
        if not name.strip() or name == OPERATOR:
            raise UsageError(f"a token cannot be called {name!r}: name who will use it")
        try:
            check_text(name, "the token's name")
        except ValueError as error:
            raise UsageError(str(error)) from None
        secret = PREFIX + secrets.token_urlsafe(32)

        def work(connection: Connection) -> None:
            row = connection.execute(select(TokenRow.digest).where(TokenRow.name == name)).one_or_none()
            if row is not None and row.digest == _digest(secret):
                return  # the connection was lost while it was committed
            if row is not None:
                raise UsageError(f"there is, or was, a token called {name!r}: take another name")
            values = {"name": name, "scope": scope, "digest": _digest(secret), "created_at": precise_now()}
            connection.execute(insert(TokenRow).values(values))

        self._database.commit(work)
        return secret

    def tokens(self) -> list[Token]:
        """Every token, the oldest first, revoked ones included."""
        rows = self._database.fetch(lambda c: c.execute(_TOKENS.order_by(TokenRow.created_at, TokenRow.name)).all())
        return [Token(**row._asdict()) for row in rows]

    def revoke(self, name: str) -> None:
        """Makes a token invalid from the next request on. Raises `UsageError` if there is none of that name."""

        def work(connection: Connection) -> None:
            names = connection.scalars(select(TokenRow.name)).all()
            if name not in names:
                raise unknown("token", name, names)
            valid = TokenRow.name == name, TokenRow.revoked_at.is_(None)
            connection.execute(update(TokenRow).where(*valid).values(revoked_at=precise_now()))

        self._database.commit(work)

    def bearer(self, secret: str) -> Token | None:
        """The valid token that this is, or None."""
        if not secret.startswith(PREFIX):
            return None
        valid = _TOKENS.where(TokenRow.digest == _digest(secret), TokenRow.revoked_at.is_(None))
        row = self._database.fetch(lambda c: c.execute(valid).one_or_none())
        return None if row is None else Token(**row._asdict())

    def any_valid(self) -> bool:
        valid = select(TokenRow.name).where(TokenRow.revoked_at.is_(None)).limit(1)
        return self._database.fetch(lambda c: c.scalar(valid)) is not None

    def audit(self, *, limit: int = 100, before: int | None = None) -> list[Audited]:
        """The latest that was started or ended, newest first; of numbers below `before`, if that is given."""
        columns = AuditRow.id.label("number"), AuditRow.at, AuditRow.token, AuditRow.action, AuditRow.search_id
        newest = select(*columns).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            newest = newest.where(AuditRow.id < before)
        return [Audited(**row._asdict()) for row in self._database.fetch(lambda c: c.execute(newest).all())]

    def note_refusal(self, token: str, search_id: str) -> None:
        """Writes down that this token would have cancelled a search that it had not asked for."""
        self._database.commit(lambda c: add_audit(c, token, "refused", search_id))

    def has_asked(self, token: str, search_id: str) -> bool:
        """Whether this token has asked for this search, whatever it has done since."""
        asked = AuditRow.search_id == search_id, AuditRow.token == token, AuditRow.action == "search"
        return self._database.fetch(lambda c: c.scalar(select(AuditRow.id).where(*asked).limit(1))) is not None


def askers(connection: Connection, search_id: str) -> set[str]:
    """The names of the tokens that have asked for a search, and have not cancelled it since; without revoked ones."""
    asked = {token for token, action in _last_actions(connection, search_id).items() if action == "search"}
    return asked.difference(connection.scalars(select(TokenRow.name).where(TokenRow.revoked_at.is_not(None))))


def add_audit(connection: Connection, token: str | None, action: str, search_id: str) -> None:
    """Writes down who has done what, in the transaction that does it; nothing if `token` is None, or if it was this
    token's last action already."""
    if token is not None and _last_actions(connection, search_id).get(token) != action:
        connection.execute(insert(AuditRow).values(at=precise_now(), token=token, action=action, search_id=search_id))


def _last_actions(connection: Connection, search_id: str) -> dict[str, str]:
    """By the names of tokens, what each has done last to a search."""
    rows = select(AuditRow.token, AuditRow.action).where(AuditRow.search_id == search_id).order_by(AuditRow.id)
    return {token: action for token, action in connection.execute(rows)}


_TOKENS = select(TokenRow.name, TokenRow.scope, TokenRow.created_at, TokenRow.revoked_at)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
