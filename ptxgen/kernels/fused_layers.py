"""All layers of a decode step in one launch: a persistent kernel whose stages wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.kernels._decode_attention import WARPS
from urdir.ptxgen.kernels._fused_product import SMS
from urdir.ptxgen.kernels._weight_tiles import Run, Tile
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.tile_matvec import RECORD_NBYTES, TileMatvec
from urdir.ptxgen.kv_layout import KvLayout
from urdir.ptxgen.layout import TILE_ROWS, Layout
from urdir.ptxgen.rope import Rotation
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Columns of a tile: rows of every matrix must be whole blocks.
BLOCK = 256
#: Slots of a warp's ring, at least and at most.
MIN_SLOTS, MAX_SLOTS = 2, 8
#: Bytes of shared memory that a CTA takes if it is not told.
SHARED_NBYTES = 227 * 1024
#: The lowest bits of an activation that say which layer's it is.
TAG_BITS = 2
#: How often a thread looks for an activation before it gives up: some seconds.
MOST_POLLS = 1 << 22
#: Alignment of parts of shared memory.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class LayerAt:
    """Where the weights of a layer lie, in bytes from the first, and the types of its matrices.

    ``matrices``: those of Q, K, V, O, gate, up and down; ``norms``: before attention and before
    the MLP; ``biases``: of Q, K and V, or nothing.
    """

    matrices: tuple[int, int, int, int, int, int, int]
    formats: tuple[Format, Format, Format, Format, Format, Format, Format]
    norms: tuple[int, int]
    biases: tuple[int, ...] = ()

    @property
    def vectors(self) -> tuple[int, ...]:
        """Places of all vectors."""
        return (*self.norms, *self.biases)


@dataclass(frozen=True, slots=True)
class TileType:
    """A type of weights, and how its tiles lie in a ring."""

    number: int
    layout: Layout
    tile: Tile

    @property
    def runs(self) -> tuple[tuple[int, Run], ...]:
        """The runs that a whole warp copies, with the numbers of their planes."""
        return tuple((i, run) for i, run in enumerate(self.tile.runs) if run.copies)

    @property
    def shared(self) -> tuple[tuple[int, Run], ...]:
        """The runs that share a copy, the same way: one copy is enough for all types."""
        return tuple((i, run) for i, run in enumerate(self.tile.runs) if not run.copies)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one matrix that a stage's CTAs share: ``tiles`` of 16 rows, from CTA ``first_cta`` on.

    ``matrix`` numbers those of a layer, ``y`` is where in the channels its first output goes.
    """

    matrix: int
    tiles: int
    first_cta: int
    y: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the four products of a layer: a CTA takes ``each`` tiles of each of ``matrices``
    matrices (two for gate and up); ``x`` is where in the channels its activations are."""

    number: int
    name: str
    blocks: int
    each: int
    x: int
    pieces: tuple[Piece, ...]
    matrices: int = 1

    @property
    def normed(self) -> bool:
        """Whether activations are normalised."""
        return self.number in (0, 2)


@dataclass(frozen=True)
class FusedLayers(KernelSpec):
    """The layers of a decode step of one row, as one persistent kernel: x -> x, in place.

    What a layer does is what the launches do that `stages` names (products of 16-bit activations,
    attention with a rope). Activations pass between CTAs through ``channels``, each of which says
    by its lowest bits (`TAG_BITS`) whose it is, so that a reader waits for the very values that it
    needs: no barrier, no fence. ``epoch`` counts how often a channel was written, and is never
    reset; channels and epoch begin as zeros. A reader that waits too long leaves (stage, CTA,
    channel, 1) in ``stall`` and traps.

    All CTAs must be resident at once, one an SM. ``hidden``, ``ffn`` and the heads' values must be
    multiples of 256; weights and caches lie at constant places.

    Raises PtxgenError for other shapes, more than one row, and types without blocks.
    """

    hidden: int
    ffn: int
    attention: Attention
    layers: tuple[LayerAt, ...]
    eps: float
    weights_nbytes: int
    frequencies_at: int
    sms: int = SMS
    shared: int = SHARED_NBYTES
    slots_most: int = MAX_SLOTS
    warps_each: int = 0
    timed: bool = False
    together: int = 2

    name = "fused_layers"
    template = ("urdir.templates", "fused_layers.ptx.j2")

    # What the macros of products go by.
    normed = False
    activations = "i16"
    record_nbytes = RECORD_NBYTES["i16"]
    #: Times of a stage, where it is ``timed``.
    marks = 10
    tag_bits, most_polls = TAG_BITS, MOST_POLLS

    def __post_init__(self) -> None:
        for what, cols in (("hidden", self.hidden), ("ffn", self.ffn), ("heads", self.q_rows)):
            if cols < BLOCK or cols % BLOCK:
                raise PtxgenError(f"fused_layers: {what} is {cols}: a multiple of {BLOCK}")
        if self.attention.rows != 1 or self.attention.rope is None:
            raise PtxgenError("fused_layers: attention of one row that turns and appends its token")
        if self.attention.layout.is_paged or self.kv_rows % TILE_ROWS:
            raise PtxgenError("fused_layers: a contiguous cache, keys of a multiple of 16 values")
        if any(at % _ALIGNMENT for layer in self.layers for at in layer.matrices):
            raise PtxgenError(f"fused_layers: matrices lie at multiples of {_ALIGNMENT} bytes")
        if any(fmt.is_float for fmt in self.formats):
            raise PtxgenError("fused_layers: the weights must be quantised")
        if self.attention.layout.dtype == "q8_0":
            raise PtxgenError("fused_layers: a cache of floats")
        if self.slots < MIN_SLOTS:
            raise PtxgenError(
                f"fused_layers: {MIN_SLOTS} tiles ({self.slot_nbytes} bytes) of {self.warps} warps "
                f"do not fit {self.shared} bytes of shared memory beside {self._fixed_nbytes}"
            )

    @property
    def minimum_sm(self) -> int:
        return 80

    @cached_property
    def warps(self) -> int:
        """Warps of a CTA: at least as many as attention has, more if all have a block."""
        if self.warps_each:
            return self.warps_each
        return 2 * WARPS if self.least_blocks >= 2 * WARPS else WARPS

    @property
    def blocks(self) -> int:
        """Blocks of activations that are rounded at a time: one a warp."""
        return self.warps

    @property
    def most_blocks(self) -> int:
        """Blocks of a warp in a stage, at most."""
        return max(ceil_div(stage.blocks, self.warps) for stage in self.stages)

    @property
    def most_normed_blocks(self) -> int:
        """The same of activations that are normalised."""
        return ceil_div(self.hidden // BLOCK, self.warps)

    # ---- the model ----

    @property
    def q_rows(self) -> int:
        """Values of all query heads."""
        return self.attention.heads * self.attention.head_dim

    @property
    def kv_rows(self) -> int:
        """Values of all KV heads."""
        return self.attention.layout.kv_heads * self.attention.head_dim

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """The types of all matrices, each once."""
        return tuple({f.name: f for layer in self.layers for f in layer.formats}.values())

    @cached_property
    def types(self) -> tuple[TileType, ...]:
        """The same, with their tiles."""
        layouts = [Layout(fmt, TILE_ROWS, BLOCK) for fmt in self.formats]
        return tuple(TileType(i, layout, Tile(layout)) for i, layout in enumerate(layouts))

    @property
    def has_minimums(self) -> bool:
        """Whether some matrix' groups have an additive term."""
        return any(fmt.has_minimums for fmt in self.formats)

    @property
    def biased(self) -> bool:
        """Whether Q, K and V have biases."""
        return bool(self.layers[0].biases)

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, cols) of a layer's matrices."""
        h, f = self.hidden, self.ffn
        q, kv = self.q_rows, self.kv_rows
        return ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f))

    def layout(self, layer: LayerAt, matrix: int) -> Layout:
        """How a matrix of a layer lies in memory."""
        return Layout(layer.formats[matrix], *self.shapes[matrix])

    def products(self, layer: LayerAt) -> tuple[TileMatvec, TileMatvec, TileMatvec, TileMatvec]:
        """The launches that a layer's products would be by themselves."""
        q, k, v, o, gate, _, down = layer.formats
        rows, hidden = self.q_rows, self.hidden
        others = ((k, self.kv_rows), (v, self.kv_rows))
        bias, eps = self.biased, self.eps
        return (
            TileMatvec(q, rows, hidden, bias, eps, others=others, activations="i16"),
            TileMatvec(o, hidden, rows, residual=True, activations="i16"),
            TileMatvec(gate, self.ffn, hidden, eps=eps, gated=True, activations="i16"),
            TileMatvec(down, hidden, self.ffn, residual=True, activations="i16"),
        )

    # ---- channels: activations between stages ----

    @cached_property
    def channels(self) -> dict[str, tuple[int, int]]:
        """Name -> (first value, values) of each channel."""
        sizes = {
            "hidden": self.hidden,
            "q": self.q_rows,
            "k": self.kv_rows,
            "v": self.kv_rows,
            "heads": self.q_rows,
            "residual": self.hidden,
            "activated": self.ffn,
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = (at, size)
            at += size
        return places

    @property
    def channel_values(self) -> int:
        """Values of all channels."""
        return sum(size for _, size in self.channels.values())

    # ---- how it is cut ----

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The products of a layer, attention being between the first two."""
        return (
            self._stage(0, "qkv", "hidden", (0, 1, 2), ("q", "k", "v")),
            self._stage(1, "attn_output", "heads", (3,), ("residual",)),
            self._stage(2, "ffn_gate_up", "residual", (4,), ("activated",), matrices=2),
            self._stage(3, "ffn_down", "activated", (6,), ("hidden",)),
        )

    def _stage(
        self,
        number: int,
        name: str,
        x: str,
        which: tuple[int, ...],
        outputs: tuple[str, ...],
        matrices: int = 1,
    ) -> Stage:
        tiles = [self.shapes[m][0] // TILE_ROWS for m in which]
        each = next(n for n in range(1, sum(tiles) + 1) if self._ctas(tiles, n) <= self.sms)
        pieces, first = [], 0
        for matrix, count, output in zip(which, tiles, outputs, strict=True):
            pieces.append(Piece(matrix, count, first, self.channels[output][0]))
            first += ceil_div(count, each)
        at, cols = self.channels[x]
        return Stage(number, name, cols // BLOCK, each, at, tuple(pieces), matrices)

    @staticmethod
    def _ctas(tiles: Sequence[int], each: int) -> int:
        return sum(ceil_div(count, each) for count in tiles)

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
        room = (self.shared - self._fixed_nbytes) // (self.warps * self.slot_nbytes)
        return min(self.slots_most, room)

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
            "squares": 4 * self.warps,
            "residual": 4 * TILE_ROWS * self.stages[1].each,
            "records": 8 * self.record_nbytes * max(stage.blocks for stage in self.stages),
            "partials": 4 * self.warps * self.most_sums,
        }
        places, at = {}, 0
        for name, size in sizes.items():
            places[name] = at
            at += ceil_div(size, _ALIGNMENT) * _ALIGNMENT
        # Attention has its ring, and what its warps merge, where products have both.
        scratch = places["records"]
        return places | {"rings": max(at, scratch + self.scratch_nbytes), "scratch": scratch}

    @property
    def _fixed_nbytes(self) -> int:
        return self.offsets["rings"]

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of attention's ring, or of what its warps merge."""
        a = self.attention
        ring = 3 * 2 * 32 * a.launch_shape.threads
        return max(ring, WARPS * a.tile * (4 * a.head_dim + 8))

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.sms, 1, 1),
            block=(32 * self.warps, 1, 1),
            shared_bytes=self.offsets["rings"] + self.warps * self.slots * self.slot_nbytes,
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
    def cache_nbytes(self) -> int:
        """Bytes of a layer's keys, or values, as they follow each other: keys, values, keys ..."""
        return ceil_div(self.attention.layout.nbytes, _ALIGNMENT) * _ALIGNMENT

    @property
    def key_nbytes(self) -> int:
        """Bytes of a key, or value, of one head."""
        layout = self.attention.layout
        return layout.nbytes // (layout.sequences * layout.kv_heads * layout.max_len)

    @property
    def params(self) -> tuple[Param, ...]:
        caches = self.attention.param("k_cache")
        nbytes = (2 * len(self.layers) - 1) * self.cache_nbytes + self.attention.layout.nbytes
        values = nbytes // caches.numpy_dtype.itemsize
        times: tuple[Param, ...] = ()
        if self.timed:
            shape = (self.sms, 4 * len(self.layers), self.marks)
            times = (Param("times", "u32", shape, Access.OUT),)
        return (
            Param("weights", "u8", (self.weights_nbytes,), Access.IN),
            Param("caches", caches.dtype, (values,), Access.INOUT),
            Param("x", "f32", ("hidden",), Access.INOUT),
            Param("sent", "f32", ("channel_values",), Access.INOUT),
            Param("epoch", "u32", (1,), Access.INOUT),
            Param("stall", "u32", (4,), Access.INOUT),
            Param("sequence", "u32", (1,), Access.IN),
            Param("position", "u32", (1,), Access.IN),
            *times,
        )

    @property
    def tolerance(self) -> Tolerance:
        """What a product is off by (`TileMatvec`), for four products a layer, of which the errors
        add like independent ones; and a cache's neighbouring value (f16), where one of these
        decides how a key is rounded."""
        return Tolerance(rtol=1.5e-4 * (4 * len(self.layers)) ** 0.5 + 2**-10, atol=5e-4)

    def flops(self) -> int:
        per_layer = sum(2 * rows * cols for rows, cols in self.shapes) + self.attention.flops()
        return len(self.layers) * per_layer

    def bytes_moved(self) -> int:
        """Weights and caches once; what passes between stages stays in the L2."""
        weights = sum(
            self.layout(layer, m).nbytes for layer in self.layers for m in range(len(self.shapes))
        )
        return weights + len(self.layers) * self.attention.bytes_moved()

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, caches = inputs["x"], inputs["caches"].copy()
        sent = np.zeros(self.channel_values, np.float32)
        for number, layer in enumerate(self.layers):
            values = self._layer_reference(inputs, layer, number, x, caches)
            x = values["hidden"]
            for name, value in values.items():
                at, size = self.channels[name]
                sent[at : at + size] = value.ravel()
        epoch = inputs["epoch"] + np.uint32(len(self.layers) + 1)
        return {"caches": caches, "x": x, "sent": sent, "epoch": epoch, "stall": inputs["stall"]}

    def _layer_reference(
        self, inputs: dict[str, Any], layer: LayerAt, number: int, x: Array, caches: Array
    ) -> dict[str, Array]:
        weights = inputs["weights"]
        qkv, o, gate_up, down = self.products(layer)

        def matrix(m: int) -> Array:
            at = layer.matrices[m]
            found: Array = weights[at : at + self.layout(layer, m).nbytes]
            return found

        def vector(at: int, size: int) -> Array:
            found: Array = weights[at : at + 4 * size].view(np.float32)
            return found

        rows = (self.q_rows, self.kv_rows, self.kv_rows)
        tags = ("", "1", "2")
        biases = {
            f"bias{tag}": vector(at, size)
            for tag, at, size in zip(tags, layer.biases, rows, strict=False)
        }
        given = {f"weights{tag}": matrix(m) for m, tag in enumerate(tags)}
        norm = vector(layer.norms[0], self.hidden)
        y = qkv.reference(x=x[None], norm=norm, **given, **biases)
        values = {name: y[f"y{tag}"] for name, tag in zip("qkv", tags, strict=True)}
        values["heads"] = self._attend(inputs, number, values, caches)
        heads = values["heads"].reshape(1, -1)
        residual = o.reference(weights=matrix(3), x=heads, residual=x[None])["y"]
        norm = vector(layer.norms[1], self.hidden)
        activated = gate_up.reference(weights=matrix(4), up=matrix(5), x=residual, norm=norm)["y"]
        out = down.reference(weights=matrix(6), x=activated, residual=residual)["y"]
        return values | {"residual": residual, "activated": activated, "hidden": out[0]}

    def _attend(
        self, inputs: dict[str, Any], number: int, values: dict[str, Array], caches: Array
    ) -> Array:
        """Attention of a layer, which writes its token to ``caches``."""
        a = self.attention
        k, v = (
            self._cache(caches, number, i).reshape(a.shape_of(a.param(name)))
            for i, name in enumerate(("k_cache", "v_cache"))
        )
        pairs = a.rope.pairs if a.rope else 0
        table = inputs["weights"][self.frequencies_at :][: 8 * pairs]
        given = {name: inputs[name] for name in ("sequence", "position")}
        out = a.reference(
            q=values["q"].reshape(1, a.heads, a.head_dim),
            k=values["k"].reshape(1, a.layout.kv_heads, a.head_dim),
            v=values["v"].reshape(1, a.layout.kv_heads, a.head_dim),
            frequencies=table.view(np.float32).reshape(pairs, 2),
            k_cache=k,
            v_cache=v,
            **given,
        )
        k[...], v[...] = out["k_cache"], out["v_cache"]
        heads: Array = out["out"]
        return heads

    def _cache(self, caches: Array, layer: int, which: int) -> Array:
        """A view of a layer's keys (0) or values (1)."""
        size = self.cache_nbytes // caches.itemsize
        found: Array = caches[(2 * layer + which) * size :][: self.attention.layout.nbytes // caches.itemsize]
        return found

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        a = self.attention
        given = a.make_inputs(rng)
        weights = np.zeros(self.weights_nbytes, np.uint8)
        for at, array in self._random_weights(rng):
            weights[at : at + array.nbytes] = array.view(np.uint8).ravel()
        table = given["frequencies"]
        weights[self.frequencies_at :][: table.nbytes] = table.view(np.uint8).ravel()
        param = self.param("caches")
        caches = np.zeros(self.shape_of(param), param.numpy_dtype)
        for number in range(len(self.layers)):
            for i, name in enumerate(("k_cache", "v_cache")):
                self._cache(caches, number, i)[...] = given[name].ravel()
        return {
            "weights": weights,
            "caches": caches,
            "x": rng.standard_normal(self.hidden).astype(np.float32),
            "sent": np.zeros(self.channel_values, np.float32),
            "epoch": np.zeros(1, np.uint32),
            "stall": np.zeros(4, np.uint32),
            "sequence": given["sequence"],
            "position": given["position"],
        }

    def _random_weights(self, rng: np.random.Generator) -> Iterator[tuple[int, Array]]:
        """Places and values. Norms are such that queries and keys are standard normal, about:
        larger scores would make one key of all, and small errors choose another."""
        for layer in self.layers:
            sizes = []
            for m, (rows, cols) in enumerate(self.shapes):
                layout = self.layout(layer, m)
                blocks = random_blocks(layout.format, rows * cols // layout.format.block, rng)
                packed = layout.pack(blocks)
                sizes.append(float(np.sqrt(np.mean(layout.unpack(packed) ** 2) * cols)))
                yield layer.matrices[m], packed
            for at, m in zip(layer.norms, (0, 4), strict=True):
                norm = rng.standard_normal(self.hidden) / sizes[m]
                yield at, norm.astype(np.float32)
            for at, rows in zip(layer.biases, (self.q_rows, self.kv_rows, self.kv_rows), strict=False):
                yield at, rng.standard_normal(rows).astype(np.float32)

    @classmethod
    def examples(cls) -> Sequence[FusedLayers]:
        q8, q4, q6 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K"))
        small = Attention(4, KvLayout(1, 2, 33, 64, "f16"), rope=Rotation(64, "half"))
        return (
            cls.of(256, 256, small, [(q8,) * 7], sms=3),
            cls.of(256, 512, small, [(q4, q4, q6, q4, q4, q4, q6), (q4,) * 7], sms=4, biased=True),
        )

    @classmethod
    def of(
        cls,
        hidden: int,
        ffn: int,
        attention: Attention,
        formats: Sequence[tuple[Format, ...]],
        *,
        eps: float = 1e-5,
        biased: bool = False,
        **fields: Any,
    ) -> FusedLayers:
        """Layers with matrices of these ``formats`` one after the other in memory."""
        q = attention.heads * attention.head_dim
        kv = attention.layout.kv_heads * attention.head_dim
        shapes = (q, hidden), (kv, hidden), (kv, hidden), (hidden, q)
        shapes += (ffn, hidden), (ffn, hidden), (hidden, ffn)
        at, layers = 0, []

        def place(nbytes: int) -> int:
            nonlocal at
            first, at = at, at + ceil_div(nbytes, _ALIGNMENT) * _ALIGNMENT
            return first

        for each in formats:
            matrices = [
                place(Layout(fmt, *shape).nbytes) for fmt, shape in zip(each, shapes, strict=True)
            ]
            norms = place(4 * hidden), place(4 * hidden)
            biases = tuple(place(4 * rows) for rows in (q, kv, kv)) if biased else ()
            layers.append(LayerAt(tuple(matrices), tuple(each), norms, biases))  # type: ignore[arg-type]
        frequencies = place(4 * attention.head_dim)
        return cls(hidden, ffn, attention, tuple(layers), eps, at, frequencies, **fields)
