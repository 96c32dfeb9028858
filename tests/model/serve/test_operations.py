"""What operators need: logs, TLS, the end of a server, metrics and what is shipped beside it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model.serve.serve_process import CHAT, HI
from tests.patience import PATIENCE
from urdir.model.errors import ModelError
from urdir.model.serve import server as serving
from urdir.model.serve.access import Tls
from urdir.model.serve.connections import accept
from urdir.model.serve.logs import LogSettings
from urdir.model.serve.metrics import ServerMetrics

TLS = Path(__file__).parents[2] / "data" / "tls"
DEPLOY = Path(serving.__file__).with_name("deploy")


@pytest.fixture
def logs() -> Iterator[None]:
    """Logging is as before at the end."""
    root = logging.getLogger("urdir")
    before = (root.handlers, root.propagate, root.level)
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.propagate, root.level = before


@pytest.mark.parametrize("form", ["text", "json"])
def test_each_request_is_a_line(form: Any, server: Any, tmp_path: Path, logs: None) -> None:
    file = tmp_path / "log"
    LogSettings(form, file).begin()
    http = server.http()
    http.post(CHAT, json=HI, headers={"X-Request-Id": "mine"})
    server.wait_for(lambda: file.read_text().endswith("\n"))  # after the answer
    http.post("/v1/nothing", headers={"X-Request-Id": 'a "b" =c'})
    server.wait_for(lambda: file.read_text().count("\n") == 2)
    lines = file.read_text().splitlines()
    if form == "text":
        assert re.fullmatch(
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info urdir\.access client=127\.0\.0\.1 "
            r"method=POST path=/v1/chat/completions status=200 seconds=0\.\d{4} request_id=mine",
            lines[0],
        )
        assert lines[1].endswith(r'status=404 seconds=' + re.search(r"seconds=(\S+)", lines[1])[1]
                                 + r' request_id="a \"b\" =c"')  # fmt: skip
    else:
        first, second = map(json.loads, lines)
        assert (first["status"], first["request_id"], first["logger"]) == (
            200,
            "mine",
            "urdir.access",
        )
        assert (second["status"], second["request_id"]) == (404, 'a "b" =c')


def test_a_failure_is_one_line_of_json(server: Any, tmp_path: Path, logs: None) -> None:
    file = tmp_path / "log"
    LogSettings("json", file).begin()
    server.service.error = ModelError("broken")
    server.http().post(CHAT, json=HI, headers={"X-Request-Id": "mine"})
    server.wait_for(lambda: file.read_text().count("\n") == 2)  # the request, too
    failed = json.loads(file.read_text().splitlines()[0])
    assert failed["level"] == "error"
    assert "broken" in failed["message"]
    assert "mine" in failed["message"]
    assert "Traceback" in failed["error"]


def test_a_file_that_cannot_be_written(tmp_path: Path, logs: None) -> None:
    with pytest.raises(ModelError, match=r"the log .*: Is a directory"):
        LogSettings(file=tmp_path).begin()


def test_a_log_that_fails_later(tmp_path: Path, logs: None, capsys: Any) -> None:
    """A full disk, and a file that was moved where no new one can be made: reported once each."""
    file = tmp_path / "log"
    LogSettings(file=file).begin()
    log = logging.getLogger("urdir.serve")
    for stands_in, why in (("/dev/full", "No space left"), ("/dev/null/x", "Not a directory")):
        file.unlink()
        file.symlink_to(stands_in)
        log.info("lost")
        log.info("lost")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"urdir: the log {file}: {why}")
        file.unlink()
        log.info("kept")
        assert file.read_text().endswith(" urdir.serve kept\n")
    assert capsys.readouterr().err == ""


def test_nothing_is_logged_that_nobody_wants(server: Any, capfd: Any) -> None:
    server.http().post(CHAT, json=HI)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_https(process: Callable[..., Any]) -> None:
    server = process(
        *("--ssl-cert-file", str(TLS / "certificate.pem")),
        *("--ssl-key-file", str(TLS / "key.pem"), "-v"),
    )
    assert server.url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
    with httpx.Client(
        base_url=server.url, verify=trusting, timeout=PATIENCE, trust_env=False
    ) as http:
        answer = http.post(CHAT, json=HI).json()
    assert answer["choices"][0]["message"]["content"] == "2 plus 3 is 5."
    with pytest.raises(httpx.HTTPError):
        httpx.get(
            server.url.replace("https", "http") + "/health", timeout=PATIENCE, trust_env=False
        )
    server.interrupt()
    out, err = server.end()
    assert out.startswith("0 drained")
    assert "path=/v1/chat/completions status=200" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("certificate", "key", "why"),
    [
        ("none.pem", "key.pem", "No such file"),
        ("key.pem", "key.pem", "no certificate with its private key"),
    ],
)
def test_certificates_that_are_none(certificate: str, key: str, why: str) -> None:
    with pytest.raises(ModelError, match=f"{certificate} and .*{key}: {why}"):
        Tls(TLS / certificate, TLS / key).context()


@pytest.mark.slow
def test_drain_aborts_what_takes_too_long(process: Callable[..., Any]) -> None:
    server = process("--drain", "1", delay=0.2, repeat=10_000)
    with httpx.stream(
        "POST", server.url + CHAT, json={**HI, "stream": True}, timeout=PATIENCE, trust_env=False
    ) as response:
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        server.interrupt()
        with pytest.raises(httpx.HTTPError):
            for _ in lines:
                pass
        assert time.monotonic() - began > 0.8
    out, err = server.end()
    assert out == "0 drained closed 1\n"
    assert "requests are open after 1 s: they are aborted" in err


def test_metrics_of_whole_answers(server: Any) -> None:
    http = server.http()

    def value(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    ends = {name: value(f'urdir_answers_total{{reason="{name}"}}') for name in ("end", "error")}
    count = value("urdir_request_seconds_count")
    http.post(CHAT, json=HI)
    server.service.error = ModelError("no")
    http.post(CHAT, json=HI)
    assert value('urdir_answers_total{reason="end"}') == ends["end"] + 1
    assert value('urdir_answers_total{reason="error"}') == ends["error"] + 1
    assert value("urdir_request_seconds_count") == count + 2
    assert value('urdir_model_info{name="toy"}') == 1


def test_the_dashboard_has_metrics_that_there_are(server: Any) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"urdir_\w+", query)}
    server.http().post(CHAT, json=HI)
    now = server.http().get("/metrics").text
    there = {*re.findall(r"^(urdir_\w+)", now, re.MULTILINE)}
    there |= {sample.name for sample in ServerMetrics().samples(_metrics())}
    assert named <= there
    assert len(queries) > 10


def test_every_metric_is_in_the_guide() -> None:
    guide = (DEPLOY.parent / "README.md").read_text()
    families = [*ServerMetrics().collect(_metrics())]
    assert len(families) > 20
    assert [family.name for family in families if family.name not in guide] == []


def _metrics() -> Any:
    from urdir.model.serve.interface import Metrics

    return Metrics(drafted_tokens=(1,), accepted_tokens=(1,))


def test_files_of_deployments_have_flags_that_there_are() -> None:
    from urdir.model.cli import build_parser

    parser = build_parser("serve").subcommands["serve"]
    found = 0
    for path in DEPLOY.iterdir():
        for line in path.read_text().splitlines():
            if re.search(r"urdir\"?,? \"?serve|args: ", line):
                for flag in re.findall(
                    r"[\s\"](--[a-z][a-z-]+)", line.partition("serve")[2] or line
                ):
                    assert flag in parser.flags, (path.name, flag)
                    found += 1
    assert found > 5


def test_a_client_that_shakes_no_hands_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("urdir.model.serve.connections._HANDSHAKE_SECONDS", 2 * PATIENCE)
    context = Tls(TLS / "certificate.pem", TLS / "key.pem").context()

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            accepting = asyncio.create_task(accept(listener, asyncio.Protocol, context))
            with socket.create_connection(listener.getsockname()) as client:
                client.setblocking(False)
                await asyncio.sleep(0.05)
                accepting.cancel()
                await asyncio.wait_for(asyncio.wait([accepting]), PATIENCE)
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    asyncio.run(run())


def test_flags_of_the_log() -> None:
    from urdir.model.cli import build_parser
    from urdir.model.commands.serve_settings import logs as logs_of

    words = ["serve", "-v", "--log-format", "json", "--otlp-endpoint", "http://localhost:4318"]
    logs = logs_of(build_parser("serve").parse(words))
    assert logs == LogSettings("json", None, verbose=True, otlp="http://localhost:4318")
    assert logs_of(build_parser("serve").parse(["serve"])) == LogSettings()
