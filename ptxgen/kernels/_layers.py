"""The layers of a model as one kernel sees them: where weights are, what is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from urdir.ptxgen.formats import Format, random_blocks
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.tile_matvec import TileMatvec
from urdir.ptxgen.layout import Layout
from urdir.ptxgen.spec import UNIT_ROUNDOFF, Array, KernelSpec, Tolerance, ceil_div

#: Alignment of matrices, caches, and parts of shared memory.
ALIGNMENT = 256


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


@dataclass(frozen=True)
class Layers(KernelSpec):
    """A decode step of one row through ``layers``, x (hidden) -> x: shapes, reference, inputs.

    Weights lie at constant places of one allocation of ``weights_nbytes`` bytes, the frequencies of
    RoPE among them; the caches of all layers in another: keys, values, keys ... Subclasses have the
    parameters weights, caches, x, sent (`channels`), epoch, stall, sequence and position.
    """

    hidden: int
    ffn: int
    attention: Attention
    layers: tuple[LayerAt, ...]
    eps: float
    weights_nbytes: int
    frequencies_at: int

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
        return _shapes(self.hidden, self.ffn, self.q_rows, self.kv_rows)

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
        places, at = {}, 0
        sizes = channel_sizes(self.hidden, self.ffn, self.q_rows, self.kv_rows)
        for name, size in sizes.items():
            places[name] = (at, size)
            at += size
        return places

    @property
    def channel_values(self) -> int:
        """Values of all channels."""
        return sum(size for _, size in self.channels.values())

    # ---- caches ----

    @property
    def cache_nbytes(self) -> int:
        """Bytes of a layer's keys, or values, as they follow each other: keys, values, keys ..."""
        return ceil_div(self.attention.layout.nbytes, ALIGNMENT) * ALIGNMENT

    @property
    def key_nbytes(self) -> int:
        """Bytes of a key, or value, of one head."""
        layout = self.attention.layout
        return layout.nbytes // (layout.sequences * layout.kv_heads * layout.max_len)

    @property
    def tolerance(self) -> Tolerance:
        """What a product is off by (`TileMatvec`), for four products a layer, of which the errors
        add like independent ones; and a neighbouring value of the cache's type, where one of these
        decides how a key is rounded."""
        neighbour = 2 * UNIT_ROUNDOFF[self.attention.layout.dtype]
        return Tolerance(rtol=1.5e-4 * (4 * len(self.layers)) ** 0.5 + neighbour, atol=5e-4)

    # ---- costs, reference, inputs ----

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
        found: Array = caches[(2 * layer + which) * size :][
            : self.attention.layout.nbytes // caches.itemsize
        ]
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
            for at, rows in zip(
                layer.biases, (self.q_rows, self.kv_rows, self.kv_rows), strict=False
            ):
                yield at, rng.standard_normal(rows).astype(np.float32)

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
    ) -> Self:
        """Layers with matrices of these ``formats`` one after the other in memory."""
        q = attention.heads * attention.head_dim
        kv = attention.layout.kv_heads * attention.head_dim
        shapes = _shapes(hidden, ffn, q, kv)
        at, layers = 0, []

        def place(nbytes: int) -> int:
            nonlocal at
            first, at = at, at + ceil_div(nbytes, ALIGNMENT) * ALIGNMENT
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


def channel_sizes(hidden: int, ffn: int, q_rows: int, kv_rows: int) -> dict[str, int]:
    """Name -> values of each channel, in the order in which they lie."""
    return {
        "hidden": hidden,
        "q": q_rows,
        "k": kv_rows,
        "v": kv_rows,
        "heads": q_rows,
        "residual": hidden,
        "activated": ffn,
    }


def _shapes(h: int, f: int, q: int, kv: int) -> tuple[tuple[int, int], ...]:
    """(rows, cols) of a layer's matrices, in the order of `LayerAt`."""
    return ((q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f))
