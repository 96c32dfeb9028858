"""Every shape that `urdir bench` offers has plans, on a device of paper."""

from __future__ import annotations

import pytest

from urdir.model.families.registry import read_config
from urdir.model.families.shapes import SHAPES
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.model_kernels import model_kernels

CONTEXT = 1024


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_plans(name: str) -> None:
    model = SyntheticModel(name)
    config = read_config(model)
    kernels = model_kernels(model, config, CONTEXT, "sm_90", 132)
    assert any(kernel.per_step(prompt=False) for kernel in kernels)
    assert any(kernel.per_step(prompt=True) for kernel in kernels)
