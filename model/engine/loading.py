"""The first phase of an engine: all except the weights is ready, and nothing can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from urdir.model.engine.adapter_pool import open_adapters, open_pool
from urdir.model.engine.opening import Opening
from urdir.model.engine.options import HEADS, NGRAM
from urdir.model.engine.pieces import announce, driver_loader, open_file, open_group, template_of
from urdir.model.engine.texts import Texts
from urdir.model.errors import ModelError, UnsupportedError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from pathlib import Path

    from urdir.driver.device import Device
    from urdir.driver.group import Group
    from urdir.model.engine.batch import ShapeBuckets
    from urdir.model.engine.draft_pair import Pair
    from urdir.model.engine.encoding.encoder import Encoder
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.requests.request import Request
    from urdir.model.engine.requests.warm_up import WarmUp
    from urdir.model.engine.session import Session
    from urdir.model.families.config import Config
    from urdir.model.files.low_rank import Adapter
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.model.memory.weights import Weights
    from urdir.model.text.chat import ChatTemplate
    from urdir.model.text.tokenizer import Tokenizer
    from urdir.ptxgen.kernels.linear.epilogue.adapted import Element


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of; ``seconds`` has what opening each part took."""

    file: ModelFile
    texts: Texts
    config: Config
    group: Group
    weights: Sequence[Weights]
    session: Session | None
    encoder: Encoder | None
    host_sampling: bool
    seconds: Mapping[str, float]


