"""Operations of RWKV: mixes of a token with the one before it, and time mixing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from urdir.model.families.rwkv import LowRank, TimeMix
from urdir.model.families.stored import StoredVector
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.recurrent.wkv import DECAY, LEAST_LENGTH


@dataclass(frozen=True, slots=True, eq=False)
class Shift(Op):
    """y and ``more``, one for each of ``mixes`` (width,): x + mix * (x of the token before - x),
    with ``dynamic`` mixes added to these. The state ``name`` of ``layer`` has the last token's x;
    ``stores``: the operation updates it."""

    word = "shift"
    x: Tensor
    dynamic: tuple[Tensor, ...]
    mixes: tuple[StoredVector, ...]
    results: tuple[Tensor, ...]
    layer: int
    name: str
    stores: bool = True

    def __post_init__(self) -> None:
        self._check_same(self.x, *self.dynamic, *self.results)
        self._check(self.results[:1] == (self.y,), "y is not the first result")
        self._check(len(self.results) == len(self.mixes), "not a result for each mix")
        self._check(len(self.dynamic) in (0, len(self.mixes)), "not a dynamic one for each mix")

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """x, and the dynamic mixes."""
        return (self.x, *self.dynamic)

    @property
    def makes(self) -> tuple[Tensor, ...]:
        """The mixes of the tokens."""
        return self.results

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        tokens, *dynamic = x
        before = np.concatenate([np.zeros_like(tokens[:1]), tokens[:-1]])
        mixes = [at.vector(mix) for mix in self.mixes]
        if dynamic:
            mixes = [mix + more for mix, more in zip(mixes, dynamic, strict=True)]
        return np.concatenate([tokens + mix * (before - tokens) for mix in mixes], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class LowRanks(Op):
    """y and the other ``results``: of each of ``inputs`` the product ``of`` low rank."""

    word = "low_ranks"
    inputs: tuple[Tensor, ...]
    of: tuple[LowRank, ...]
    results: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self._check(self.results[:1] == (self.y,), "y is not the first result")
        for x, of, y in zip(self.inputs, self.of, self.results, strict=True):
            self._check((y.width, x.width) == (of.up.rows, of.down.cols), "other matrices")

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The inputs."""
        return self.inputs

    @property
    def makes(self) -> tuple[Tensor, ...]:
        """The products."""
        return self.results

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        found = []
        for of, values in zip(self.of, x, strict=True):
            low = at.linear(of.down, values)
            found.append(at.linear(of.up, low if of.activation is None else of.activation(low)))
        return np.concatenate(found, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Wkv(Op):
    """y = the time mixing of the ``mixer``, whose ``inputs`` are named by ``roles`` as the
    kernel's (`ptxgen.kernels.recurrent.wkv`). Its state is that of ``layer``."""

    word = "wkv"
    inputs: tuple[Tensor, ...]
    roles: tuple[str, ...]
    mixer: TimeMix
    layer: int

    def __post_init__(self) -> None:
        self._check(self.y.width == self.mixer.r.rows, "heads of another width")
        self._check(len(self.roles) == len(self.inputs), "not a role for each input")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        of = self.mixer
        weights = {"bonus": of.bonus, "key_scale": of.key_scale, "key_rate": of.key_rate}
        if of.norm is not None:
            weights |= {"weight": of.norm.weight, "bias": of.norm.bias}
        vectors = {
            name: at.vector(stored).reshape(of.heads, of.dim)
            for name, stored in weights.items()
            if stored is not None
        }
        rows = {}
        for role, values in zip(self.roles, x, strict=True):
            heads = values.reshape(len(values), -1, of.dim)
            rows[role] = np.repeat(heads, of.heads // heads.shape[1], axis=1)
        y, state = np.zeros((len(x[0]), of.heads, of.dim)), np.zeros((of.heads, of.dim, of.dim))
        for row in range(len(y)):
            token = {role: values[row] for role, values in rows.items()}
            y[row], state = _of_token(of, vectors, token, state)
        return y.reshape(len(y), -1)


def _of_token(
    of: TimeMix, weights: Mapping[str, Floats], token: Mapping[str, Floats], state: Floats
) -> tuple[Floats, Floats]:
    """The result of a token (heads, dim), and the states (heads, values, keys) after it."""
    r, k, v, old = token["r"], token["k"], token["v"], state
    if of.variant == "rwkv7":
        decay, a = np.exp(DECAY * _sigmoid(token["decay"])), _sigmoid(token["rate"])
        if "residual" in token:
            v = v + (token["first"] - v) * _sigmoid(token["residual"])
        u = k * weights["key_scale"]
        u = u / np.maximum(np.linalg.norm(u, axis=1, keepdims=True), LEAST_LENGTH)
        k = k + (a - 1.0) * k * weights["key_rate"]
        erased = (old @ u[:, :, None]) * (u * a)[:, None, :]
        state = old * decay[:, None, :] - erased + v[:, :, None] * k[:, None, :]
    else:
        decay = np.exp(-np.exp(token["decay"]))
        k = k * (1.0 - decay) if of.variant == "gated" else k
        state = old * decay[:, None, :] + v[:, :, None] * k[:, None, :]
    read = old if of.variant == "rwkv6" else state
    y: Floats = (read @ r[:, :, None])[:, :, 0]
    extra = (r * k * weights["bonus"]).sum(1, keepdims=True) * v if "bonus" in weights else 0.0
    y = y / np.sqrt(of.dim) if of.variant == "gated" else y
    y = y + extra if of.variant == "rwkv6" else y
    if of.norm is not None:
        y = of.norm.norm(y, weights["weight"], weights["bias"])
    y = y + extra if of.variant == "rwkv7" else y
    return y * _gate(of, token["gate"]) if "gate" in token else y, state


def _gate(of: TimeMix, gate: Floats) -> Floats:
    if of.variant == "rwkv7":
        return gate
    return _sigmoid(gate) * (gate if of.variant == "rwkv6" else 1.0)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))
