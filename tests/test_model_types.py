"""The list of model types in model/MODELS.md is that of the tables."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from urdir.model.families.registry import families
from urdir.model.files.pretrained.tables import FAMILIES

DOCUMENT = Path(__file__).parents[1] / "model" / "MODELS.md"


def test_the_list_of_model_types_is_current() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    written = re.search(r"<!-- by tests/test_model_types.py -->\n(.*?)<!-- end -->", text, re.S)
    assert written is not None
    readme = (DOCUMENT.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"{len(families())} architectures" in readme
    assert f"[{len(FAMILIES)} types]" in readme
    assert written[1] == textwrap.fill(", ".join(sorted(FAMILIES)) + ".", 108) + "\n"
