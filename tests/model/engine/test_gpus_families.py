"""Golden logits of every family on several emulated devices: of each some networks are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.families.share import cut_networks
from urdir.model.verify.conformance import relative_rms

FAMILIES = Path(__file__).parents[2] / "data" / "families"
NAMES = sorted(path.name.removesuffix(".gguf.xz") for path in FAMILIES.glob("*.gguf.xz"))
EXACT_RELATIVE_RMS = 1e-4
#: Tokens of a prompt, and of those that are fed one after the other.
PROMPT, MORE = 3, 1
#: Part of the default run. Attention has two heads in these files, and one where it is latent or a
#: delta rule with a gate for each key: `test_random_models` has more.
QUICK = {("falcon-h1-dense", 2), ("mamba-dense", 4), ("minicpm3-dense", 2)}
#: No network can be cut: one has heads with ALiBi alone, another has heads too few.
WHOLE = {("refact-moe", 2), ("refact-moe", 4), ("mamba2-dense", 4)}


def logits(eager: EagerSteps, tokens: Sequence[int]) -> Any:
    """After a prompt, and after each token of more."""
    eager.truncate(0)
    eager.feed(tokens[:PROMPT])
    rows = [eager.logits()[0]]
    for token in tokens[PROMPT:]:
        eager.feed([token])
        rows.append(eager.logits()[0])
    return np.stack(rows)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        pytest.param(name, gpus, marks=[pytest.mark.full] * ((name, gpus) not in QUICK))
        for name in NAMES
        for gpus in (2, 4)
    ],
)
def test_exact_mode_matches_golden(
    name: str,
    gpus: int,
    reference_file: Callable[[str], Path],
    device_name: str,
    needs_gpus: Callable[[int], None],
) -> None:
    needs_gpus(gpus)
    with np.load(FAMILIES / f"{name}.npz") as file:
        tokens, expected = file["tokens"][: PROMPT + MORE].tolist(), file["logits"]
    settings: Any = {"context": 48, "kv_dtype": "f32", "exact": True}
    with (
        Engine.open(reference_file(name), device=device_name, gpus=gpus, **settings) as engine,
        EagerSteps(engine.session) as eager,
    ):
        found = logits(eager, tokens)
        assert relative_rms(found, expected[PROMPT - 1 : PROMPT + MORE]) <= EXACT_RELATIVE_RMS
        assert (found == logits(eager, tokens)).all()
        cut, _ = cut_networks(engine.session.parts.config)
        assert (cut == 0) == ((name, gpus) in WHOLE)
