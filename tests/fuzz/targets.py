"""What is given mutated input: each target makes an input of a seed, and takes it.

Taking may raise the project's own errors (`ALLOWED`), and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.fuzz import gguf_header, trees
from tests.fuzz.adapters import AdapterTarget
from tests.model.files.class_goldens import ClassGolden
from tests.model.files.plain_folder import LLAMA3_SCALING
from tests.model.files.quantised_folders import KINDS, quantised
from urdir.driver import bindings
from urdir.driver.emulator.machine.compile import compile_entry
from urdir.driver.emulator.machine.execution import GridExecution
from urdir.driver.emulator.machine.faults import KernelFault
from urdir.driver.emulator.machine.memory import Memory
from urdir.model.errors import ModelError, TemplateError
from urdir.model.families.config import Config
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Gguf
from urdir.model.files.metadata import Metadata
from urdir.model.files.pretrained.tables import FAMILIES
from urdir.model.files.source import open_model
from urdir.model.text.answers import AnswerParser
from urdir.model.text.chat import ChatTemplate, Message
from urdir.model.text.sandbox import TemplateProcess
from urdir.model.text.tokenizer import Tokenizer
from urdir.ptxgen import ptx
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.ptx.syntax import PtxSyntaxError
from urdir.ptxgen.tools.lint import lint

ALLOWED = (ModelError, PtxgenError, PtxSyntaxError)
DATA = Path(__file__).parent.parent / "data"


#: Values of fields of families.
_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 4, 1 << 40, 0.5, -1.0, True, False, "silu", "relu2", "M*", "LG", "auto"),
    *([], [1, 2], [1.0] * 5, ["full_attention", "sliding_attention"], ["mamba", "attention"], {}),
)


def _of_another_type(rng: random.Random) -> dict[str, Any]:
    """Fields of a random family."""
    kind = rng.choice([*FAMILIES])
    family = FAMILIES[kind]
    names = [*family.keys, *family.fixed, "layer_types", "head_dim", "sliding_window"]
    chosen = rng.sample(names, rng.randint(1, min(4, len(names))))
    activation = dict(zip(("hidden_act",), family.activations, strict=False))
    return {"model_type": kind, **activation, **{name: rng.choice(_VALUES) for name in chosen}}


class Target(Protocol):
    """One kind of input."""

    def make(self, rng: random.Random) -> bytes:
        """An input."""

    def take(self, data: bytes) -> None:
        """Give it to the project."""


class GgufTarget:
    """A GGUF header, with as much (empty) data as its tensors had: file, description, tokeniser."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "mutated.gguf"
        files = [DATA / "golden" / "nano-llama-q2_k.gguf", demo_model()]
        for name in ("gemma3-dense.gguf", "glm4-dense.gguf", "qwen3moe-moe.gguf"):
            packed = DATA / "families" / f"{name}.xz"
            (folder / name).write_bytes(lzma.decompress(packed.read_bytes()))
            files.append(folder / name)
        self._bases = []
        for file in files:
            with Gguf(file) as gguf:  # a smaller vocabulary is as good
                self._bases.append(gguf_header.Base(gguf, longest=300))

    def make(self, rng: random.Random) -> bytes:
        base = rng.choice(self._bases)
        return struct.pack("<Q", base.nbytes) + base.mutated(rng)

    def take(self, data: bytes) -> None:
        (size,), header = struct.unpack_from("<Q", data), data[8:]
        self._path.write_bytes(header)
        os.truncate(self._path, max(size, len(header)))
        with Gguf(self._path) as gguf:
            for use in (Config.of, _use_tokenizer):
                _put_up_with(use, gguf)


