"""The plan of a step of texts: its rows through the whole model, to one result a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from urdir.driver.plan import Plan
from urdir.model.families.config import Config
from urdir.model.families.pooling import Pooling
from urdir.model.layers.builder import StepOps
from urdir.model.layers.pooled import RESULT, encoded, masked_logits
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.rows import OutputRows, Rows, RowsOfTexts, bounds_kind
from urdir.model.lower.sheet import Sheet
from urdir.model.lower.step import lower
from urdir.model.memory.text_rows import TextRows
from urdir.ptxgen.kernels.attention.scores import Scores

#: Rows of a step at most: kernels have a CTA for each in a grid's y, of up to 65,535.
LARGEST_STEP = 61440
#: Texts of a step at most.
MOST_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class EncodeShape:
    """What a plan is made for: ``rows`` rows of ``texts`` texts, and what becomes of each text; or
    the logits of this many rows. ``short`` texts have up to `MOST_TOKENS` rows each."""

    rows: int
    texts: int
    pooling: Pooling | Literal["logits"]
    short: bool = False


def row_bucket(rows: int) -> int:
    """Rows of the graph for a step with this many tokens: an eighth more at most, or seven."""
    step = max(8, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


def text_bucket(texts: int, rows: int) -> int:
    """Texts of the graph for a step of ``texts`` with ``rows`` rows: one, or the next power of
    four, but no more than rows and `MOST_TEXTS`."""
    return min(1 if texts == 1 else 4 ** -(-(texts - 1).bit_length() // 2), rows, MOST_TEXTS)


def kinds_of(config: Config) -> tuple[Scores, ...]:
    """The kinds of attention in a model, by which keys a row attends to."""
    return tuple(dict.fromkeys(bounds_kind(mixer.scores) for mixer in config.attentions))


def rows_of(state: TextRows, shape: EncodeShape) -> tuple[Rows, OutputRows]:
    """The rows of a step, and those that are picked."""
    parts, kinds = state.parts(shape.rows, shape.texts), state.shape.kinds
    bounds = [(parts[f"begin {i}"], parts[f"last {i}"]) for i in range(len(kinds))]
    places = parts["position" if state.shape.padding is None else "place"]
    texts = RowsOfTexts(
        parts["tokens"], parts["types"], places, parts["segment"], kinds, bounds, shape.short
    )
    at = parts["sequence"], parts["position"]
    rows = Rows(shape.rows, state.shape.rows, shape.rows, *at, texts=texts)
    return rows, OutputRows(parts["picked"], Rows(shape.texts, state.shape.rows, 0, *at))


def append_step(plan: Plan | Sheet, parts: LayerParts, state: TextRows, shape: EncodeShape) -> None:
    """Append the launches of a step, whose results go to `RESULT` of the workspace."""
    rows, outputs = rows_of(state, shape)
    step = StepOps(parts.config, shape.rows)
    if shape.pooling == "logits":
        y = masked_logits(step, shape.texts)
    else:
        y = encoded(step, shape.texts, shape.pooling)
    result = parts.work[RESULT].slice(0, y.nbytes)
    lower(plan, parts, rows, step.graph, outputs, {y: result})


def build_plan(parts: LayerParts, state: TextRows, shape: EncodeShape) -> Plan:
    """The plan of a step."""
    plan = Plan(f"{shape.pooling} of {shape.texts} texts, {shape.rows} rows")
    append_step(plan, parts, state, shape)
    plan.add_transfers()
    return plan
