"""LoRA adapters of all tensors that take them, of models of other architectures: logits against
float64 with merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_adapters import TOKENS
from tests.model.files.adapter_files import made, write_gguf
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.layers.adaptable import adaptable
from urdir.model.verify.conformance import relative_rms

FAMILIES = {
    p.name.removesuffix(".gguf.xz")
    for p in (Path(__file__).parents[2] / "data" / "families").glob("*.gguf.xz")
}
#: What the default run has, and why; those whose adapters tokens switch on have their own.
SAMPLE = {
    "granitehybrid-dense": "a state, scales of sums and logits",
    "deepseek2-moe": "latent vectors, a router, experts beside shared ones",
}
OTHERS = sorted(FAMILIES - {*SAMPLE, "graniteswitch"})
#: The largest of 231 logits on the emulator was 2.5e-6.
EXACT_RELATIVE_RMS = 1e-5
#: Ends of what is fed at once: few rows, one, and many.
ENDS = (3, 4, 14, 15)


@pytest.mark.parametrize("gpus", [None, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_logits_are_those_of_merged_weights(
    name: str,
    gpus: int | None,
    tmp_path: Path,
    device_name: str,
    needs_gpus: Callable[[int], None],
    reference_file: Callable[[str], Path],
    reference_model: Any,
) -> None:
    needs_gpus(gpus or 1)
    path = reference_file(name)
    with Gguf(path) as file:
        config = Config.of(file)
        takes = adaptable(config)
        matrices = {name: of for name, of in made(path, 1, 4, *takes).items() if name in takes}
        reference = reference_model(file, config, 64)
        plain = reference._tensor

        def merged(tensor: str) -> Any:
            values = plain(tensor)
            if tensor in matrices:
                a, b = (of.astype(np.float64) for of in matrices[tensor])
                values = values + 2 / 4 * (b @ a).reshape(values.shape)
            return values

        reference.tensor = merged
        tokens = [token % config.vocab_size for token in TOKENS]
        wanted = reference.logits(tokens)[[end - 1 for end in ENDS]]
        adapter = write_gguf(tmp_path / "all.gguf", matrices, arch=file.architecture)
    found = []
    with (
        Engine.open(
            path,
            device=device_name,
            gpus=gpus,
            context=32,
            exact=True,
            kv_dtype="f32",
            adapters=[(adapter, 1.0)],
        ) as engine,
        EagerSteps(engine.session) as eager,
    ):
        for end in ENDS:
            eager.feed(tokens[eager.lengths[0] : end])
            found.append(eager.logits()[0])
    assert relative_rms(np.stack(found), wanted) <= EXACT_RELATIVE_RMS
