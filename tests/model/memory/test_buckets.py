"""Numbers of rows that steps are rounded up to."""

import pytest

from urdir.model.commands.values import sequences
from urdir.model.memory.buckets import COMMON_ROWS, ROWS, common_rows, row_bucket, row_buckets


def test_steps_have_few_padding_rows() -> None:
    """Fewer than a group of eight vectors up to 256 rows, than a sixteenth of the rows beyond."""
    for rows in range(1, ROWS[-1] + 1):
        padding = row_bucket(rows) - rows
        assert 0 <= padding < max(8, rows / 16)
        assert row_bucket(row_bucket(rows)) == row_bucket(rows)


@pytest.mark.parametrize("rows", [1, 3, 8, 70, 200, 256, 300, 1024])
def test_graphs_are_recorded_ahead_for_few_of_them_and_for_the_most(rows: int) -> None:
    common, all_of_them = common_rows(rows), row_buckets(rows)
    assert set(common) <= set(all_of_them)
    assert set(common[:-1]) <= set(COMMON_ROWS)
    assert common[-1] == all_of_them[-1] == row_bucket(rows)
    assert list(common) == sorted(set(common))


def test_as_many_sequences_can_be_asked_for() -> None:
    assert sequences(str(ROWS[-1])) == ROWS[-1]
    assert sequences("-1") is None
