"""Models on the hub, from a server of this machine that answers what huggingface_hub asks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from urdir.model.errors import HubError, HubNameError
from urdir.model.files.gguf import Gguf
from urdir.model.files.hub import HubName, choose, download
from urdir.model.files.hub_cache import cached_models
from urdir.model.files.source import open_model

hub_constants = pytest.importorskip("huggingface_hub.constants")
hub_downloads = pytest.importorskip("huggingface_hub.file_download")

SHA = "0123456789abcdef0123456789abcdef01234567"
Repositories = dict[str, dict[str, bytes]]


class _Server(ThreadingHTTPServer):
    repositories: Repositories
    status: int = 200  # of every answer but good ones
    asked: list[str]
    ranges: list[str]  # that were asked for
    cut_at: int | None = None  # a file's answer breaks off there, once


class _Handler(BaseHTTPRequestHandler):
    """GET api/models/ORG/REPO, HEAD and GET ORG/REPO/resolve/COMMIT/FILE."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        name = re.search(r"^/(?:api/models/)?([\w.-]+/[\w.-]+)", path)
        repository = self.server.repositories.get(name[1]) if name else None
        if self.server.status != 200:
            code = "GatedRepo" if self.server.status == 403 else "Odd"
            self._send(self.server.status, b"no", {"X-Error-Code": code})
        elif name is None or repository is None:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/"):
            files = [{"rfilename": file} for file in repository]
            info = {"id": name[1], "sha": SHA, "siblings": files, "tags": [], "downloads": 0}
            body = json.dumps(info | {"private": False, "likes": 0}).encode()
            self._send(200, body, {"Content-Type": "application/json"})
        else:
            file = path.partition(f"/resolve/{SHA}/")[2]
            if file not in repository:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                self._send_file(repository[file])

    def _send_file(self, body: bytes) -> None:
        headers = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        if (span := self.headers.get("Range")) and (start := re.match(r"bytes=(\d+)-", span)):
            first = int(start[1])
            self.server.ranges.append(span)
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            self._send(206, body[first:], headers)
        else:
            self._send(200, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.cut_at
        if cut is not None and cut < len(body):
            self.server.cut_at = None
            self.wfile.write(body[:cut])
            self.close_connection = True
        else:
            self.wfile.write(body)


def _point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does when the package is imported."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(hub_constants, "ENDPOINT", endpoint)
    for module in (hub_constants, hub_downloads):  # old versions have it in both
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    """The only hub that huggingface_hub knows, with a cache of its own."""
    with _Server(("127.0.0.1", 0), _Handler) as made:
        made.repositories, made.asked, made.ranges = {}, [], []
        _point_to(f"http://127.0.0.1:{made.server_port}", monkeypatch)
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def _fetch(text: str) -> Path:
    return download(HubName.parse(text))


# ---- names -------------------------------------------------------------------------------------


def test_names() -> None:
    assert HubName.parse("a/b") == HubName("a/b", None)
    assert HubName.parse("a-1/b.c_d:Q8_0") == HubName("a-1/b.c_d", "Q8_0")
    assert HubName.parse("a/b:c/d.gguf").wanted == "c/d.gguf"
    for text in ("", "a", "a/", "/b", "a/b/c", "a/b:", "../b", "a/..", "a b/c", "a/b\n"):
        with pytest.raises(HubNameError, match="is not a name such as"):
            HubName.parse(text)


FILES = (
    "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf",
    "m-UD-IQ1_S.gguf", "m-IQ1_S.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "m.q8_0.gguf"),
        ("Q6_K", "Q6_K/m-Q6_K-00001-of-00002.gguf"),
        ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        ("Q6_K/m-Q6_K-00002-of-00002.gguf", "Q6_K/m-Q6_K-00001-of-00002.gguf"),
        ("UD-IQ1_S", "m-UD-IQ1_S.gguf"),
    ],
)
def test_the_file_that_is_meant(wanted: str | None, expected: str) -> None:
    assert choose(HubName("a/b", wanted), FILES) == expected


