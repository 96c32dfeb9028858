"""A model and its draft, described together and opened on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from urdir.model.engine.block_drafts import BlockDraft
from urdir.model.engine.budget import MemoryPlan, SessionBudget, check_context
from urdir.model.engine.chain_drafts import ChainDraft
from urdir.model.engine.drafts import Draft, DraftShape
from urdir.model.engine.session import Session
from urdir.model.engine.speculation.draft import (
    EMBEDDED,
    GIVEN,
    JOINED,
    PASSED_ON,
    DraftLaunches,
    DraftParts,
)
from urdir.model.engine.speculation.draft_assistant import AssistantDraft
from urdir.model.engine.speculation.draft_convolutions import DYNAMIC
from urdir.model.engine.speculation.draft_dflash import DFlashDraft
from urdir.model.engine.speculation.draft_eagle3 import Eagle3Draft
from urdir.model.engine.speculation.draft_nextn import MERGED, WIDENED, NextnDraft
from urdir.model.engine.speculation.draft_streams import NO_STREAM, STREAMS_READ
from urdir.model.engine.speculation.markov_tokens import PREVIOUS
from urdir.model.engine.speculation.model_source import service_widths
from urdir.model.engine.speculation.selected_tokens import selector_widths
from urdir.model.errors import UnsupportedError
from urdir.model.families.config import Config
from urdir.model.families.dflash import DFlash, dflash
from urdir.model.families.draft_file import DraftConfig, read_token_map
from urdir.model.families.eagle3 import eagle3
from urdir.model.families.gemma4_assistant import Gemma4Assistant, gemma4_assistant
from urdir.model.families.tapped import nextn_heads, tap, tapped
from urdir.model.lower.paper import paper_weights
from urdir.model.memory.draft_model import DraftModel
from urdir.model.memory.weight_sizes import weight_sizes
from urdir.model.memory.weights import Weights
from urdir.model.memory.workspace import saved
from urdir.model.text.same_vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from urdir.driver.device import Device
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.model.memory.session_settings import SessionSettings


#: Drafts in files of their own that read the model's streams, by general.architecture: how they are
#: described, and what they launch.
FILE_DRAFTS: Mapping[
    str,
    tuple[Callable[[ModelFile, Config], DraftConfig], Callable[[DraftParts], DraftLaunches]],
] = {
    "eagle3": (eagle3, Eagle3Draft),
    "dflash": (dflash, DFlashDraft),
    "gemma4-assistant": (gemma4_assistant, AssistantDraft),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and a draft that fits it. ``config`` describes the model, which keeps the streams
    that the draft reads, ``own`` the draft's layers, whose weights are in ``file``; None: they are
    the model's. ``widths`` are those of its further intermediates, ``of_drafts`` those that rows
    of prompts do not have, ``most`` the tokens that it can
    draft at once, 0: any number; more than one of ``slots``: in a pass of as many rows.
    ``token_map`` (n,) u32 are the model's tokens of the draft's, where it has its own. Without
    ``launches`` the draft is a model by itself. With ``shares_cache`` its layers attend to the
    model's keys and values."""

    gguf: ModelFile
    config: Config
    own: Config
    widths: Mapping[str, int]
    launches: Callable[[DraftParts], DraftLaunches] | None
    most: int = 0
    file: ModelFile | None = None
    slots: int = 1
    token_map: npt.NDArray[np.uint32] | None = None
    shares_cache: bool = False
    of_drafts: Mapping[str, int] = field(default_factory=dict)

    @property
    def model(self) -> DraftModel:
        """What the draft takes of a session's memory."""
        if self.launches is None:
            return DraftModel(self.own, self.file, each=2)
        mapped = 0 if self.token_map is None else len(self.token_map)
        config, given = self.config, self.widths.get(GIVEN, self.own.hidden)
        taps = {tap(layer) for layer in range(config.n_layers + 1)}
        streams = [saved(name) for name in config.saved_streams if name in taps]
        return DraftModel(
            self.own,
            self.file,
            {**self.widths, **service_widths(given)},
            self.of_drafts,
            held=given if self.slots == 1 else 0,
            streams=() if self.shares_cache else tuple(streams),
            stream=config.stream_width,
            mapped=mapped,
            slots=self.slots,
            shares_cache=self.shares_cache,
        )

    @property
    def is_replicable(self) -> bool:
        """Whether each of several GPUs can draft the same with all of the draft: it reads nothing
        of the model but streams and embeddings."""
        if self.file is None or self.shares_cache:
            return False
        return not (isinstance(self.own, DraftConfig) and self.own.shares_output)

    def check_devices(self, devices: int) -> None:
        """Raise UnsupportedError for several GPUs if each has a part of what the draft needs."""
        if devices > 1 and not self.is_replicable:
            raise UnsupportedError(
                "a draft that uses the output, the cache or heads of its model on "
                f"{devices} GPUs is not supported, as each has a part of them: open the model on "
                "one, without the draft, or with one that has all of its own"
            )

    def with_draft(self, settings: SessionSettings) -> SessionSettings:
        """The settings of a session with this draft model, if it has drafts."""
        if settings.drafts is None:
            return settings
        model = replace(self.model, tokens=self._first_tokens(settings.drafts))
        return replace(settings, drafts=self.settings(settings.drafts), draft_model=model)

    def _first_tokens(self, drafts: DraftSettings) -> int:
        """How many tokens the model's own heads draft alone, see `DraftSettings.first_tokens`:
        those of byte-pair vocabularies are in the order of their merges; 0 with a file."""
        if self.file is not None:
            return 0
        kind = self.gguf.metadata.optional("tokenizer.ggml.model", str, "gpt2")
        return drafts.first_tokens(self.config.vocab_size, ranked=kind == "gpt2")

    def settings(self, wanted: DraftSettings) -> DraftSettings:
        """Draft settings with no more drafts than the draft can make at once."""
        most = min(wanted.most, self.most or wanted.most)
        return replace(wanted, kind="model", most=most, least=min(wanted.least, most))

    def at_context(self, context: int) -> Pair:
        """The same for sequences of up to ``context`` tokens. Raises SettingsError for more than
        the model takes."""
        check_context(self.config, context)
        config, own = (of.at_context(context) for of in (self.config, self.own))
        return replace(self, config=config, own=own)


