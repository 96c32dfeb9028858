"""No kernel's instructions change unnoticed, nor the launches of real models' steps."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).with_name("ptx_digests.py")


@pytest.fixture(scope="module")
def ptx_digests() -> Iterator[ModuleType]:
    """The script beside this file."""
    spec = importlib.util.spec_from_file_location("ptx_digests", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("table", ["examples.txt", "plans.txt"])
def test_instructions_and_launches_are_as_they_were(
    ptx_digests: ModuleType, table: str, pytestconfig: pytest.Config
) -> None:
    """Where a change is meant, ``python tests/ptx_digests.py`` writes the tables anew."""
    is_whole = pytestconfig.getoption("--full")
    written = (ptx_digests.FOLDER / table).read_text().splitlines()
    found = list(ptx_digests.TABLES[table](is_whole))
    if not is_whole:
        written = list(ptx_digests.of_sample(written, found))
    assert len(found) > 200
    changed = list(difflib.unified_diff(written, found, "written", "found", lineterm="", n=0))
    assert not changed, f"{table} differs:\n" + "\n".join(changed[:200])


def test_a_digest_is_of_the_instructions(ptx_digests: ModuleType) -> None:
    text = Stub("// a\n.visible .entry k(\n  mov.u32 %a, 1; // b\n\n")
    same = Stub("// other\n.visible   .entry k(\n  /* c */ mov.u32   %a, 1;\n")
    renamed = Stub(text.text.replace("entry k(", "entry other("), "other")
    other = Stub(text.text.replace("1;", "2;"))
    digests = [ptx_digests.digest(spec, "sm_90") for spec in (text, same, renamed, other)]
    assert digests[0] == digests[1] == digests[2] != digests[3]


def test_a_sample_is_of_what_it_has(ptx_digests: ModuleType) -> None:
    """What is missing or too much is seen as well."""
    written = ["a | x | 1 2 3 -", "a | y | 4 5 6 7 8", "b | x | 9 9", "c | x | 1 2"]
    found = ["a | x | 1 * * -", "a | y | * 0 * *", "c | x | * 2 3"]
    wanted = ["a | x | 1 * * -", "a | y | * 5 * * 8", "b | x | 9 9", "c | x | * 2 "]
    assert list(ptx_digests.of_sample(written, found)) == wanted
    inside, outside = (
        [f"{' '.join(model)} | 1 row", "    q | gemv | 1"]
        for model in (ptx_digests.SAMPLE[0], ("llama-3.2-3b", "q8_0", "bf16"))
    )
    assert list(ptx_digests.of_sample([*inside, *outside, *inside], [])) == inside * 2


class Stub:
    """Stands in for a spec: a text and the name of its entry."""

    def __init__(self, text: str, name: str = "k") -> None:
        self.text = text
        self.name = name

    def ptx(self, target: str) -> str:
        return self.text
