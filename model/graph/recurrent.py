"""Operations that move the states of sequences on, and the norm with a gate after them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.recurrent import (
    Convolution,
    Decaying,
    KimiDelta,
    Lightning,
    Recurrence,
    Selective,
)
from urdir.model.families.stored import StoredVector
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.qkv_rows import Order


@dataclass(frozen=True, slots=True, eq=False)
class Convolve(Op):
    """y = f of the causal convolution along the tokens of each channel of x; with gates, of
    ``input_gate`` * x, times ``output_gate``. The state ``tail`` of ``layer`` has the last values.
    """

    word = "convolve"
    x: Tensor
    conv: Convolution
    f: Activation | None
    layer: int
    tail: str = "tail"
    input_gate: Tensor | None = None
    output_gate: Tensor | None = None

    def __post_init__(self) -> None:
        self._check_same(*self.reads)
        self._check(self.x.width == self.conv.channels, f"{self.conv.channels} channels")
        gates = self.input_gate, self.output_gate
        self._check(gates.count(None) != 1, "both gates or none")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        values, *gates = x
        values = values * gates[0] if gates else values
        weight = at.vector(self.conv.weight).reshape(self.conv.channels, self.conv.taps)
        padded = np.concatenate([np.zeros((self.conv.taps - 1, self.conv.channels)), values])
        taps = range(self.conv.taps)
        y: Floats = sum(  # type: ignore[assignment]
            padded[tap : tap + len(values)] * weight[:, tap] for tap in taps
        )
        if self.conv.bias is not None:
            y = y + at.vector(self.conv.bias)
        if self.f is not None:
            y = np.asarray(self.f(y), np.float64)
        return y * gates[1] if gates else y


@dataclass(frozen=True, slots=True, eq=False)
class Recur(Op):
    """y (rows, heads * value_dim) = the results of heads whose states decay, as the ``mixer`` says.

    ``inputs`` are, by ``roles``: "mixed", q, k and v of all heads side by side, or each of them
    ("q_heads", "k_heads", "v_heads"); "alpha", what decays are made of; "beta", rates of the delta
    rule.
    """

    word = "recur"
    inputs: tuple[Tensor, ...]
    roles: tuple[str, ...]
    mixer: Decaying
    layer: int

    def __post_init__(self) -> None:
        self._check(len(self.inputs) == len(self.roles), f"roles {self.roles}")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        given, mixer = dict(zip(self.roles, x, strict=True)), self.mixer
        match mixer:
            case Recurrence():
                return _recurrence(at, mixer, given)
            case KimiDelta():
                return _kimi_delta(at, mixer, given)
            case Lightning():
                return _lightning(mixer, given)
        return _selective_heads(at, mixer, given)


@dataclass(frozen=True, slots=True, eq=False)
class Scan(Op):
    """y = the selective scan of the channels of u, times silu(``gate``): ``step`` before its
    softplus, ``b`` and ``c`` (rows, size)."""

    word = "scan"
    step: Tensor
    u: Tensor
    gate: Tensor
    b: Tensor
    c: Tensor
    mixer: Selective
    layer: int

    def __post_init__(self) -> None:
        self._check_same(self.step, self.u, self.gate)
        sizes = self.b.width == self.c.width == self.mixer.size
        self._check(sizes, f"states of {self.mixer.size} values")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        step, u, gate, b, c = x
        rates = at.vector(self.mixer.a).reshape(u.shape[1], -1)
        y = _scan(np.logaddexp(0.0, step), rates, u, b, c)
        y = y + u * at.vector(self.mixer.skip)
        return y * gate / (1.0 + np.exp(-gate))


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm(Op):
    """y = the RMSNorm, with ``weight`` (sets, cols), of every cols values of x, times f(``gate``);
    with ``gates_first``, of x * f(gate)."""

    word = "gated_norm"
    x: Tensor
    gate: Tensor
    weight: StoredVector
    cols: int
    eps: float
    f: Activation
    gates_first: bool = False

    def __post_init__(self) -> None:
        self._check_same(self.x, self.gate)
        self._check(self.x.width % self.cols == 0, f"not a multiple of {self.cols}")

    @property
    def sets(self) -> int:
        """Vectors of weights."""
        return self.weight.size // self.cols

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        values, gate = x[0], np.asarray(self.f(x[1]), np.float64)
        if self.gates_first:
            values = values * gate
        parts = values.reshape(len(values), -1, self.cols)
        weight = np.tile(at.vector(self.weight).reshape(self.sets, -1), (1, 1))
        weight = np.tile(weight, (parts.shape[1] // self.sets, 1))
        lengths = np.sqrt(np.mean(parts * parts, axis=2, keepdims=True) + self.eps)
        y: Floats = (parts / lengths * weight).reshape(values.shape)
        return y if self.gates_first else y * gate


# ---- recurrences of heads ----


def _recurrence(at: Evaluation, of: Recurrence, x: dict[str, Floats]) -> Floats:
    mixed, rows = x["mixed"], len(x["mixed"])
    keys = of.key_heads * of.key_dim
    widths = {"q": keys, "k": keys, "v": of.width}
    order: Order = of.order
    ends = np.cumsum([widths[name] for name in order])
    parts = dict(zip(order, np.split(mixed, ends[:-1], axis=1), strict=True))
    v = parts["v"].reshape(rows, of.heads, of.value_dim)
    q, k = (parts[name].reshape(rows, of.key_heads, of.key_dim) for name in "qk")
    group = of.heads // of.key_heads
    if of.tiled:
        q, k = (np.tile(a, (1, group, 1)) for a in (q, k))
    else:
        q, k = (np.repeat(a, group, axis=1) for a in (q, k))
    dt = np.logaddexp(0.0, x["alpha"] + at.vector(of.dt_bias))
    decay = np.exp(dt * at.vector(of.a))
    rate = dt
    if of.beta is not None:
        q, k = (_unit(a, of.eps) for a in (q, k))
        q = q / np.sqrt(of.key_dim)
        rate = _sigmoid(x["beta"])
    y = _states(q, k, v, decay[:, :, None], rate, delta=of.beta is not None)
    if of.skip is not None:
        y = y + v * at.vector(of.skip)[:, None]
    return y.reshape(rows, -1)


def _kimi_delta(at: Evaluation, of: KimiDelta, x: dict[str, Floats]) -> Floats:
    shape = len(x["alpha"]), of.heads, of.dim
    q, k, v = (x[f"{name}_heads"].reshape(shape) for name in "qkv")
    q, k = (_unit(a, of.eps) for a in (q, k))
    steps = (x["alpha"] + at.vector(of.dt_bias)).reshape(shape)
    rates = at.vector(of.a)[:, None] * (-1.0 if of.negated else 1.0)
    logs = of.floor * _sigmoid(rates * steps) if of.floor else rates * np.logaddexp(0.0, steps)
    y = _states(q / np.sqrt(of.dim), k, v, np.exp(logs), _sigmoid(x["beta"]), delta=True)
    return y.reshape(shape[0], -1)


def _lightning(of: Lightning, x: dict[str, Floats]) -> Floats:
    shape = len(x["q_heads"]), of.heads, of.dim
    q, k, v = (x[f"{name}_heads"].reshape(shape) for name in "qkv")
    decay = np.broadcast_to(np.exp(of.slopes.rates().astype(np.float64)), shape[:2])
    y = _states(q, k, v, decay[:, :, None], np.ones(shape[:2]), delta=False)
    return y.reshape(shape[0], -1)


def _selective_heads(at: Evaluation, of: Selective, x: dict[str, Floats]) -> Floats:
    u, group = x["v_heads"], of.conv.channels // of.heads
    assert of.step.bias is not None
    dt = np.logaddexp(0.0, x["alpha"] + at.vector(of.step.bias))
    rates, skip = at.vector(of.a), at.vector(of.skip)
    dt, rates, skip = (np.repeat(a, group, axis=-1) for a in (dt, rates, skip))
    whole = np.repeat(rates, of.size).reshape(of.conv.channels, of.size)
    return _scan(dt, whole, u, x["k_heads"], x["q_heads"]) + u * skip


def _states(q: Floats, k: Floats, v: Floats, decay: Floats, rate: Floats, *, delta: bool) -> Floats:
    """(rows, heads, value_dim): of states (heads, value_dim, key_dim) that decay by keys."""
    state = np.zeros((q.shape[1], v.shape[2], k.shape[2]))
    y = np.zeros_like(v)
    for row in range(len(q)):
        state = state * decay[row][:, None, :]
        target = v[row]
        if delta:
            target = target - np.einsum("hvk,hk->hv", state, k[row])
        state = state + np.einsum("h,hv,hk->hvk", rate[row], target, k[row])
        y[row] = np.einsum("hvk,hk->hv", state, q[row])
    return y


def _scan(dt: Floats, rates: Floats, u: Floats, b: Floats, c: Floats) -> Floats:
    """(rows, channels): of states (channels, size)."""
    state = np.zeros_like(rates)
    y = np.zeros_like(u)
    for row in range(len(u)):
        state = state * np.exp(dt[row][:, None] * rates) + np.outer(dt[row] * u[row], b[row])
        y[row] = state @ c[row]
    return y


def _unit(x: Floats, eps: float) -> Floats:
    y: Floats = x / np.sqrt((x * x).sum(axis=2, keepdims=True) + eps)
    return y


def _sigmoid(x: Floats) -> Floats:
    y: Floats = 1.0 / (1.0 + np.exp(-x))
    return y
