"""What model tests share: the test data."""

from __future__ import annotations

import functools
import itertools
import json
import lzma
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model import golden_files, kept_processes
from tests.model import vocabulary_merges as merges
from tests.model.reference import Reference
from urdir.driver.emulator import jit
from urdir.model.cli import main
from urdir.ptxgen.render import frame
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.target import Target

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def data() -> Path:
    """The folder of test data."""
    return DATA


#: Texts and programs of kernels that a process of tests keeps: a megabyte each.
KEPT_KERNELS = 1024
_texts: dict[str, str] = {}
_compile_once = functools.lru_cache(maxsize=KEPT_KERNELS)(jit._compile.__wrapped__)
_render = frame.render


def _render_once(spec: KernelSpec, target: Target) -> str:
    if not type(spec).__module__.startswith("urdir."):  # made for a test
        return _render(spec, target)
    key = spec.key(target.name)
    if key not in _texts:
        if len(_texts) == KEPT_KERNELS:
            _texts.clear()
        _texts[key] = _render(spec, target)
    return _texts[key]


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_made_once() -> Iterator[None]:
    """Most tests open a device of their own, which has no cache, and many files the same models:
    they would render and compile the same kernels again and again. Not for longer than a module:
    tests elsewhere, in the same process, are of rendering itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "render", _render_once)
        patch.setattr(jit, "_compile", _compile_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _template_processes_are_kept() -> Iterator[None]:
    with kept_processes.kept():
        yield


@pytest.fixture(scope="session")
def reference_model() -> Any:
    """The class of `reference.py`: a forward pass of any description in numpy."""
    return Reference


@pytest.fixture(scope="session")
def vocabulary_merges() -> Any:
    """The module `vocabulary_merges.py`."""
    return merges


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line on the emulator; (exit code, stdout, stderr)."""
    monkeypatch.setenv("URDIR_DEVICE", "emulator")

    def run(*argv: str | Path) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in argv])
        except SystemExit as exc:
            code = int(exc.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ---- GGUF files made for a test ------------------------------------------------------------------

_ARRAY_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11}


def gguf_string(text: str | bytes) -> bytes:
    """A string as GGUF stores it."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """A value with its type; an (id, bytes) pair is taken as it is."""
    match value:
        case (int(type_id), bytes(raw)):
            return struct.pack("<I", type_id) + raw
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + gguf_string(value)
        case np.ndarray():
            type_id = _ARRAY_TYPES[value.dtype.str[1:]]
            return struct.pack("<IIQ", 9, type_id, len(value)) + value.tobytes()
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    raise TypeError(value)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; `tensors` maps names to (ggml type, shape with rows first, data)."""
    tensors = tensors or {}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += gguf_string(key) + gguf_value(value)
    data = b""
    for name, (type_id, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        header += gguf_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", type_id, len(data))
        data += raw
    return header + b"\0" * (-len(header) % alignment if tensors else 0) + data


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file with the given metadata and tensors (see `gguf_bytes`), returns its path."""
    numbers = itertools.count()

    def make(metadata: Mapping[str, Any], tensors: Any = None) -> Path:
        path = tmp_path / f"made-{next(numbers)}.gguf"
        path.write_bytes(gguf_bytes(metadata, tensors))
        return path

    return make


# ---- folders made for a test ---------------------------------------------------------------------


def safetensors_bytes(tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]]) -> bytes:
    """A safetensors file of arrays by name, each with its dtype (BF16: its 16-bit numbers)."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes config.json and model.safetensors (see `safetensors_bytes`), returns the folder."""
    numbers = itertools.count()

    def make(config: Mapping[str, Any], tensors: Any) -> Path:
        folder = tmp_path / f"folder-{next(numbers)}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder

    return make


#: A vocabulary that has another's tokens and merges, but is cut by a pre-tokeniser of its own name.
_SAME_TOKENS = {"qwen35": "qwen2"}


@pytest.fixture(scope="session")
def vocab_file(
    tmp_path_factory: pytest.TempPathFactory, vocabulary_merges: Any
) -> Callable[[str], Path]:
    """Unpacks one of the vocabularies of `data/vocab` ("qwen2"), returns its path."""
    folder = tmp_path_factory.mktemp("vocab")

    def cut_by(name: str) -> bytes:
        return gguf_string("tokenizer.ggml.pre") + gguf_value(name)

    @functools.cache
    def unpack(name: str) -> Path:
        path, stored = folder / f"{name}.gguf", _SAME_TOKENS.get(name, name)
        packed = DATA / "vocab" / f"ggml-vocab-{stored}.gguf.xz"
        raw = lzma.decompress(packed.read_bytes())
        path.write_bytes(raw if name == stored else raw.replace(cut_by(stored), cut_by(name), 1))
        vocabulary_merges.restore(path)
        return path

    return unpack


@pytest.fixture(scope="session")
def reference_file(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str], Path]:
    """The path of a model of `data/families`, `data/golden`, `data/drafts`, `data/encoders` or
    `data/encoder_decoders`, or of the folder of ``--references``; unpacked, or written by
    `golden_files`."""
    folder = tmp_path_factory.mktemp("references")
    given = pytestconfig.getoption("--references")
    kinds = ("golden", "families", "drafts", "encoders", "encoder_decoders")
    folders = [DATA / kind for kind in kinds] if given is None else [given]

    @functools.cache
    def unpack(name: str) -> Path:
        for stored in (of / f"{name}.gguf" for of in folders):
            if stored.exists():
                return stored
        path = folder / f"{name}.gguf"
        if given is None and name in golden_files.FILES:
            golden_files.write(name, path)
            return path
        packed = next(found for of in folders if (found := of / f"{path.name}.xz").exists())
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        return path

    return unpack


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model of the package."""
    return DATA.parent.parent / "model" / "data" / "demo-q4_k_m.gguf"
