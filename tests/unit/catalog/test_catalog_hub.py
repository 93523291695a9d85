"""Hub ids, asked of a small server that answers as the hub does; and what is said when there is no answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
).encode()
REFUSALS = {
    "none": (404, "RepoNotFound"),
    "bare": (404, "EntryNotFound"),
    "gated": (403, "GatedRepo"),
    "Llama-3.1-8B": (403, "GatedRepo"),
}
NOWHERE = "http://127.0.0.1:9"
"""A port that nothing listens on."""

PROGRAM = """
import json, sys
from autofit.catalog.models import load
from autofit.core.errors import AutofitError
for name in sys.argv[1:]:
    try:
        model = load(name)
        print(json.dumps({"name": model.name, "source": model.source, "digest": model.digest}))
    except AutofitError as error:
        print(json.dumps({"kind": type(error).__name__, "message": str(error)}))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers for `acme/tiny` with a config, for the names of `REFUSALS` with the hub's error headers."""

    def do_HEAD(self) -> None:
        status, reason = REFUSALS.get(self.path.split("/")[2], (200, ""))
        self.send_response(status)
        if reason:
            self.send_header("X-Error-Code", reason)
        else:
            self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
            self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        self.send_header("Content-Length", str(len(CONFIG) if status == 200 else 0))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(CONFIG)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def loaded(names: list[str], endpoint: str, home: Path) -> list[dict[str, str]]:
    """What `load` makes of each name, in a process for which the hub is at `endpoint`: it is read at import."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_id_becomes_a_model_and_is_kept_for_when_the_hub_is_away(endpoint: str, tmp_path: Path) -> None:
    fresh = loaded(["acme/tiny"], endpoint, tmp_path)
    assert fresh[0]["name"] == "acme/tiny"
    assert fresh[0]["source"] == "acme/tiny, config.json"
    assert loaded(["acme/tiny"], NOWHERE, tmp_path) == fresh


def test_what_the_hub_refuses_is_said(endpoint: str, tmp_path: Path) -> None:
    ids = ["acme/none", "acme/bare", "acme/gated", "a b/c", "meta-llama/Llama-3.1-8B"]
    none, bare, gated, malformed, catalogued = loaded(ids, endpoint, tmp_path)
    assert none == {"kind": "UsageError", "message": "the hub has no model 'acme/none', or it is private"}
    assert bare == {"kind": "UsageError", "message": "acme/bare has no config.json on the hub"}
    assert gated["kind"] == "EnvironmentLacks" and "hf auth login" in gated["message"]
    assert malformed["kind"] == "UsageError"
    assert catalogued["name"] == "llama-3.1-8b"


def test_an_unreachable_hub_is_what_the_environment_lacks(tmp_path: Path) -> None:
    asked = ["acme/tiny", "Qwen/Qwen3-8B", "google/gemma-3-12b-it", "acme/my-qwen3-8b", "acme/qwen3"]
    asked += ["deepseek-ai/DeepSeek-R1-Distill-Llama-8B"]
    unknown, catalogued, of_no_such_size, alike, of_any_size, of_a_family = loaded(asked, NOWHERE, tmp_path)
    assert unknown["kind"] == "EnvironmentLacks"
    assert "cannot be reached for the config.json of acme/tiny" in unknown["message"]
    assert "\n" not in unknown["message"]
    assert catalogued["name"] == "qwen3-8b"
    assert "--model qwen3-8b" in alike["message"]
    assert "--model llama-3.1-8b" in of_a_family["message"]
    assert all("--model" not in other["message"] for other in (unknown, of_no_such_size, of_any_size))
