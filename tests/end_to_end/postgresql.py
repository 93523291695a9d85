"""A PostgreSQL server of a test's own, which can be restarted."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from unittest.mock import patch


class Database:
    """One server; `url` names its only database."""

    def __init__(self) -> None:
        # Not in pytest's own folder: started by root, the server runs as another user, whom any later pytest locks out.
        self._folder = tempfile.mkdtemp(prefix="autofit-postgresql-")
        self._begin()

    def _begin(self) -> None:
        with warnings.catch_warnings(), patch.dict(os.environ):
            warnings.simplefilter("ignore")  # of a runtime folder that containers do not have
            os.environ.pop("AUTOFIT_TEST_FOLDER", None)  # its processes are none of the service's
            from pgserver.postgres_server import get_server

            self._server = get_server(self._folder)
        self.url = str(self._server.get_uri())

    def restart(self) -> None:
        """End it, with all its connections, and start it again."""
        self._server.cleanup()
        time.sleep(1)  # those who ask meanwhile meet no server
        self._begin()

    def end(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)