def nextn_pair(gguf: ModelFile) -> Pair:
    """A model whose draft are its own heads for predicting several tokens. Raises UnsupportedError
    for a file without any."""
    config = Config.of(gguf, nextn=True)
    if not config.nextn:
        key = f"{gguf.architecture}.nextn_predict_layers"
        raise UnsupportedError(
            f"{gguf.path}: there are no layers for predicting several tokens (MTP, '{key}'): give "
            "the file of a draft model"
        )
    width, heads = config.stream_width, len(config.nextn)
    widths = {EMBEDDED: config.hidden, JOINED: 2 * width, GIVEN: width, PASSED_ON: width}
    if config.has_streams:
        widths |= {WIDENED: width, MERGED: config.hidden}
    return Pair(
        gguf,
        tapped(config, [config.n_layers]),
        nextn_heads(config),
        widths,
        NextnDraft,
        heads if heads > 1 else 0,
    )


def file_pair(gguf: ModelFile, file: ModelFile) -> Pair:
    """A model and a draft in a ``file`` of its own that reads the model's streams. Raises
    UnsupportedError for one that does not fit the model, ConfigError."""
    config, (describe, launches) = Config.of(gguf), FILE_DRAFTS[file.architecture]
    own = describe(file, config)
    check_same_vocabulary(gguf, file)
    if isinstance(own, Gemma4Assistant):
        return _assistant_pair(gguf, config, own, file)
    hidden, given = own.hidden, [of for of in own.target_layers if of < config.n_layers]
    widths = {EMBEDDED: hidden, JOINED: 2 * hidden, GIVEN: hidden, PASSED_ON: hidden}
    widths[STREAMS_READ] = own.fc.cols
    if len(given) < len(own.target_layers):
        widths[NO_STREAM] = own.target_hidden
    most, slots, of_drafts = 0, 1, dict[str, int]()
    if isinstance(own, DFlash):
        most, slots = own.most, own.block
        if own.markov is not None:
            of_drafts[PREVIOUS] = own.markov.next.cols
        if own.selector is not None:
            of_drafts |= selector_widths(own.selector)
        if own.convolutions:
            of_drafts[DYNAMIC] = own.dynamic_width
    return Pair(
        gguf,
        tapped(config, given),
        own,
        widths,
        launches,
        most=most,
        file=file,
        slots=slots,
        token_map=read_token_map(file, config) if own.token_map else None,
        of_drafts=of_drafts,
    )


