"""Descriptions against llama.cpp: what the numpy reference makes of the models of its generator.

`tests/data/families/NAME.gguf.xz` is a tiny model with random weights, made by llama.cpp's own test
generator for one architecture; `NAME.npz` has llama.cpp's logits (f32 values, f32 cache).
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.partial_sort import WHOLE_POOLS, CutPools
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.verify.conformance import relative_rms

FILES = sorted((Path(__file__).parents[2] / "data" / "families").glob("*.gguf.xz"))
#: What llama.cpp allocates unless it is told otherwise: above the 256 that the models are trained
#: for, so that LongRoPE has its long factors.
CONTEXT = 512
#: llama.cpp's logits are f32: what they lose against f64. The contract is 1e-4.
TOLERANCE = 1e-5
#: How many of them are part of the quick run.
QUICK = 5


def _name(path: Path) -> str:
    return path.name.removesuffix(".gguf.xz")


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(path, marks=[pytest.mark.quick] if index < QUICK else [], id=_name(path))
        for index, path in enumerate(FILES)
    ],
)
def test_logits_are_llama_cpp_s(packed: Path, tmp_path: Path, reference_model: Any) -> None:
    path = tmp_path / f"{_name(packed)}.gguf"
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    golden = np.load(packed.with_name(f"{_name(packed)}.npz"))
    reference = CutPools if _name(packed) in WHOLE_POOLS else reference_model
    with Gguf(path) as file:
        logits = reference(file, Config.of(file), CONTEXT).logits(golden["tokens"])
    assert relative_rms(logits, golden["logits"]) < TOLERANCE


def test_there_are_models_of_dozens_of_architectures() -> None:
    assert len(FILES) >= 60
