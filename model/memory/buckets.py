"""Row buckets: step sizes are rounded up to a few, since each needs a graph and kernels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

#: Rows of a decode step, smallest first; fewer sequences leave padding rows. Products take vectors
#: by eight, and from 64 on a step takes longer with each eight. Three rows are a token and two
#: drafts.
ROWS: tuple[int, ...] = (1, 2, 3, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32))
#: Those whose graphs are recorded ahead; others are while steps of these run.
COMMON_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
#: Rows of a prompt step, smallest first; fewer tokens leave padding rows.
CHUNKS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
#: The same for steps with several prompt segments: rows that choose a token, rows of prompts.
COARSE_ROWS, COARSE_CHUNKS = (0, 16, 64, 128, 256, 512), (128, 512, 1024, 2048)
#: The fewest rows that choose a token in a finer shape of such a step (`fine_chunk`).
FINE_ROWS = 8
#: Rows of one prompt alone are multiples of as many in shapes between the coarse and the finest.
MIDDLE_GRAIN = 32
#: Up to as many rows a prompt alone keeps to `CHUNKS`, above them it may have a graph of a finer
#: shape, too. Tokens/s of 129, 193, 257 and 385 tokens of an 8B Q4_K_M model on an H200: 26,047,
#: 31,625, 33,052 and 38,473, without 22,247, 28,421, 27,654 and 33,115; of 65 17,760, and 18,603
#: without.
WHOLE_CHUNK = 128
#: A prompt's step takes as much time besides as this many of its rows, and two steps take the place
#: of one with padding where they take this share less. ms of 128, 512, 1,024 and 1,536 tokens of an
#: 8B Q4_K_M model on an H200: 4.4, 12.0, 21.8 and 32.9.
STEP_ROWS, _LESS = 128, 0.05
#: Maximum rows of a step with drafts: beyond them one more costs as much as a token gains.
MOST_DRAFTED = 64
#: Maximum rows of a prompt step, if memory allows.
MOST_CHUNK = CHUNKS[-1]
#: The same with pipeline parallelism, where the ranks process different chunks. 70B Q4_K_M on two
#: H200, tokens/s of 512, 2,048 and 8,000 tokens: 4,525, 4,148 and 5,879 in chunks of 2,048; 4,530,
#: 6,558 and 6,939 of 512; 5,549, 6,864 and 6,835 of 256.
MOST_PASSED_CHUNK = 256


def row_bucket(rows: int) -> int:
    """Rows of the graph for a step of ``rows`` sequences: the next of `ROWS`, above them the next
    power of two."""
    at = bisect_left(ROWS, rows)
    return ROWS[at] if at < len(ROWS) else 1 << (rows - 1).bit_length()


def fine_chunk(rows: int, grain: int = 16) -> int:
    """Rows of prompts of a fine shape for a step with several prompt segments, whose graphs are
    recorded while steps of coarse ones run: 3 % more at most, or 15 rows. With half the ``grain``,
    for one prompt alone, half as many more."""
    step = max(grain, (1 << (rows - 1).bit_length()) * grain // 1024)
    return -(-rows // step) * step


def first_rows(rows: int, chunks: Sequence[int]) -> int:
    """How many of the ``rows`` that a prompt alone has left its next step takes, of one of the
    ``chunks``: all that fit, or fewer where one step with padding takes longer than two."""
    if rows >= chunks[-1]:
        return chunks[-1]
    first, taken = two_steps(rows, chunks)
    whole = chunks[bisect_left(chunks, rows)] + STEP_ROWS
    return first if taken < whole * (1 - _LESS) else rows


def two_steps(rows: int, chunks: Sequence[int]) -> tuple[int, float]:
    """The fastest way to divide a prompt between two steps, of one of the ``chunks`` each: the rows
    of the first one, and the rows of one step that would take as long, `STEP_ROWS` counted;
    infinity where the first chunk holds all."""

    def taken(rows: int) -> int:
        return chunks[bisect_left(chunks, rows)] + STEP_ROWS

    firsts = (chunk for chunk in reversed(chunks) if chunk < rows)  # the largest of equal ones
    ways = {first: taken(first) + taken(rows - first) for first in firsts}
    first = min(ways, key=ways.__getitem__, default=rows)
    return first, ways.get(first, inf)


def choosing_rows(sequences: int) -> int:
    """Rows that choose a token, in sessions of this many sequences. Rows of prompts lie after them,
    where kernels take them: at 16 bytes."""
    return row_bucket(sequences) if sequences == 1 else max(4, row_bucket(sequences))


def drafted_rows(sequences: int, most: int) -> int:
    """The most rows of a step with up to ``most`` drafts of each sequence."""
    rows = max(choosing_rows(sequences), row_bucket(min(sequences * (1 + most), MOST_DRAFTED)))
    return max(4, rows) if rows > 2 else rows


def row_buckets(rows: int) -> tuple[int, ...]:
    """All row buckets of steps of up to ``rows`` sequences, smallest first."""
    return tuple(dict.fromkeys(row_bucket(count) for count in range(1, rows + 1)))


def common_rows(rows: int) -> tuple[int, ...]:
    """The row buckets of which graphs are recorded ahead, of steps of up to ``rows`` sequences."""
    return (*(count for count in COMMON_ROWS if count < rows), row_bucket(rows))


def chunks_of(exact: bool, most: int = MOST_CHUNK) -> tuple[int, ...]:
    """Rows of the prompt steps, smallest first, up to the first that holds ``most`` tokens."""
    if exact:  # products take f32 activations, few rows at a time
        from urdir.ptxgen.kernels.linear.spec import MAX_BATCH  # numpy is not imported before

        return (MAX_BATCH,)
    return CHUNKS[: bisect_left(CHUNKS, most) + 1]
