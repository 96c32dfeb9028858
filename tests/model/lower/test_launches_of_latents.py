"""Launches of attention by a latent vector: fewer where all rows are decoded, and blocks of keys of
heads where many are prompts'."""

from __future__ import annotations

from urdir.driver.operation import Launch
from urdir.model.engine.batch import Batch, Output, Segment, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.draft_settings import DraftSettings
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode

#: Of a layer, in every step; and what puts the parts of heads together.
ALWAYS = {"attn_kv_a", "attn_k_b", "attention", "attn_v_b", "attn_output"}
TOGETHER = {"attn_kv_a_norm", "attention.k", "attention.q"}


def attention_launches(session: Session, shape: StepShape) -> dict[str, Launch]:
    """Those of a layer's attention by their labels."""
    plan = build_plan(session.parts, shape)
    own = {op.label.removeprefix("blk.1."): op for op in plan if isinstance(op, Launch)}
    return {label: op for label, op in own.items() if label.startswith("att")}


def blocks(session: Session, shape: StepShape) -> int:
    """Blocks of cached tokens that a layer walks over."""
    labels = [op.label for op in build_plan(session.parts, shape)]
    return labels.count("blk.1.attention.block")


def test_rows_of_drafts_attend_on_tensor_cores_as_others() -> None:
    """After their keys, in a launch of its own."""
    model = SyntheticModel("deepseek-v2-lite", "q4_k_m")
    settings = SessionSettings(16384, sequences=2, drafts=DraftSettings(most=3))
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, Config.of(model), device) as weights,
        Session(device, weights, settings) as session,
    ):
        shape = session.shapes.decode(8, 9000, Output.GREEDY, drafted=True)
        found = attention_launches(session, shape)
    assert found.keys() == ALWAYS | {"attn_kv_a_norm", "attention.k", "attention.cached"}
    kernel = found["attention"].kernel
    assert isinstance(kernel, LatentDecode)
    assert not kernel.appends


def test_attention_puts_heads_together_where_all_rows_are_decoded() -> None:
    model = SyntheticModel("deepseek-v2-lite", "q4_k_m")
    config = Config.of(model)
    with (
        paper_device("sm_90a", 132) as device,
        Weights(model, config, device) as weights,
        Session(device, weights, SessionSettings(16384, sequences=4)) as session,
    ):
        for rows, keys, tile in ((1, 256, 8), (2, 16384, 16)):
            found = attention_launches(session, StepShape(rows, keys, Output.GREEDY))
            assert found.keys() == ALWAYS
            kernel = found["attention"].kernel
            assert kernel.head_tiles.size == tile
            assert isinstance(kernel, LatentDecode)
            assert "latent" in {param.name for param in kernel.params}
        few = attention_launches(session, session.shapes.prompt(1, 8)[0])
        assert few.keys() >= ALWAYS | TOGETHER
        shape = session.shapes.prompt(1000, 2900)[0]
        many = attention_launches(session, shape)
        assert many.keys() >= {"attention.read", "attn_kv_b", "attention.block"}
        assert not many.keys() & {"attn_k_b", "attn_v_b"}
        assert (blocks(session, shape), shape.walk.length) == (1, 3168)

        # beside decoded rows, whose attention is absorbed, and beside another prompt
        prompts = Segment(0, 1000, 2800, chooses=True), Segment(2, 2000, 2100)
        shape = session.shapes.of_batch(Batch((1, 3), prompts), 9000, Output.GREEDY)
        mixed = attention_launches(session, shape)
        assert mixed.keys() >= many.keys() | ALWAYS
        assert isinstance(mixed["attention"].kernel, LatentDecode)
        assert (mixed["attention"].kernel.rows, shape.decode) == (4, 4)
        assert (blocks(session, shape), shape.walk.length) == (1, 5280)  # of 2,880 and 2,112
        deep = session.shapes.prompt(14000, 16000)[0]
        assert (blocks(session, deep), deep.walk.length) == (2, 8448)
