"""Requests to a server that speaks OpenAI's protocol (urdir, vLLM, llama.cpp)."""

from __future__ import annotations

import time
from contextlib import aclosing

from urdir.model.measure.http_events import HttpServer, ServerError
from urdir.model.measure.load import Ask, Reply

#: Ids below this are in the vocabulary of every model that does not say how large it is.
_SMALL_VOCABULARY = 10_000


async def server_model(server: HttpServer) -> tuple[str, int]:
    """The name of the first model, and how many token ids it certainly has."""
    models = await server.json("/v1/models")
    try:
        model = models["data"][0]
        return str(model["id"]), int((model.get("meta") or {}).get("n_vocab", _SMALL_VOCABULARY))
    except (KeyError, IndexError, TypeError, ValueError):
        raise ServerError(f"{server.host}:{server.port}/v1/models names no model") from None


async def ask_server(server: HttpServer, model: str, ask: Ask) -> Reply:
    """Have it answered. ``ignore_eos``, which the three know, keeps answers going."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = Reply(time.perf_counter())
    try:
        async with aclosing(server.events("/v1/completions", body)) as events:
            async for event in events:
                if "error" in event:
                    raise ServerError(str(event["error"].get("message")))
                if usage := event.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    reply.prompt_tokens = usage["prompt_tokens"]
                    reply.cached_tokens = details.get("cached_tokens") or 0
                    reply.tokens = usage["completion_tokens"]
                if event["choices"] and event["choices"][0].get("text"):
                    reply.add(1)
    except ServerError as error:
        reply.error = str(error)
    reply.end = time.perf_counter()
    return reply