@pytest.mark.parametrize(
    ("wanted", "files", "message"),
    [
        (None, ["x.gguf", "y.gguf"], "hf:a/b: there are x.gguf, y.gguf: add one as ':NAME'"),
        ("Q4", FILES, "hf:a/b: no 'Q4' in this repository; there are m-Q4_K_M.gguf, m-Q4_K_S"),
        ("Q4_K", FILES, "no 'Q4_K' in this repository"),
        ("IQ1_S", FILES, "hf:a/b:IQ1_S: there are m-UD-IQ1_S.gguf, m-IQ1_S.gguf: name the file"),
        ("z.gguf", FILES, "no 'z.gguf' in this repository"),
        (None, [], "no GGUF file"),
        ("Q8_0", ["x.gguf"], "there is x.gguf"),
    ],
)
def test_files_that_are_not_there(wanted: str | None, files: Any, message: str) -> None:
    with pytest.raises(HubError, match=re.escape(message)):
        choose(HubName("a/b", wanted), files)


def test_the_only_file() -> None:
    assert choose(HubName("a/b", None), ["x-F16.gguf"]) == "x-F16.gguf"


# ---- downloads ---------------------------------------------------------------------------------


def test_a_file_is_downloaded_once(server: _Server, data: Path) -> None:
    content = (data / "golden" / "nano-llama-q4_k_m.gguf").read_bytes()
    server.repositories["a/b"] = {
        "README.md": b"#", "x-Q4_K_M.gguf": content, "x-Q8_0.gguf": b"", "mmproj-x.gguf": b"",
        "../Q4_K_M.gguf": b"",
    }  # fmt: skip
    path = _fetch("a/b")
    assert path.name == "x-Q4_K_M.gguf"
    assert path.read_bytes() == content
    gets = [line for line in server.asked if line.startswith("GET") and "resolve" in line]
    assert gets == [f"GET /a/b/resolve/{SHA}/x-Q4_K_M.gguf"]
    with open_model("hf:a/b:q4_k_m") as model:
        assert isinstance(model, Gguf)
        assert model.path == path
    assert len([line for line in server.asked if "GET" in line and "resolve" in line]) == 1


def test_a_download_goes_on_where_it_broke_off(server: _Server) -> None:
    content = os.urandom(22 << 20)  # what arrives is written every 10 MiB
    server.repositories["a/b"] = {"x.gguf": content}
    server.cut_at = 12 << 20
    try:
        _fetch("a/b")
    except HubError:  # a version that leaves it to the next call
        _fetch("a/b")
    assert _fetch("a/b").read_bytes() == content
    (span,) = server.ranges
    assert 0 < int(span.removeprefix("bytes=").removesuffix("-")) <= 12 << 20


