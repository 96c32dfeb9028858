"""The parts of an engine, opened in order: file, devices, weights, then a session or an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.engine.adapter_pool import open_adapters, open_pool
from urdir.model.engine.opening import Opening
from urdir.model.engine.options import HEADS, NGRAM
from urdir.model.engine.pieces import announce, folder_of, open_file, open_group, template_of
from urdir.model.engine.texts import Texts
from urdir.model.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from urdir.driver.apart import Compilers
    from urdir.driver.device import Device
    from urdir.driver.group import Group
    from urdir.model.engine.draft_pair import Pair
    from urdir.model.engine.encoding.encoder import Encoder
    from urdir.model.engine.options import EngineOptions
    from urdir.model.engine.session import Session
    from urdir.model.engine.speculation.model_source import Drafter
    from urdir.model.families.config import Config
    from urdir.model.files.low_rank import Adapter
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_model import DraftModel
    from urdir.model.memory.session_settings import SessionSettings
    from urdir.model.memory.weights import Weights
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


def open_parts(opening: Opening, options: EngineOptions) -> EngineParts:
    """The parts of an engine, which ``opening`` owns. Weights are being loaded."""
    compilers = _begin_compilers(opening, options)
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
    if compilers is not None and (embeds or devices[0].is_emulated):
        compilers.close()
    if embeds:
        return _open_encoder(opening, options, file, config, texts, devices)
    return _open_session(opening, options, file, pair, config, texts, devices, compilers)


def _open_session(
    opening: Opening,
    options: EngineOptions,
    file: ModelFile,
    pair: Pair | None,
    config: Config,
    texts: Texts,
    devices: Group,
    compilers: Compilers | None,
) -> EngineParts:
    """The parts of an engine that gives answers, which ``opening`` owns."""
    from urdir.model.engine.fitting import fitting_settings
    from urdir.model.engine.placing import placed
    from urdir.model.engine.session import Session
    from urdir.model.memory.weight_sizes import shares_of
    from urdir.model.memory.weights import Weights

    if config.source is not None:
        _check_source(options, config, len(devices))
    context = options.chosen_context(config)
    config = config.at_context(context)
    if pair is not None:
        pair = pair.at_context(context)
        pair.check_devices(len(devices))
        config = pair.config
    config = _with_bytes(config, file, devices[0], options)
    config, adapters = _with_adapters(config, file, options)
    with_draft = _unchanged if pair is None else pair.with_draft
    with devices[0].memory_as_it_is():
        if options.warms_up and not devices[0].is_emulated:
            _fork_compilers(devices[0], options.memory_share, compilers)
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
    drafters = _open_drafters(opening, pair, settings.draft_model, weights)
    loaded = [(each, file) for each in weights]
    if pair is not None and pair.file is not None:
        loaded += [(each.weights, pair.file) for each in drafters]
    opening.upload(loaded, None if options.stream_dir is None else Path(options.stream_dir))
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
        _save_prefixes(session, Path(options.prefix_dir), file)
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


def _open_drafters(
    opening: Opening, pair: Pair | None, model: DraftModel | None, weights: Sequence[Weights]
) -> list[Drafter]:
    """The draft ``model`` on each device: with weights of the pair's file, or the model's own."""
    from urdir.model.engine.speculation.model_source import Drafter
    from urdir.model.memory.weights import Weights

    if pair is None or model is None:
        return []
    if (of := pair.file) is not None:
        weights = [opening.own(Weights(of, pair.own, each.device)) for each in weights]
    return [Drafter(model, each, pair.launches, pair.token_map) for each in weights]


def _begin_compilers(opening: Opening, options: EngineOptions) -> Compilers | None:
    """Start the program of the processes that will compile the kernels of graphs, where that is
    known before a device is open."""
    if not options.warms_up or options.gpus is not None:
        return None
    from urdir.driver.apart import compilers_for

    found = compilers_for(options.device, folder_of(options.cache_folder))
    return None if found is None else opening.own(found)


def _fork_compilers(device: Device, memory_share: float, begun: Compilers | None) -> None:
    """Start these processes, if all kernels are new."""
    spare = int((1 - memory_share) * device.usable_memory())
    device.begin_compilers(spare, begun)


def _with_adapters(
    config: Config, file: ModelFile, options: EngineOptions
) -> tuple[Config, list[tuple[Adapter, float]]]:
    """The model with room for LoRA adapters, and those that are given, with their scales. Raises
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

        limits = options.max_adapters, options.max_adapter_rank
        room = room_for(config, adapters, element, *limits)
        config = replace(config, adapters=room)
    return config, adapters


