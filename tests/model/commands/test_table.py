"""Tables of text in terminals of any width."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.model.commands import table
from urdir.model.commands.report import megabytes_text, roles_text
from urdir.model.commands.table import Column, fitted, markdown, print_table, wrapped

COLUMNS = (
    Column("name"),
    Column("size", right=True, rank=1),
    Column("made of", rank=3),
    Column("notes", rank=2, cut=True),
)
ROWS = [("a", "1", "wood", "x" * 40), ("longer", "1000", "stone", "short")]


def test_a_wide_table_is_aligned() -> None:
    lines, left_out = fitted(COLUMNS, ROWS, None)
    assert left_out == []
    assert lines == [
        "name    size  made of  notes",
        "a          1  wood     " + "x" * 40,
        "longer  1000  stone    short",
    ]


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(63, []), (39, []), (38, ["made of"]), (29, ["made of", "notes"]), (11, ["size"])],
)
def test_columns_of_the_highest_rank_go_first(width: int, left_out: list[str]) -> None:
    lines, found = fitted(COLUMNS, ROWS, width)
    assert max(map(len, lines)) <= width
    assert set(left_out) <= set(found)
    assert lines[0].startswith("name")


def test_random_tables_fit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        count, width = int(rng.integers(1, 7)), int(rng.integers(20, 100))
        columns = [
            Column("h" * int(rng.integers(1, 9)), bool(rng.integers(2)), int(rank), bool(cut))
            for rank, cut in zip(rng.permutation(count), rng.integers(0, 2, count), strict=True)
        ]
        cells = [
            tuple("c" * int(rng.integers(0, 30)) for _ in columns) for _ in range(rng.integers(4))
        ]
        lines, left_out = fitted(columns, cells, width)
        assert len(lines) == len(cells) + 1
        assert max(map(len, lines)) <= width
        least = min(column.rank for column in columns)
        assert len(left_out) < count
        whole, none = fitted(columns, cells, None)
        assert none == []
        if left_out == [] and all(len(line) <= width for line in whole):
            assert lines == whole
        assert least == 0


def test_a_terminal_is_told_what_had_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "terminal_width", lambda: 20)
    print_table(COLUMNS, ROWS)
    out, err = capsys.readouterr()
    assert out.splitlines() == ["name    size", "a          1", "longer  1000"]
    assert err == "left out in a terminal of 20 columns: made of, notes\n"
    assert wrapped("a text that goes on and on", 4) == "a text that goes on\n    and on"


def test_markdown_is_aligned_and_says_so() -> None:
    assert list(markdown(("what", "us"), [("add", "1.5"), ("normalise", "10")])) == [
        "| what      |  us |",
        "| :-------- | --: |",
        "| add       | 1.5 |",
        "| normalise |  10 |",
    ]


def test_roles_and_sizes_of_a_column() -> None:
    assert roles_text(["attn_q", "attn_k"]) == "attn_q, attn_k"
    assert roles_text(["attn_qkv.norm", "ffn_gate_up.norm", "x"]) == "attn_qkv.norm +2"
    assert roles_text(["a_role_that_is_longer_than_a_column"]).startswith("a_role_that_is")
    assert [megabytes_text(n) for n in (0, 12, 5_000, 1_234_567_890)] == [
        "0.000", "<0.001", "0.005", "1,234.568",
    ]  # fmt: skip
