"""Rules for a memory of n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from urdir.model.graph.ngrams import ConvolveApart, EmbedNgrams
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import StepParts
from urdir.model.lower.rule import Rule, alone, launched
from urdir.model.lower.states import recurrent_state
from urdir.ptxgen.kernels.embedding import Embedding
from urdir.ptxgen.kernels.gate_streams import GateStreams
from urdir.ptxgen.kernels.ngram_rows import NgramRows
from urdir.ptxgen.kernels.recurrent.dilated_conv import DilatedConv

#: Rows of a table that a launch gathers at most: a long prompt is cut by them, into parts of
#: multiples of four rows of the step, whose numbers are 16-byte aligned.
MOST_ROWS, _ALIGNED_ROWS = 65535, 4
#: The rows of the table for each row of the step, u32.
ROWS = "ngram rows"


def lower_embed_ngrams(at: Lowering, of: EmbedNgrams) -> None:
    """The rows' numbers, and then the rows."""
    assert isinstance(at.parts, StepParts)
    state, table, heads = at.parts.state, at.parts.weights.matrix(of.table), of.hash.heads
    kernel = NgramRows(of.hash, state.max_len, of.y.rows, state.sequences)
    found, y = at.work[ROWS], at.place(of.y)
    at.launch(kernel, f"{of.label}.rows", tokens=state["tokens"], y=found, **at.rows.arguments)
    whole, multiple = of.y.rows * heads, _ALIGNED_ROWS * heads
    each = MOST_ROWS // multiple * multiple
    for first in range(0, whole, each):
        count = min(each, whole - first)
        gather = Embedding(table.format, table.rows, table.cols, table.rows, count, texts=True)
        numbers = found.slice(4 * first, 4 * count)
        at.launch(
            gather,
            of.label if each >= whole else f"{of.label} {first}",
            weights=table.data,
            tokens=numbers,
            position=numbers,  # each is below the table's rows: there is no padding row
            y=y.slice(4 * first * table.cols, 4 * count * table.cols),
        )


def lower_convolve_apart(at: Lowering, of: ConvolveApart) -> None:
    """The convolution, and then its inputs into the state."""
    memory, shape, states = of.of, at.parts.cache.shape, at.parts.recurrent
    assert states is not None
    (size,) = memory.state_with(states.shape.drafts).values()
    kernel = DilatedConv(
        memory.channels,
        memory.taps,
        memory.dilation,
        size // memory.channels,
        shape.max_len,
        of.y.rows,
        shape.sequences,
    )
    given = {"x": at.place(of.x), "tail": recurrent_state(at, of.layer)["ngram tail"]}
    given |= at.rows.arguments
    weight = at.vector(memory.conv)
    at.launch(kernel, of.label, weight=weight, y=at.place(of.y), **given)
    at.launch(replace(kernel, stores=True), f"{of.label}.tail", **given)


RULES: Sequence[Rule] = (
    alone("embed_ngrams", lower_embed_ngrams),
    launched("gate_streams", lambda of: GateStreams(of.value.width, of.y.rows)),
    alone("convolve_apart", lower_convolve_apart),
)
