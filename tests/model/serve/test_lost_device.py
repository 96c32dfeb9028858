"""A server whose GPU is lost in the middle of answers: everybody is told, /health first."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from urdir.driver import bindings
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.async_service import AsyncService
from urdir.model.serve.app import make_app
from urdir.model.serve.guard import Access
from urdir.model.serve.interface import Defaults
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.served_model import EngineModel

ASKED = {"prompt": "By the old mill", "max_tokens": 3, "temperature": 0}


@pytest.mark.slow
def test_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    api = bindings.emulated()
    monkeypatch.setattr(bindings, "emulated", lambda *_, **__: api)

    async def run() -> tuple[list[httpx.Response], list[httpx.Response]]:
        engine = Engine.open(device="emulator", sequences=2, page_len=16, context=64)
        service = AsyncService(engine, lambda owner: EngineModel(engine, (), owner, Defaults()))
        transport = httpx.ASGITransport(
            make_app(service, Access(), Limits(), ServerMetrics(service))
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:

            async def ask(**more: Any) -> httpx.Response:
                return await http.post("/v1/completions", json=ASKED | more)

            sound = [await http.get("/health"), *await asyncio.gather(ask(), ask(n=2), ask())]
            api.inject("launch", 60)  # within the second step
            failed = await asyncio.gather(ask(), ask(n=2), ask())
            lost = [*failed, await http.get("/health"), await ask()]
        await service.close()
        return sound, lost

    sound, lost = asyncio.run(run())
    assert [reply.status_code for reply in sound] == [200] * 4
    assert sound[0].json() == {"status": "ok"}
    for reply in lost:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (503, "device_lost")
        assert "the device is lost, open the model again: " in error["message"]
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in error["message"]
    assert api.live() == {}
