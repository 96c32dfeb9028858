"""A server whose GPU is lost in the middle of answers: everybody is told, /health first, and its
exit code says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE
from urdir.driver import bindings
from urdir.model.commands import serve_one, serve_opening
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.serve.access import Access
from urdir.model.serve.app import make_app
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.served_model import EngineModel

ASKED = {"prompt": "By the old mill", "max_tokens": 3, "temperature": 0}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emulated driver that the next engine will have."""
    api = bindings.emulated()
    monkeypatch.setattr(bindings, "emulated", lambda *_, **__: api)
    return api


def open_service() -> AsyncService[EngineModel]:
    engine = Engine.open(device="emulator", sequences=2, page_len=16, context=64)
    return AsyncService(engine, EngineModel(engine, (), 64, Defaults()))


@pytest.mark.slow
def test_everybody_is_told(api: Any) -> None:
    async def run() -> tuple[list[httpx.Response], list[httpx.Response]]:
        service = open_service()
        transport = httpx.ASGITransport(make_app(service, Access(), Limits(), ServerMetrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:

            async def ask(**more: Any) -> httpx.Response:
                return await http.post("/v1/completions", json=ASKED | more)

            sound = [await http.get("/health"), await ask()]
            api.inject("launch", 60)  # within the second step
            failed = await asyncio.gather(ask(), ask(n=2), ask())
            lost = [*failed, await http.get("/health"), await http.get("/metrics"), await ask()]
            lost.append(await http.post("/slots/0?action=erase", json={}))
        await service.close()
        return sound, lost

    sound, lost = asyncio.run(run())
    assert [reply.status_code for reply in sound] == [200] * 2
    assert sound[0].json() == {"status": "ok"}
    for reply in lost:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (503, "device_lost")
        assert "the device is lost, open the model again: " in error["message"]
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in error["message"]
    assert api.live() == {}


@pytest.mark.slow
def test_the_command_ends(
    api: Any, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """With --exit-on-device-loss at once: test_command.py has the end that waits for Ctrl-C."""
    statuses: list[int] = []

    def lose(what: str, host: str, port: int, access: Access) -> None:
        """In place of the greeting: a client in a thread, whose third request meets the fault."""
        where = f"http://127.0.0.1:{port}"

        def ask() -> None:
            with httpx.Client(base_url=where, timeout=120, trust_env=False) as http:
                statuses.append(http.get("/health").status_code)
                statuses.append(http.post("/v1/completions", json=ASKED).status_code)
                api.inject("launch", 60)
                statuses.append(http.post("/v1/completions", json=ASKED).status_code)

        client.append(threading.Thread(target=ask))
        client[0].start()

    client: list[threading.Thread] = []
    monkeypatch.setattr(serve_opening, "open_service", lambda *_: open_service())
    monkeypatch.setattr(serve_one, "greet_at", lose)
    code, out, err = cli("serve", "--port", "0", "--api-workers", "0", "--exit-on-device-loss")
    client[0].join(PATIENCE)
    assert statuses == [200, 200, 503]
    assert (code, out) == (1, "")
    assert "urdir: error: the device is lost, open the model again: " in err
    assert "Traceback" not in err
    assert api.live() == {}
