"""Commands for the tokens by which others may ask the server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json

Name = Annotated[str, typer.Argument(help="Who uses it.")]

group = typer.Typer(help="Tokens for the HTTP server.", no_args_is_help=True, rich_markup_mode=None)


@group.command()
def create(
    name: Name,
    scope: Annotated[str, typer.Option("--scope", help="read, run or admin.")] = "read",
    store: options.Store = None,
) -> None:
    """Make a token and print it: it is shown this once, and only its digest is kept.

    \b
    Examples:
      autofit token create ann --scope run
      autofit token create dashboard --store postgresql://autofit@db/autofit

    read: ask for recommendations, frontiers, trials and estimates. run: also start searches, and cancel those that it
    has asked for. admin: also cancel any search, and read the audit.
    """
    from autofit.store import Store

    with Store.open(store) as opened:
        secret = opened.access.create(name, scope)
    print(f"token {name}, scope {scope}: keep it, for it is not shown again", file=sys.stderr)
    print(secret)


@group.command("list")
def list_(store: options.Store = None, as_json: options.Json = False) -> None:
    """List the tokens, without what they are.

    \b
    Examples:
      autofit token list
      autofit token list --json
    """
    from autofit.store import Store

    with Store.open(store, create=False) as opened:
        tokens = opened.access.tokens()
    if as_json:
        print_json([token.to_json() for token in tokens])
        return
    rows = [("token", "scope", "created", "revoked")]
    rows += [(t.name, t.scope, t.created_at[:10], (t.revoked_at or "-")[:10]) for t in tokens]
    print(columns(rows))


@group.command()
def revoke(name: Name, store: options.Store = None) -> None:
    """Make a token invalid, from the next request on.

    \b
    Examples:
      autofit token revoke ann
    """
    from autofit.store import Store

    with Store.open(store, create=False) as opened:
        opened.access.revoke(name)
    print(f"token {name} is revoked")
