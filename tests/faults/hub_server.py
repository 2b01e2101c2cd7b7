"""A small server on 127.0.0.1 that speaks the hub's layout, with faults to order. Used through HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """One repository, ``tiny/model``, and ``more`` by name, with one commit that is also the branch ``main``.

    ``status``      answer everything (or, with ``only``, requests whose path contains it) with this HTTP status
    ``error_code``  X-Error-Code of that answer: RepoNotFound, RevisionNotFound, GatedRepo
    ``cut``         bytes of each large body to send before the connection is closed, once (``cut_always``: each time)
    ``stall``       send half of each large body, then wait for ``released``
    """

    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    status: int | None = None
    only: str = ""
    error_code: str = ""
    cut: int | None = None
    cut_always: bool = False
    stall: bool = False
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    sent: int = 0  # bytes of files
    more: dict[str, dict[str, bytes]] = field(default_factory=dict)
    url: str = ""

    repo = "tiny/model"
    large = 100_000  # bodies from this size on are the ones that faults hit


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        path = path.replace("/api/datasets/", "/api/models/").removeprefix("/datasets")  # laid out as models are
        if hub.status is not None and hub.only in path:
            return self._fail(hub.status, hub.error_code)
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        inside = hub.files if repo == hub.repo else hub.more.get(repo)
        if inside is None:
            return self._fail(404, "RepoNotFound")
        api, files = f"/api/models/{repo}", f"/{repo}/resolve/"
        revisions = ("main", hub.commit)
        if path == api or path.startswith(f"{api}/revision/"):
            if path != api and path.rsplit("/", 1)[1] not in revisions:
                return self._fail(404, "RevisionNotFound")
            siblings = [{"rfilename": n, "size": len(b), "blobId": _oid(b)} for n, b in inside.items()]
            return self._json({"id": repo, "sha": hub.commit, "siblings": siblings, "private": False})
        if path.startswith(f"{api}/tree/"):
            tree = [{"type": "file", "path": n, "size": len(b), "oid": _oid(b)} for n, b in inside.items()]
            return self._json(tree)
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            if revision not in revisions:
                return self._fail(404, "RevisionNotFound")
            if name not in inside:
                return self._fail(404, "EntryNotFound")
            return self._file(inside[name], body)
        self._fail(404, "RepoNotFound")

    def _file(self, content: bytes, body: bool) -> None:
        hub, first, last = self.hub, 0, len(content) - 1
        wanted = self.headers.get("Range", "")
        if wanted and body:
            hub.ranges.append(wanted)
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(last, int(end)) if end else last
        part = content[first : last + 1]
        self.send_response(206 if len(part) < len(content) else 200)
        if len(part) < len(content):
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if not body:
            return
        hub.sent += len(part)
        if len(content) >= hub.large and hub.cut is not None:
            self.wfile.write(part[: hub.cut])
            self.close_connection = True
            if hub.cut_always:
                hub.cut = 0  # and nothing more, however often the client asks
            else:
                hub.cut = None
            return
        if len(content) >= hub.large and hub.stall:
            self.wfile.write(part[: len(part) // 2])
            self.wfile.flush()
            hub.stalled.set()
            hub.released.wait(30)
            return
        self.wfile.write(part)

    def _json(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
