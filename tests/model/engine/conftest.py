"""Models with random weights, of any size, and small ones with the logits that they are to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.reader import Reader
from urdir.model.families.registry import describe
from urdir.model.families.shapes import Shape
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.files.demo import demo_model
from urdir.model.files.gguf import Tensor
from urdir.model.files.metadata import Metadata
from urdir.model.verify.conformance import relative_rms

DATA = Path(__file__).parents[2] / "data"


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
    config = describe(Reader(metadata, shape.arch, shape.stored(), shape.layers))
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


@pytest.fixture(scope="session")
def golden(reference_file: Callable[[str], Path]) -> Callable[[str], tuple[Path, list[int], Any]]:
    """A file of data/golden, or the demo model: its path, tokens, and the logits (tokens, vocab)
    f32 after each."""

    def read(name: str) -> tuple[Path, list[int], Any]:
        demo = name.startswith("demo")
        with np.load(DATA / ("demo" if demo else "golden") / f"{name}.npz") as file:
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
