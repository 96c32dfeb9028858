"""Division of work and shared memory in a CTA of decode attention, for the templates."""

from __future__ import annotations

from urdir.ptxgen.kernels.attention.decode import DecodeAttention
from urdir.ptxgen.kernels.attention.decode_memory import eight_nbytes
from urdir.ptxgen.kernels.attention.head_tiles import MAX_STATIC_SHARED, TILE_KEYS
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.target import Target

#: Minimum bytes of a CTA's remaining keys and values when the next launch may start: its CTAs begin
#: to load within 1.4 us, in which an SM of an H200 reads this much.
LEFT_NBYTES = 44 << 10
#: Stages of small slabs: more are not needed.
MAX_STAGES = 8
#: Maximum number of threads that merge the same outputs, limited by shared memory.
MAX_MERGERS = 4


class DecodeCta:
    """Division of keys and dims between the threads of a CTA, and the layout of shared memory.

    If the CTA is ``asynchronous``, keys and values pass through a ring of ``stages`` stages, one
    per step of the loop over the keys; afterwards the warps' sums take its place. An f16 scale is
    copied with its neighbour in an aligned word, which must belong to the same slot. On
    ``tensor_cores`` a stage is half a slab, 128 dims of the keys or values of a step
    (attention/_mma.j2). Values contained in keys are read from there (``keeps_keys``). With
    ``reads_once`` keys and values in tensor cores' rings are evicted first from the L2 cache: a
    step reads more of them than it holds, and CTAs that read the same ones do so at about the same
    time. Sizes and offsets (``..._at``) are in bytes.
    """

    def __init__(self, spec: DecodeAttention, target: Target, *, reads_once: bool) -> None:
        layout, tiles = spec.layout, spec.head_tiles
        self.spec, self.target, self.layout, self.reads_once = spec, target, layout, reads_once
        self.head_dim, self.value_dim = layout.widths
        self.warps = tiles.lanes.warps
        self.threads = 32 * self.warps
        # query heads of the CTA; lanes that share a key; groups of eight dims of a key and a value,
        # and their number per lane
        self.tile, self.tiles, self.lanes = tiles.size, tiles.each, tiles.lanes.count
        self.keys_per_pass = tiles.lanes.keys_per_pass
        # rows of a sequence that the CTA takes at once, and the heads of all of them
        self.rows, self.vectors = tiles.rows, tiles.rows * tiles.size
        self.eights = {"k": self.head_dim // 8, "v": self.value_dim // 8}
        self.pieces = dict(zip("kv", tiles.lanes.pieces, strict=True))
        self.formats = {"k": layout.format, "v": layout.values.format}
        # caches whose elements have scales, whose scales are halves of words, whose elements tensor
        # cores multiply as integers
        self.scaled = [name for name, of in self.formats.items() if of.is_scaled]
        self.halved = [name for name in self.scaled if self.formats[name].scale == "f16"]
        self.scales_heads = any(of.scales_heads for of in self.formats.values())
        self.integers = [name for name, of in self.formats.items() if of.operand == "s8"]

        # bytes of a thread's load
        self.load_bytes = {name: min(16, of.bits) for name, of in self.formats.items()}
        self.tensor_cores = tiles.tensor_cores and target.sm >= tiles.since
        self.asynchronous = self.keeps_keys = False
        if self.tensor_cores:
            self._divide_among_fragments()
        else:
            self._divide_among_lanes()
        # whether the ring is dynamic shared memory
        self.is_ring_apart = self.tensor_cores and tiles.ring > 0
        self.ring_bytes = self.stages * self.stage_bytes
        has_ring = (self.asynchronous or self.tensor_cores) and not self.is_ring_apart

        token = self._place_token(has_ring)
        # the warps' maxima and sums, then their weighted values, in place of the ring; if the ring
        # is separate only merged values are here
        self.values_at = 8 * self.warps * self.vectors
        sums = self.values_at + 4 * self.warps * self.vectors * self.value_dim
        scratch = [32 * self.threads if self.is_ring_apart else sums]
        if has_ring:
            scratch.append(self.ring_bytes)
        if spec.token:
            scratch.append(token)
        # a multiple of the alignment of dynamic shared memory: no gap between them
        self.scratch_bytes = 256 * ceil_div(max(scratch), 256)

    def _place_token(self, has_ring: bool) -> int:
        """Staged heads of the row's new token, and their places in scratch memory. Returns the
        bytes up to their end."""
        spec = self.spec
        # of a head the pairs that rotate and the other values
        self.staged_heads = self.tile + spec.appends
        # heads whose norms a warp finds
        norms = spec.token.norms(self.tile) if spec.token else 0
        self.norm_rounds = ceil_div(norms, self.warps)
        self.pairs = spec.rope.pairs if spec.rope else 0
        self.rest = self.head_dim - 2 * self.pairs
        # pairs per thread, in the queries and the key
        self.turn_rounds = ceil_div(self.staged_heads * self.pairs, self.threads)
        self.copy_rounds = ceil_div(self.staged_heads * self.rest, self.threads)
        self.rounds = self.turn_rounds + self.copy_rounds
        # the last stage of the ring is filled only after all threads have read theirs
        self.turned_at = self.ring_bytes - self.stage_bytes if has_ring else 0
        # factors of the norms of queries, key and value
        self.norms_at = self.turned_at + 4 * self.staged_heads * self.head_dim
        # for each row that is normed as one vector, the warps' sums of squares
        self.row_norms = _row_norms(spec)
        self.sums_at: dict[str, int] = {}
        end = 16 * ceil_div(self.norms_at + 4 * (self.staged_heads + 1), 16)
        for name, norm in self.row_norms.items():
            self.sums_at[name] = end
            end += 16 * ceil_div(norm.warps, 4)
        # eight dims of a key or a value in the cache's form, and the key
        self.eight_bytes = eight_nbytes(self.layout)
        self.token_bytes = self.eights["k"] * self.eight_bytes
        # the warp that stores the row's new key, before the one that stores the value: others than
        # those that split the queries, if there are any
        splitting = self.strip_count if self.tensor_cores else 0
        self.keeper = splitting if splitting + 2 <= self.warps else 0
        return end

    @property
    def fetched(self) -> str:
        """The arrays read from the caches: keys, and values unless they are read from keys."""
        return "k" if self.keeps_keys else "kv"

    @property
    def has_holes(self) -> bool:
        """Whether places of heads that the last tile lacks lie between those of rows."""
        return self.rows > 1 and self.spec.group % self.tile > 0

    @property
    def outputs_each(self) -> int:
        """Outputs that a thread merges at once: neighbours, of one head."""
        outputs = self.vectors * self.value_dim
        return next((n for n in (1, 2) if outputs <= n * self.threads), 4)

    @property
    def merges_again(self) -> bool:
        """Whether a thread merges further outputs afterwards."""
        return self.vectors * self.value_dim > self.outputs_each * self.threads

    @property
    def merged_vectors(self) -> int:
        """Groups of four output values of the CTA: each is merged by one or several threads."""
        return self.vectors * self.value_dim // 4

    def mergers(self, chunks: int) -> int:
        """Threads that merge the ``chunks`` of four output values."""
        return max(1, min(MAX_MERGERS, self.threads // self.merged_vectors, chunks))

    def _divide_among_lanes(self) -> None:
        """The ring if lanes multiply: a thread's part of the first copy of a key or value, the
        distance to its second one, eight dims of a key or value of all threads; then the keys of a
        step, per lane and per CTA, all loaded ``together``."""
        threads = self.threads
        # values in a key belong to the lanes that have the key, not to those of separate values
        self.keeps_keys = self.layout.values_in_keys
        if self.keeps_keys:
            self.pieces["v"] = self.pieces["k"]
        pieces = sum(self.pieces[name] for name in self.fetched)
        wide = max(self.pieces.values()) > 1
        self.stages = 2 if wide and self.keeps_keys else 3
        self.thread_bytes = max(self.load_bytes.values())
        self.second_part = self.thread_bytes * threads
        has_second = [of.is_scaled or of.bits == 32 for of in self.formats.values()]
        self.piece_bytes = (1 + any(has_second)) * self.second_part
        fewest = self.stages * pieces * self.piece_bytes
        dims = {"k": self.head_dim, "v": self.value_dim}
        in_words = not any(dims[name] % 64 for name in self.halved)
        self.asynchronous = self.target.sm >= 80 and in_words and fewest <= MAX_STATIC_SHARED
        is_long = self.asynchronous and self.piece_bytes > 16 * threads
        self.ahead = 1 if (wide and not self.keeps_keys) or is_long else 2
        self.together = self.step = self.ahead * self.keys_per_pass
        self.stage_bytes = self.ahead * pieces * self.piece_bytes

    def _divide_among_fragments(self) -> None:
        """Operand type; strips of 32 dims of a key, blocks of 64 dims of a value, slabs of 128
        dims. The keys of a tile are ``together``, those of the warps' tiles a step.
        ``stages_of_slab``: the halves of the tile's keys per stage. ``order``: cache and slab of
        each stage of a tile, and its number in the slab."""
        self.half = {
            name: "bf16" if of.operand == "bf16" else "f16" for name, of in self.formats.items()
        }
        # bytes of values become operands in pairs of keys; registers of a load of eight dims
        of = self.formats["v"]
        self.late = ["v"] if of.bits == 8 and of.operand_words == 4 else []
        self.load_words = {
            name: 2 if name in self.late else of.operand_words for name, of in self.formats.items()
        }
        # Weights are relative to a maximum minus this, in exponents of 2, which may lag by as much
        # plus one. So they are at most 2^15, and small ones keep their low parts in f16. Those that
        # include scales are at most 2^9: finite with values up to 16,000.
        self.lift = 4 if self.formats["v"].is_scaled else 7
        self.together = TILE_KEYS
        self.step = TILE_KEYS * self.warps
        # minimum number of remaining keys when the next launch may start
        self.fewest_left = LEFT_NBYTES // (self._bytes_of("k") + self._bytes_of("v"))
        self.strip_count = ceil_div(self.head_dim, 32)
        self.block_count = ceil_div(self.value_dim, 64)
        # few integer queries stay in registers
        self.holds_queries = "k" in self.integers and self.strip_count <= 4 and self.rows == 1
        self.slabs = {"k": ceil_div(self.head_dim, 128), "v": ceil_div(self.value_dim, 128)}
        # the halves of a tile multiplied together: registers hold one of wide heads
        widest = max(self.head_dim, self.value_dim)
        is_wide = widest > 192 and not self.integers
        self.halves: tuple[tuple[int, ...], ...] = ((0,), (1,)) if is_wide else ((0, 1),)
        # eight bits are small: whole slabs, if there is memory for enough of them
        is_small = all(of.bits <= 8 for of in self.formats.values())
        whole = is_small and not is_wide and self.spec.head_tiles.ring > 0
        self.stages_of_slab: tuple[tuple[int, ...], ...] = ((0, 1),) if whole else ((0,), (1,))
        self.order = [
            (name, slab, number)
            for name, slabs in self.slabs.items()
            for slab in range(slabs)
            for number in range(len(self.stages_of_slab))
        ]
        self.stage_keys = TILE_KEYS // len(self.stages_of_slab)
        # heads that leave registers for the first values while weights are computed
        self.is_narrow = widest <= 128
        # a slab of a key in memory; in shared memory at least a strip, or a block, a power of two
        self.slab_bytes = {name: 16 * nbytes for name, nbytes in self.load_bytes.items()}
        self.row_bytes = {
            name: min(
                self.slab_bytes[name],
                max(
                    eights * self.load_bytes[name], 1 << (self._bytes_of(name) - 1).bit_length(), 64
                ),
            )
            for name, eights in (("k", 4), ("v", 8))
        }
        self.warp_bytes = self.stage_keys * max(self.row_bytes.values())
        self.word_bytes = 8 * self.stage_keys if self.scaled else 0
        self.stage_bytes = (self.warp_bytes + self.word_bytes) * self.warps
        self.stages = min(MAX_STAGES, MAX_STATIC_SHARED // self.stage_bytes)
        if self.spec.head_tiles.ring:
            self.stages = self.spec.head_tiles.ring // self.stage_bytes

    def _bytes_of(self, name: str) -> int:
        """Bytes of a key or value in the cache, without scales."""
        return self.load_bytes[name] * self.eights[name]

    def ragged_slab(self, name: str) -> int:
        """Number of lanes with 16 bytes of the last slab of a row, if not all; else 0."""
        last = self._bytes_of(name) - (self.slabs[name] - 1) * self.slab_bytes[name]
        return last // 16 if last < self.row_bytes[name] else 0

    def words(self, name: str, slab: int) -> int:
        """Words of scales in a slab: of two each, or the head's own."""
        return min(2, self.eights[name] // 8 - 2 * slab) if name in self.halved else 1

    @property
    def has_single_words(self) -> bool:
        """Whether a slab has one word of scales."""
        return any(self.words(name, self.slabs[name] - 1) == 1 for name in self.scaled)

    def operand_factor(self, name: str) -> int:
        """How many times as large as operands, beside the scale, keys or values are."""
        return 1 if self.target.sm >= self.formats[name].operands_since else 256

    @property
    def uses_zero(self) -> bool:
        """Whether products on tensor cores need a register of zeros."""
        return bool(self.integers) or len(self.halves) > 1

    def swizzle(self, name: str, row: int) -> int:
        """The XOR pattern for the offset of 16 bytes in row ``row`` of a stage. 32 bytes of four
        rows, and of rows 0, 2, 4, 6 (1, 3, 5, 7), lie in different banks; so do 64 bytes of two
        rows, if rows are that long."""
        turn = 32 * ((row >> 1 & 1) ^ 2 * ((row ^ row >> 2) & 1))
        return turn % self.row_bytes[name]

    def strips(self, slab: int) -> range:
        """The strips of a slab of "k"."""
        return range(4 * slab, min(4 * slab + 4, self.strip_count))

    def blocks(self, slab: int) -> range:
        """The blocks of a slab of "v"."""
        return range(2 * slab, min(2 * slab + 2, self.block_count))

    def ragged(self, name: str) -> int:
        """Groups of eight dims in the last strip of "k" or block of "v"; 0 if complete."""
        return self.eights[name] % {"k": 4, "v": 8}[name]

    def guard(self, name: str, piece: int) -> str:
        """The predicate of lanes with dims in this piece of "k" or "v"; "" if all have."""
        return self.guards.get(self.eights[name] - self.lanes * piece, "")

    @property
    def guards(self) -> dict[int, str]:
        """Number of lanes with dims in a piece, if not all: a predicate for each."""
        counts = [
            self.eights[name] - self.lanes * piece
            for name in "kv"
            for piece in range(self.pieces[name])
            if name in self.fetched
        ]
        ragged = dict.fromkeys(count for count in counts if count < self.lanes)
        return {count: f"%has_dims{i or ''}" for i, count in enumerate(ragged)}


def _row_norms(spec: DecodeAttention) -> dict[str, Normalise]:
    """The kernels that norm "q" and "k" as one vector, or the "latent" one: the CTA adds in their
    order."""
    token = spec.token
    if token is not None and token.latent_norm is not None:
        return {"latent": Normalise(1, spec.value_dim, token.latent_norm)}
    if token is None or token.qk_norm is None or not token.norms_rows:
        return {}
    heads = {"q": spec.heads, "k": spec.layout.kv_heads if spec.appends else 0}
    return {
        name: Normalise(1, count * spec.head_dim, token.qk_norm)
        for name, count in heads.items()
        if count
    }
