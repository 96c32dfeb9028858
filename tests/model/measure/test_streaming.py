"""How fast streamed weights can be, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from urdir.model.measure.streaming import LinkUse, Streaming


def test_layers_are_copied_beside_launches() -> None:
    of = Streaming(20_000, 10_000, 0, 0, link=1e5, read=1e6, measured=True)
    assert of.tokens_per_second() == pytest.approx(5)  # 0.2 s of copies hide 0.01 s of reads
    assert of.prompt_tokens_per_second == pytest.approx(2048 / 0.2)
    assert "(measured)" in str(of)
    assert "files" not in str(of)
    assert "(5.00 GB of them from files)" in str(replace(of, in_files=5_000_000_000))


def test_experts_that_are_missing_are_waited_for() -> None:
    of = Streaming(20_000, 10_000, 20_000, 5_000, link=1e5, read=1e6, measured=False)
    assert of.tokens_per_second() == pytest.approx(1 / 0.015)
    assert of.tokens_per_second(0.8) == pytest.approx(1 / (0.015 + 0.01))
    cached = replace(of, caches=12_000)
    assert cached.prompt_tokens_per_second == pytest.approx(2048 / 0.08)
    for caches in (20_000, 20_100):  # all of them, with their state
        all_cached = replace(of, caches=caches)
        assert all_cached.prompt_tokens_per_second == pytest.approx(2048 / 0.03)
    assert "all chosen experts" in str(of)


class Counted:
    """A cache that has found two thirds of what was chosen each time."""

    expert_nbytes, slots, reader = 100, 2, None

    def __init__(self) -> None:
        self.pairs, self.used = 0, 30

    def statistics(self) -> tuple[int, int]:
        self.pairs += self.used
        return self.pairs, self.pairs // 3


def test_what_a_test_uses_of_the_link() -> None:
    """A row chooses 6 experts of a layer, of which 2 are copied, 200 bytes."""
    mixture = SimpleNamespace(router=SimpleNamespace(used=6))
    config = SimpleNamespace(layers=[SimpleNamespace(mixtures=[mixture])])
    cache = Counted()
    weights = SimpleNamespace(
        streamed=SimpleNamespace(nbytes=1000), expert_caches={0: cache}, experts_nbytes=700
    )
    session: Any = SimpleNamespace(
        weights=weights,
        parts=SimpleNamespace(config=config),
        shapes=SimpleNamespace(chunks=(8, 64)),
    )
    use = LinkUse(session, link=10_000.0)
    row = {"test": "tg1", "sequences": 2, "tokens_per_second": 20.0, "ms_per_step": 100.0}
    text = use.during(cast(Any, SimpleNamespace(**row)))
    # 300 bytes of layers and 400 of experts, ten times a second
    assert "66.7% of the experts were on the device" in text
    assert text.endswith("70.0%")
    prompt = row | {"test": "pp64", "sequences": 1, "tokens_per_second": 64.0, "ms_per_step": None}
    # all but the 200 bytes that are cached, once a second
    assert use.during(cast(Any, SimpleNamespace(**prompt))).endswith("8.0%")
    cache.used = 0
    text = use.during(cast(Any, SimpleNamespace(**row)))
    assert "all experts, as many rows choose" in text
    assert text.endswith("80.0%")  # all but the 200 bytes that are cached, ten times a second
