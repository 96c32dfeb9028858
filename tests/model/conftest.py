"""What model tests share: the test data."""

from __future__ import annotations

import functools
import itertools
import lzma
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def data() -> Path:
    """The folder of test data."""
    return DATA