def _assistant_pair(gguf: ModelFile, config: Config, own: Config, file: ModelFile) -> Pair:
    hidden = config.hidden
    widths = {EMBEDDED: hidden, JOINED: 2 * hidden, GIVEN: hidden, PASSED_ON: hidden}
    of_target = tapped(config, [config.n_layers])
    return Pair(gguf, of_target, own, widths, AssistantDraft, file=file, shares_cache=True)


def plain_pair(gguf: ModelFile, file: ModelFile) -> Pair:
    """A model and another one with the same vocabulary as its draft. Raises UnsupportedError for
    another vocabulary, for models that are no decoders and for recurrent layers, which cannot go
    back, ConfigError."""
    config, own = Config.of(gguf), Config.of(file)
    check_same_vocabulary(gguf, file)
    for of, described in ((gguf, config), (file, own)):
        check_takes_drafts(described, of.path)
    if own.recurrents:
        raise UnsupportedError(
            f"{file.path}: a draft with recurrent layers is not supported: its states cannot go "
            "back to the accepted tokens"
        )
    return Pair(gguf, config, own, {}, None, file=file)


def check_takes_drafts(config: Config, path: object) -> None:
    """Raise UnsupportedError for a model that has no drafts and is none: an encoder, an
    encoder-decoder, or one that fills masks."""
    if config.source is not None or not config.is_causal:
        raise UnsupportedError(
            f"{path}: drafts are those of decoders, '{config.architecture}' models are none: leave "
            "the draft out"
        )


def pair_of(gguf: ModelFile, file: ModelFile | None) -> Pair:
    """A model and its draft: of a ``file``, or the model's own heads (None). Raises as those."""
    if file is None:
        return nextn_pair(gguf)
    return plain_pair(gguf, file) if is_plain(file) else file_pair(gguf, file)


def is_plain(file: ModelFile) -> bool:
    """Whether a draft is a model by itself."""
    return file.architecture not in FILE_DRAFTS


@contextmanager
def open_pair(pair: Pair, device: Device, settings: SessionSettings, most: int) -> Iterator[Draft]:
    """A session of the model, and the draft of up to ``most`` tokens beside it. Raises ModelError
    where there is too little memory."""
    pair = pair.at_context(settings.context)
    most = min(most, pair.most or most)
    slots = 1 if pair.slots == 1 else most + pair.slots - pair.most
    source = pair.config if pair.shares_cache else None
    shape = DraftShape(pair.own, settings, {**pair.widths, **pair.of_drafts}, most, slots, source)
    budget = SessionBudget.of(paper_weights(pair.gguf, pair.config, device), settings)
    plan = MemoryPlan.of(pair.gguf, pair.config, budget)
    more = sum(weight_sizes(pair.file, pair.own).values()) if pair.file else 0
    beside = plan.workspace + shape.nbytes(device)
    replace(plan, workspace=beside, weights=plan.weights + more).check(device)
    with ExitStack() as owners:
        weights = owners.enter_context(Weights.load(pair.gguf, pair.config, device))
        own = weights
        if pair.file is not None:
            own = owners.enter_context(Weights.load(pair.file, pair.own, device))
        session = owners.enter_context(Session(device, weights, settings))
        kind = ChainDraft if pair.slots == 1 else BlockDraft
        assert pair.launches is not None
        draft = kind(session, shape, own, pair.launches, pair.token_map)
        yield owners.enter_context(draft)


@contextmanager
def open_alone(
    gguf: ModelFile, config: Config, device: Device, settings: SessionSettings
) -> Iterator[Session]:
    """A session of one model. Raises ModelError for a context that it does not take and where there
    is too little memory."""
    check_context(config, settings.context)
    config = config.at_context(settings.context)
    budget = SessionBudget.of(paper_weights(gguf, config, device), settings)
    MemoryPlan.of(gguf, config, budget).check(device)
    with ExitStack() as owners:
        weights = owners.enter_context(Weights.load(gguf, config, device))
        yield owners.enter_context(Session(device, weights, settings))
