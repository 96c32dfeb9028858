"""The demo model's tokenizer, and what compiles constraints for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from urdir.model.files.gguf import Gguf
from urdir.model.text.matcher import ConstraintCompiler
from urdir.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_file: Path) -> Tokenizer:
    return Tokenizer.of(Gguf(demo_file))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[ConstraintCompiler]:
    with ConstraintCompiler(tokenizer) as opened:
        yield opened
