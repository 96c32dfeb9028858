"""Rules for RWKV: mixes with the token before, and time mixing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.model.graph.op import Op
from urdir.model.graph.ops import Norm, Product
from urdir.model.graph.rwkv import LowRanks, Shift, Wkv
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.chain import Chain
from urdir.model.lower.linear import lower_chain
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import request_of
from urdir.model.lower.rule import Rule, alone, variants
from urdir.model.lower.states import launch_recurrent, recurrent_state
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear import low_ranks as kernels
from urdir.ptxgen.kernels.linear.choice import choose_linear
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated
from urdir.ptxgen.kernels.linear.prologue.own import OwnVectors
from urdir.ptxgen.kernels.recurrent.token_shift import TokenShift
from urdir.ptxgen.kernels.recurrent.wkv import Wkv as WkvKernel

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

#: Rows of products of low rank that share launches, at most: more are multiplied on tensor cores.
MOST_LOW = 64


def lower_shift(at: Lowering, ops: Sequence[Op]) -> bool:
    """[norm] shift: of rows that are no prompt's the launch computes the norm."""
    *norms, of = ops
    assert isinstance(of, Shift)
    x, norm, weights = of.x, None, {}
    if norms:
        (before,) = norms
        assert isinstance(before, Norm)
        can = not at.rows.prompt and TokenShift.can_norm(of.x.width, 0)
        if not can or at.readers(before.y) != [of] or before.over:
            return False
        layer = at.norm(before.of)
        x, norm, weights = before.x, layer.norm, {"weight": layer.weight, "bias": layer.bias}

    def kernel(*, most: int, drafted: bool, **shape: Any) -> TokenShift:
        return TokenShift(
            **shape,
            channels=of.x.width,
            mixes=len(of.mixes),
            dynamic=bool(of.dynamic),
            stores=of.stores,
            norm=norm,
        )

    arguments = {
        "x": at.place(x),
        "shift": recurrent_state(at, of.layer)[of.name],
        **{f"mix{i}": at.vector(mix) for i, mix in enumerate(of.mixes)},
        **{f"dynamic{i}": at.place(mix) for i, mix in enumerate(of.dynamic)},
        **{f"y{i}": at.place(y) for i, y in enumerate(of.results)},
        **{name: vector for name, vector in weights.items() if vector is not None},
    }
    launch_recurrent(at, of.label, kernel, **arguments)
    return True


def lower_wkv(at: Lowering, of: Wkv) -> None:
    """Time mixing."""
    mixer = of.mixer
    vectors = {"bonus": mixer.bonus, "key_scale": mixer.key_scale, "key_rate": mixer.key_rate}
    if mixer.norm is not None:
        vectors |= {"weight": mixer.norm.weight, "bias": mixer.norm.bias}

    def kernel(*, most: int, drafted: bool, **shape: Any) -> WkvKernel:
        return WkvKernel(
            **shape,
            heads=mixer.heads,
            dim=mixer.dim,
            kind=mixer.variant,
            key_heads=mixer.key_heads,
            residual=mixer.residual is not None,
            gate=mixer.gate is not None,
            normed=mixer.norm is not None,
            eps=0.0 if mixer.norm is None else mixer.norm.norm.eps,
        )

    arguments = {role: at.place(x) for role, x in zip(of.roles, of.inputs, strict=True)}
    arguments |= {name: at.vector(v) for name, v in vectors.items() if v is not None}
    arguments |= {"state": recurrent_state(at, of.layer)["state"], "y": at.place(of.y)}
    launch_recurrent(at, of.label, kernel, **arguments)


def lower_low_ranks(at: Lowering, of: LowRanks) -> None:
    """Products of low rank: of up to `MOST_LOW` rows two launches, if their matrices are floats."""
    lows = [Tensor(f"low rank {i}", of.y.rows, low.down.rows) for i, low in enumerate(of.of)]
    linears = [linear for low in of.of for linear in (low.down, low.up)]
    matrices = [at.matrix(linear) for linear in linears]
    served = all(kernels.LowRanks.serves(m.format, m.rows, m.cols) for m in matrices)
    if of.y.rows <= MOST_LOW and served:
        fs = [low.activation for low in of.of]
        _small(at, f"{of.label}.down", matrices[::2], of.inputs, lows, [None] * len(lows))
        _small(at, of.label, matrices[1::2], lows, of.results, fs)
        return
    for x, low, z, y in zip(of.inputs, of.of, lows, of.results, strict=True):
        label = f"{of.label}.{y.name.removeprefix('time ')}"
        ends = () if low.activation is None else (Activated(low.activation),)
        down, up = Product(f"{label}.down", z, x, low.down), Product(label, y, z, low.up)
        assert lower_chain(at, Chain(x, products=[down], ends=ends, results=[z]))
        assert lower_chain(at, Chain(z, products=[up], results=[y]))


def _small(
    at: Lowering,
    label: str,
    matrices: Sequence[Matrix],
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    fs: Sequence[Activation | None],
) -> None:
    """y = W f(x) of each matrix, in one launch."""
    parts = (
        kernels.SmallPart(m.format, m.rows, m.cols, f, m.bias is not None)
        for m, f in zip(matrices, fs, strict=True)
    )
    arguments: dict[str, Slice | None] = {}
    for i, matrix in enumerate(matrices):
        arguments |= {f"weights{i}": matrix.data, f"bias{i}": matrix.bias}
        arguments |= {f"x{i}": at.place(x[i]), f"y{i}": at.place(y[i])}
    at.launch(kernels.LowRanks(tuple(parts), y[0].rows), label, **arguments)


def lower_own_vectors(at: Lowering, ops: Sequence[Op]) -> bool:
    """Products side by side of as many vectors, of one row: a launch for all."""
    products = [op for op in ops if isinstance(op, Product)]
    matrices = [at.matrix(op.of) for op in products]
    alike = {(of.cols, of.format.arithmetic) for of in matrices}
    several = len({op.x for op in products} - {op.y for op in products}) < len(products)
    if products[0].y.rows > 1 or len(alike) > 1 or several or any(op.low for op in products):
        return False
    if any(op.x in at.unmade or op.x in at.packed or op.y.is_stream for op in products):
        return False
    if len(products) == 2 and _goes_on(at, products[1]):
        return False
    request = request_of(at, 1, matrices, OwnVectors())
    if not request.fits_gemv:
        return False
    arguments: dict[str, Slice | None] = {}
    for number, (op, matrix) in enumerate(zip(products, matrices, strict=True)):
        tag, x = str(number or ""), f"vector{number}" if number else "x"
        arguments |= {f"weights{tag}": matrix.data, f"bias{tag}": matrix.bias}
        arguments |= {x: at.place(op.x), f"y{tag}": at.place(op.y)}
    at.launch(choose_linear(request), products[0].label, **arguments)
    return True


def _goes_on(at: Lowering, last: Product) -> bool:
    """Whether the operation that follows may be a part of the last product's launch."""
    following = at.following()
    return following is not None and not {last.y, last.x}.isdisjoint(following.reads)


RULES: Sequence[Rule] = (
    alone("low_ranks", lower_low_ranks),
    Rule("product product product", lower_own_vectors),
    Rule("product product", lower_own_vectors),
    *variants("norm? shift", lower_shift),
    alone("wkv", lower_wkv),
)