class Loading(Owner):
    """A model whose weights are being loaded: prompts can be tokenised and steps recorded.

    ``Engine(loading)`` waits for the weights and owns all of it from then on. Until then closing it
    ends the threads and frees what they made. The file is checked whole before a device is opened,
    with what ``text`` and ``chat`` need, and a vocabulary that it has; the memory that it needs is
    compared with what is free before anything is allocated. Raises ModelError, and DriverError for
    a device that is absent or fails; nothing stays open then, and no thread runs.
    """

    def __init__(self, options: EngineOptions) -> None:
        with ExitStack() as unless_done:
            self._opening = unless_done.enter_context(Opening(driver_loader(options.device)))
            self._parts = _open_parts(self._opening, options)
            unless_done.pop_all()
        self._is_open = True

    @property
    def config(self) -> Config:
        """The model's description."""
        return self._parts.config

    @property
    def file(self) -> ModelFile:
        """The open file."""
        return self._parts.file

    @property
    def device(self) -> Device:
        """The device, or that of rank 0."""
        return self._parts.group[0]

    @property
    def session(self) -> Session:
        """The sequences. Raises UnsupportedError for a model that makes embeddings."""
        return answering(self._parts.session, self.config)

    @property
    def shapes(self) -> ShapeBuckets:
        """The shapes of the steps that the engine will have."""
        return self.session.shapes

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Engine.tokenizer`."""
        return self._parts.texts.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """See `Engine.template`."""
        return self._parts.texts.template

    def prepare(self, request: Request) -> None:
        """Record the graphs of a request's prompt and of its first token."""
        from urdir.model.engine.batch import Output, StepShape

        session = self.session
        output = Output.of(request.settings, masked=request.constraint is not None)
        output = Output.LOGITS if self._parts.host_sampling else output
        revised = bool(request.processors) and output is not Output.LOGITS
        shapes: list[StepShape] = []
        length = 0
        end = 1 if session.takes_sources else min(len(request.prompt), session.context)
        with self._opening.timed("graphs"):
            while length < end:
                shape, length = session.shapes.prompt(length, end, output)
                chooses = shape.output is not Output.NONE
                shapes += shape.halves if revised and chooses else (shape,)
            session.steps.record(shapes)

    def warm_up(self, on_graph: Callable[[], None], **likely: Any) -> WarmUp:
        """What records the steps of a first request, and the likeliest others, now or later;
        ``likely`` is for `likely_shapes`."""
        from urdir.model.engine.batch import Output
        from urdir.model.engine.requests.warm_up import WarmUp, first_shapes, likely_shapes

        session = self.session
        states = session.storage.shared_states
        divided = states is not None and states.places > 0
        shapes = likely_shapes(session.shapes, **likely, divided=divided)
        first = likely.get("outputs", (Output.SAMPLE,))[0]
        needed = first_shapes(session.shapes, first, divided)
        return WarmUp(session.steps, shapes, on_graph, needed)

    def finish(self) -> tuple[EngineParts, ExitStack]:
        """Wait for the weights: all parts, and what closes them. It can be done once."""
        if not self._is_open:
            raise ModelError("the model is closed, or an engine already")
        self._opening.wait_for_upload()
        self._is_open = False
        return self._parts, self._opening.hand_over()

    def close(self) -> None:
        """End the threads and free all of it, unless an engine owns it."""
        self._is_open = False
        self._opening.close()


def answering(session: Session | None, config: Config) -> Session:
    """The sequences of a model. Raises UnsupportedError without them."""
    if session is not None:
        return session
    if config.diffuses:
        raise UnsupportedError(
            f"'{config.architecture}' models fill masked tokens (diffuse), and give no answers"
        )
    raise UnsupportedError(
        "the model is open for embeddings and scores (embed, rerank), it gives no answers; a "
        "decoder does if it is opened with embeddings=False"
    )


def _open_parts(opening: Opening, options: EngineOptions) -> EngineParts:
    """The parts of an engine, which ``opening`` owns. Weights are being loaded."""
    file, pair, config, texts = _open_file(opening, options)
    embeds = options.makes_embeddings(config)
    group = partial(
        open_group, options.device, options.gpus, options.cache_folder, options.ptx_files
    )
    opening.open_devices(group)
    # imported while the device is opened
    import urdir.model.engine.fitting
    import urdir.model.engine.session
    import urdir.model.engine.speculation.model_source  # noqa: F401

    devices = opening.group()
    if embeds:
        return _open_encoder(opening, options, file, config, texts, devices)
    return _open_session(opening, options, file, pair, config, texts, devices)


def _open_session(
    opening: Opening,
    options: EngineOptions,
    file: ModelFile,
    pair: Pair | None,
    config: Config,
    texts: Texts,
    devices: Group,
) -> EngineParts:
    """The parts of an engine that gives answers, which ``opening`` owns."""
    from urdir.model.engine.fitting import fitting_settings
    from urdir.model.engine.placing import placed
    from urdir.model.engine.session import Session
    from urdir.model.engine.speculation.model_source import Drafter
    from urdir.model.memory.weight_sizes import shares_of
    from urdir.model.memory.weights import Weights

    if config.source is not None:
        _check_sources(options, config, len(devices))
    context = options.chosen_context(config)
    config = config.at_context(context)
    if pair is not None:
        pair = _checked_pair(pair.at_context(context), len(devices))
        config = pair.config
    config = _with_bytes(config, file, devices[0], options)
    config, adapters = _with_adapters(config, file, options)
    with_draft = partial(_with_draft, pair, file)
    config = placed(config, file, devices, options, with_draft)
    shares = shares_of(config, file, len(devices), options.split)
    ranks = [*zip(shares, devices, strict=True)]
    announce(devices[0], file)
    settings = fitting_settings(
        file,
        ranks,
        with_draft(options.session(*ranks[0], context)),
        memory_share=options.memory_share,
        fewer_sequences=options.sequences is None,
    )
    weights = [opening.own(Weights(file, share, device)) for share, device in ranks]
    _keep_counts(opening, options, file, weights)
    loaded = [(each, file) for each in weights]
    drafters: list[Drafter] = []
    model = settings.draft_model
    if pair is not None and model is not None:
        for own, device in zip(tuple(weights), devices, strict=True):
            if pair.file is not None:
                own = opening.own(Weights(pair.file, pair.own, device))
                loaded.append((own, pair.file))
            drafters.append(Drafter(model, own, pair.launches, pair.token_map))
    opening.upload(loaded, options.stream_dir)
    session = opening.own(
        Session(
            devices[0],
            weights[0],
            settings,
            observer=options.observer,
            peers=weights[1:],
            drafters=drafters,
        )
    )
    if options.prefix_dir is not None:
        _save_prefixes(session, options.prefix_dir, file)
    if session.adapters is not None:
        session.adapters.load_all(adapters)
        most = options.max_host_adapters
        session.adapters.pool = open_pool(options.adapter_folder, most, file, config)
    if session.exchange is not None:
        devices.notes.append(session.exchange.describe_faults)
    return EngineParts(
        *(file, texts, config, devices, weights, session, None),
        host_sampling=options.host_sampling,
        seconds=opening.seconds,
    )


def _with_adapters(
    config: Config, file: ModelFile, options: EngineOptions
) -> tuple[Config, list[tuple[Adapter, float]]]:
    """The model with room for adapters, and those that are given, with their scales. Raises
    UnsupportedError for a model that has adapters of its own."""
    element: Element = "f32" if options.exact else "f16"
    wanted = bool(options.adapters) or options.max_adapters is not None
    if config.switch is not None:
        if wanted:
            raise UnsupportedError(
                f"'{config.architecture}' models with LoRA adapters are not supported: they have "
                "adapters of their own, which tokens switch on"
            )
        return replace(config, adapters=config.switch.room(element)), []
    adapters = open_adapters(options.adapters, file, config)
    if wanted:
        from urdir.model.layers.adaptable import room_for

        given = [adapter for adapter, _ in adapters]
        room = room_for(config, given, element, options.max_adapters, options.max_adapter_rank)
        config = replace(config, adapters=room)
    return config, adapters


def _check_sources(options: EngineOptions, config: Config, devices: int) -> None:
    """Raise UnsupportedError for what encoder-decoders do not have."""
    refused = {
        "several GPUs": devices > 1,
        "drafts": options.drafts is not None,
        "LoRA adapters": bool(options.adapters) or options.max_adapters is not None,
    }
    if wanted := [name for name, is_wanted in refused.items() if is_wanted]:
        raise UnsupportedError(
            f"'{config.architecture}' models with {', '.join(wanted)} are not supported: an "
            "encoder-decoder runs on one GPU without them"
        )


def _open_encoder(
    opening: Opening,
    options: EngineOptions,
    file: ModelFile,
    config: Config,
    texts: Texts,
    devices: Group,
) -> EngineParts:
    """The parts of an engine that makes embeddings, which ``opening`` owns."""
    from urdir.model.engine.encoding.budget import EncoderSettings, encoder_plan
    from urdir.model.engine.encoding.encoder import Encoder, check_encodes
    from urdir.model.engine.sources import encoder_of
    from urdir.model.lower.paper import paper_weights
    from urdir.model.memory.weights import Weights

    if config.source is not None:
        config = encoder_of(config)
    check_encodes(config)
    on_host = options.placement is not None and bool(options.placement.on_host(config))
    refused = {
        "several GPUs": len(devices) > 1,
        "drafts": options.drafts is not None or options.draft is not None,
        "LoRA adapters": bool(options.adapters) or options.max_adapters is not None,
        "weights in host memory": on_host,
    }
    if wanted := [name for name, is_wanted in refused.items() if is_wanted]:
        made = "filled masks" if config.diffuses else "embeddings"
        raise UnsupportedError(f"{made} with {', '.join(wanted)} are not supported: leave that out")
    device = devices[0]
    device.limit_memory(options.device_memory)
    settings = EncoderSettings.of(
        config,
        options.context,
        options.chunk,
        exact=options.exact,
        emulated=device.is_emulated,
    )
    config = _with_bytes(config.at_context(settings.context), file, device, options)
    announce(device, file)
    encoder_plan(file, paper_weights(file, config, device), settings).check(device)
    weights = opening.own(Weights(file, config, device))
    encoder = opening.own(Encoder(device, weights, settings, options.observer))
    opening.upload([(weights, file)])
    return EngineParts(
        *(file, texts, config, devices, [weights], None, encoder),
        host_sampling=False,
        seconds=opening.seconds,
    )


def _with_draft(pair: Pair | None, file: ModelFile, settings: SessionSettings) -> SessionSettings:
    """The settings with the draft model of a pair, if the session has drafts of one."""
    if pair is None or settings.drafts is None:
        return settings
    tokens = 0 if pair.file is not None else _first_tokens(settings.drafts, file, pair.config)
    model = replace(pair.model, tokens=tokens)
    return replace(settings, drafts=pair.settings(settings.drafts), draft_model=model)


def _first_tokens(drafts: DraftSettings, file: ModelFile, config: Config) -> int:
    """How many tokens the model's own heads draft alone, see `DraftSettings.first_tokens`: those of
    byte-pair vocabularies are in the order of their merges."""
    kind = file.metadata.optional("tokenizer.ggml.model", str, "gpt2")
    return drafts.first_tokens(config.vocab_size, ranked=kind == "gpt2")


def _with_bytes(config: Config, file: ModelFile, device: Device, options: EngineOptions) -> Config:
    """The description with the matrices that prompts multiply as bytes on the device. Raises
    UnsupportedError for a device without such products, if they are wanted."""
    if options.prompt_arithmetic == "f16" or options.exact:
        return config
    from urdir.model.memory.matrix_bytes import with_bytes
    from urdir.ptxgen.kernels.linear.bytes_choice import TARGETS

    if device.native_target in TARGETS:
        return with_bytes(config, file, options.prompt_arithmetic)
    if options.prompt_arithmetic == "auto":
        return config
    raise UnsupportedError(
        f"prompts in int8 need {' or '.join(TARGETS)}, the device is {device.native_target}: "
        "choose f16 or auto"
    )


def _checked_pair(pair: Pair, devices: int) -> Pair:
    """Raise UnsupportedError for a draft on several GPUs that needs what each has a part of."""
    if devices > 1 and not pair.is_replicable:
        raise UnsupportedError(
            f"a draft that uses the output, the cache or heads of its model on {devices} GPUs is "
            "not supported, as each has a part of them: open the model on one, without the draft, "
            "or with one that has all of its own"
        )
    return pair


def _open_pair(opening: Opening, options: EngineOptions, file: ModelFile) -> Pair | None:
    """The model with its draft model; None without one."""
    if options.draft is None or options.draft == NGRAM:
        return None
    from urdir.model.engine.draft_pair import pair_of

    own = None
    if options.draft not in HEADS:
        own = opening.own(open_file(options.draft, options.quantize))
    return pair_of(file, own)


def _open_file(
    opening: Opening, options: EngineOptions
) -> tuple[ModelFile, Pair | None, Config, Texts]:
    """The file, checked, while the driver is loaded."""
    source = options.chat_template
    if source is not None:
        from urdir.model.text.named_templates import template_text

        source = template_text(source)
    process = None if options.chat is False else opening.template_process()
    from urdir.model.families.config import Config

    with opening.timed("file"):
        file = opening.own(open_file(options.path, options.quantize))
        pair = _open_pair(opening, options, file)
        config = Config.of(file) if pair is None else pair.config
        options.makes_embeddings(config)  # refuses what cannot be
        needed = options.text or options.chat is not False
        tokenizer = opening.tokenizer(file, needed=needed)
        if process is not None:
            # texts for an encoder need none
            needed = bool(options.chat) and config.source is None
            source = source or template_of(file, tokenizer, needed)
            if source is not None:
                process.check(source)
    return file, pair, config, opening.own(Texts(file, tokenizer, source, process))


def _keep_counts(
    opening: Opening, options: EngineOptions, file: ModelFile, weights: Sequence[Weights]
) -> None:
    """Read how often cached experts were chosen in earlier runs; it is noted in the end."""
    folder = options.cache_folder
    has_caches = any(each.expert_caches for each in weights)
    if folder is None or not has_caches or options.random_routing is not None:
        return
    from urdir.model.cache_folder import user_cache_folder
    from urdir.model.engine.expert_counts import ExpertCounts

    opening.own(ExpertCounts(user_cache_folder() if folder == "user" else folder, file, weights))


def _save_prefixes(session: Session, folder: Path, file: ModelFile) -> None:
    """Give a session a folder for its prefixes, made if it does not exist. Raises ModelError."""
    from urdir.model.memory.prefix_files import PrefixFiles, layout_digest, model_digest

    if not session.cache.share_len:
        raise ModelError("prefixes are saved where the cache has pages: open with page_len")
    if session.cache.followers:
        raise ModelError("prefixes of models on several GPUs are not saved")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ModelError(f"the folder of prefixes {folder}: {error.strerror}") from None
    assert session.parts.recurrent is not None
    ropes = session.parts.config.ropes
    layout = layout_digest(session.cache.shape, session.parts.recurrent.shape, ropes)
    session.prefix_files = PrefixFiles(
        folder, partial(model_digest, file), layout, session.cache.shape.dtypes
    )
