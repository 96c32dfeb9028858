"""A toy in place of the engine, and servers that answer with it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from tests.patience import PATIENCE, wait_for
from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.requests.request import Ending, Finish, Piece, Request, TokenChoice
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.errors import ConstraintError, PrefixFileError
from urdir.model.files.gguf import Gguf
from urdir.model.memory.scored_rows import TokenScores
from urdir.model.serve.access import Access
from urdir.model.serve.interface import Defaults, Facts, Metrics
from urdir.model.serve.limits import Limits
from urdir.model.serve.listening import listen
from urdir.model.serve.server import Server
from urdir.model.text.answers import AnswerFormat, AnswerParser
from urdir.model.text.chat import ChatTemplate, Prompt
from urdir.model.text.fill import FillTokens
from urdir.model.text.formats import Format
from urdir.model.text.text_stream import TextStream
from urdir.model.text.thought_limit import ThoughtLimit
from urdir.model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import openai

OPEN = Access()
FACTS = Facts(
    "llama", 1_000_000, 2_000_000_000, "Q4_K_M", file="toy.gguf", trained_context=2048, width=64
)
USUAL = Limits()


@dataclass
class ToyModel:
    """The demo model's text; constraints are what was asked for."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    names: tuple[str, ...] = ("toy", "a/b-GGUF")
    adapters: tuple[tuple[str, float], ...] = ()
    created: int = 1_700_000_000
    context: int = 512
    defaults: Defaults = field(default_factory=Defaults)
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    facts: Facts = field(default_factory=lambda: FACTS)
    fill: FillTokens | None = None

    @property
    def shown(self) -> frozenset[str]:
        return self.answer_format.shown

    def answer_parser(self, prompt: Prompt, tools: Mapping[str, Any]) -> AnswerParser:
        return AnswerParser(
            self.answer_format, prompt=prompt.before, begun=prompt.begun, tools=tools
        )

    def constraint(
        self,
        form: Format,
        prompt: Prompt | None,
        tools: Mapping[str, Any] | None = None,
        many: bool = False,
    ) -> object:
        if form.source == "(":
            raise ConstraintError("the expression has no end")
        return (form.kind, form.source, prompt is not None)

    def thought_limit(self, tokens: int | None, prompt: Prompt) -> ThoughtLimit | None:
        return self.answer_format.limit(tokens, prompt.text)

    def required_call(
        self, tools: Mapping[str, Any], prompt: Prompt, name: str | None, many: bool
    ) -> object:
        return (dict(tools), name, many)


class Gate:
    """Where answers wait after ``tokens`` tokens, until it is opened, in any thread."""

    def __init__(self, tokens: int = 0) -> None:
        self._tokens = tokens
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    async def passed(self, tokens: int) -> None:
        """Wait unless the answer is before the gate."""
        while tokens >= self._tokens and not self._opened.is_set():
            await asyncio.sleep(0.005)


@dataclass
class ToyService:
    """Answers every request with ``answer``, a token at a time. A request takes what is set here
    as it begins, so that nothing that is set later changes an answer."""

    model: ToyModel
    answer: str = "2 plus 3 is 5."
    delay: float = 0.0  # seconds before each token
    gate: Gate = field(default_factory=lambda: Gate(1 << 30))  # of requests that begin
    repeat: int = 1  # how often the answer is given
    error: Exception | None = None  # raised after ``good`` tokens
    lost: Exception | None = None  # as `health` has it
    good: int = 0
    drafts: tuple[int, int] = (0, 0)  # of an answer, and those accepted
    requests: list[Request] = field(default_factory=list)
    actions: list[SlotAction] = field(default_factory=list)
    scales: dict[int, float] = field(default_factory=dict)  # of adapters
    tokens: int = 0
    running: int = 0
    cancelled: int = 0
    ended: list[str] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        gate, delay, error, good = self.gate, self.delay, self.error, self.good
        drafts = self.drafts if request.drafts else (0, 0)
        stream = TextStream(self.model.tokenizer, request.stops, request.shown)
        ids = self.model.tokenizer.encode(self.answer) * self.repeat
        finish = Finish.END
        count = 0
        self.running += 1
        self.requests.append(request)
        try:
            for scores in self._scores(request):
                yield Piece("", (), (scores,))
            for token in ids if request.limit != 0 else ():
                if error is not None and count >= good:
                    raise error
                await gate.passed(count)
                await asyncio.sleep(delay)
                self.tokens += 1
                count += 1
                yield Piece(stream.push(token), (self._choice(token, request),))
                if stream.stopped_by is not None:
                    finish = Finish.STOP
                    break
                if count == request.limit:
                    finish = Finish.LENGTH
                    break
            if request.limit == 0:
                finish = Finish.LENGTH
            else:
                yield Piece(stream.finish(), ())
            yield Ending(finish, len(request.prompt), 4, count, stream.stopped_by, *drafts)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _scores(self, request: Request) -> Iterator[TokenScores]:
        """Of token t -t / 10, and less of the ids after it; three tokens at a time."""
        if (likely := request.prompt_logprobs) is None:
            return
        for start in range(1, len(request.prompt), 3):
            tokens = np.array(request.prompt[start : start + 3], np.uint32)[:, None]
            steps = np.arange(1 + likely, dtype=np.uint32)
            values = tokens / -10 - 0.5 * np.maximum(0.0, steps - 1.0)
            yield TokenScores(values.astype(np.float32), tokens + steps[:-1])

    def _choice(self, token: int, request: Request) -> TokenChoice:
        if request.settings.logprobs is None:
            return TokenChoice(token)
        top = tuple((token + i, -0.5 - i) for i in range(request.settings.logprobs))
        return TokenChoice(token, -0.5, top)

    async def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        if scales is not None:
            self.scales = dict(scales)
        names = enumerate(name for name, _ in self.model.adapters)
        return tuple(AdapterScale(n, f"/a/{n}.gguf", self.scales.get(i, 0.0)) for i, n in names)

    async def check(self, constraint: object) -> None:
        pass

    async def act_on_slot(self, action: SlotAction) -> SlotDone:
        self.actions.append(action)
        if action.slot == 9:
            raise PrefixFileError("slot 9: there are 2, from 0 on")
        return SlotDone(17, 4096, 0.25)

    async def metrics(self) -> Metrics:
        return Metrics(
            queued=3, running=self.running, sequences=2, pages_used=7, pages_total=99, steps=12
        )

    async def drain(self) -> None:
        self.ended.append("drained")

    async def close(self) -> None:
        self.ended.append("closed")