class SafetensorsTarget:
    """A folder: config.json, headers and index of *.safetensors; of floats, or quantised."""

    #: Kinds of quantised folders: all sets of tensors that belong together.
    _KINDS = (
        "fp8-blocks",
        "fp8-matrix",
        "gptq-order",
        "awq",
        "w4a16-zeros",
        "nvfp4",
        "mxfp4",
        "bitnet",
    )
    #: Classes with lists of layers, sizes and positions of their own.
    _CLASSES = ("GPTNeo", "Lfm3", "XGLM", "cohere_compass_text", "mllama_text_model")

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "pretrained"
        self._folder.mkdir()
        sources = [DATA / "safetensors" / "qwen2-f16-sharded"]
        for name in self._KINDS:
            (folder / name).mkdir()
            made = quantised(DATA / "safetensors" / "llama-bf16", KINDS[name], folder / name)
            sources.append(made[0])
        for name in self._CLASSES:
            (folder / name).mkdir()
            sources.append(ClassGolden.read(name).write_folder(folder / name))
        self._bases = [_FolderBase.of(source) for source in sources]

    def make(self, rng: random.Random) -> bytes:
        base = rng.choice(self._bases)
        texts, heads = dict(base.texts), dict(base.heads)
        if rng.random() < 0.3:  # factors are made of sizes of the configuration alone
            scaled = texts["config.json"] | {"rope_scaling": LLAMA3_SCALING}
            texts["config.json"] = trees.claimed(rng, scaled)
        if rng.random() < 0.3:
            texts["config.json"] = texts["config.json"] | _of_another_type(rng)
        for files in rng.choice(((texts,), (heads,), (heads, texts))):
            name = rng.choice([*files])
            files[name] = trees.changed(rng, files[name])
        files = {name: json.dumps(tree).encode() for name, tree in texts.items()}
        for name, tree in heads.items():
            head = json.dumps(tree).encode()
            files[name] = struct.pack("<Q", len(head)) + head
        if rng.random() < 0.3:
            name = rng.choice([*files])
            files[name] = trees.raw(rng, files[name])
        made = {name: (data.hex(), base.sizes.get(name, 0)) for name, data in files.items()}
        return json.dumps(made).encode()

    def take(self, data: bytes) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        for name, (raw, more) in json.loads(data).items():
            path = self._folder / name
            path.write_bytes(bytes.fromhex(raw))
            os.truncate(path, path.stat().st_size + more)
        with open_model(self._folder) as model:
            for tensor in model.tensors.values():
                _ = tensor.data[:64]
            _put_up_with(Config.of, model)


@dataclass(frozen=True)
class _FolderBase:
    """A folder's JSON files, headers of its *.safetensors, and how many bytes follow these."""

    texts: dict[str, Any]
    heads: dict[str, Any]
    sizes: dict[str, int]

    @classmethod
    def of(cls, source: Path) -> _FolderBase:
        paths = [path for path in source.glob("*.json") if path.name != "tokenizer.json"]
        base = cls({path.name: json.loads(path.read_text()) for path in paths}, {}, {})
        for path in source.glob("*.safetensors"):
            with open(path, "rb") as file:
                (nbytes,) = struct.unpack("<Q", file.read(8))
                base.heads[path.name] = json.loads(file.read(nbytes))
            base.sizes[path.name] = path.stat().st_size - 8 - nbytes
        return base


class TokenizerTarget:
    """tokenizer.json, as a folder or a GGUF file has it."""

    def __init__(self, folder: Path) -> None:
        paths = sorted((DATA / "safetensors").glob("*/tokenizer.json"))
        self._bases = [_smaller(json.loads(path.read_text())) for path in paths]

    def make(self, rng: random.Random) -> bytes:
        base = rng.choice(self._bases)
        if rng.random() < 0.2:
            return json.dumps(base | _repeated(rng)).encode()
        data = json.dumps(trees.changed(rng, base)).encode()
        return trees.raw(rng, data) if rng.random() < 0.1 else data

    def take(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        values = {"tokenizer.ggml.model": "huggingface", "tokenizer.huggingface.json": text}
        _use_tokenizer(_File(Metadata(values, "mutated")))


#: Steps of a text, each of which makes it longer.
_LONGER: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "normalizer": (
        "normalizers",
        [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
            {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "é"},
            {"type": "Prepend", "prepend": "a"},
            {"type": "NFKD"},
            {"type": "ByteLevel"},
        ],
    ),
    "pre_tokenizer": (
        "pretokenizers",
        [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        ],
    ),
}


