"""Prefixes of slots in files: what one engine saved, another one goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model.engine.requests.test_service import GREEDY, Collected
from tests.model.engine.test_recurrent_together import Letters, Opened
from tests.model.engine.test_shared_states import cached
from tests.model.engine.test_window_prefixes import TOKENS
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.service import Service
from urdir.model.engine.requests.slots import SlotAction
from urdir.model.errors import ModelError, PrefixFileError

#: A window beside full attention; latent vectors; recurrent states beside attention; states alone.
SAMPLE = "gemma3-dense"
OTHERS = ("deepseek2-moe", "qwen35-dense", "mamba-dense")
NAMES = [SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_state")
FIRST, OWN = TOKENS[:48], TOKENS[200:207]


@pytest.fixture(scope="module", params=NAMES)
def file(request: pytest.FixtureRequest, reference_file: Callable[[str], Path]) -> Path:
    return reference_file(request.param)


@pytest.fixture
def opened(file: Path, device_name: str, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Opens an engine of two sequences with a folder."""
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        wanted: dict[str, Any] = {"context": 96, "page_len": 16, "memory_share": 0.5}
        wanted |= {"sequences": 2, "exact": True, "kv_dtype": "f32", "chunk": 16}
        wanted |= {"prefix_dir": tmp_path / "saved", "prefix_host_memory": 1 << 20}
        engines.append(Engine.open(file, device=device_name, **(wanted | fields)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def answer(service: Service, prompt: list[int], scope: bytes = b"") -> tuple[int, list[int]]:
    """How many tokens of a prompt were found, and the answer."""
    collected = Collected()
    request = Request(prompt=tuple(prompt), settings=GREEDY, limit=3, scope=scope)
    service.submit(request, collected.deliver)
    return cached(collected), collected.tokens


@pytest.mark.slow
def test_another_engine_goes_on(opened: Callable[..., Engine], tmp_path: Path) -> None:
    """As from its own pages: the same tokens. A scope has what it restored, and no other has."""
    save, restore = SlotAction("save", 0, "a"), SlotAction("restore", 1, "a", b"x")
    with Service(Opened(opened().session, Letters()), None) as service:
        answer(service, [*FIRST, 1])
        done = service.act_on_slot(save)
        assert done.nbytes == (tmp_path / "saved" / "a").stat().st_size
        own = answer(service, [*FIRST, *OWN])
        assert own[0] == 48 <= done.tokens
        with pytest.raises(PrefixFileError, match="slot 0 has nothing of this caller"):
            service.act_on_slot(SlotAction("save", 0, "b", b"x"))
        with pytest.raises(PrefixFileError, match="slot 2: there are 2"):
            service.act_on_slot(SlotAction("erase", 2))
    with Service(Opened(opened().session, Letters()), None) as service:
        assert service.act_on_slot(restore).tokens == done.tokens
        assert answer(service, [*FIRST, *OWN], b"x") == own
        assert answer(service, [*FIRST, *OWN])[0] == 0
        restore = SlotAction("restore", 0, "a", b"y")
        service.act_on_slot(restore)
        assert service.act_on_slot(SlotAction("erase", 0, scope=b"y")).tokens == done.tokens
        assert answer(service, [*FIRST, *OWN], b"y")[0] == 0
        metrics = service.metrics()
    assert (metrics.pages_used, metrics.running) == (0, 0)


@pytest.mark.slow
def test_a_file_of_another_cache_is_refused(file: Path, opened: Callable[..., Engine]) -> None:
    if "mamba" in file.name:
        pytest.skip("no cache")
    with Service(Opened(opened().session, Letters()), None) as service:
        answer(service, [*FIRST, 1])
        service.act_on_slot(SlotAction("save", 0, "a"))
    for fields, what in (({"kv_dtype": "f16"}, "cache"), ({"page_len": 32}, "layout")):
        with Service(Opened(opened(**fields).session, Letters()), None) as service:
            with pytest.raises(PrefixFileError, match=f"'a' is of another {what}"):
                service.act_on_slot(SlotAction("restore", 0, "a"))
            assert answer(service, [*FIRST, 1])[0] == 0
    with (
        Service(Opened(opened(prefix_dir=None).session, Letters()), None) as service,
        pytest.raises(PrefixFileError, match="has no folder for them"),
    ):
        service.act_on_slot(SlotAction("restore", 0, "a"))
    with pytest.raises(ModelError, match="the service is closed"):
        service.act_on_slot(SlotAction("erase", 0))