def _check_source(options: EngineOptions, config: Config, devices: int) -> None:
    """Raise UnsupportedError for what encoder-decoders do not have."""
    if wanted := _of_decoders(options, devices):
        raise UnsupportedError(
            f"'{config.architecture}' models with {', '.join(wanted)} are not supported: an "
            "encoder-decoder runs on one GPU without them"
        )


def _of_decoders(options: EngineOptions, devices: int) -> list[str]:
    """What is wanted that only decoders have."""
    wanted = {
        "several GPUs": devices > 1,
        "drafts": options.drafts is not None or options.draft is not None,
        "LoRA adapters": bool(options.adapters) or options.max_adapters is not None,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


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
    folder = folder_of(options.cache_folder)
    has_caches = any(each.expert_caches for each in weights)
    if folder is None or not has_caches or options.random_routing is not None:
        return
    from urdir.model.engine.expert_counts import ExpertCounts

    opening.own(ExpertCounts(folder, file, weights))


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


def _open_pair(opening: Opening, options: EngineOptions, file: ModelFile) -> Pair | None:
    """The model with its draft model; None without one."""
    if options.draft is None or options.draft == NGRAM:
        return None
    from urdir.model.engine.draft_pair import pair_of

    own = (
        None if options.draft in HEADS else opening.own(open_file(options.draft, options.quantize))
    )
    return pair_of(file, own)


def _unchanged(settings: SessionSettings) -> SessionSettings:
    """The settings of a session without a draft model."""
    return settings


def _open_encoder(
    opening: Opening,
    options: EngineOptions,
    file: ModelFile,
    config: Config,
    texts: Texts,
    devices: Group,
) -> EngineParts:
    """The parts of an engine that makes embeddings or fills masks, which ``opening`` owns."""
    from urdir.model.engine.encoding.budget import EncoderSettings, encoder_plan
    from urdir.model.engine.encoding.encoder import Encoder, check_encodes
    from urdir.model.engine.sources import encoder_of
    from urdir.model.lower.paper import paper_weights
    from urdir.model.memory.weights import Weights

    if config.source is not None:
        config = encoder_of(config)
    check_encodes(config)
    wanted = _of_decoders(options, len(devices))
    if options.placement is not None and options.placement.on_host(config):
        wanted.append("weights in host memory")
    if wanted:
        made = "filled masks" if config.diffuses else "embeddings"
        raise UnsupportedError(f"{made} with {', '.join(wanted)} are not supported: leave that out")
    device = devices[0]
    device.limit_memory(options.device_memory)
    given = config, options.context, options.chunk
    settings = EncoderSettings.of(*given, exact=options.exact, emulated=device.is_emulated)
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


def _with_bytes(config: Config, file: ModelFile, device: Device, options: EngineOptions) -> Config:
    """The description with the matrices that prompts multiply as bytes on the device. Raises
    UnsupportedError for a device without such products, if they are wanted."""
    if options.prompt_arithmetic == "f16" or options.exact:
        return config
    from urdir.model.memory.matrix_bytes import with_bytes
    from urdir.ptxgen.kernels.linear.bytes_choice import multiplies_bytes

    if multiplies_bytes(device.native_target):
        return with_bytes(config, file, options.prompt_arithmetic)
    if options.prompt_arithmetic == "auto":
        return config
    raise UnsupportedError(
        f"prompts in int8 need sm_80 or newer, the device is {device.native_target}: "
        "choose f16 or auto"
    )
