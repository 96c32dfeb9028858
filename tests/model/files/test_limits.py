"""The table of limits in model/MODELS.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from urdir.model.errors import GgufError
from urdir.model.files.limits import LIMITS


def test_the_document_lists_every_limit() -> None:
    readme = (Path(__file__).parents[3] / "model" / "MODELS.md").read_text()
    rows = [f"| {limit.what} | {limit.most:,} | {limit.known} |" for limit in LIMITS]
    table = readme.split("## Limits of files")[1].split("\n##")[0].split("|---|---|---|\n")[1]
    assert table.strip().splitlines() == rows


def test_the_limit_itself_is_allowed() -> None:
    for limit in LIMITS:
        limit.check(limit.most, "f", GgufError)
        with pytest.raises(GgufError, match=f"f: .* {limit.what}, at most {limit.most:,}"):
            limit.check(limit.most + 1, "f", GgufError)
