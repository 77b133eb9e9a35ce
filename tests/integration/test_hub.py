"""Checkpoints by their names on a hub: the real library with a small hub on the loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub.constants
import pytest

from antiphon.errors import SourceError
from antiphon.importer.hub import find_checkpoint

pytestmark = pytest.mark.combinations

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": b"tensors",
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"tensors",
    "onnx/model.onnx": b"a graph",
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"raise SystemExit",
    "README.md": b"---\nlicense: mit\n---\n",
}
OLD_FILES = {"config.json": b"{}", "vocab.txt": b"a\n", "pytorch_model.bin": b"a pickle", "tf_model.h5": b"no"}
REPOSITORIES = {"someone/new": FILES, "someone/old": OLD_FILES, "someone/gated": FILES}


class Hub(BaseHTTPRequestHandler):
    """Part of a hub's interface that a download needs."""

    requests: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        Hub.requests.append(path)
        if path.startswith("/api/models/"):
            self._tell(path.removeprefix("/api/models/").split("/"))
        else:
            owner, name, _, _, file = path.strip("/").split("/", 4)
            self._give(f"{owner}/{name}", file)

    def _tell(self, parts: list[str]) -> None:
        name = "/".join(parts[:2])
        asked, revision = parts[2:4] if len(parts) > 3 else ("", "")
        if name not in REPOSITORIES:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("", "main", COMMIT):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif asked == "tree":
            files = REPOSITORIES[name].items()
            self._json([dict(type="file", path=path, size=len(held), oid=etag(held)) for path, held in files])
        else:
            self._json(dict(id=name, sha=COMMIT, siblings=[dict(rfilename=path) for path in REPOSITORIES[name]]))

    def _give(self, name: str, file: str) -> None:
        if name == "someone/gated":
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        held = REPOSITORIES[name][file]
        self._answer(200, held, {"ETag": f'"{etag(held)}"', "X-Repo-Commit": COMMIT})

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


def etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.requests.clear()
    yield server
    close(server)
    thread.join()


def close(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


def held(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_only_needed_files_are_downloaded(hub: ThreadingHTTPServer) -> None:
    wanted = {name: content for name, content in FILES.items() if not name.endswith((".bin", ".py", ".onnx"))}
    assert held(find_checkpoint("someone/new", None)) == wanted
    assert not any(path.endswith((".bin", ".py", ".onnx")) for path in Hub.requests)


def test_pytorch_weights_are_downloaded_when_there_are_no_others(hub: ThreadingHTTPServer) -> None:
    wanted = {name: content for name, content in OLD_FILES.items() if name != "tf_model.h5"}
    assert held(find_checkpoint("someone/old", "main")) == wanted


def test_cache_is_used_when_the_hub_does_not_answer(hub: ThreadingHTTPServer) -> None:
    first = find_checkpoint("someone/new", COMMIT)
    close(hub)
    assert find_checkpoint("someone/new", COMMIT) == first


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("someone/gated", None, "is gated: accept its terms"),
        ("someone/nobody", None, "no public checkpoint of that name"),
        ("someone/new", "v9", "has no revision v9"),
    ],
)
def test_refusal_of_a_hub_is_reported(hub: ThreadingHTTPServer, name: str, revision: str | None, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        find_checkpoint(name, revision)


def test_unreachable_hub_is_reported(hub: ThreadingHTTPServer) -> None:
    close(hub)
    with pytest.raises(SourceError, match=r"someone/new is not a local directory, .* the hub cannot be reached"):
        find_checkpoint("someone/new", None)
