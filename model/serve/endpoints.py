"""What each path does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from urdir.model.engine.requests.request import Request as EngineRequest
from urdir.model.serve.answers import Usage, together
from urdir.model.serve.bodies import Bodies, parse_body, parse_json
from urdir.model.serve.chats import ChatRequest, ChatShape, read_chat
from urdir.model.serve.completions import CompletionShape, read_completion
from urdir.model.serve.conversations import template_of
from urdir.model.serve.errors import ApiError, unknown_model
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import AsyncService, Json, ServedModel
from urdir.model.serve.json_response import JsonResponse
from urdir.model.serve.limits import Limits
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.parameters import Parameters, read_scales
from urdir.model.serve.prefix_scope import CALLER
from urdir.model.serve.stream import AnswerResponse, Shape, while_connected
from urdir.model.serve.text_thread import Run, TextThread
from urdir.model.serve.tokens import check_length, check_tokens, encode_text
from urdir.model.text.chat import Prompt
from urdir.model.text.constraints import Constraint

_Result = TypeVar("_Result")


class Endpoints:
    """The endpoints of one service.

    Long text processing runs in a thread, so that the event loop is not blocked.
    """

    def __init__(self, service: AsyncService, limits: Limits, metrics: ServerMetrics) -> None:
        self._service = service
        self._model = service.model
        self._limits = limits
        self._metrics = metrics
        self._bodies = Bodies(limits, metrics.counts)
        self._text = TextThread()

    async def health(self, request: Request) -> Response:
        """GET /health. Raises the error of all requests once the device is lost."""
        if (lost := self._service.lost) is not None:
            raise lost
        health: Json = {"status": "ok"}
        now = await self._service.metrics()
        if now.graphs_wanted:
            health["graphs"] = {"recorded": now.graphs_recorded, "of": now.graphs_wanted}
        return JsonResponse(health)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        text = self._metrics.text(await self._service.metrics())
        return Response(text, media_type=self._metrics.content_type)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        names = (*self._model.names, *(name for name, _ in self._model.adapters))
        data = [self._model_json(name) for name in names]
        return JsonResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        names = (*self._model.names, *(name for name, _ in self._model.adapters))
        if name not in names:
            raise unknown_model(name, names)
        return JsonResponse(self._model_json(name))

    async def adapters(self, request: Request) -> Response:
        """GET /lora-adapters: all adapters, with their scales in requests that name none, as
        llama-server has them; POST sets these, 0 of those that are not in the list."""
        scales = None
        if request.method == "POST":
            async with self._bodies.body(request) as body:
                listed = Fields({"body": parse_json(body, self._limits)})
            scales = read_scales(listed, "body", len(self._model.adapters)) or {}
        found = await self._service.adapters(scales)
        data: Any = [
            {"id": place, "path": Path(of.path).name, "name": of.name, "scale": of.scale}
            for place, of in enumerate(found)
        ]
        return JsonResponse(data)

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

    async def completions(self, request: Request) -> AnswerResponse:
        """POST /v1/completions."""
        return await self._prepared(request, self._prepare_completions)

    async def chat(self, request: Request) -> AnswerResponse:
        """POST /v1/chat/completions."""
        return await self._prepared(request, self._prepare_chat)

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

    async def _prepare_completions(self, body: bytearray, caller: bytes) -> AnswerResponse:
        async with self._turn(body, read_completion) as (asked, run):
            prompts = [
                await run(partial(encode_text, self._model, prompt, asked.special))
                if isinstance(prompt, str)
                else prompt
                for prompt in asked.prompts
            ]
            echoes = [""] * len(prompts)
            if asked.echo:
                echoes = [await run(partial(self._text_of, prompt)) for prompt in asked.prompts]
        parameters = asked.parameters
        shape = CompletionShape(
            self._model,
            [echo for echo in echoes for _ in range(parameters.n)],
            logprobs=parameters.settings.logprobs is not None,
        )
        constraint = None
        if (form := asked.form) is not None:
            constraint = await self._checked(
                partial(self._model.constraint, form.kind, form.source, None)
            )
        return self._response(caller, prompts, parameters, shape, constraint)

    def _text_of(self, prompt: str | tuple[int, ...]) -> str:
        return prompt if isinstance(prompt, str) else self._model.tokenizer.decode(prompt)

    async def _prepare_chat(self, body: bytearray, caller: bytes) -> AnswerResponse:
        async with self._turn(body, read_chat) as (asked, run):
            prompt = await run(partial(self._render, asked))
            tokens = await run(lambda: tuple(template_of(self._model).tokens(prompt)))
        constraint = await self._checked(partial(asked.constraint, self._model, prompt))
        parameters = asked.parameters
        shape = ChatShape(
            self._model,
            [asked.parser(self._model, prompt) for _ in range(parameters.n)],
            logprobs=parameters.settings.logprobs is not None,
            parallel=asked.conversation.tools.parallel,
            echo=asked.echo,
        )
        return self._response(caller, [tokens], parameters, shape, constraint, self._model.shown)

    async def _checked(self, make: Callable[[], Constraint | None]) -> Constraint | None:
        """The constraint that ``make`` makes, which the engine takes. Raises ModelError."""
        constraint = await asyncio.to_thread(make)
        if constraint is not None:
            await self._service.check(constraint)
        return constraint

    def _render(self, asked: ChatRequest) -> Prompt:
        """The conversation as text."""
        prompt = asked.conversation.render(self._model)
        check_length(self._model, prompt.text)
        return prompt

    def _response(
        self,
        caller: bytes,
        prompts: Sequence[tuple[int, ...]],
        parameters: Parameters,
        shape: Shape,
        constraint: Constraint | None,
        shown: frozenset[str] = frozenset(),
    ) -> AnswerResponse:
        requests: list[EngineRequest] = []
        for prompt in prompts:
            self._check_prompt(prompt)
            requests += parameters.requests(prompt, caller, constraint, shown)
        return AnswerResponse(
            together(self._service, requests, self._metrics),
            shape,
            Usage(parameters.n),
            stream=parameters.stream,
            include_usage=parameters.include_usage,
        )

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise ApiError("the prompt has no tokens", param="prompt")
        check_tokens(self._model, len(prompt))

    def _model_json(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "urdir",
            "max_model_len": self._model.context,  # vLLM
            "meta": {"n_vocab": self._model.tokenizer.vocab_size},  # llama.cpp
        }
