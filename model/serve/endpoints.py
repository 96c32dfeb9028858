"""What each path does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from urdir.model.engine.requests.request import Request as EngineRequest
from urdir.model.errors import ContextFullError
from urdir.model.serve.answers import Usage, together
from urdir.model.serve.chats import ChatRequest, ChatShape, read_chat, render, template_of
from urdir.model.serve.completions import CompletionShape, read_completion
from urdir.model.serve.errors import ApiError, unknown_model
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import AsyncService, Json, ServedModel
from urdir.model.serve.limits import Limits, read_json
from urdir.model.serve.metrics import ServerMetrics
from urdir.model.serve.parameters import Parameters
from urdir.model.serve.prefix_scope import CALLER
from urdir.model.serve.stream import AnswerResponse, Shape
from urdir.model.serve.tokens import check_length, encode_text
from urdir.model.text.constraints import Constraint

_Result = TypeVar("_Result")


class Endpoints:
    """The endpoints of one service.

    Text is rendered and tokenised in a thread, so that the event loop goes on; in one, because a
    template's process serves one at a time.
    """

    def __init__(self, service: AsyncService, limits: Limits, metrics: ServerMetrics) -> None:
        self._service = service
        self._model = service.model
        self._limits = limits
        self._metrics = metrics
        self._text_thread = ThreadPoolExecutor(1, "text")

    async def health(self, request: Request) -> Response:
        """GET /health. Raises what every request is told once the device is lost."""
        if (lost := self._service.lost) is not None:
            raise lost
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.text(), media_type=self._metrics.content_type)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [self._model_json(name) for name in self._model.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name not in self._model.names:
            raise unknown_model(name, self._model.names)
        return JSONResponse(self._model_json(name))

    def text_job(
        self, job: Callable[[Fields, ServedModel, Limits], Json]
    ) -> Callable[[Request], object]:
        """POST of what ``job`` does with text."""

        async def endpoint(request: Request) -> Response:
            fields = Fields(await read_json(request, self._limits))
            return JSONResponse(
                await self._with_text(lambda: job(fields, self._model, self._limits))
            )

        return endpoint

    async def completions(self, request: Request) -> AnswerResponse:
        """POST /v1/completions."""
        fields = Fields(await read_json(request, self._limits))
        asked = read_completion(fields, self._model, self._limits)
        prompts, echoes = await self._with_text(lambda: self._read_prompts(asked.prompts))
        parameters = asked.parameters
        shape = CompletionShape(
            self._model,
            [echo if asked.echo else "" for echo in echoes for _ in range(parameters.n)],
            logprobs=parameters.settings.logprobs is not None,
        )
        constraint = None
        if (form := asked.form) is not None:
            constraint = await asyncio.to_thread(
                self._model.constraint, form.kind, form.source, None
            )
        return self._response(request, prompts, parameters, shape, constraint)

    def _read_prompts(
        self, given: Sequence[str | tuple[int, ...]]
    ) -> tuple[list[tuple[int, ...]], list[str]]:
        """Prompts as tokens and as text."""
        tokens = [encode_text(self._model, p) if isinstance(p, str) else p for p in given]
        texts = [p if isinstance(p, str) else self._model.tokenizer.decode(p) for p in given]
        return tokens, texts

    async def chat(self, request: Request) -> AnswerResponse:
        """POST /v1/chat/completions."""
        fields = Fields(await read_json(request, self._limits))
        asked = read_chat(fields, self._model, self._limits)
        text, prompt = await self._with_text(lambda: self._render(asked))
        constraint = await asyncio.to_thread(asked.constraint, self._model, text)
        parameters = asked.parameters
        shape = ChatShape(
            self._model,
            [asked.parser(self._model, text) for _ in range(parameters.n)],
            logprobs=parameters.settings.logprobs is not None,
            parallel=asked.tools.parallel,
        )
        return self._response(request, [prompt], parameters, shape, constraint, self._model.shown)

    def _render(self, asked: ChatRequest) -> tuple[str, tuple[int, ...]]:
        """The conversation as text and as tokens."""
        prompt = render(self._model, asked.messages, asked.tools, asked.variables)
        check_length(self._model, prompt.text)
        return prompt.text, tuple(template_of(self._model).tokens(prompt))

    def _response(
        self,
        request: Request,
        prompts: Sequence[tuple[int, ...]],
        parameters: Parameters,
        shape: Shape,
        constraint: Constraint | None,
        shown: frozenset[str] = frozenset(),
    ) -> AnswerResponse:
        requests: list[EngineRequest] = []
        for prompt in prompts:
            self._check_prompt(prompt)
            requests += parameters.requests(prompt, request.scope[CALLER], constraint, shown)
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
        if len(prompt) >= self._model.context:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, the context is {self._model.context} "
                "with the answer"
            )

    async def _with_text(self, job: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, job)

    def _model_json(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "urdir",
            "max_model_len": self._model.context,  # vLLM
            "meta": {"n_vocab": self._model.tokenizer.vocab_size},  # llama.cpp
        }
