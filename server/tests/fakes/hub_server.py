"""A fake model hub over HTTP, with the part of the API that downloads need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository, `someone/tiny`, and the requests for its files."""

    files: dict[str, bytes]
    url: str = ""
    token: str | None = None  # requests without it are refused
    gated: bool = False  # the files are gated, their list is not
    break_after: dict[str, int] = field(default_factory=dict)  # file → bytes after which its connection breaks once
    status: int = 200  # any other status is the reply to every request
    failures: dict[str, list[int]] = field(default_factory=dict)  # file, or "api" → statuses of the next replies
    holds: dict[str, threading.Event] = field(default_factory=dict)  # file → half of it is sent before the event is set
    gets: list[tuple[str, str | None]] = field(default_factory=list)  # (file, requested range)
    xet: set[str] = field(default_factory=set)  # files that are in Xet storage

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that asks this hub. On a busy machine an answer may take long."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DOWNLOAD_TIMEOUT": "240", "HF_HUB_ETAG_TIMEOUT": "240"}


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            if hub.status != 200:
                return self.answer(b"{}", hub.status)
            if hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
                return self.answer(b"{}", 401, {"X-Error-Code": "RepoNotFound"})
            parts = path.strip("/").split("/", 5)
            name = "api" if parts[0] == "api" else "/".join(path.strip("/").split("/")[4:])
            if (name == "api" or self.is_get) and (statuses := hub.failures.get(name)):
                return self.answer(b"{}", statuses.pop(0), {"Retry-After": "0"})
            if parts[:2] == ["api", "models"]:
                return self.describe(parts[2:])
            if parts[:2] == ["someone", "tiny"] and parts[2] == "resolve":
                return self.give(name)
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

        def describe(self, parts: list[str]) -> None:
            if parts[:2] != ["someone", "tiny"]:
                return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            if len(parts) > 3 and parts[3].split("/")[0] not in ("main", SHA):
                return self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
            if len(parts) > 2 and parts[2] == "tree":
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files.items()
                ]
                return self.answer(json.dumps(entries).encode())
            siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
            info = {"id": "someone/tiny", "sha": SHA, "siblings": siblings, "pipeline_tag": "text-generation"}
            return self.answer(json.dumps(info).encode())

        def give(self, name: str) -> None:
            if hub.gated:
                return self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
            data = hub.files.get(name)
            if data is None:
                return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            if name in hub.xet:
                headers |= {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": f"{hub.url}/api/xet"}
            asked = self.headers["Range"]
            if self.command == "GET":
                hub.gets.append((name, asked))
            if self.is_get and (hold := hub.holds.get(name)):
                return self.answer(data, 200, headers, hold=hold)
            if asked is None:
                return self.answer(data, 200, headers, hub.break_after.pop(name, None) if self.is_get else None)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1 if last else len(data)
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            return self.answer(data[start:stop], 206, headers)

        @property
        def is_get(self) -> bool:
            return self.command == "GET"

        def answer(
            self,
            body: bytes,
            status: int = 200,
            headers: dict[str, str] | None = None,
            breaks: int | None = None,
            hold: threading.Event | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if hold is not None:
                with suppress(OSError):  # the client may be gone
                    self.wfile.write(body[: len(body) // 2])
                    hold.wait()
                    self.wfile.write(body[len(body) // 2 :])
            elif self.is_get:
                self.wfile.write(body if breaks is None else body[:breaks])
            if breaks is not None:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for hold in hub.holds.values():
            hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
