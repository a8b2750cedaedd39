"""A hub of Hugging Face on this machine: the few routes that its library asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
TOKEN = "hf_right"


@dataclass
class FakeHub:
    """
    Attributes:
        files: of each repository, by its name.
        gated: repositories that need `TOKEN`.
        asked: paths of requests, but for one that the library sends once a day of its own accord.
        held: called with a file's name before its contents are sent; they wait for it.
    """

    files: Mapping[str, Mapping[str, bytes]]
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    held: Callable[[str], None] = lambda name: None
    url: str = ""


@contextmanager
def fake_hub(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub(files)

    class Routes(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if path != "/api/agent-harnesses":
                hub.asked.append(path)
            parts = path.removeprefix("/api/models").strip("/").split("/")
            repository = "/".join(parts[:2])
            has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if repository not in hub.files:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
            elif repository in hub.gated and not has_token:
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            elif path.startswith("/api/") and parts[2:3] == ["revision"]:
                self._info(repository, "/".join(parts[3:]), with_body)
            elif path.startswith("/api/") and parts[2:3] == ["tree"]:
                self._json(list(_tree(hub.files[repository])), with_body)
            elif path.startswith("/api/"):
                self._info(repository, "main", with_body)
            else:
                self._file(hub.files[repository], "/".join(parts[4:]), with_body)

        def _info(self, repository: str, revision: str, with_body: bool) -> None:
            if revision not in ("main", "v1", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
                return
            siblings = [
                {"rfilename": name, "size": len(raw)} for name, raw in hub.files[repository].items()
            ]
            self._json({"id": repository, "sha": COMMIT, "siblings": siblings}, with_body)

        def _file(self, files: Mapping[str, bytes], name: str, with_body: bool) -> None:
            if name not in files:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"}, with_body)
                return
            tag = hashlib.sha256(files[name]).hexdigest()
            headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
            if name.endswith(".safetensors"):  # large files are offered over Xet as well
                headers |= {"X-Xet-Hash": tag, "X-Xet-Refresh-Route": f"{hub.url}/xet"}
            if with_body:
                hub.held(name)
            self._send(200, files[name], headers, with_body)

        def _json(self, said: Any, with_body: bool) -> None:
            self._send(200, json.dumps(said).encode(), {}, with_body)

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _tree(files: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    for name, raw in files.items():
        oid = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
        yield {"type": "file", "path": name, "size": len(raw), "oid": oid}