def test_all_parts_of_a_split_model(server: _Server) -> None:
    parts = [f"q/x-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    server.repositories["a/b"] = {part: part.encode() for part in parts}
    path = _fetch("a/b:Q4_K_M")
    assert [path.with_name(Path(part).name).read_text() for part in parts] == parts
    assert path.name == "x-Q4_K_M-00001-of-00003.gguf"
    del server.repositories["a/b"][parts[1]]
    with pytest.raises(HubError, match=r"no q/x-Q4_K_M-00002-of-00003\.gguf in this"):
        _fetch("a/b")


@pytest.mark.parametrize("name", ["llama-bf16", "qwen2-f16-sharded"])
def test_a_folder_where_there_is_no_gguf(server: _Server, data: Path, name: str) -> None:
    folder = data / "safetensors" / name
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    unused = {
        "consolidated.safetensors": b"",
        "sub/model.safetensors": b"",
        "pytorch_model.bin": b"",
    }
    server.repositories["a/tiny"] = files | unused
    with open_model("hf:a/tiny", quantize="q8_0") as model, open_model(folder) as expected:
        assert list(model.tensors) == list(expected.tensors)
        assert model.metadata["general.name"] == "tiny"
        assert model.tensors["token_embd.weight"].type_name == "Q8_0"
    fetched = {line.rpartition("/")[2] for line in server.asked if "resolve" in line}
    assert fetched == set(files) - {"golden.npz"}


@pytest.mark.parametrize(
    ("files", "unused"),
    [
        ("tokenizer.model chat_template.json hf_quant_config.json", "README.md vocab.txt"),
        ("tiktoken.model tokenizer_config.json", "tokenization_kimi.py"),
        ("tokenizer.json", "tokenizer.model onnx/model.onnx"),
        (
            "modules.json 1_Pooling/config.json 2_Dense/config.json 2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin 1_Other/config.json openvino/model.safetensors",
        ),
        ("", "model.safetensors.index.json model-00001-of-00002.safetensors"),
    ],
)
def test_what_a_folder_is_read_with_is_fetched(server: _Server, files: str, unused: str) -> None:
    wanted = {"config.json", "model.safetensors", *files.split()} - {"modules.json"}
    server.repositories["a/b"] = dict.fromkeys({*wanted, *unused.split()}, b"{}")
    folder = _fetch("a/b")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == wanted


def test_a_repository_without_a_model(server: _Server) -> None:
    server.repositories["a/b"] = {"README.md": b""}
    with pytest.raises(HubError, match="hf:a/b: no GGUF file in this repository"):
        _fetch("a/b")
    server.repositories["a/b"] = {"config.json": b"{}"}
    with pytest.raises(HubError, match="neither GGUF nor safetensors files"):
        _fetch("a/b")


# ---- what fails --------------------------------------------------------------------------------


def test_an_unknown_repository(server: _Server) -> None:
    with pytest.raises(HubError, match=r"hf:a/b: no such model repository, or it is priv"):
        _fetch("a/b")


def test_a_gated_repository(server: _Server) -> None:
    server.status = 403
    with pytest.raises(HubError, match=r"hf:a/b: the repository is gated: accept its terms on"):
        _fetch("a/b")


def test_a_server_in_trouble(server: _Server) -> None:
    server.status = 418
    with pytest.raises(HubError, match=r"hf:a/b: .*418"):
        _fetch("a/b")


def test_without_network(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["a/b"] = {"x.gguf": b"content"}
    path = _fetch("a/b")
    _point_to("http://127.0.0.1:9", monkeypatch)
    assert _fetch("a/b") == path
    with pytest.raises(HubError, match=r"hf:a/c: the hub cannot be reached \(.*without network"):
        _fetch("a/c")
    found = [model.name for model in cached_models()]
    assert found == ["hf:a/b:x.gguf"]
    for cache in (tmp_path / "absent", path):  # a file is no cache
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(cache))
        assert cached_models() == []
        with pytest.raises(HubError, match="hf:a/b: the hub cannot be reached"):
            _fetch("a/b")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"hf:a/b needs .*: pip install 'urdir\[hub\]'"):
        _fetch("a/b")


def test_the_command(server: _Server, tmp_path: Path, data: Path) -> None:
    """With the environment that a user sets, in a process of its own."""
    content = (data / "golden" / "nano-llama-q4_k_m.gguf").read_bytes()
    server.repositories["a/b"] = {"x-Q4_0.gguf": content}
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    source = str(Path(__file__).parents[3] / ".src")
    environment["PYTHONPATH"] = os.pathsep.join([source, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "urdir.model", "show", "hf:a/b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "x-Q4_0.gguf: runs on" in done.stdout
    assert "\nGGUF version 3, " in done.stdout
    command[-1] = "hf:a/b:Q8_0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    error = "urdir: error: hf:a/b: no 'Q8_0' in this repository; there is x-Q4_0.gguf\n"
    assert done.stderr == error


def test_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from urdir.model.cli import build_parser

    parse = build_parser().parse_args
    assert parse(["run", "-hf", "a/b:Q8_0"]).model == "hf:a/b:Q8_0"
    assert parse(["chat", "--hf-repo", "a/b"]).model == "hf:a/b"
    assert parse(["chat", "-m", "x.gguf"]).model == "x.gguf"
    with pytest.raises(SystemExit):
        parse(["run", "-hf", "a/b", "-m", "x"])
