"""What a description means, in numpy: the forward pass that the engine is compared with.

Everything is float64, on dequantised weights (by gguf-py), without a cache: all tokens at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import gguf
import numpy as np

from tests.model.mixers.mixer import Floats, mixer, sigmoid, silu
from urdir.model.families.attention import Attention, Indexer, Latent, QkNorm
from urdir.model.families.compression import BlockIndexer, Compression, Compressor
from urdir.model.families.config import Config
from urdir.model.families.feed_forward import Dense, Mixture, Router
from urdir.model.families.layers import (
    AltUp,
    Block,
    HyperConnection,
    LayerConfig,
    LowRankConnection,
    Network,
    StreamJoin,
)
from urdir.model.families.recurrent import Recurrent
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, Normalization, StoredMatrix, StoredVector
from urdir.model.families.switch import Switch
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.rotation import turns_table


class Reference:
    """A model file's description, run in numpy, for sequences of up to ``context`` tokens."""

    def __init__(self, file: Any, config: Config, context: int | None = None) -> None:
        self.file = file
        self.config = config.at_context(context or config.context_length)
        self.tensor = cache(self._tensor)
        self._saved: dict[str, Floats] = {}
        self._banked: list[Floats] = []
        self.values: Floats = np.zeros(0)
        self._streams: list[Floats] = []
        self.tokens: Any = None
        self._adapters: list[int] = []

    def logits(self, tokens: Any) -> Floats:
        """Logits (tokens, vocab) after every token of one sequence."""
        c = self.config
        tokens = self.tokens = np.asarray(tokens)
        positions = np.arange(len(tokens))
        if c.switch is not None:
            self._switch(c.switch)
        x = self.matrix(c.embedding)[self.tokens] * c.embedding_scale
        if c.positions is not None:
            x = x + self.matrix(c.positions)[positions]
        x = self.norm(c.embedding_norm, x)
        extra = self._layer_embeddings(tokens, x)
        self._streams = [self._as_long(self.linear(of, x), x) for of in c.streams]
        self._save(c.saves, x)
        if c.adds is not None:
            x = x + self.vector(c.adds)
        keys_and_values: list[Any] = []
        self._banked.clear()
        if c.has_streams:
            x = np.repeat(x[:, None], 4, axis=1)
        for index, layer in enumerate(c.layers):
            x = self._layer(layer, index, x, positions, keys_and_values, extra)
        if c.has_streams:
            x = self._joined(c.join, x)
        else:
            merged = [
                self._as_long(self.linear(of, stream), x)
                for of, stream in zip(c.merges, self._streams, strict=True)
            ]
            x = self._recalled(c.recalls, sum(merged, x) / (1 + len(merged)))
        logits = self.linear(c.output, self.norm(c.output_norm, x)) * c.logit_scale
        logits = c.softcap * np.tanh(logits / c.softcap) if c.softcap else logits
        if c.hides is not None:
            logits[:, slice(*c.hides)] = np.finfo(np.float32).min
        return logits

    def _switch(self, of: Switch) -> None:
        """The adapter of each row, by attention to all tokens up to it, of one head and one value;
        and the tokens that are embedded in place of those that switch one on."""
        numbers = {token: number + 1 for number, token in enumerate(of.tokens)}
        values = np.array([numbers.get(token, 0) for token in self.tokens.tolist()], np.float64)
        scores = np.where(values > 0, of.gain, -of.gain)
        self._adapters = []
        for row in range(len(values)):
            weights = np.exp(scores[: row + 1] - scores[: row + 1].max())
            mean = weights @ values[: row + 1] / weights.sum()
            self._adapters.append(int(mean + 0.5))
        others = dict(zip(of.tokens, of.substitutes, strict=True))
        self.tokens = np.array([others.get(token, token) for token in self.tokens.tolist()])

    def _switched(self, of: Switch, matrix: StoredMatrix, x: Floats) -> Floats:
        """What each row's adapter adds to the products of a matrix; nothing of others."""
        for each in of.matrices:
            if (each.name, each.first) == (matrix.name, matrix.first):
                a, b = self.tensor(each.a.name), self.tensor(each.b.name)
                rows = zip(x, self._adapters, strict=True)
                return np.stack([b[number] @ (a[number] @ row) for row, number in rows])
        return np.zeros((len(x), matrix.rows))

    # ---- weights ----

    def _tensor(self, name: str) -> Floats:
        tensor = self.file.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        data = np.frombuffer(bytes(tensor.data[:]), np.uint8)
        if kind == gguf.GGMLQuantizationType.F32:
            values = data.view(np.float32)
        else:
            rows = data.reshape(-1, data.size // (tensor.nbytes // _row_nbytes(tensor)))
            values = gguf.quants.dequantize(rows, kind)
        return values.astype(np.float64).reshape(tensor.shape)

    def matrix(self, stored: StoredMatrix) -> Floats:
        """(rows, cols)."""
        whole = self.tensor(stored.name)
        periods = whole.reshape(-1, stored.period, stored.shape[-1])
        taken = periods[:, stored.first : stored.first + stored.each]
        if stored.transposed:
            taken = taken.swapaxes(1, 2)
        taken = taken.reshape(-1, stored.cols)
        if stored.runs is not None:
            taken = np.concatenate([taken[start:stop] for start, stop in stored.runs])
        return taken

    def vector(self, stored: StoredVector) -> Floats:
        """(size,)."""
        return stored.of(self.tensor(stored.name))

    def linear(self, linear: Linear, x: Floats) -> Floats:
        """x W^T (+ bias)."""
        y = x @ self.matrix(linear.matrix).T
        if linear.low is not None:
            y = y + x @ (self.matrix(linear.low.b) @ self.matrix(linear.low.a)).T
        if self.config.switch is not None:
            y = y + self._switched(self.config.switch, linear.matrix, x)
        if linear.factor is not None:
            y = y * self.vector(linear.factor)
        return y if linear.bias is None else y + self.vector(linear.bias)

    def norm(self, of: Normalization | None, x: Floats) -> Floats:
        """Of the last axis, or x where there is no norm."""
        if of is None:
            return x
        weight, bias = (None if v is None else self.vector(v) for v in (of.weight, of.bias))
        if weight is not None and of.weight is not None and len(of.weight.shape) > 1:
            weight = weight.reshape(of.weight.shape[0], -1)  # (heads, head_dim)
            bias = None if bias is None else bias.reshape(weight.shape)
        return of.norm(x, weight, bias)

    # ---- layers ----

    def _layer(
        self,
        layer: LayerConfig,
        index: int,
        x: Floats,
        positions: Any,
        caches: list[Any],
        extra: Floats | None,
    ) -> Floats:
        caches.append(None)
        if layer.altup is not None:
            return self._altup_layer(layer, layer.altup, index, x, positions, caches, extra)
        start = x
        for block in layer.blocks:
            if block.hyper is not None:
                x = self._in_streams(block, block.hyper, x, positions, caches)
                continue
            x = self.norm(block.stream_norm, x)
            read = self._recalled(block.recalls, x)
            if (of := block.transformer) is not None:
                both = np.concatenate([x, self._saved["embedding"]], axis=1)
                made = self._attention(of.attention, self.norm(of.norm, both), positions, caches)
                made = self._dense(of.ffn, self.norm(of.ffn_norm, made))
                read = x + self.linear(of.linear, made)
            if block.banks:
                self._banked.append(x)
                x = np.zeros_like(x)
            x = x + self._block(block, read, start, positions, caches)
        if layer.embedding is not None:
            assert extra is not None
            e = layer.embedding
            gated = e.activation(self.linear(e.gate, x)) * extra[:, index]
            x = x + self.norm(e.norm, self.linear(e.proj, gated))
        if layer.output_scale is not None:
            x = x * self.vector(layer.output_scale)
        x = self.norm(layer.output_norm, x)
        self._save(layer.saves, x)
        if layer.adds is not None:
            scale = 1.0 if layer.adds_scale is None else self.vector(layer.adds_scale)
            x = x + self._saved[layer.adds] * scale
        return x

    def _in_streams(
        self,
        block: Block,
        of: HyperConnection | LowRankConnection,
        x: Floats,
        positions: Any,
        caches: Any,
    ) -> Floats:
        """The streams x (rows, 4, hidden) after a block, each row by itself."""
        if isinstance(of, LowRankConnection):
            assert of.inject is not None
            read, normed = self._gated_mean(of, x)
            made = self._block(block, read, read, positions, caches)
            return x + 2 * sigmoid(self.linear(of.inject, normed) / 4)[:, :, None] * made[:, None]
        mixes = self.linear(of.mixes, self.norm(of.norm, x.reshape(len(x), -1)))
        scale, base = self.vector(of.scale), self.vector(of.base)
        pre = sigmoid(mixes[:, :4] * scale[0] + base[:4]) + of.eps
        post = of.magnitude * sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
        read = np.stack([row @ streams for row, streams in zip(pre, x, strict=True)])
        made = self._block(block, read, read, positions, caches)
        if not of.iterations:
            return x + (post + of.eps)[:, :, None] * made[:, None]
        streams = []
        for row, y in enumerate(made):
            comb = _softmax((mixes[row, 8:] * scale[2] + base[8:]).reshape(4, 4)) + of.eps
            for turn in range(of.iterations):
                if turn:
                    comb = comb / (comb.sum(1, keepdims=True) + of.eps)
                comb = comb / (comb.sum(0, keepdims=True) + of.eps)
            streams.append(comb.T @ x[row] + np.outer(post[row], y))
        return np.stack(streams)

    def _gated_mean(self, of: LowRankConnection, x: Floats) -> tuple[Floats, Floats]:
        """What a block reads of the streams x (rows, 4, hidden), and their norm side by side."""
        normed = self.norm(of.norm, x)
        flat = normed.reshape(len(x), -1)
        gates = self.linear(of.up, silu(self.linear(of.down, flat) / 4))
        return (normed * sigmoid(gates.reshape(x.shape))).mean(axis=1), flat

    def _joined(self, of: StreamJoin | LowRankConnection | None, x: Floats) -> Floats:
        """One stream, of those of x (rows, 4, hidden)."""
        if isinstance(of, LowRankConnection):
            return self._gated_mean(of, x)[0]
        if of is None:
            return np.asarray(x.mean(axis=1))
        mixes = self.linear(of.mixes, self.norm(of.norm, x.reshape(len(x), -1)))
        weights = sigmoid(mixes * self.vector(of.scale) + self.vector(of.base)) + of.eps
        return np.stack([row @ streams for row, streams in zip(weights, x, strict=True)])

    @staticmethod
    def _as_long(x: Floats, target: Floats) -> Floats:
        lengths = [np.sqrt((of**2).sum(1, keepdims=True)) for of in (target, x)]
        return x * lengths[0] / lengths[1]

    def _altup_layer(
        self,
        layer: LayerConfig,
        of: AltUp,
        index: int,
        x: Floats,
        positions: Any,
        caches: Any,
        extra: Any,
    ) -> Floats:
        """Google's modeling_gemma3n, Gemma3nTextDecoderLayer, as llama.cpp has it."""

        def modalities(of_x: Floats) -> Floats:
            return np.tanh(self.linear(of.router, self.norm(of.router_norm, of_x) / x.shape[1]))

        streams = np.stack([x, *self._streams])
        count = len(streams)
        coefs = self.linear(of.predict, modalities(x)).reshape(len(x), count, count)
        predicted = streams + np.einsum("tij,jte->ite", coefs, streams)
        active = predicted[0]
        (attends,), (network,) = (block.branches for block in layer.blocks)
        n = self.norm(attends.norm, active)
        assert isinstance(attends.network, Attention)
        made = self.norm(attends.post_norm, self._attention(attends.network, n, positions, caches))
        laurel = self.linear(of.laurel[1], self.linear(of.laurel[0], n))
        m = (active + made + n + self.norm(of.laurel_norm, laurel)) / np.sqrt(2.0)
        assert isinstance(network.network, Dense)
        ffn = self._dense(network.network, self.norm(network.norm, m))
        activated = m + self.norm(network.post_norm, ffn)
        weights = self.linear(of.correct, modalities(activated)) + 1.0
        corrected = predicted + weights.T[:, :, None] * (activated - active)
        assert layer.embedding is not None
        e = layer.embedding
        first = corrected[0] * self.vector(of.correct_scale)
        gated = e.activation(self.linear(e.gate, first)) * extra[:, index]
        added = self.norm(e.norm, self.linear(e.proj, gated))
        self._streams = [stream + added for stream in corrected[1:]]
        return corrected[0]

    def _block(self, block: Block, x: Floats, start: Floats, positions: Any, caches: Any) -> Floats:
        total: Floats = np.zeros_like(x)
        added = total
        for branch in block.branches:
            stream = start if branch.reads_layer_input else x
            if branch.reads_sibling:
                stream = added
            y = self._network(
                branch.network, self.norm(branch.norm, stream), stream, start, positions, caches
            )
            added = self.norm(branch.post_norm, y)
            total = total + added
        return self.norm(block.post_norm, block.scale * total)

    def _network(
        self, of: Network, x: Floats, stream: Floats, start: Floats, positions: Any, caches: Any
    ) -> Floats:
        match of:
            case Attention():
                return self._attention(of, x, positions, caches)
            case Recurrent():
                return mixer(self, of, x)
            case Dense():
                return self._dense(of, x)
            case Mixture():
                return self._mixture(of, x, stream, start)
            case Linear():
                return self.linear(of, x)
            case Activation():
                return np.asarray(of(x), np.float64)

    def _dense(self, of: Dense, x: Floats) -> Floats:
        up = self.linear(of.up, x)
        if of.gate is None:
            hidden = of.activation(up)
        else:
            gate = self.linear(of.gate, x)
            if of.deviations is not None:
                bound = gate.mean(1, keepdims=True)
                bound = bound + of.deviations * gate.std(1, ddof=1, keepdims=True)
                gate = np.maximum(gate - bound, 0.0)
            hidden = of.activation.gated(gate, up)
        if of.divisors is not None:
            hidden = hidden / self.vector(of.divisors)
        hidden = self.norm(of.norm, hidden)
        return self.linear(of.down, hidden)

    # ---- mixtures ----

    def _mixture(self, of: Mixture, x: Floats, stream: Floats, start: Floats) -> Floats:
        source = {"input": x, "layer": start}.get(of.router.reads)
        if source is None:
            source = self.norm(of.router.norm, stream) * of.router.norm_scale
        chosen, weights = self._route(of.router, self.linear(of.router.linear, source))
        read = x if of.latent is None else self.linear(of.latent.down, x)
        out = self._experts(of, read, chosen, weights)
        if of.chunks is not None:
            chosen, weights = self._route(of.chunks.router, self.linear(of.chunks.router.linear, x))
            out = out + of.chunk_scale * self._experts(of.chunks, out, chosen, weights)
        if of.latent is not None:
            out = self.linear(of.latent.up, self.norm(of.latent.norm, out))
        if of.shared is not None:
            shared = self._dense(of.shared, x)
            if of.shared_gate is not None:
                shared = shared / (1.0 + np.exp(-self.linear(of.shared_gate, x)))
            out = out + shared
        return out

    def _experts(self, of: Mixture, x: Floats, chosen: Any, weights: Floats) -> Floats:
        """The weighted sum of the chosen experts' results."""
        out: Floats = np.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row], weights[row], strict=True):
                out[row] += self._expert(of, int(expert), x[row], weight)
        return out

    def _route(self, of: Router, logits: Floats) -> tuple[Any, Floats]:
        """Experts (rows, used) and their weights."""
        match of.scoring:
            case "softmax":
                scores = _softmax(logits)
            case "sigmoid":
                scores = 1.0 / (1.0 + np.exp(-logits))
            case "sqrt_softplus":
                scores = np.sqrt(np.log1p(np.exp(logits)))
            case _:
                scores = logits
        choice = logits if of.by_logits else scores
        if of.by_token is not None:
            chosen = self.vector(of.by_token).reshape(-1, of.used)[self.tokens].astype(int)
            weights = np.take_along_axis(scores, chosen, axis=1)
            return chosen, weights / weights.sum(axis=1, keepdims=True) * of.scale
        if of.choice_bias is not None:
            choice = choice + self.vector(of.choice_bias)
        if of.groups > 1:
            grouped = choice.reshape(len(choice), of.groups, -1)
            best = np.sort(grouped, axis=2)[:, :, -1 if of.by_best else -2 :].sum(axis=2)
            kept = np.argsort(-best, axis=1, kind="stable")[:, : of.groups_used]
            mask = np.full(grouped.shape, -np.inf)
            np.put_along_axis(mask, kept[:, :, None], 0.0, axis=1)
            choice = (grouped + mask).reshape(choice.shape)
        chosen = np.argsort(-choice, axis=1, kind="stable")[:, : of.used] // of.shares
        weights = np.take_along_axis(scores, chosen, axis=1)
        if of.scoring == "softmax_selected":
            weights = _softmax(weights)
        if of.scoring == "sparsemixer":
            weights = _sparse_weights(logits, chosen)
        if of.normalize:
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 6.103515625e-5)
        weights = weights * of.scale
        if of.expert_scale is not None:
            weights = weights * self.vector(of.expert_scale)[chosen]
        return chosen, weights

    def _expert(self, of: Mixture, expert: int, x: Floats, weight: float) -> Floats:
        def product(linear: Linear, value: Floats, by: float = 1.0) -> Floats:
            rows = linear.rows // of.router.experts
            part = slice(expert * rows, (expert + 1) * rows)
            y = self.matrix(linear.matrix)[part] @ (value * by)
            return y if linear.bias is None else y + self.vector(linear.bias)[part]

        before = weight if of.weigh_input else 1.0
        up = product(of.up, x, before)
        if of.gate is None:
            hidden = of.activation(up)
        else:
            hidden = of.activation.gated(product(of.gate, x, before), up)
        down = product(of.down, hidden)
        return down if of.weigh_input else down * weight

    # ---- attention ----

    def _attention(self, a: Attention, x: Floats, positions: Any, caches: list[Any]) -> Floats:
        if a.latent is not None:
            return self._latent_attention(a, a.latent, x, positions, len(caches) - 1)
        if a.compression is not None:
            return self._compressed_attention(a, a.compression, x)
        q = self._clamped(a, self.linear(a.q, x)).reshape(len(x), a.heads, a.key_dim)
        if a.k is None:
            assert a.shares_cache_of is not None
            k, v = caches[a.shares_cache_of]
            q = self._turned(a, q, "q", positions)
        else:
            k = self._clamped(a, self.linear(a.k, x)).reshape(len(x), a.kv_heads, a.key_dim)
            v = k
            if a.v is not None:
                v = self._clamped(a, self.linear(a.v, x))
                v = v.reshape(len(x), a.kv_heads, a.value_dim)
            if a.v_norm is not None:
                v = a.v_norm(v)
            q, k = self._turned(a, q, "q", positions), self._turned(a, k, "k", positions)
            k, v = self.stored(len(caches) - 1, k, v)
        caches[-1] = k, v
        q = self._tempered(a, q, positions)
        chosen = None if a.indexer is None else self._selected(a.indexer, x, x, positions)
        out = (
            self._attend(a, q, k, v, positions, chosen).reshape(len(x), a.output_width)
            * a.value_scale
        )
        return self.linear(a.o, self.norm(a.norm, self._gated(a, out, x)))

    def _gated(self, a: Attention, out: Floats, x: Floats) -> Floats:
        if a.gate is None:
            return out
        gate = self.linear(a.gate.linear, x)
        gate = np.logaddexp(0, gate) if a.gate.activation == "softplus" else sigmoid(gate)
        return (out.reshape(len(x), gate.shape[1], -1) * gate[:, :, None]).reshape(out.shape)

    def stored(self, layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """What attention of a layer reads of keys and values (tokens, KV heads, dim), for those who
        would have a cache; of latent attention the keys that rotate, and the latent vectors."""
        return keys, values

    def _latent_attention(
        self, a: Attention, of: Latent, x: Floats, positions: Any, layer: int
    ) -> Floats:
        """Keys and values of each head written out."""
        assert a.k is not None
        rows, latent = len(x), self.norm(of.norm, self.linear(of.down, x))
        source = x if of.q_down is None else self.norm(of.q_norm, self.linear(of.q_down, x))
        parts = self.matrix(of.expand.matrix).reshape(a.heads, -1, a.value_dim)
        turned = self.linear(a.q, source).reshape(rows, a.heads, -1)
        turned = self._turned(a, turned, "q", positions)
        k_turned = self.norm(of.k_norm, self.linear(a.k, x))[:, None]
        k_turned = self._turned(a, k_turned, "k", positions)
        if a.key_is_latent:
            turned, k_turned = turned[:, :, :0], k_turned[:, :, :0]
        k_turned, latents = self.stored(layer, k_turned, latent[:, None])
        latent = latents[:, 0]
        q, k = turned, np.repeat(k_turned, a.heads, axis=1)
        if of.q_still is not None and of.absorb is not None:
            up = self.matrix(of.absorb.matrix).reshape(a.heads, a.value_dim, -1)
            still = self.linear(of.q_still, source).reshape(rows, a.heads, -1)
            q = np.concatenate([q, still], 2)
            k = np.concatenate([k, np.einsum("rl,hls->rhs", latent, up)], 2)
        q, v = self._tempered(a, q, positions), np.einsum("rl,hvl->rhv", latent, parts)
        plain = replace(a, kv_heads=a.heads)
        if a.indexer is not None:
            self._chosen = self._selected(a.indexer, x, source, positions)
        chosen = self._chosen if a.indexer or a.follows_indexer else None
        out = self._attend(plain, q, k, v, positions, chosen).reshape(rows, -1)
        return self.linear(a.o, self._gated(a, out, x))

    def _compressed_attention(self, a: Attention, of: Compression, x: Floats) -> Floats:
        """Row by row, over the tokens and blocks that each sees."""
        assert a.k is not None
        assert a.rope is not None
        assert a.sinks is not None
        low = self.norm(of.q_norm, self.linear(of.q_down, x))
        heads = self.norm(of.head_norm, self.linear(a.q, low).reshape(len(x), a.heads, -1))
        keys = self.norm(of.k_norm, self.linear(a.k, x))
        blocks, sinks, made = of.blocks, self.vector(a.sinks), []
        of_blocks = [] if blocks is None else self._block_keys(blocks, a.rope, x)
        chosen = None if of.index is None else self._chosen_blocks(of.index, a.rope, x, low)
        turned = [self._tail(a.rope, key, at) for at, key in enumerate(keys)]
        for row, q in enumerate(heads):
            seen = turned[max(0, row + 1 - of.window) : row + 1]
            if blocks is not None:
                count = (row + 1) // blocks.ratio
                seen += [of_blocks[i] for i in (range(count) if chosen is None else chosen[row])]
            cached, q = np.stack(seen), self._tail(a.rope, q, row)
            scores = np.concatenate([q @ cached.T * a.scale, sinks[:, None]], axis=1)
            made.append(self._tail(a.rope, _softmax(scores)[:, :-1] @ cached, -row))
        groups = np.stack(made).reshape(len(x), of.groups, -1)
        down = self.matrix(of.o_down.matrix).reshape(of.groups, -1, groups.shape[2])
        narrow = np.concatenate([groups[:, g] @ down[g].T for g in range(of.groups)], axis=1)
        return self.linear(a.o, narrow)

    @staticmethod
    def _tail(rope: RopeConfig, x: Floats, position: int) -> Floats:
        """x (..., dim) with its last values rotated as complex numbers."""
        start = x.shape[-1] - rope.dim
        pairs = x[..., start::2] + 1j * x[..., start + 1 :: 2]
        turned = pairs * np.exp(1j * position * rope.frequencies(None))
        y = x.copy()
        y[..., start::2], y[..., start + 1 :: 2] = turned.real, turned.imag
        return y

    def _block_keys(self, of: Compressor, rope: RopeConfig, x: Floats) -> list[Floats]:
        """The keys of whole blocks."""
        keys, gates = self.linear(of.keys, x), self.linear(of.gate, x)
        places = self.vector(of.places).reshape(of.ratio, -1)
        gates = gates + np.tile(places, (len(x) // of.ratio + 1, 1))[: len(x)]
        made = []
        for first in range(0, len(x) - of.ratio + 1, of.ratio):
            own = slice(first, first + of.ratio)
            key, gate = keys[own, -of.dim :], gates[own, -of.dim :]
            if of.width > of.dim and first:
                before = slice(first - of.ratio, first)
                key = np.concatenate([key, keys[before, : of.dim]])
                gate = np.concatenate([gate, gates[before, : of.dim]])
            total = (_softmax(gate.T).T * key).sum(axis=0)
            made.append(self._tail(rope, self.norm(of.norm, total), first))
        return made

    def _chosen_blocks(
        self, of: BlockIndexer, rope: RopeConfig, x: Floats, low: Floats
    ) -> list[list[int]]:
        """The blocks that each row attends to."""
        queries = self.linear(of.q, low).reshape(len(x), of.heads, of.dim)
        weights, keys = self.linear(of.weights, x), self._block_keys(of.blocks, rope, x)
        chosen = []
        for row, q in enumerate(queries):
            turned, count = self._tail(rope, q, row), (row + 1) // of.pool
            scores = [weights[row] @ np.maximum(turned @ keys[i], 0) for i in range(count)]
            best = sorted(range(count), key=lambda i, scores=scores: (-scores[i], i))
            chosen.append(best[: of.most // of.pool])
        return chosen

    def _selected(self, of: Indexer, x: Floats, source: Floats, positions: Any) -> Any:
        """Which tokens (rows, tokens) an indexer selects."""
        q = self.norm(of.q_norm, self.linear(of.q, source).reshape(len(x), of.heads, of.dim))
        k = self.linear(of.k, x)[:, None]
        if (pool_rope := of.pool_rope) is not None:
            k = k[: len(x) // of.pool * of.pool].reshape(-1, of.pool, of.dim).mean(1)[:, None]
        k = self.norm(of.k_norm, k)
        if of.rope is not None:
            table = turns_table(of.rope.frequencies(None))
            q = of.rope.rotation.turn(q, positions, table)
            if pool_rope is None:
                k = of.rope.rotation.turn(k, positions, table)
            else:
                table = turns_table(pool_rope.frequencies(None))
                k = pool_rope.rotation.turn(k, np.arange(len(k)) * of.pool, table)
        weights = np.ones((len(x), of.heads))
        if of.weights is not None:
            weights = self.linear(of.weights, x)
        keys = k[:, 0]
        if of.gate is not None and of.places is not None:
            gates, places = self.linear(of.gate, x), self.vector(of.places).reshape(of.pool, -1)
            pools = [range(at, at + of.pool) for at in range(0, len(x) - of.pool + 1, of.pool)]
            keys = [(_softmax((gates[p] + places).T).T * keys[p]).sum(0) for p in map(list, pools)]
        seen = np.zeros((len(x), len(x)), np.bool_)
        for row in range(len(x)):
            count = (row + 1) // of.pool
            scores = [weights[row] @ np.maximum(q[row] @ keys[key], 0) for key in range(count)]
            seen[row, self.best_tokens(of, scores, row)] = True
        return seen

    def best_tokens(self, of: Indexer, scores: list[Any], row: int) -> list[int]:
        """The tokens that a row attends to, of the scores of whole pools."""
        best = sorted(range(len(scores)), key=lambda key: (-scores[key], key))
        pools = [range(key * of.pool, (key + 1) * of.pool) for key in best[: of.most // of.pool]]
        return [*chain.from_iterable(pools), *range(len(scores) * of.pool, row + 1)]

    @staticmethod
    def _tempered(a: Attention, q: Floats, positions: Any) -> Floats:
        if a.temperature is None:
            return q
        steps = np.floor((positions + a.temperature.offset) / a.temperature.floor)
        return q * (1.0 + a.temperature.scale * np.log(steps + 1.0))[:, None, None]

    @staticmethod
    def _clamped(a: Attention, x: Floats) -> Floats:
        return np.clip(x, -a.clamp, a.clamp) if a.clamp else x

    def _turned(self, a: Attention, x: Floats, which: str, positions: Any) -> Floats:
        norm = a.qk_norm
        if norm is not None and not norm.after_rope:
            x = self._head_norm(norm, x, which)
        if a.rope is not None:
            factors = None
            if a.rope.factors is not None:
                factors = self.vector(a.rope.factors).astype(np.float32)
            table = turns_table(a.rope.frequencies(factors))
            x = a.rope.rotation.turn(x, positions, table)
        if norm is not None and norm.after_rope:
            x = self._head_norm(norm, x, which)
        return x

    def _head_norm(self, norm: QkNorm, x: Floats, which: str) -> Floats:
        of = norm.q if which == "q" else norm.k
        if norm.over == "head":
            return self.norm(of, x)
        return self.norm(of, x.reshape(len(x), -1)).reshape(x.shape)

    def _attend(
        self, a: Attention, q: Floats, k: Floats, v: Floats, positions: Any, chosen: Any = None
    ) -> Floats:
        group = a.heads // a.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * a.scale
        if a.softcap:
            scores = a.softcap * np.tanh(scores / a.softcap)
        behind = positions[:, None] - positions[None, :]
        if a.max_bias:
            scores = scores - _slopes(a.heads, a.max_bias)[:, None, None] * behind
        seen = (behind >= 0) | (not a.causal)
        if chosen is not None:
            seen &= chosen
        if a.window:
            seen &= behind < a.window
        if a.chunk:
            seen &= positions[None, :] >= positions[:, None] // a.chunk * a.chunk
        scores = np.where(seen, scores, -np.inf)
        if a.sinks is not None:
            sinks = np.broadcast_to(self.vector(a.sinks)[:, None, None], (*scores.shape[:2], 1))
            return np.einsum(
                "hqk,khd->qhd", _softmax(np.concatenate([scores, sinks], 2))[:, :, :-1], v
            )
        return np.einsum("hqk,khd->qhd", _softmax(scores), v)

    # ---- streams ----

    def _recalled(self, of: Normalization | None, x: Floats) -> Floats:
        if of is None or not self._banked:
            return x
        streams = np.stack([*self._banked, x], axis=-2)
        scores = self.norm(of, streams).sum(axis=-1)
        total: Floats = np.einsum("rs,rsc->rc", _softmax(scores), streams)
        return total

    def _save(self, name: str | None, x: Floats) -> None:
        if name is not None:
            self._saved[name] = x

    def _layer_embeddings(self, tokens: Any, x: Floats) -> Floats | None:
        e = self.config.layer_embeddings
        if e is None:
            return None
        shape = (len(tokens), self.config.n_layers, e.width)
        own = (self.matrix(e.table)[tokens] * e.scale).reshape(shape)
        projected = (self.linear(e.proj, x) * e.proj_scale).reshape(shape)
        return (self.norm(e.norm, projected) + own) * e.input_scale


def _row_nbytes(tensor: Any) -> int:
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    return int(tensor.shape[-1] // block * nbytes)


def _sparse_weights(logits: Floats, chosen: Any) -> Floats:
    """Weights of two experts by the definition of the paper's authors: two masked softmaxes."""
    rows = np.arange(len(logits))
    found = []
    for place in range(2):
        left = logits.copy()
        left[rows[:, None], chosen[:, :place]] = -np.inf
        best = left.max(axis=1, keepdims=True)
        is_far = (best - left) / np.maximum(np.abs(logits), best) > 0.02
        found.append(_softmax(np.where(is_far, -np.inf, left))[rows, chosen[:, place]])
    return np.stack(found, axis=1)


def _softmax(x: Floats) -> Floats:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return out


def _slopes(heads: int, max_bias: float) -> Floats:
    """ALiBi's slope of each head, as ggml has them for any number of heads."""
    power = 1 << (heads.bit_length() - 1)
    first, second = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    return np.array(
        [first ** (h + 1) if h < power else second ** (2 * (h - power) + 1) for h in range(heads)]
    )
