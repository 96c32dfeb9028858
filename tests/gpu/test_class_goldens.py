"""Classes of transformers that no other golden covers, on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model.files.class_goldens import NAMES, ClassGolden
from urdir.model.engine.engine import Engine
from urdir.model.verify.conformance import relative_rms


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_class(name: str, exact: bool, tmp_path: Path) -> None:
    """In 16 bits a router may choose other experts, so that the median of positions counts."""
    golden = ClassGolden.read(name)
    options = {"exact": True, "kv_dtype": "f32"} if exact else {}
    with Engine.open(
        golden.write_folder(tmp_path), device="cuda", context=64, cache_folder=None, **options
    ) as engine:
        logits = engine.logits(golden.tokens.tolist())[golden.positions]
    errors = [relative_rms(*rows) for rows in zip(logits, golden.logits, strict=True)]
    assert np.median(errors) < (1e-4 if exact else 0.03)
