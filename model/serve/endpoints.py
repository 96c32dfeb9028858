"""What each path does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Request as EngineRequest
from urdir.model.engine.requests.slots import SlotAction
from urdir.model.serve.answer import Answer
from urdir.model.serve.answers import together
from urdir.model.serve.asked import Asked, Begun, Follows, Mixed, Text, render
from urdir.model.serve.background import Background
from urdir.model.serve.bodies import Bodies, parse_body, parse_json
from urdir.model.serve.conversations import Conversation
from urdir.model.serve.embedding_service import EmbeddingService
from urdir.model.serve.embeddings import Embeds
from urdir.model.serve.errors import ApiError
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import AsyncService, Json, ServedModel
from urdir.model.serve.json_response import JsonResponse, encode_json, iso_time
from urdir.model.serve.kept import Kept
from urdir.model.serve.limits import Limits
from urdir.model.serve.llama_server import props, slots
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.parameters import Parameters, check_model, names_of, read_scales
from urdir.model.serve.prefix_scope import CALLER, prefix_scope
from urdir.model.serve.slots import slot_action, slot_json
from urdir.model.serve.spans import INCOMING
from urdir.model.serve.stream import AnswerResponse, while_connected
from urdir.model.serve.text_thread import Run, TextThread
from urdir.model.serve.tokens import check_tokens
from urdir.model.serve.usage import Usage
from urdir.model.text.constraints import Constraint
from urdir.model.text.formats import Format

_Result = TypeVar("_Result")


class Endpoints:
    """The endpoints of one service.

    Long text processing runs in a thread, so that the event loop is not blocked.
    """

    def __init__(
        self,
        service: AsyncService,
        limits: Limits,
        metrics: ServerMetrics,
        kept: Kept,
        background: Background,
    ) -> None:
        self._service = service
        self._limits = limits
        self._metrics = metrics
        self._kept = kept
        self._background = background
        self._bodies = Bodies(limits, metrics.counts)
        self._text = TextThread()

    @property
    def _model(self) -> ServedModel:
        """The model. Raises ApiError while it is loaded."""
        return self._service.model

    async def health(self, request: Request) -> Response:
        """GET /health. Raises the error of all requests before the model is loaded, and once the
        device is lost."""
        if (lost := self._service.lost) is not None:
            raise lost
        health: Json = {"status": "ok"}
        now = await self._metrics_now()
        if now.graphs_wanted:
            health["graphs"] = {"recorded": now.graphs_recorded, "of": now.graphs_wanted}
        return JsonResponse(health)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        now = await self._metrics_now()
        self._metrics.say_model(self._model.names[0])
        text = self._metrics.text(now)
        return Response(text, media_type=self._metrics.content_type)

    async def slots(self, request: Request) -> Response:
        """GET /slots, and ?fail_on_no_slot=1."""
        fails = request.query_params.get("fail_on_no_slot", "0") not in ("", "0")
        return JsonResponse(slots(self._model, await self._metrics_now(), fails=fails))

    async def props(self, request: Request) -> Response:
        """GET /props."""
        return JsonResponse(props(self._model, await self._metrics_now()))

    async def _metrics_now(self) -> Metrics:
        """Of the service, once it has a model."""
        assert self._model
        return await self._service.metrics()

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [self._model_json(name) for name in names_of(self._model)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}
        return JsonResponse({"object": "list", "data": data} | ends)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        check_model(name, self._model)
        return JsonResponse(self._model_json(name))

    async def adapters(self, request: Request) -> Response:
        """GET /lora-adapters: all adapters, with their scales in requests that name none, as
        llama-server has them; POST sets these, 0 of those that are not in the list."""
        scales = None
        if request.method == "POST":
            async with self._bodies.body(request) as body:
                listed = Fields({"body": parse_json(body, self._limits)})
            scales = read_scales(listed, "body", len(self._model.adapters))
            if scales is None:
                listed.fail("body", "must be a list of objects", "invalid_type")
        found = await self._service.adapters(scales)
        data: Any = [
            {"id": place, "path": Path(of.path).name, "name": of.name, "scale": of.scale}
            for place, of in enumerate(found)
        ]
        return JsonResponse(data)

    def fixed(self, make: Callable[[ServedModel], Json]) -> Callable[[Request], object]:
        """A GET endpoint of facts of the model."""

        async def endpoint(request: Request) -> Response:
            return JsonResponse(make(self._model))

        return endpoint

    def text_job(
        self, job: Callable[[Fields, ServedModel, Limits], Json]
    ) -> Callable[[Request], object]:
        """A POST endpoint that runs ``job`` on text."""

        async def prepare(body: bytearray, caller: bytes) -> Response:
            async with self._turn(body, lambda fields, *_: fields) as (fields, run):
                return JsonResponse(await run(lambda: job(fields, self._model, self._limits)))

        async def endpoint(request: Request) -> Response:
            return await self._prepared(request, prepare)

        return endpoint

    def answered(
        self,
        read: Callable[[Fields, ServedModel, Limits], Asked | Follows | Json],
        *,
        counts: bool = False,
    ) -> Callable[[Request], object]:
        """A POST endpoint that answers what ``read`` reads in a body, or with what it returns. One
        that ``counts`` tells the tokens of the inputs instead, as OpenAI and llama-server do."""

        async def prepare(body: bytearray, caller: bytes) -> AnswerResponse | Response:
            if isinstance(self._service, EmbeddingService):
                self._service.refuse()
            async with self._turn(body, read) as (asked, run):
                if isinstance(asked, dict):
                    return JsonResponse(asked)
                while isinstance(asked, Follows):
                    kept = await self._kept.get(caller, asked.name)
                    asked = await run(partial(asked.then, kept))
                begun = [await self._begin(each, asked, run) for each in asked.inputs]
            if counts:
                tokens = sum(len(each.tokens) for each in begun)
                return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})
            return await self._response(caller, asked, begun)

        async def endpoint(request: Request) -> AnswerResponse | Response:
            return await self._prepared(request, prepare)

        return endpoint

    def embedded(
        self, read: Callable[[Fields, ServedModel, Limits], Embeds]
    ) -> Callable[[Request], object]:
        """A POST endpoint that answers with embeddings or scores."""

        async def prepare(body: bytearray, caller: bytes) -> Response:
            assert self._model
            if not isinstance(self._service, EmbeddingService):
                raise ApiError(
                    "the model gives answers, no embeddings: serve an embedding model, or open "
                    "this one for embeddings",
                    code="no_embeddings",
                )
            async with self._turn(body, read) as (asked, _):
                pass
            rows, tokens = await self._service.embed(asked)
            if (incoming := INCOMING.get()) is not None:
                incoming.ended(self._model.names[0], tokens=tokens)
            return Response(
                await asyncio.to_thread(lambda: encode_json(asked.shape(rows, tokens))),
                media_type="application/json",
            )

        async def endpoint(request: Request) -> Response:
            return await self._prepared(request, prepare)

        return endpoint

    async def slot(self, request: Request) -> Response:
        """POST /slots/N?action=..., of what the caller's answers without a salt left there."""
        slot, kind = request.path_params["slot"], request.query_params.get("action")
        scope = prefix_scope(request.scope[CALLER], None)

        async def prepare(body: bytearray, caller: bytes) -> Response:
            def read(fields: Fields, *_: object) -> SlotAction:
                return slot_action(slot, kind, scope, fields)

            async with self._turn(body, read) as (action, _):
                pass
            return JsonResponse(slot_json(action, await self._service.act_on_slot(action)))

        return await self._prepared(request, prepare)

    async def _prepared(
        self, request: Request, prepare: Callable[[bytearray, bytes], Coroutine[Any, Any, _Result]]
    ) -> _Result:
        """The result of ``prepare`` for a body and the digest of the caller's key. Raises
        ClientDisconnect when the client leaves."""
        async with self._bodies.body(request) as body:
            return await while_connected(request.receive, prepare(body, request.scope[CALLER]))

    @contextlib.asynccontextmanager
    async def _turn(
        self, body: bytearray, read: Callable[[Fields, ServedModel, Limits], _Result]
    ) -> AsyncGenerator[tuple[_Result, Run], None]:
        """A turn of the text thread, with the result of ``read`` for a body's fields.

        A large body is read in its turn, and by the thread.
        """

        def job() -> _Result:
            return read(Fields(parse_body(body, self._limits)), self._model, self._limits)

        if len(body) <= self._limits.small_body:
            found = job()
            async with self._text.turn() as run:
                yield found, run
        else:
            async with self._text.turn() as run:
                yield await run(job), run

    async def _begin(self, source: Conversation | Text | Mixed, asked: Asked, run: Run) -> Begun:
        """An input as the model reads it."""
        if isinstance(source, Conversation):
            rendered = await run(partial(render, self._model, source))
            begun = await run(partial(Begun.of_conversation, self._model, source, rendered))
        elif isinstance(source, tuple):
            begun = Begun(source, source)
        else:
            begun = await run(partial(Begun.of_text, self._model, source, asked.special))
        return replace(begun, tokens=asked.earlier + begun.tokens) if asked.earlier else begun

    async def _response(
        self, caller: bytes, asked: Asked, inputs: Sequence[Begun]
    ) -> AnswerResponse | Response:
        for each in inputs:
            self._check_prompt(each.tokens)
        constraint = await self._constraint(inputs[0], asked.form)
        self._check_scores(inputs, asked.parameters)
        parameters, shown = asked.parameters, self._model.shown if asked.is_chat else frozenset()
        requests: list[EngineRequest] = []
        answers: list[Answer] = []
        for each in inputs:
            thoughts = each.thoughts(self._model, parameters.thinking)
            new = parameters.requests(each.tokens, caller, constraint, shown, thoughts)
            answers += (each.answer(self._model, len(requests) + i, asked) for i in range(len(new)))
            requests += new
        response = AnswerResponse(
            together(self._service, requests, self._metrics),
            asked.shape(self._model, parameters, answers),
            Usage(len(requests), parameters.n),
            self._limits.pulse_seconds,
            partial(self._kept.put, caller),
        )
        return await self._background.begin(caller, response) if asked.background else response

    async def _constraint(self, begun: Begun, form: Format | None) -> Constraint | None:
        """The constraint on all answers, which the engine takes. Raises ModelError."""
        if form is None and not begun.must_call:
            return None  # without a thread, which takes longer
        constraint = await asyncio.to_thread(begun.constraint, self._model, form)
        if constraint is not None:
            await self._service.check(constraint)
        return constraint

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise ApiError("the prompt has no tokens", param="prompt")
        check_tokens(self._model, len(prompt))

    def _check_scores(self, inputs: Sequence[Begun], parameters: Parameters) -> None:
        """Raise ApiError where prompts have too many tokens for their log-probabilities."""
        if (likely := parameters.prompt_logprobs) is None:
            return
        tokens = parameters.n * sum(len(each.tokens) for each in inputs)
        if (count := (1 + likely) * tokens) > (most := self._limits.scores):
            raise ApiError(
                f"the prompts have {tokens:,} tokens with {1 + likely} log-probabilities each: "
                f"{count:,}, at most {most:,} are answered",
                param="prompt",
                code="invalid_value",
            )

    def _model_json(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "type": "model",  # Anthropic
            "display_name": self._model.names[0],
            "created_at": iso_time(self._model.created),
            "created": self._model.created,
            "owned_by": "urdir",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "max_model_len": self._model.context,  # vLLM
            "max_input_tokens": self._model.context,  # Anthropic
            "max_tokens": self._model.context,
            "meta": {  # llama.cpp
                "n_vocab": self._model.tokenizer.vocab_size,
                "n_ctx_train": self._model.facts.trained_context,
                "n_embd": self._model.facts.width,
                "n_params": self._model.facts.parameters,
                "size": self._model.facts.bytes,
            },
        }
