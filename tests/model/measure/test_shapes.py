"""Every shape that `urdir bench` offers has plans, on a device of paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from urdir.model.families.config import Config
from urdir.model.families.shapes import SHAPES, Shape
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.model_kernels import model_kernels

CONTEXT = 1024
#: Layers whose kernels are those of all.
LAYERS = 8
MORE_LAYERS = {"lfm2-8b-a1b": 12, "nemotron-h-8b": 12}
#: Where layers differ: by the types of their weights, the place in a pattern, or what they share.
WHOLE = {"llama-3.1-70b", "gemma-3-27b", "gemma-4-e4b", "falcon-7b", "deepseek-v2-lite"}


def first_layers(shape: Shape, count: int) -> Shape:
    """A model of the first ``count`` layers, with its numbers for each layer."""
    keys = {
        key: value[:count] if isinstance(value, np.ndarray) and len(value) > count else value
        for key, value in shape.keys.items()
    }
    return replace(shape, layers=count, keys=keys)


#: Whose plans take longest, and have layers that others have, too.
FULL = {"deepseek-v2-lite", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "granite-4.0-h-small"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in SHAPES],
)
def test_every_shape_has_plans(
    name: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many layers, unless ``--full``: the kernels of all others but `WHOLE` are the same."""
    assert Config.from_gguf(SyntheticModel(name)).layers
    if name not in WHOLE and not pytestconfig.getoption("--full"):
        monkeypatch.setitem(SHAPES, name, first_layers(SHAPES[name], MORE_LAYERS.get(name, LAYERS)))
    model = SyntheticModel(name)
    kernels = model_kernels(model, Config.from_gguf(model), CONTEXT, "sm_90a", 132)
    assert any(kernel.per_step(prompt=False) for kernel in kernels)
    assert any(kernel.per_step(prompt=True) for kernel in kernels)
