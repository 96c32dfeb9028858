"""Models of the types with codebooks, against the reference in numpy with gguf-py's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_random_models import errors
from urdir.driver.device import Device
from urdir.model.families.shapes import Shape
from urdir.ptxgen.weights.formats import FORMATS, random_blocks
from urdir.ptxgen.weights.layout import Layout

DENSE = Shape("llama", 1, 256, 4, 2, 64, 512, 97, False)
MIXTURE = Shape(
    *("qwen3moe", 1, 256, 4, 2, 64, 256, 83, True),
    {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 256},
    ("attn_q_norm.weight", "attn_k_norm.weight"),
)
#: Shape, types of its matrices in turn: those of Q, K and V differ, so does a pair of gate and up.
CASES = {
    "dense": (DENSE, ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0")),
    "one type": (DENSE, ("IQ3_S",)),
    "mixture": (MIXTURE, ("IQ1_M", "IQ2_S", "IQ1_S")),
}


def of_types(model: Any, kinds: Sequence[str]) -> Any:
    """The model, its matrices of Q8_0 replaced by random ones of these types in turn."""
    rng, tensors = np.random.default_rng(4), dict(model.tensors)
    matrices = [name for name, tensor in tensors.items() if tensor.type_id == 8]
    for number, name in enumerate(matrices):
        fmt, tensor = FORMATS[kinds[number % len(kinds)]], tensors[name]
        rows, cols = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
        layout, count = Layout(fmt, rows, cols), rows * cols // fmt.block
        sample = layout.unpack(layout.pack(random_blocks(fmt, count, rng)))
        data = random_blocks(fmt, count, rng, cols**-0.5 / float(sample.std())).reshape(-1)
        tensors[name] = replace(tensor, type_id=fmt.ggml_type, nbytes=data.nbytes, data=data)
    return replace(model, tensors=tensors)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_reference_s(
    case: str, device: Device, random_model: Callable[..., Any], reference_model: Any
) -> None:
    shape, kinds = CASES[case]
    model = of_types(random_model(shape, "Q8_0"), kinds)
    exact, rounded = errors(device, model, reference_model)
    assert exact <= 1e-5
    assert rounded <= 2e-3
