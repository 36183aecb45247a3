"""A hub on 127.0.0.1: as much of its HTTP API as huggingface_hub's own client needs to create repos, commit and tag.

Large files go through the LFS protocol, small ones come within the commit, as on the real one. Point a process at it
with `env()`. Set `refuse` to let every upload fail.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = "tester"


@dataclass
class Repo:
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """What the hub holds; `refuse` is a status that every upload is answered with."""

    url: str = ""
    refuse: int | None = None
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def env(self) -> dict[str, str]:
        """Variables for a process that talks to this hub alone."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_test",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }


@contextlib.contextmanager
def local_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        path = self.path.partition("?")[0]
        self.hub.calls.append(f"{method} {path}")
        self.hub.tokens.add(self.headers.get("Authorization"))
        body = self._body()
        for pattern, answer in _ROUTES.items():
            if match := re.fullmatch(pattern, f"{method} {path}"):
                return self._send(*answer(self.hub, body, **match.groupdict()))
        return self._send(404, {"error": f"no route for {method} {path}"})

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _whoami(hub: Hub, body: bytes) -> tuple[int, Any]:
    return 200, {"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}}


def _create(hub: Hub, body: bytes) -> tuple[int, Any]:
    asked = json.loads(body)
    name = f"{asked.get('organization') or USER}/{asked['name']}"
    url = {"url": f"{hub.url}/{name}", "name": name, "id": name}
    if name in hub.repos:
        return 409, {"error": "You already created this model repo", **url}
    hub.repos[name] = Repo(private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return 200, url


def _info(hub: Hub, body: bytes, repo: str) -> tuple[int, Any]:
    if repo not in hub.repos:
        return 404, {"error": "Repository not found"}
    kept = hub.repos[repo]
    files = [{"rfilename": name} for name in sorted(kept.files)]
    return 200, {"id": repo, "modelId": repo, "private": kept.private, "sha": _oid(kept.commits), "siblings": files}


def _preupload(hub: Hub, body: bytes, repo: str) -> tuple[int, Any]:
    if hub.refuse:
        return hub.refuse, {"error": "the storage quota is exceeded"}
    large = (".safetensors", ".distcp", ".bin")
    modes = {path: "lfs" if path.endswith(large) else "regular" for path in _paths(body)}
    return 200, {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}


def _paths(body: bytes) -> list[str]:
    return [file["path"] for file in json.loads(body)["files"]]


def _batch(hub: Hub, body: bytes, repo: str) -> tuple[int, Any]:
    objects = [
        {
            "oid": each["oid"],
            "size": each["size"],
            "authenticated": True,
            "actions": {"upload": {"href": f"{hub.url}/storage/{each['oid']}"}},
        }
        for each in json.loads(body)["objects"]
    ]
    return 200, {"transfer": "basic", "objects": objects}


def _store(hub: Hub, body: bytes, oid: str) -> tuple[int, Any]:
    if hashlib.sha256(body).hexdigest() != oid:
        return 400, {"error": "the bytes are others"}
    hub.objects[oid] = body
    return 200, {}


def _commit(hub: Hub, body: bytes, repo: str) -> tuple[int, Any]:
    kept = hub.repos[repo]
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            kept.commits.append(value["summary"])
        elif line["key"] == "file":
            kept.files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            kept.files[value["path"]] = hub.objects[value["oid"]]
    oid = _oid(kept.commits)
    return 200, {"success": True, "commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid, "hookOutput": ""}


def _oid(commits: list[str]) -> str:
    return hashlib.sha1("\n".join(commits).encode()).hexdigest()


def _tag(hub: Hub, body: bytes, repo: str, revision: str) -> tuple[int, Any]:
    tag = json.loads(body)["tag"]
    if tag in hub.repos[repo].tags:
        return 409, {"error": "Tag exists"}
    hub.repos[repo].tags[tag] = revision
    return 200, {}


def _fine(hub: Hub, body: bytes) -> tuple[int, Any]:
    return 200, {"errors": [], "warnings": []}


_REPO = r"(?P<repo>[^/ ]+/[^/ ]+)"
_ROUTES = {
    r"GET /api/whoami-v2": _whoami,
    r"POST /api/repos/create": _create,
    r"POST /api/validate-yaml": _fine,
    rf"(?:GET|HEAD) /api/models/{_REPO}(?:/revision/[^/]+)?": _info,
    rf"POST /api/models/{_REPO}/preupload/[^/]+": _preupload,
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": _batch,
    r"PUT /storage/(?P<oid>\w+)": _store,
    rf"POST /api/models/{_REPO}/commit/[^/]+": _commit,
    rf"POST /api/models/{_REPO}/tag/(?P<revision>[^/]+)": _tag,
}
