"""A small Hugging Face Hub on 127.0.0.1 with enough of the HTTP API for the client to download and upload."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"  # stored as LFS objects: served through a redirect to the "CDN", uploaded by PUT


class Repo:
    """The branches of a repository. A commit is a mapping from file name to content."""

    def __init__(self, private: bool = False) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.messages: list[str] = []
        self.commit("main", {})

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        content = [(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(files.items())]
        sha = hashlib.sha1(repr((content, len(self.commits))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer:
    """The hub: ``repos``, ``requests`` as (method, path), and switches for failures.

    ``repos`` has the repositories by their ids, which begin with "datasets/" for data sets.
    """

    def __init__(self, token: str = "hf_secret") -> None:
        self.token = token
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.cut: dict[str, int] = {}  # file name -> bytes after which the connection breaks, each time
        self.short: dict[str, int] = {}  # file name -> length that is served for the whole
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        port = self._http.server_address[1]
        self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}/cdn"  # the CDN is another host
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def downloaded(self) -> set[str]:
        """Names of the files whose content was requested."""
        paths = [urlsplit(path).path for method, path in self.requests if method == "GET"]
        return {unquote(path.split("/resolve/")[1].split("/", 1)[1]) for path in paths if "/resolve/" in path} | {
            path.split("/", 5)[5] for path in paths if path.startswith("/cdn/")
        }


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, self.path))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "repos", "create"]:
                self._create()
            case ["api", "models", owner, name, *rest]:
                self._with_repo(f"{owner}/{name}", lambda repo: self._api(repo, f"{owner}/{name}", rest))
            case ["api", "datasets", owner, name, *rest]:
                repo_id = f"datasets/{owner}/{name}"
                self._with_repo(repo_id, lambda repo: self._api(repo, repo_id, rest))
            case ["datasets", owner, name, "resolve", revision, *path]:
                repo_id = f"datasets/{owner}/{name}"
                self._with_repo(repo_id, lambda repo: self._resolve(repo, repo_id, revision, "/".join(path)))
            case [owner, git, "info", "lfs", "objects", "batch"]:
                self._with_repo(f"{owner}/{git.removesuffix('.git')}", lambda repo: self._lfs_batch())
            case ["lfs", oid]:
                self.hub.uploads[oid] = self.body
                self._json({})
            case ["api", "validate-yaml"]:  # of a model card
                self._json({"errors": [], "warnings": []})
            case ["cdn", owner, name, sha, *path]:
                self._send(self.hub.repos[f"{owner}/{name}"].commits[sha]["/".join(path)], name="/".join(path))
            case [owner, name, "resolve", revision, *path]:
                self._with_repo(
                    f"{owner}/{name}", lambda repo: self._resolve(repo, f"{owner}/{name}", revision, "/".join(path))
                )
            case _:
                self._error(404, "EntryNotFound")

    def _with_repo(self, repo_id: str, action) -> None:
        repo = self.hub.repos.get(repo_id)
        known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repo is None or (repo.private and not known):
            self._error(404 if known else 401, "RepoNotFound")
        elif self.command == "POST" and not known:
            self._error(401, "Unauthorized")
        else:
            action(repo)

    def _api(self, repo: Repo, repo_id: str, rest: list[str]) -> None:
        action, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        sha = repo.resolve(revision)
        if action == "branch":
            if sha is not None:
                return self._error(409, "Conflict")
            repo.branches[revision] = repo.branches["main"]
            return self._json({})
        if sha is None:
            return self._error(404, "RevisionNotFound")
        files = repo.commits[sha]
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repo_id, "sha": sha, "private": repo.private, "siblings": siblings})
        elif action == "tree":
            self._json([_entry(name, data) for name, data in files.items()])
        elif action == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(self.body)["files"]
            ]
            self._json({"files": modes})
        elif action == "commit":
            oid = self._commit(repo, revision, dict(files))
            self._json({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid, "success": True})
        else:
            self._error(404, "EntryNotFound")

    def _create(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._error(401, "Unauthorized")
        wanted = json.loads(self.body)
        repo_id = f"{wanted['organization'] or 'user'}/{wanted['name']}"
        exists = repo_id in self.hub.repos
        if not exists:
            self.hub.repos[repo_id] = Repo(private=bool(wanted.get("private")) or wanted.get("visibility") == "private")
        self._json({"url": f"{self.hub.url}/{repo_id}", "id": repo_id}, status=409 if exists else 200)

    def _lfs_batch(self) -> None:
        objects = [
            {
                "oid": item["oid"],
                "size": item["size"],
                "actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}},
            }
            for item in json.loads(self.body)["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: Repo, branch: str, files: dict[str, bytes]) -> str:
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    message = value["summary"]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.uploads[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        return repo.commit(branch, files, message)

    def _resolve(self, repo: Repo, repo_id: str, revision: str, name: str) -> None:
        sha = repo.resolve(revision)
        if sha is None:
            return self._error(404, "RevisionNotFound")
        if name not in repo.commits[sha]:
            return self._error(404, "EntryNotFound", {"X-Repo-Commit": sha})
        data = repo.commits[sha][name]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_blob_id(data)}"'}
        if name.endswith(LARGE):
            headers |= {
                "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{self.hub.cdn}/{repo_id}/{sha}/{name}",
            }
            self._send(b"", headers, status=302)
        else:
            self._send(data, headers, name=name)

    def _send(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200, name: str = "") -> None:
        headers = headers or {}
        data = data[: self.hub.short.get(name)]
        wanted = self.headers.get("Range")
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self.send_response(status)
        for key, value in {"Accept-Ranges": "bytes", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.cut:
            self.wfile.write(data[: self.hub.cut[name]])
            self.close_connection = True
        else:
            self.wfile.write(data)

    def _json(self, content: object, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"}, status)

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}, status)


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _blob_id(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
