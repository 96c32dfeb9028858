"""Where more sequences give fewer tokens/s."""

import dataclasses

import pytest

from urdir.model.measure.bench import BenchRow
from urdir.model.measure.falls import falls

ROW = BenchRow("", 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def row(sequences: int, median: float, depth: str = "") -> BenchRow:
    name = "tg64" + (f" x {sequences}" if sequences > 1 else "") + depth
    return dataclasses.replace(ROW, test=name, sequences=sequences, median=median)


def test_falls_are_found_in_any_order_and_for_each_depth_apart() -> None:
    rows = [row(8, 5392.0), row(1, 770.0), row(9, 4485.0), row(12, 5957.0)]
    rows += [row(8, 3000.0, " @ d4096"), row(9, 3100.0, " @ d4096"), row(16, 2000.0, " @ d4096")]
    found = falls(rows)
    assert [(fall.fewer.sequences, fall.more.sequences) for fall in found] == [(8, 9), (9, 16)]
    assert found[0].share == pytest.approx(1 - 4485 / 5392)
    assert str(found[0]) == "tg64 x 9: 4,485 tokens/s, 16.8% less than tg64 x 8: 5,392 tokens/s"


def test_noise_is_no_fall() -> None:
    rows = [row(2, 1000.0), row(3, 995.0), row(4, 980.0)]
    assert [fall.more.sequences for fall in falls(rows)] == [4]
    assert len(falls(rows, noise=0.0)) == 2
    assert falls([row(1, 770.0)]) == []