@pytest.fixture(scope="session")
def toy_texts(demo_file: Path) -> Iterator[tuple[Tokenizer, ChatTemplate]]:
    gguf = Gguf(demo_file)
    tokenizer = Tokenizer.of(gguf)
    with ChatTemplate.of(gguf, tokenizer) as template:
        yield tokenizer, template


def _model(tokenizer: Tokenizer, template: ChatTemplate) -> ToyModel:
    return ToyModel(tokenizer, template, answer_format=template.form)


@pytest.fixture
def service(toy_texts: tuple[Tokenizer, ChatTemplate]) -> ToyService:
    """A toy; set its fields before asking."""
    return ToyService(_model(*toy_texts))


@dataclass
class Running:
    """A server at work."""

    service: ToyService
    url: str
    port: int
    server: Server

    model: ToyModel
    client: httpx.Client

    def http(self) -> httpx.Client:
        return self.client

    def openai(self, **settings: Any) -> openai.OpenAI:
        import openai

        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0}
        return openai.OpenAI(**{**defaults, "http_client": self.http(), **settings})

    def async_openai(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(timeout=PATIENCE, trust_env=False),
        )

    wait_for = staticmethod(wait_for)


@contextlib.contextmanager
def running(
    service: ToyService, access: Access = OPEN, limits: Limits = USUAL
) -> Iterator[Running]:
    """A server on a free port, in a thread."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = Server(service, access, limits)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(
                base_url=url, timeout=PATIENCE, trust_env=False, verify=False
            ) as client:
                yield Running(service, url, port, server, service.model, client)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def run_server() -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """See `running`."""
    return running


@pytest.fixture
def start(service: ToyService) -> Iterator[Callable[..., Running]]:
    """Start a server that answers with ``service``; ``access`` and ``limits`` as wanted."""
    with contextlib.ExitStack() as stack:

        def begin(access: Access = OPEN, **limits: Any) -> Running:
            bounds = replace(USUAL, **limits)
            return stack.enter_context(running(service, access, bounds))

        yield begin


class Current:
    """The service of a test, where a server is shared by many."""

    def __init__(self, service: ToyService) -> None:
        self.service = service

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


@pytest.fixture(scope="module")
def _shared_server(toy_texts: tuple[Tokenizer, ChatTemplate]) -> Iterator[Running]:
    current: Any = Current(ToyService(_model(*toy_texts)))
    # A pulse is how a server finds that a browser has closed a silent stream.
    with running(current, OPEN, replace(USUAL, pulse_seconds=1.0)) as server:
        yield server


@pytest.fixture
def server(_shared_server: Running, service: ToyService) -> Iterator[Running]:
    """A server whose service is for one test, which waits for its requests to end."""
    shared: Any = _shared_server
    vars(shared.model).update(vars(service.model))
    service.model = shared.model
    shared.service.service = service
    yield replace(shared, service=service)
    wait_for(lambda: not shared.server.server_state.tasks)


@pytest.fixture
def process() -> Iterator[Callable[..., Any]]:
    """Starts `serve_process.Process`."""
    from tests.model.serve.serve_process import Process
    from tests.processes import kill

    with contextlib.ExitStack() as stack:

        def start(*flags: str, **how: Any) -> Process:
            started = Process(*flags, **how)
            stack.callback(kill, started.process)
            return started

        yield start
