"""Classes of transformers that no other golden covers, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.files.class_goldens import NAMES, ClassGolden
from urdir.model.engine.engine import Engine
from urdir.model.engine.realizar import EagerSteps
from urdir.model.verify.conformance import relative_rms


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_class(name: str, exact: bool, tmp_path: Path) -> None:
    """Token by token, and after a prompt. In 16 bits a router may choose other experts, so that the
    median counts."""
    golden = ClassGolden.read(name)
    tokens, wanted = golden.tokens.tolist(), golden.logits
    options: dict[str, Any] = {"exact": True, "kv_dtype": "f32"} if exact else {}
    with Engine.open(
        golden.write_folder(tmp_path), device="cuda", context=64, cache_folder=None, **options
    ) as engine:
        logits = engine.logits(tokens)[golden.positions]
        with EagerSteps(engine.session) as eager:
            eager.feed(tokens)
            last = eager.logits()[0]
    rows = [*zip(logits, wanted, strict=True), (last, wanted[-1])]
    assert golden.positions[-1] == len(tokens) - 1
    assert np.median([relative_rms(*of) for of in rows]) < (1e-4 if exact else 0.03)
    assert not exact or relative_rms(last, wanted[-1]) < 1e-4
