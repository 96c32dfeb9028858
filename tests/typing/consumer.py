"""What a user of the three packages writes, with every public name: for type checkers alone.

`.ci/run` reads it with mypy --strict. CONTRIBUTING.md says how pyright does, in its strict mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import urdir.driver
import urdir.model
import urdir.ptxgen
from urdir.driver import (
    Arena,
    Buffer,
    CubinKernel,
    CudaError,
    Deviation,
    Device,
    DeviceArray,
    DriverError,
    Event,
    Explanation,
    Group,
    GuardedBuffer,
    Kernel,
    LaunchError,
    LifetimeError,
    LoadedKernel,
    MismatchError,
    NoDeviceError,
    NoDriverError,
    OutOfMemoryError,
    PinnedBuffer,
    Plan,
    Probe,
    PtxFiles,
    RecordedGraph,
    Slice,
    Stream,
    borrow,
    check_kernel,
    diff,
    emulated,
    execute,
    explain,
    launch_together,
    poison,
    probe,
    run_kernel,
    time_kernel,
)
from urdir.model import (
    AnswerOptions,
    AsyncReply,
    ChatOptions,
    ChatTemplate,
    Config,
    ContextFullError,
    Continuation,
    Delta,
    DraftSettings,
    Ending,
    Engine,
    EngineOptions,
    Finish,
    Generation,
    Gguf,
    Loading,
    LogitProcessor,
    LogitRow,
    MemoryModel,
    Message,
    ModelError,
    Piece,
    Placement,
    Reply,
    ReplyStream,
    Request,
    SamplingSettings,
    Session,
    SessionSettings,
    Statistics,
    Tensor,
    TokenChoice,
    Tokenizer,
    demo_model,
)
from urdir.model.engine.requests.service import Service
from urdir.model.kernel_suite import KernelSuite
from urdir.ptxgen import (
    FORMATS,
    Access,
    Format,
    KernelSpec,
    LaunchShape,
    Layout,
    Param,
    PtxgenError,
    Tolerance,
    assemble,
    catalog,
    format_of,
    kernels,
    lint,
)
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise

Arrays = Mapping[str, Any]


def answers(engine: Engine) -> Reply:
    """Whole answers, and many of them."""
    greedy = SamplingSettings(temperature=0.0)
    question = {"role": "user", "content": "What is 2 plus 3?"}
    reply = engine.chat([question], settings=greedy)
    for call in reply.tool_calls:
        print(call.name.upper(), call.arguments)
    text: str = reply.content + reply.reasoning + engine.generate("Once", settings=greedy, limit=1)
    many: list[Continuation] = [*engine.generate_all(["a", "b"])]
    choices: list[TokenChoice] = [*reply.choices, *many[0].choices]
    print(text, many[0].text, many[0].settings, [choice.logprob for choice in choices])
    more = [Message("user", "What is 2 plus 3?"), reply.message, Message("user", "And plus 1?")]
    print(engine.adapters, engine.chat(more, reasoning_budget=100))
    return engine.chat(more, variables={"enable_thinking": False}, stops=["."])


def constrained(engine: Engine, question: Message) -> str:
    """Answers of a format, in parts."""
    form: ChatOptions = {"response_format": {"type": "json_object"}, "tool_choice": "none"}
    stream: ReplyStream = engine.chat([question], stream=True, **form)
    texts: list[str] = []
    for delta in stream:
        part: Delta = delta
        texts.append(part.content + part.reasoning)
        if len(texts) > 100:
            stream.cancel()
    options: AnswerOptions = {"regex": "yes|no", "limit": 3, "processors": [Without(5)]}
    rows = engine.logits(engine.tokenize("Once"))
    text = engine.generate("Once", **options) + engine.detokenize(rows.argmax(1).tolist())
    return stream.reply.content.join([*texts, text])


class Without(LogitProcessor):
    """Forbids a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def process(self, rows: Sequence[LogitRow], logits: npt.NDArray[np.float32]) -> None:
        """See the base class."""
        logits[[len(row.answer) == 0 for row in rows], self.token] = -np.inf


