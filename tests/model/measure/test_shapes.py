"""Every shape that `urdir bench` offers has plans, on a device of paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from urdir.model.families.registry import read_config
from urdir.model.families.shapes import SHAPES
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.model_kernels import model_kernels

CONTEXT = 1024
LAYERS = 12
#: Where layers differ: by the types of their weights, the place in a pattern, or what they share.
WHOLE = {"llama-3.1-70b", "gemma-3-27b", "gemma-4-e4b", "falcon-7b"}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_plans(
    name: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many layers, unless ``--full``: the kernels of all others but `WHOLE` are the same."""
    assert read_config(SyntheticModel(name)).layers
    if name not in WHOLE and not pytestconfig.getoption("--full"):
        monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], layers=LAYERS))
    model = SyntheticModel(name)
    kernels = model_kernels(model, read_config(model), CONTEXT, "sm_90a", 132)
    assert any(kernel.per_step(prompt=False) for kernel in kernels)
    assert any(kernel.per_step(prompt=True) for kernel in kernels)
