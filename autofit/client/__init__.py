"""The client of the HTTP API: it needs the standard library alone, and loads nothing that trains or estimates."""

from autofit.client.client import Client
from autofit.client.search import RemoteSearch

__all__ = ["Client", "RemoteSearch"]
