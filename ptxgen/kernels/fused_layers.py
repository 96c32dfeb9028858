"""All layers of a decode step in one launch: a persistent kernel, whose stages wait for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS
from urdir.ptxgen.kernels._decode_attention import RING_STAGES, WARPS
from urdir.ptxgen.kernels._fused_product import SMS
from urdir.ptxgen.kernels._layer_stages import Piece, Stage, TileType, share
from urdir.ptxgen.kernels._layers import ALIGNMENT, Layers
from urdir.ptxgen.kernels._weight_tiles import Tile
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.tile_matvec import RECORD_NBYTES
from urdir.ptxgen.kv_layout import KvLayout
from urdir.ptxgen.layout import TILE_COLS, TILE_ROWS, Layout
from urdir.ptxgen.rope import Rotation
from urdir.ptxgen.spec import Access, LaunchShape, Param, ceil_div

#: Slots of a warp's ring, at least and at most.
MIN_SLOTS, MAX_SLOTS = 2, 8
#: Bytes of shared memory that a CTA takes if it is not told: sm_80, sm_90 and sm_100 have them.
SHARED_NBYTES = 160 * 1024
#: Blocks of activations that a warp asks for at a time: more take registers from the tiles.
TOGETHER = 2
#: The lowest bits of an activation that say which layer's it is.
TAG_BITS = 2
#: How often a thread looks for an activation before it gives up: some seconds.
MOST_POLLS = 1 << 22


@dataclass(frozen=True)
class FusedLayers(Layers):
    """The layers of a decode step of one row, as one persistent kernel: x -> x, in place.

    What a layer does is what the launches do that `stages` names (products of 16-bit activations,
    attention with a rope). Activations pass between CTAs through ``channels``, each of which says
    by its lowest bits (`TAG_BITS`) whose it is, so that a reader waits for the very values that it
    needs: no barrier, no fence. ``epoch`` counts how often a channel was written, and is never
    reset; channels and epoch begin as zeros. A reader that waits too long leaves (stage, CTA,
    channel, 1) in ``stall`` and traps.

    All CTAs must be resident at once, one an SM, of ``cta_warps`` warps: those of attention, or
    twice as many. ``hidden``, ``ffn`` and the heads' values must be multiples of 256.

    Raises PtxgenError for other shapes, more than one row, paged or quantised caches, unquantised
    weights, and what does not fit ``sms`` SMs or ``shared`` bytes of shared memory.
    """

    sms: int = SMS
    shared: int = SHARED_NBYTES
    cta_warps: int = WARPS

    name = "fused_layers"
    template = ("urdir.templates", "fused_layers.ptx.j2")

    # What the macros of products go by.
    normed = False
    activations = "i16"
    record_nbytes = RECORD_NBYTES["i16"]
    tag_bits, most_polls, together = TAG_BITS, MOST_POLLS, TOGETHER

    def __post_init__(self) -> None:
        for what, cols in (("hidden", self.hidden), ("ffn", self.ffn), ("heads", self.q_rows)):
            if cols < TILE_COLS or cols % TILE_COLS:
                raise PtxgenError(f"fused_layers: {what} is {cols}: a multiple of {TILE_COLS}")
        if self.attention.rows != 1 or self.attention.rope is None:
            raise PtxgenError("fused_layers: attention of one row that turns and appends its token")
        if self.attention.layout.is_paged or self.kv_rows % TILE_ROWS:
            raise PtxgenError("fused_layers: a contiguous cache, keys of a multiple of 16 values")
        if self.attention_ctas > self.sms:
            raise PtxgenError(
                f"fused_layers: attention takes {self.attention_ctas} CTAs, of {self.sms} there are"
            )
        if self.cta_warps not in (WARPS, 2 * WARPS):
            raise PtxgenError(f"fused_layers: {self.cta_warps} warps: {WARPS} or {2 * WARPS}")
        if any(at % ALIGNMENT for layer in self.layers for at in layer.matrices):
            raise PtxgenError(f"fused_layers: matrices lie at multiples of {ALIGNMENT} bytes")
        if any(fmt.is_float for fmt in self.formats):
            raise PtxgenError("fused_layers: the weights must be quantised")
        if self.attention.layout.dtype == "q8_0":
            raise PtxgenError("fused_layers: a cache of floats")
        if self.slots < MIN_SLOTS:
            raise PtxgenError(
                f"fused_layers: {MIN_SLOTS} tiles ({self.slot_nbytes} bytes) of {self.cta_warps} "
                f"warps do not fit {self.shared} bytes of shared memory beside "
                f"{self.offsets['rings']}"
            )

    @property
    def minimum_sm(self) -> int:
        # Before sm_90, assemblers' code for 128 registers a thread spills.
        return 80 if self.cta_warps == WARPS else 90

    @property
    def cta_blocks(self) -> int:
        """Blocks of activations that are rounded at a time: one a warp."""
        return self.cta_warps

    @property
    def most_blocks(self) -> int:
        """Blocks of a warp in a stage, at most."""
        return max(ceil_div(stage.blocks, self.cta_warps) for stage in self.stages)

    @property
    def most_normed_blocks(self) -> int:
        """The same of activations that are normalised."""
        return ceil_div(self.hidden // TILE_COLS, self.cta_warps)

    @cached_property
    def types(self) -> tuple[TileType, ...]:
        """The types of the layers' matrices, with their tiles."""
        layouts = [Layout(fmt, TILE_ROWS, TILE_COLS) for fmt in self.formats]
        return tuple(TileType(i, layout, Tile(layout)) for i, layout in enumerate(layouts))

    # ---- how it is cut ----

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The products of a layer, attention being between the first two."""
        return (
            self._stage(0, "hidden", (0, 1, 2), ("q", "k", "v")),
            self._stage(1, "heads", (3,), ("residual",)),
            self._stage(2, "residual", (4,), ("activated",), matrices=2),
            self._stage(3, "activated", (6,), ("hidden",)),
        )

    def _stage(
        self,
        number: int,
        x: str,
        which: tuple[int, ...],
        outputs: tuple[str, ...],
        matrices: int = 1,
    ) -> Stage:
        tiles = [self.shapes[m][0] // TILE_ROWS for m in which]
        each = share(tiles, self.sms)
        pieces, first = [], 0
        for matrix, count, output in zip(which, tiles, outputs, strict=True):
            pieces.append(Piece(matrix, count, first, self.channels[output][0]))
            first += ceil_div(count, each)
        at, cols = self.channels[x]
        return Stage(number, cols // TILE_COLS, each, at, tuple(pieces), matrices)

    @property
    def attention_ctas(self) -> int:
        """CTAs that attend: one a KV head and tile of its query heads."""
        return self.attention.launch_shape.grid[0]

    @cached_property
    def least_blocks(self) -> int:
        """Blocks of the shortest row: with fewer than warps, some of these have nothing to do."""
        return min(stage.blocks for stage in self.stages)

    # ---- shared memory ----

    @cached_property
    def slot_nbytes(self) -> int:
        """Bytes of a slot of a ring."""
        return max(each.tile.nbytes for each in self.types)

    @cached_property
    def slots(self) -> int:
        """Slots of a warp's ring."""
        room = (self.shared - self.offsets["rings"]) // (self.cta_warps * self.slot_nbytes)
        return min(MAX_SLOTS, room)

    @cached_property
    def most_sums(self) -> int:
        """Rows of a CTA in a stage, those of both matrices."""
        return max(TILE_ROWS * s.each * s.matrices for s in self.stages)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Name -> first byte of each part of dynamic shared memory. Attention's token comes first,
        where its macros look for it."""
        head = 4 * self.attention.head_dim
        sizes = {
            "token": self.attention.token_nbytes,
            "heads": head * (self.attention.tile + 2),
            "stages": 32 * len(self.stages),
            "places": 8 * len(self.tables["places"][1]),
            "planes": 4 * len(self.tables["planes"][1]),
            "squares": 4 * self.cta_warps,
            "residual": 4 * TILE_ROWS * self.stages[1].each,
            "records": 8 * self.record_nbytes * max(stage.blocks for stage in self.stages),
            "partials": 4 * self.cta_warps * self.most_sums,
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += ceil_div(size, ALIGNMENT) * ALIGNMENT
        # Attention has its ring, and what its warps merge, where products have both.
        scratch = places["records"]
        return places | {"rings": max(at, scratch + self.scratch_nbytes), "scratch": scratch}

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of attention's ring, or of what its warps merge."""
        a = self.attention
        ring = RING_STAGES * 2 * 32 * a.launch_shape.threads
        return max(ring, WARPS * a.tile * (4 * a.head_dim + 8))

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.sms, 1, 1),
            block=(32 * self.cta_warps, 1, 1),
            shared_bytes=self.offsets["rings"] + self.cta_warps * self.slots * self.slot_nbytes,
            cooperative=True,
            resident=1,
            prefers_shared=True,
        )

    # ---- tables ----

    @property
    def places(self) -> int:
        """Places of a layer: seven matrices, then vectors."""
        return 7 + len(self.layers[0].vectors)

    @cached_property
    def tables(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """``places`` (layers, places) u64: where the layers' matrices and vectors are; the lowest
        byte of a matrix' is the number of its type. ``planes`` (7, types, 8) u32: where the planes
        of a matrix are, if it is of that type.
        """
        places: list[int] = []
        for layer in self.layers:
            for at, fmt in zip(layer.matrices, layer.formats, strict=True):
                places.append(at + self.formats.index(fmt))
            places += layer.vectors
        planes: list[int] = []
        for shape in self.shapes:
            for fmt in self.formats:
                offsets = list(Layout(fmt, *shape).offsets.values())
                planes += offsets + [0] * (8 - len(offsets))
        return {"places": ("u64", tuple(places)), "planes": ("u32", tuple(planes))}

    # ---- parameters, reference, examples ----

    @property
    def params(self) -> tuple[Param, ...]:
        caches = self.attention.param("k_cache")
        nbytes = (2 * len(self.layers) - 1) * self.cache_nbytes + self.attention.layout.nbytes
        values = nbytes // caches.numpy_dtype.itemsize
        return (
            Param("weights", "u8", (self.weights_nbytes,), Access.IN),
            Param("caches", caches.dtype, (values,), Access.INOUT),
            Param("x", "f32", ("hidden",), Access.INOUT),
            Param("sent", "f32", ("channel_values",), Access.INOUT),
            Param("epoch", "u32", (1,), Access.INOUT),
            Param("stall", "u32", (4,), Access.INOUT),
            Param("sequence", "u32", (1,), Access.IN),
            Param("position", "u32", (1,), Access.IN),
        )

    @classmethod
    def examples(cls) -> Mapping[str, FusedLayers]:
        q8, q4, q6 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K"))
        small = Attention(4, KvLayout(1, 2, 33, 64, "f16"), rope=Rotation(64, "half"))
        mixed = [(q4, q4, q6, q4, q4, q4, q6), (q4,) * 7]
        wide = Attention(
            8, KvLayout(2, 2, 70, 128, "bf16"), rope=Rotation(64, "interleaved"), most_heads=2
        )
        return {
            "equal": cls.of(256, 256, small, [(q8,) * 7], sms=3),
            "mixed types, biases": cls.of(256, 512, small, mixed, sms=4, biased=True),
            "wide rows": cls.of(768, 1280, wide, mixed[:1], sms=4, cta_warps=2 * WARPS),
        }
