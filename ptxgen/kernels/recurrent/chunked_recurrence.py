"""Linear attention with a decaying state over prompts: chunks of tokens on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.gated_recurrence import GatedRecurrence
from urdir.ptxgen.spec import LaunchShape, Tolerance, ceil_div
from urdir.ptxgen.target import since

#: Tokens of a chunk, and of a block of it: the height of an mma.
CHUNK, BLOCK = 32, 16
#: Warps that prepare chunks, and most that move the state on, by 16 of its values each.
PREPARING, MOST_MOVING = 4, 4
#: Most keys whose state the registers of a warp hold.
MAX_KEYS = 128


@dataclass(frozen=True)
class ChunkedRecurrence(GatedRecurrence):
    """What `GatedRecurrence` computes of segments, by chunks of `CHUNK` tokens from the first of
    each segment: the chunked form of SSD (Dao & Gu 2024, arXiv 2405.21060) and of the gated delta
    rule (Yang et al. 2024, arXiv 2412.06464).

    With G the sums of log g along a chunk, W its additions (e), all tokens of it at once:

        y_i = scale * (exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (k_j . q_i) w_j)
        S = exp(G_end) S + sum over j of exp(G_end - G_j) w_j k_j^T

    and of the delta rule w_i = beta_i (v_i - exp(G_i) S k_i - sum over j < i of
    exp(G_i - G_j) (k_j . k_i) w_j), a triangular system. Factors of products are rounded to f16:
    queries and keys divided by their lengths, rows of S and of W divided by their largest values,
    so that none is beyond f16's range. Sums, decays and the state are f32. A sequence's bits depend
    on how its tokens are divided into segments.

    With ``channels``, G has a value for each key, and the decay between two tokens is multiplied
    out half by half, as no product of decays from the chunk's beginning: these leave f32's range.
    """

    name = "chunked_recurrence"
    template = ("urdir.templates", "chunked_recurrence.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.segments or not self.serves(self.key_dim, self.delta):
            raise PtxgenError(
                f"chunked_recurrence: {self.segments} segments, keys of {self.key_dim}: it is for "
                f"segments, and keys of multiples of {BLOCK} up to {MAX_KEYS}, or of {2 * BLOCK} "
                f"up to {2 * MAX_KEYS} without the delta rule"
            )

    @classmethod
    def serves(cls, key_dim: int, delta: bool) -> bool:
        """Whether there is a chunked form for such heads."""
        if key_dim <= MAX_KEYS:
            return key_dim % BLOCK == 0
        return key_dim % (2 * BLOCK) == 0 and key_dim <= 2 * MAX_KEYS and not delta

    @property
    def targets(self) -> tuple[str, ...]:
        # for earlier ones the assembler keeps more values, and has too few registers for them
        return since(90)

    # ---- how it is divided ----

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return CHUNK

    @property
    def preparing(self) -> int:
        """Warps that prepare chunks."""
        return PREPARING if self.channels or self.key_dim % 32 else 2 * PREPARING

    @property
    def blocks(self) -> int:
        """Blocks of tokens of a chunk."""
        return self.chunk // BLOCK

    @property
    def products(self) -> tuple[tuple[bool, int, int], ...]:
        """Products of blocks of tokens with those that they look back on, of keys or of queries:
        first of keys with themselves, after which there is most to do."""
        pairs = [(i, j) for i in range(self.blocks) for j in range(i + 1)]
        of_keys = sorted(pairs, key=lambda pair: pair[0] - pair[1]) if self.delta else []
        return (*((True, i, j) for i, j in of_keys), *((False, i, j) for i, j in pairs))

    @property
    def splits(self) -> int:
        """Warps that share the keys of a value."""
        return 1 if self.key_dim <= MAX_KEYS else 2

    @property
    def own_keys(self) -> int:
        """Keys of a warp."""
        return self.key_dim // self.splits

    @property
    def groups(self) -> int:
        """Groups of 16 values of a CTA."""
        return min(MOST_MOVING // self.splits, ceil_div(self.value_dim, BLOCK))

    @property
    def columns(self) -> int:
        """Values of the state of a CTA."""
        return BLOCK * self.groups

    # ---- shared memory, in bytes ----

    @property
    def stride(self) -> int:
        """Of a row of keys or queries, f16: 16 more than it takes, so that eight rows' 16 bytes at
        the same place lie in different banks."""
        return 2 * self.key_dim + 16

    @property
    def square_stride(self) -> int:
        """The same of what a token has for each of its chunk."""
        return 2 * self.chunk + 16

    @property
    def places(self) -> Mapping[str, int]:
        """Where the parts of a prepared chunk begin, and their "end"."""
        tile, square, numbers = (
            self.chunk * nbytes for nbytes in (self.stride, self.square_stride, 4)
        )
        sizes = {"keys": tile, "queries": tile, "scores": square}
        sizes |= {"solution": square} if self.delta else {}
        if self.channels:
            sizes |= {"left": tile, "own": numbers, "decay": 4 * self.key_dim}
        else:
            sizes |= dict.fromkeys(("log", "before", "after"), numbers)
        sizes |= dict.fromkeys(("of_w", "of_y"), numbers)
        places, at = {}, 0
        for name, nbytes in sizes.items():
            places[name] = at
            at += nbytes
        return {**places, "end": at}

    @property
    def scratch_place(self) -> int:
        """Behind a chunk that is prepared and one that is used: blocks that are inverted."""
        return 2 * self.places["end"]

    @property
    def totals_place(self) -> int:
        """Behind these: decays of halves of channels' tokens, or parts of results."""
        return self.scratch_place + (4 * BLOCK * BLOCK * self.blocks if self.delta else 0)

    @property
    def launch_shape(self) -> LaunchShape:
        totals = self.chunk * (4 * self.key_dim + 16) if self.channels else 0
        parts = 4 * BLOCK * self.chunk * self.groups * (self.splits - 1)
        return LaunchShape(
            grid=(ceil_div(self.value_dim, self.columns), self.heads, self.segments),
            block=(32 * (self.preparing + self.groups * self.splits), 1, 1),
            shared_bytes=self.totals_place + totals + parts,
        )

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each factor that is rounded to f16 on the way to a result."""
        return Tolerance(rtol=4 * 2**-11)

    @classmethod
    def examples(cls) -> Mapping[str, ChunkedRecurrence]:
        scan = partial(cls, max_len=256, delta=False, order="vkq")
        steady = partial(scan, order="apart", steady=True)
        delta = partial(cls, max_len=256, delta=True, eps=1e-6)
        by_channel = partial(delta, order="apart", channels=True)

        def prompt(count: int, sequences: int, segments: int = 1) -> dict[str, Any]:
            return {"rows": count, "sequences": sequences, "segments": segments}

        def heads(count: int, shared: int, key_dim: int, value_dim: int) -> dict[str, Any]:
            sizes = {"heads": count, "key_heads": shared}
            return {**sizes, "key_dim": key_dim, "value_dim": value_dim}

        return {
            "scan": scan(**prompt(35, 2), **heads(2, 1, 16, 24)),
            "scan, long keys": scan(**prompt(33, 1), **heads(1, 1, 128, 24)),
            "scan of arrays": scan(**prompt(40, 2), **heads(4, 2, 32, 12), order="apart"),
            "scan of segments": scan(**prompt(100, 5, 4), **heads(2, 2, 16, 72), tiled=True),
            "keys of 256": scan(**prompt(33, 1), **heads(1, 1, 256, 40)),
            "steady": steady(**prompt(65, 2), **heads(2, 2, 64, 40)),
            "delta": delta(**prompt(33, 2), **heads(2, 1, 16, 20)),
            "delta, long keys": delta(**prompt(33, 1), **heads(1, 1, 128, 24)),
            "delta of segments": delta(**prompt(100, 5, 4), **heads(4, 2, 16, 40), tiled=True),
            "delta with a floor": delta(**prompt(1, 1), **heads(2, 1, 48, 8), floor=-5.0),
            "channels": by_channel(**prompt(35, 2), **heads(2, 2, 32, 24)),
            "channels, long keys": by_channel(**prompt(33, 1), **heads(1, 1, 128, 16)),
            "channels of segments": by_channel(
                **prompt(60, 4, 3), **heads(2, 1, 32, 16), tiled=True, floor=-5.0, negated=True
            ),
        }