async def chatted(engine: Engine, question: Message) -> Reply:
    """A reply for asyncio."""
    reply: AsyncReply = engine.chat_async([question], grammar='root ::= "yes"')
    async for delta in reply:
        print(delta.content)
    return await reply


async def streamed(engine: Engine) -> Ending | None:
    """The same for asyncio, in pieces."""
    async for item in engine.generate_async("Once", limit=3):
        match item:
            case Piece():
                print(item.text, [choice.token for choice in item.choices])
            case Ending():
                return item
    return None


def measured(engine: Engine, embedder: Engine) -> list[float]:
    """Numbers of texts, and adapters by name."""
    rows: npt.NDArray[np.float32] = engine.logits("Once")
    vectors: npt.NDArray[np.float32] = embedder.embed(["a", "b"], pooling="mean", normalize=False)
    ranked: npt.NDArray[np.float32] = embedder.rerank("a", ["b"])
    pairs: npt.NDArray[np.float32] = embedder.score([("a", "b")])
    name: str = engine.load_adapter("poet.gguf")
    print(engine.generate("Once", adapters=[name, ("other", 0.5)]), engine.perplexity("Once"))
    tokens: list[int] = engine.tokenize("Once")
    return [*pairs.tolist(), *ranked.tolist(), float(rows[0, tokens[0]]), float(vectors[0, 0])]


def token_by_token(engine: Engine) -> Statistics:
    """The same with a template and a generation of one's own."""
    drafts = DraftSettings(most=3, longest=4, shortest=2)
    wanted = SessionSettings(4096, "f16", sequences=2, page_len=16, drafts=drafts)
    session = Session(engine.device, engine.weights, wanted)
    tokenizer: Tokenizer = engine.tokenizer
    config: Config = engine.config
    with ChatTemplate.of(engine.file, tokenizer) as template:
        prompt = template.encode([Message("user", "What is 2 plus 3?")])
    try:
        request = Request(prompt=tuple(prompt), settings=SamplingSettings(), limit=50)
        generation = Generation(session, tokenizer, request)
        print("".join(generation.text()), config.n_layers)
    except ContextFullError as exc:
        raise ModelError("too long") from exc
    assert generation.statistics.finish is Finish.END
    return generation.statistics


def sooner() -> Engine:
    """The first graphs are recorded while weights are loaded."""
    with Engine.opening("model.gguf", device="cuda:1", text=True, kv_dtype="q8_0") as loading:
        prepare(loading)
        return Engine(loading)


def prepare(loading: Loading) -> None:
    """What needs no weights."""
    prompt = loading.tokenizer.encode("Once")
    loading.prepare(Request(prompt=tuple(prompt), settings=SamplingSettings()))


def by_options(options: EngineOptions) -> Engine:
    """The arguments as one value."""
    with Loading(replace(options, text=True)) as loading:
        return Engine(loading)


def service(engine: Engine) -> Service:
    """An engine for many requests."""
    return Service(engine, engine.tokenizer)


def weights(path: Path) -> Layout:
    """A tensor of a file, as kernels want it in memory."""
    with Gguf(path) as file:
        tensor: Tensor = file.tensors["output.weight"]
        rows, cols = tensor.shape
        kind: Format = format_of(tensor.type_id)
        assert kind in FORMATS.values()
        return Layout(kind, rows, cols)


def own_weights(path: Path, name: str, values: npt.NDArray[np.float32]) -> Engine:
    """The model of a file with other weights."""
    file = Gguf(path)
    return Engine.open(MemoryModel(file.metadata, file.tensors | {name: values}), draft="ngram")


