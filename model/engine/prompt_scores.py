"""The launches of scored rows: logits of some rows at a time, and what is wanted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.layers.builder import StepOps
from urdir.model.layers.ends import head
from urdir.model.lower.rows import Rows
from urdir.model.lower.step import lower
from urdir.model.memory.scored_rows import MOST_SCORED, TURNS, blocks
from urdir.ptxgen.kernels.token_logprobs import TokenLogprobs

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.engine.batch import StepShape
    from urdir.model.lower.parts import StepParts
    from urdir.model.lower.sheet import Sheet

#: Where the logits lie: nothing else has that place before tokens are chosen.
_LOGITS = "raw logits"


def append_scores(sheet: Sheet, parts: StepParts, shape: StepShape, x: Slice) -> None:
    """Append the scores of a step's scored rows, of their stream x (scored, hidden) after the
    layers.

    `TokenLogprobs` reports them: its sequences are turns, its positions places in page-locked
    memory, and the tokens that it takes for chosen are those that the prompts go on with.
    """
    state, config = parts.state, parts.config
    row_nbytes = 4 * config.hidden
    for first, count in blocks(shape.scored):
        at = {
            name: state[f"scored_{name}"].slice(4 * first, 4 * count)
            for name in ("sequence", "turn", "place", "token")
        }
        step = StepOps(config, count)
        y = step.graph.input(step.stream())
        head(step, y, _LOGITS)
        rows = Rows.of_scored(state, at["sequence"], at["place"], shape.keys)
        lower(sheet, parts, rows, step.graph, fixed={y: x.slice(first * row_nbytes, y.nbytes)})
        sheet.launch(
            TokenLogprobs(config.vocab_size, MOST_SCORED, count, TURNS, slots=MOST_SCORED),
            "scored.logprobs",
            logits=sheet.registers[_LOGITS],
            settings=state["scored_settings"],
            sequence=at["turn"],
            position=at["place"],
            sampled=at["token"],
            logprobs=state.scores.logprobs,
            likely=state.scores.likely,
        )