def _repeated(rng: random.Random) -> dict[str, Any]:
    """Steps of a kind again and again."""
    part = rng.choice([*_LONGER])
    name, steps = _LONGER[part]
    inner = [rng.choice(steps)] * rng.choice((1, 2, 4, 8, 40, 400)) + [rng.choice(steps)]
    return {part: {"type": "Sequence", name: inner}}


class _File:
    """Metadata alone, in the place of a model file."""

    path = Path("mutated")
    architecture = "llama"

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tensors: dict[str, Any] = {}


class TemplateTarget:
    """A chat template and messages made of control tokens and what templates delete.

    Nobody but the template itself writes a control token: messages of harmless text give the same.
    Answers are read in the form that is derived from it, if there is one.
    """

    _PARTS = (
        "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ m.role }}", "{% if m %}",
        "{% endif %}", "{{ m.content | trim }}", "<|im_start|>", "<|im_end|>", "{{ bos_token }}",
        "{{ m.content | replace('<image>', '') }}", "{{ m.content | replace('\n', '') }}",
        "{{ m.content | striptags }}", "{{ m.content.split('x') | join }}",
        "{{ m.content.split('</think>') | last }}", "{% set x = namespace(n=0) %}", "{{ x.n }}",
        "{{ messages | tojson }}",
        "{% macro f(a) %}{{ a }}{% endmacro %}", "{{ f(m.content) }}", "{{ m.content[1:] }}",
        "{{ m.tool_calls | tojson }}", "{{ m.reasoning_content }}</think>", '{"a":' * 400, "[",
        "{% for c in m.tool_calls %}<c>{{ c.function.name }}({{ c.function.arguments | tojson }})"
        "</c>{% endfor %}", "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}",
        "{% for c in m.tool_calls %}{% for k, v in c.function.arguments | items %}"
        "<{{ c.function.name }} {{ k }}={{ v }}>{% endfor %}{% endfor %}",
        "{{ m.content | upper }}", "{{ raise_exception('no') }}", "{{ range(9) | list }}",
    )  # fmt: skip
    _PIECES = (
        "<|im_",
        "end|>",
        "<image>",
        "\n",
        "<b>",
        "x",
        "</think>",
        "&lt;",
        "|im_end|>",
        "<",
        "a",
    )

    def __init__(self, folder: Path) -> None:
        with Gguf(demo_model()) as gguf:
            self._tokenizer = Tokenizer.of(gguf)
            self._base = gguf.metadata.require("tokenizer.chat_template", str)
        self._process = TemplateProcess(time_limit=0.5)  # two renderings are one input
        self._process.render("", {})  # the first loads what the limits are not for

    def make(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            source = trees.text(rng, self._base)
        else:
            body = "".join(rng.choices(self._PARTS, k=rng.randint(1, 6)))
            source = rng.choice(("%s", "{%% for m in messages %%}%s{%% endfor %%}")) % body
        contents = ["".join(rng.choices(self._PIECES, k=rng.randint(0, 6))) for _ in range(2)]
        return json.dumps([source, contents]).encode()

    def take(self, data: bytes) -> None:
        source, contents = json.loads(data)
        chat = ChatTemplate(source, self._tokenizer, self._process)
        control = set(self._tokenizer.control_tokens().values())
        found = []
        for texts in (contents, ["a" for _ in contents]):
            turns = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
            try:
                ids = chat.encode(turns)
            except TemplateError:
                return
            found.append([token for token in ids if token in control])
        if len(found[0]) > len(found[1]) and "'<|'" not in source:
            raise AssertionError("a message has made a control token")
        parser = AnswerParser(chat.form, tools={"fn_alpha": {}})
        for char in "".join(contents) + source:
            parser.push(char)
        parser.finish()


class PtxTarget:
    """PTX text: lint, the emulator's linker and loader, and a small launch of what they take."""

    def __init__(self, folder: Path) -> None:
        specs = [*Normalise.examples().values()][:3]
        self._bases = [spec.ptx("sm_90") for spec in specs]
        self._api = bindings.emulated()
        self._api.cuInit(0)
        self._api.cuCtxSetCurrent(self._api.cuDevicePrimaryCtxRetain(0)[1])
        self._launch(self._bases[0])  # reserves memory, which the limit is not for

    def make(self, rng: random.Random) -> bytes:
        lines = rng.choice(self._bases).split("\n")
        for _ in range(rng.randint(1, 4)):
            at, source = rng.randrange(len(lines)), rng.randrange(len(lines))
            edit = rng.randrange(5)
            if edit == 0:
                del lines[at]
            elif edit == 1:
                lines.insert(at, lines[source])
            elif edit == 2:
                lines[at] = trees.text(rng, lines[at])
            elif edit == 3:
                words, others = lines[at].split(" "), lines[source].split(" ")
                words[rng.randrange(len(words))] = rng.choice(others)
                lines[at] = " ".join(words)
            else:
                number = str(rng.choice(trees.NUMBERS))
                lines[at] = "".join(
                    number if c.isdigit() and rng.random() < 0.3 else c for c in lines[at]
                )
        return "\n".join(lines).encode("utf-8", "replace")

    def take(self, data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        assert all(str(finding).isprintable() for finding in lint(text))
        api, source = self._api, text.encode() + b"\0"
        kind = api.CUjitInputType.CU_JIT_INPUT_PTX
        state = api.cuLinkCreate(0, [], [])[1]
        try:
            if int(api.cuLinkAddData(state, kind, source, len(source), b"x", 0, [], [])[0]):
                return
            status, address, _ = api.cuLinkComplete(state)
            if not int(status):
                status, module = api.cuModuleLoadData(address)
                if not int(status):
                    api.cuModuleUnload(module)
                    self._launch(text)
        finally:
            api.cuLinkDestroy(state)

    def _launch(self, text: str) -> None:
        """Every parameter is the address of one small buffer."""
        module = ptx.parse(text)
        for name in module.entries:
            program = compile_entry(module, name, "sm_90a")
            if program.static_shared_bytes > _SMALL:
                continue
            memory = Memory(1 << 24)
            address = memory.allocate(_SMALL)
            memory.fill(address, 0, _SMALL)
            params = struct.pack("<Q", address) * (program.param_bytes // 8 + 1)
            params = params[: program.param_bytes]
            grid = GridExecution(
                program, (2, 1, 1), (64, 1, 1), (1, 1, 1), 0, params, memory, 4, budget=_BUDGET
            )
            with contextlib.suppress(KernelFault):
                grid.run(alone=True)


_SMALL = 1 << 16  # bytes
_BUDGET = 20_000  # instructions of a launch


def _smaller(description: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json with few tokens, so that changes hit the rest of it."""
    model = description["model"]
    vocabulary = dict(sorted(model["vocab"].items(), key=lambda item: item[1])[:400])
    model["vocab"] = vocabulary
    merges = [m if isinstance(m, list) else m.split(" ") for m in model.get("merges", [])]
    model["merges"] = [
        [a, b] for a, b in merges if a in vocabulary and b in vocabulary and a + b in vocabulary
    ]
    return description


def _use_tokenizer(gguf: Any) -> None:
    build = Tokenizer.checked(gguf)
    try:
        tokenizer = build()
    except ModelError as error:  # by then a device is open
        raise AssertionError("checking the vocabulary did not find this") from error
    tokenizer.decode(
        tokenizer.encode("Hello <|im_end|> wörld\n 42", parse_special=True, add_bos=True)
    )


def _put_up_with(use: Callable[[Any], object], argument: Any) -> None:
    with contextlib.suppress(*ALLOWED):
        use(argument)


def _http_target(folder: Path) -> Target:
    from tests.fuzz.http_requests import HttpTarget  # a third of what each process would import

    return HttpTarget(folder)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "gguf": GgufTarget,
    "safetensors": SafetensorsTarget,
    "adapter": AdapterTarget,
    "tokenizer": TokenizerTarget,
    "template": TemplateTarget,
    "http": _http_target,
    "ptx": PtxTarget,
}
#: MiB of addresses that a target may reserve: the emulator keeps them for registers, mostly unused.
RESERVED = {"ptx": 1024}