def any_kernel(device: Device, spec: KernelSpec) -> Arrays:
    """A kernel by itself."""
    worst: Deviation = check_kernel(device, spec, sanitize=False)[0]
    inputs = spec.make_inputs(np.random.default_rng(0))
    print(worst.ok, worst.ratio, time_kernel(device, spec, inputs))
    found: Explanation = explain(spec)
    print(found, found.global_memory[0].parts, found.text(3))
    kernel: Kernel = spec
    loaded: LoadedKernel = device.load(kernel)
    print(loaded.resources.registers)
    return run_kernel(device, spec, inputs)


def foreign(device: Device, cubin: bytes) -> LoadedKernel:
    """A kernel of machine code."""
    params = (Param("x", "f32", (8,), Access.INOUT),)
    return device.load(CubinKernel(cubin, "entry", params, LaunchShape((1, 1, 1), (32, 1, 1))))


def plans(device: Device) -> None:
    """Plans, graphs and memory."""
    plan = Plan("fill")
    with device.create_stream() as stream, device.allocate(400, "x") as buffer:
        plan.fill(buffer, 0, "zero")
        print(plan, plan.table()[0]["label"], [kernel.name for kernel in plan.kernels()])
        execute.run(plan, device, stream)
        use(stream, buffer, borrow(device, DeviceArray(buffer, "bf16", (2, 2))))
        with execute.record(plan, device) as graph:
            launch(graph, stream)


def together(plan: Plan) -> None:
    """Several devices, each with a plan of its own."""
    with Group.open("emulator", gpus=(0, 1)) as group:
        streams: list[Stream] = [device.create_stream() for device in group]
        graphs = [execute.record(plan, device) for device in group]
        launch_together([*zip(graphs, streams, strict=True)])
        group.synchronize()
        plans(group[1])


def launch(graph: RecordedGraph, stream: Stream) -> float:
    """A recorded graph, timed."""
    start: Event = stream.record()
    graph.launch(stream)
    return stream.record().elapsed_ms_since(start)


def use(stream: Stream, *memory: Arena | Buffer | GuardedBuffer | PinnedBuffer | Slice) -> None:
    """All kinds of memory."""
    print(len(memory), poison((3,), np.dtype(np.float32), floats=True), diff)
    stream.synchronize()


def ptx(spec: KernelSpec) -> tuple[Access | None, ...]:
    """A kernel as text."""
    text = spec.ptx("sm_90")
    print(assemble.assemble(text, "sm_90").entries, lint.lint(text), kernels.__name__)
    print({name: kind.template for name, kind in catalog.kernels().items()})
    shape: LaunchShape = spec.launch_shape
    tolerance: Tolerance = spec.tolerance
    params: tuple[Param, ...] = spec.params
    print(shape.grid, tolerance.rtol)
    return tuple(param.access for param in params)


def main() -> None:
    """Everything once."""
    found: Probe = probe()
    print(found.status, urdir.model.__version__, urdir.driver.Device, urdir.ptxgen.KernelSpec)
    spec = Normalise(rows=3, cols=100, norm=Norm("rms", 1e-5))
    try:
        with Device.open("emulator", api=emulated(sanitize=True)) as device:
            any_kernel(device, spec)
            plans(device)
            together(Plan("nothing"))
        with Engine.open(demo_model(), ptx_files=PtxFiles("edited", dump=Path("x"))) as engine:
            print(answers(engine), token_by_token(engine), service(engine), weights(Path("x")))
            print(
                engine.file.path, sooner(), by_options(EngineOptions(placement=Placement(fit=True)))
            )
    except (NoDeviceError, NoDriverError, OutOfMemoryError) as exc:
        print(exc)
    except (CudaError, LaunchError, LifetimeError, MismatchError) as exc:
        raise DriverError("what a driver says") from exc
    except PtxgenError:
        print(ptx(spec))


class TestMine(KernelSuite):
    """A suite of one's own."""

    kernels = (Normalise,)
