"""Models with random weights, of any size, and small ones with the logits that they are to have."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.errors import SettingsError, UnsupportedError
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.shapes import Shape
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.files.demo import demo_model
from urdir.model.files.metadata import Metadata
from urdir.model.files.opened import Tensor
from urdir.model.verify.conformance import relative_rms

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def device(device_name: str) -> Iterator[Device]:
    """A device for the tests of a file, which so share compiled kernels."""
    with Device.open(device_name) as opened:
        yield opened


@pytest.fixture(scope="module")
def short_prompts_are_worth_a_state() -> Iterator[None]:
    """States are kept for prompts of a page or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
        yield


@dataclass(frozen=True)
class Model:
    """What a file would hold."""

    path: Path
    architecture: str
    metadata: Metadata
    tensors: dict[str, Tensor]


def _random_model(shape: Shape, kind: str = "F32", seed: int = 0) -> Model:
    """A model of that shape. Matrices have the type ``kind`` and normal values; vectors vary."""
    metadata = Metadata(shape.metadata("random"), "random")
    blocks = shape.layers + shape.nextn
    config = describe(Reader(metadata, shape.arch, shape.stored(), blocks, nextn=True))
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, stored in sorted({stored.name: stored for stored in stored_in(config)}.items()):
        values = rng.standard_normal(stored.shape).astype(np.float32)
        of = "F32"
        if not isinstance(stored, StoredMatrix):
            values = values * np.float32(0.2) + np.float32("norm" in name)
            if name.endswith("ssm_a"):  # what decays
                values = -np.exp(values)
        else:
            values *= np.float32(1 / math.sqrt(stored.shape[-1]))
            of = "F32" if "gate_inp" in name else kind
        tensors[name] = _tensor(name, values, gguf.GGMLQuantizationType[of])
    return Model(Path("random"), shape.arch, metadata, tensors)


def _tensor(name: str, values: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> Tensor:
    data = np.ascontiguousarray(gguf.quants.quantize(values, kind)).reshape(-1).view(np.uint8)
    return Tensor(name, int(kind), values.shape, 0, data.nbytes, data)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Model]:
    """See `_random_model`."""
    return _random_model


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked ``references`` runs on those of `tests/data` that it names, or on all of a
    kind in the folder of ``--references``."""
    marker = metafunc.definition.get_closest_marker("references")
    if marker is None:
        return
    kind, names = marker.args
    argument, folder = marker.kwargs.get("argument", "name"), _references_folder(metafunc.config)
    metafunc.parametrize(
        argument,
        list(names) if folder is None else _references().found_in(folder, kind),
        indirect=argument != "name",
        scope="module",
    )


def _references_folder(config: pytest.Config) -> Path | None:
    folder: Path | None = config.getoption("--references")
    return folder


@functools.cache
def _references() -> Any:
    """The module `references.py`."""
    path = Path(__file__).with_name("references.py")
    spec = importlib.util.spec_from_file_location("engine_references", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference_golden(pytestconfig: pytest.Config) -> Callable[[str, str], Path]:
    """Where the tokens and logits of a reference are, by its kind ("families", "golden") and
    name."""
    folder = _references_folder(pytestconfig)

    def find(kind: str, name: str) -> Path:
        path: Path = _references().golden_of(folder or DATA / kind.rsplit(maxsplit=1)[-1], name)
        return path

    return find


@pytest.fixture(scope="session")
def parts_of(pytestconfig: pytest.Config) -> Callable[[str], tuple[str, str | None]]:
    """The names of a draft's model and of its own file, if it has one."""
    folder = _references_folder(pytestconfig) or DATA / "drafts"
    of: Callable[[str], tuple[str, str | None]]
    of = functools.partial(_references().parts_of, folder)
    return of


@pytest.fixture(scope="session")
def supported(pytestconfig: pytest.Config) -> Callable[[str], AbstractContextManager[None]]:
    """``supported(name)`` skips a test of ``--references`` where something is refused as not
    supported, or a context as too long."""
    return functools.partial(_supported, pytestconfig)


@contextmanager
def _supported(config: pytest.Config, name: str) -> Iterator[None]:
    try:
        yield
    except (UnsupportedError, SettingsError) as error:
        if _references_folder(config) is None:
            raise
        pytest.skip(f"{name}: {error}")


@pytest.fixture(scope="session")
def golden(
    reference_file: Callable[[str], Path],
    reference_golden: Callable[[str, str], Path],
    pytestconfig: pytest.Config,
) -> Callable[[str], tuple[Path, list[int], Any]]:
    """A file of data/golden, or the demo model: its path, tokens, and the logits (tokens, vocab)
    f32 after each."""

    def read(name: str) -> tuple[Path, list[int], Any]:
        demo = name.startswith("demo") and _references_folder(pytestconfig) is None
        with np.load(reference_golden("demo" if demo else "golden", name)) as file:
            path = demo_model() if demo else reference_file(name)
            return path, file["tokens"].tolist(), file["logits"]

    return read


def _logits_of_parts(eager: EagerSteps, tokens: list[int], counts: list[int]) -> Any:
    """Logits after each part of a prompt that is processed in parts of so many tokens."""
    eager.truncate(0)
    found = []
    for count in counts:
        eager.feed(tokens[eager.lengths[0] : eager.lengths[0] + count])
        found.append(eager.logits()[0])
    return np.stack(found)


@pytest.fixture
def check_divided_prompts(
    device_name: str, reference_file: Callable[[str], Path]
) -> Callable[[str, list[list[int]], Callable[[Engine], None]], None]:
    """That logits of a family's model, by default arithmetic, are as near as llama.cpp's after a
    prompt in parts of so many tokens, in each of some ways; ``look`` is given the engine before."""

    def check(name: str, ways: list[list[int]], look: Callable[[Engine], None]) -> None:
        with np.load(DATA / "families" / f"{name}.npz") as golden:
            tokens, logits = golden["tokens"].tolist(), golden["logits"]
            allowed = max(2e-3, 1.1 * float(golden["native"]))
        with (
            Engine.open(reference_file(name), device=device_name, context=64) as engine,
            EagerSteps(engine.session) as eager,
        ):
            look(engine)
            for counts in ways:
                found = _logits_of_parts(eager, tokens, counts)
                assert relative_rms(found, logits[np.cumsum(counts) - 1]) <= allowed

    return check


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of latent attention have room for about as many tokens as a step has rows."""
    monkeypatch.setattr("urdir.model.memory.walk.MOST_STEPS", 2)
