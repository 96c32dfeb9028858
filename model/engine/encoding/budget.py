"""How much device memory an encoder takes, computed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from urdir.model.engine.budget import GRAPH_BYTES, MemoryPlan, check_context
from urdir.model.engine.text_steps import (
    LARGEST_STEP,
    MOST_TEXTS,
    EncodeShape,
    append_step,
    kinds_of,
    row_bucket,
    text_bucket,
)
from urdir.model.errors import SettingsError
from urdir.model.families.config import Config
from urdir.model.families.embedding import Embedding
from urdir.model.families.pooling import Pooling
from urdir.model.layers.pooled import RESULT, pooled_width
from urdir.model.lower.paper import Needs, PaperDevice, PaperTextRows, PaperWorkspace, needs_of
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.text_rows import TextKeys, TextRows, TextRowsShape
from urdir.model.memory.weight_sizes import weight_sizes
from urdir.model.memory.weights import STAGING_BYTES, Weights
from urdir.model.memory.workspace import Workspace, WorkspaceShape
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.files.model_file import ModelFile

#: Rows of a step, on a GPU and on the emulator, unless a text has more.
MOST_ROWS, EMULATED_ROWS = 8192, 1024
#: Tokens of a text by default, where the model takes more.
DEFAULT_TEXT = 8192
#: The same of texts whose masks are filled: there are logits of all of their tokens.
DEFAULT_CANVAS = 1024


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Texts of up to ``context`` tokens, in steps of up to ``rows`` rows; with ``exact``
    activations, keys and values stay f32."""

    context: int
    rows: int
    exact: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        context: int | None,
        rows: int | None = None,
        *,
        exact: bool = False,
        emulated: bool = False,
    ) -> EncoderSettings:
        """The settings of a model; None and 0 as `EngineOptions.context` has them. Raises
        SettingsError for longer texts than a step takes."""
        largest = MOST_TEXTS if config.diffuses else LARGEST_STEP
        most = min(config.context_length, largest)
        usual_text = DEFAULT_CANVAS if config.diffuses else DEFAULT_TEXT
        chosen = min(usual_text, most) if context is None else context or most
        check_context(config, chosen)
        if chosen > largest:
            raise SettingsError(f"steps of texts of {chosen} tokens: up to {largest}")
        usual = EMULATED_ROWS if emulated else MOST_ROWS
        if config.diffuses:
            usual = chosen
        return cls(chosen, row_bucket(max(chosen, min(rows or usual, LARGEST_STEP))), exact)

    @property
    def dtype(self) -> KvDtype:
        """The type of keys and values."""
        return "f32" if self.exact else "f16"

    def rows_shape(self, config: Config) -> TextRowsShape:
        """The rows of the largest steps."""
        padding = None
        if config.padding is not None and config.positions is not None:
            padding = config.padding, config.positions.rows - 1
        texts = text_bucket(self.rows, self.rows)
        return TextRowsShape(self.rows, texts, kinds_of(config), padding)


def workspace_of(weights: Weights, settings: EncoderSettings) -> WorkspaceShape:
    """The workspace that the largest steps need: of few rows and of most, of one text and of many,
    since their kernels differ. ``weights`` may be of paper."""
    config, rows = weights.config, settings.rows
    of = config.embedding_of_texts or Embedding(None)
    device = cast("Device", PaperDevice(weights.device))
    state = cast("TextRows", PaperTextRows(settings.rows_shape(config)))
    parts = LayerParts(
        device=device,
        config=config,
        weights=weights,
        cache=TextKeys(device, config, rows, settings.dtype),
        work=cast("Workspace", PaperWorkspace(WorkspaceShape({RESULT: 1 << 40}))),
        exact=settings.exact,
    )
    texts = state.shape.texts
    poolings: list[Pooling | Literal["logits"]] = ["none", "mean", "last"]
    values = rows * pooled_width(of, config.hidden, "none")
    if of.scorer is not None:
        poolings.append("rank")
        values = max(values, texts * of.scorer.labels)
    if config.diffuses:
        poolings.append("logits")
        values = max(values, texts * config.vocab_size)
    needs = Needs()
    for pooling in poolings:
        for shape in ((8, 1), (8, 4), (rows, 1), (rows, texts)):
            for short in (False, True):
                sheet = Sheet(parts.work)
                append_step(sheet, parts, state, EncodeShape(*shape, pooling, short))
                needs = needs.most(needs_of(sheet))
    needs = needs.for_rows(rows)
    return WorkspaceShape({RESULT: 4 * values}, zeroed=needs.zeroed, room=needs.room)


def encoder_plan(file: ModelFile, weights: Weights, settings: EncoderSettings) -> MemoryPlan:
    """The bytes of a model and its encoder, by owner."""
    config, device = weights.config, cast("Device", PaperDevice(weights.device))
    return MemoryPlan(
        weights=sum(weight_sizes(file, config).values()),
        kv_cache=TextKeys(device, config, settings.rows, settings.dtype).nbytes,
        recurrent=0,
        workspace=workspace_of(weights, settings).nbytes,
        state=sum(settings.rows_shape(config).sizes().values()),
        exchange=0,
        graphs=GRAPH_BYTES,
        staging=STAGING_BYTES,
    )
