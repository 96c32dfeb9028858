"""Rules that fuse operations into one launch: matched, not matched, refused by limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.realizar import describe
from urdir.model.engine.realizar.from_sizes import MadeFile
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.families.stored import Normalization, StoredVector
from urdir.model.graph.graph import Graph
from urdir.model.graph.ops import Add, Norm, Product, Rope, Scale
from urdir.model.graph.tensor import STREAM, Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rows import Rows
from urdir.model.lower.rule import Rule, RuleBook, variants, words_of
from urdir.model.lower.step import lower
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.kernels.linear.prologue.sum import NormedAdd

SIZES = {"layers": 2, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 64, "context": 512}


@contextmanager
def opened(
    kind: str = "Q4_0", change: Callable[[Config], Config] = lambda config: config, **settings: Any
) -> Iterator[Session]:
    config = change(describe(**SIZES))
    file = MadeFile(config, kind, {})
    with (
        paper_device("sm_90a", 132) as device,
        Weights(file, config, device) as weights,
        Session(device, weights, SessionSettings(512, sequences=16, **settings)) as session,
    ):
        yield session


def by_label(plan: Plan) -> dict[str, Any]:
    """The kernels of layer 1 and of the output by their labels."""
    ops = [op for op in plan if isinstance(op, Launch)]
    return {op.label.removeprefix("blk.1."): op.kernel for op in ops}


def kernels(session: Session, rows: int, prompt: int = 0) -> dict[str, Any]:
    return by_label(build_plan(session.parts, StepShape(rows, 512, Output.GREEDY, prompt=prompt)))


def test_one_launch_has_the_norm_all_products_and_the_gate() -> None:
    with opened() as session:
        few = kernels(session, 1)
        assert list(few) == [
            *(label for label in few if label.startswith(("token", "blk.0"))),
            *("attn_qkv", "attention", "attn_output", "ffn_gate_up", "ffn_down"),
            *("output", "argmax", "advance"),
        ]
        assert few["attn_qkv"].steps.norm is not None
        assert len(few["attn_qkv"].others) == 2
        assert few["ffn_gate_up"].steps.gated
        assert few["ffn_down"].steps.has(Residual)
        many = kernels(session, 64, prompt=64)
        assert [label for label in many if label.endswith(".norm")] == ["blk.0.attn_qkv.norm"]
        assert many["blk.0.ffn_gate_up"].steps.gated
        assert many["blk.0.ffn_gate_up"].steps.has(BegunNorm)
        assert many["blk.0.attn_output"].steps.has(BeginNorm)


def test_gate_and_up_of_different_types_are_not_one_product() -> None:
    def biased(config: Config) -> Config:
        layer = config.layers[1]
        attention, ffn = layer.blocks
        branch = ffn.branches[0]
        up = replace(branch.network.up, bias=StoredVector.whole("up.bias", 512))
        dense = replace(branch.network, up=up)
        ffn = replace(ffn, branches=(replace(branch, network=dense),))
        layer = replace(layer, blocks=(attention, ffn))
        return replace(config, layers=(config.layers[0], layer))

    with opened(change=biased) as session:
        found = kernels(session, 1)
        assert not found["ffn_gate_up"].steps.gated
        assert found["ffn_gate_up"].others
        assert found["ffn_down"].steps.has(Gate)  # which takes its vectors through the gate
        several = kernels(session, 4)
        assert "ffn_gate_up.activation" in several


@pytest.mark.parametrize(("rows", "exact", "begun"), [(4, False, True), (1, False, False)])
def test_a_sum_of_several_rows_begins_the_norm_that_follows(
    rows: int, exact: bool, begun: bool
) -> None:
    with opened(exact=exact) as session:
        found = kernels(session, rows)
        for first, second in (("attn_output", "ffn_gate_up"), ("ffn_down", "output")):
            assert found[first].steps.has(BeginNorm) == begun
            assert found[second].steps.has(BegunNorm) == begun


def test_a_norm_after_a_block_is_left_to_the_next_product_of_one_row() -> None:
    def with_post_norms(config: Config) -> Config:
        layers = []
        for i, layer in enumerate(config.layers):
            norm = layer.blocks[0].branches[0].norm
            assert norm is not None
            weight = StoredVector.whole(f"blk.{i}.post.weight", 256)
            post = Normalization(norm.norm, weight)
            blocks = tuple(replace(block, post_norm=post) for block in layer.blocks)
            layers.append(replace(layer, blocks=blocks))
        return replace(config, layers=tuple(layers))

    with opened(change=with_post_norms) as session:
        one, several = kernels(session, 1), kernels(session, 4)
        assert one["ffn_gate_up"].steps.has(NormedAdd)
        assert "post_norm" not in one
        assert "post_norm" in several
        assert several["post_norm"].then is not None
        assert several["ffn_gate_up"].steps.norm is None


def test_alike_layers_are_lowered_once_with_their_own_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(at: Lowering, *args: Any) -> Any:
        calls.append(at.position)
        return original(at, *args)

    original = Lowering.matrix
    deep = {**SIZES, "layers": 9}
    file = MadeFile(config := describe(**deep), "Q4_0", {})
    monkeypatch.setattr(Lowering, "matrix", counted)
    with (
        paper_device("sm_90a", 132) as device,
        Weights(file, config, device) as weights,
        Session(device, weights, SessionSettings(512, sequences=2)) as session,
    ):
        calls.clear()  # of what was lowered to measure the workspace
        plan = build_plan(session.parts, StepShape(1, 512, Output.GREEDY))
        lowered = len(calls)
        monkeypatch.setattr("urdir.model.lower.repeats.Repeats.begin", lambda *_: False)
        apart = build_plan(session.parts, StepShape(1, 512, Output.GREEDY))
    assert lowered < len(calls) - lowered
    for a, b in zip(plan, apart, strict=True):
        assert isinstance(a, Launch)
        assert isinstance(b, Launch)
        assert (a.label, a.kernel) == (b.label, b.kernel)
        assert a.uses() == b.uses()


def test_what_no_rule_takes_is_named() -> None:
    with opened() as session:
        parts = session.parts
        rope = next(iter(parts.config.ropes))
        graph = Graph()
        x = graph.input(Tensor("q", 1, 256))
        graph.add(Rope("lonely", Tensor("q", 1, 256), x, rope, 4))
        plan = build_plan(parts, StepShape(1, 512, Output.GREEDY))
        rows = Rows.of(parts.state, 1, 512)
        with pytest.raises(ModelError, match="no rule for lonely: rope q \\(1, 256\\)"):
            lower(plan, parts, rows, graph)


# ---- patterns ----


def nothing(*_: Any) -> bool:
    return False


def test_optional_words_are_tried_longest_first() -> None:
    rules = variants("norm? product scale?", nothing)
    assert [rule.takes for rule in rules] == [
        *("norm product scale", "norm product", "product scale", "product")
    ]
    book = RuleBook([*rules, Rule("product ( beside scale )*", nothing)])
    words = ("product", "scale", "norm")
    assert [count for _, count in book.matches(words)] == [2, 1, 1]
    words = ("product", "beside", "scale", "beside", "scale", "add")
    assert [count for _, count in book.matches(words)] == [1, 5]


def test_a_product_is_beside_one_of_the_same_vectors_and_label() -> None:
    config = describe(**SIZES)
    attention = config.layers[0].attention
    assert attention is not None
    x, other = Tensor("x", 1, 256), Tensor("x", 1, 256)

    def product(label: str, x: Tensor) -> Product:
        return Product(label, Tensor("y", 1, 256), x, attention.q)

    ops = [product("a", x), product("a", x), product("b", x), product("b", other)]
    assert words_of(ops) == ["product", "beside", "product", "product"]


# ---- shapes ----


def test_shapes_are_checked_where_an_operation_is_made() -> None:
    norm = describe(**SIZES).output_norm
    assert norm is not None
    x, y, wide = Tensor("x", 2, 8), Tensor("y", 2, 8), Tensor("wide", 2, 16)
    with pytest.raises(ValueError, match=r"sum: add of x .2, 8., wide .2, 16. to y .2, 8.:"):
        Add("sum", y, x, wide)
    with pytest.raises(ValueError, match="the shapes differ"):
        Scale("scale", wide, x, 2.0)
    with pytest.raises(ValueError, match="not a multiple of 3"):
        Norm("norm", y, x, norm, 3)
    with pytest.raises(ValueError, match="0 x 8: both from 1"):
        Tensor("none", 0, 8)
    graph = Graph()
    with pytest.raises(ModelError, match=r"x .2, 8. is read before it is made"):
        graph.add(Scale("scale", y, x, 2.0))
    graph.input(x)
    graph.add(Scale("scale", y, x, 2.0))
    with pytest.raises(ModelError, match=r"y .2, 8. is made twice"):
        graph.add(Scale("scale", y, x, 2.0))
    assert str(graph) == "scale: scale x (2, 8) -> y (2, 8)"
    assert STREAM == "stream"
    assert np.prod((x.rows, x.width)) * 4 == x.nbytes
