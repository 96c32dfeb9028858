"""A model opened for use: file, device, weights and one sequence, with their lifetimes tied."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from urdir.model.engine.opening import Opening
from urdir.model.engine.pieces import announce, driver_loader, open_file, open_group, template_of
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.group import Group
    from urdir.driver.ptx_files import PtxFiles
    from urdir.model.engine.generate import Generation
    from urdir.model.engine.reply import Messages, Reply, ToolDescriptions
    from urdir.model.engine.requests.async_service import AnswersOnDemand
    from urdir.model.engine.requests.continuations import Continuation
    from urdir.model.engine.requests.request import Ending, Piece, Request
    from urdir.model.engine.runner import Observer
    from urdir.model.engine.sampling_settings import SamplingSettings
    from urdir.model.engine.session import Session
    from urdir.model.families.config import Config
    from urdir.model.families.synthetic import SyntheticModel
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.weights import Split, Weights
    from urdir.model.text.chat import ChatTemplate
    from urdir.model.text.sandbox import TemplateProcess
    from urdir.model.text.tokenizer import Tokenizer
    from urdir.ptxgen.kernels.attention.kv_layout import KvDtype


class Engine(Owner):
    """Everything that turns tokens into tokens; a context manager that frees the device.

    ``gguf``, ``config``, ``group``, ``device``, ``weights`` and ``session`` are its parts. Where
    there are several GPUs, ``device`` and ``weights`` are those of rank 0, and ``weight_nbytes``
    are of all. ``seconds`` is what opening each of "device", "file", "tokenizer", "weights" (upload
    and repacking) took, beside the others; ``host_sampling`` whether whoever opened it wants tokens
    to be chosen by the host; ``tokenizer`` is built when first asked for, so that a file without a
    vocabulary can still be measured.
    """

    def __init__(
        self,
        gguf: ModelFile,
        config: Config,
        group: Group,
        weights: Sequence[Weights],
        session: Session,
        host_sampling: bool,
        read_tokenizer: Callable[[], Tokenizer],
        seconds: Mapping[str, float],
        chat_template: str | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        self.gguf = gguf
        self.config = config
        self.group = group
        self.device = group[0]
        self.weights = weights[0]
        self.weight_nbytes = sum(each.nbytes for each in weights)
        self.session = session
        self.seconds = seconds
        self.host_sampling = host_sampling
        self._read_tokenizer = read_tokenizer
        self._chat_template = chat_template
        self._process = process
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._owners = ExitStack()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | SyntheticModel | None = None,
        *,
        quantize: str | None = None,
        device: str = "auto",
        gpus: int | Sequence[int] | None = None,
        split: Split = "tensors",
        context: int | None = None,
        kv_dtype: KvDtype = "f16",
        exact: bool = False,
        sequences: int | None = 1,
        memory_share: float = 0.0,
        page_len: int = 0,
        pages: int | None = None,
        chunk: int | None = None,
        text: bool = False,
        chat: bool | None = False,
        chat_template: str | None = None,
        cache_folder: Path | Literal["user"] | None = "user",
        ptx_files: PtxFiles | None = None,
        host_sampling: bool = False,
        observer: Observer | None = None,
        meanwhile: Callable[[Engine], None] | None = None,
    ) -> Engine:
        """Open ``path`` (None: the demo model) on ``device`` (auto, cuda[:i], emulator[:sm_NN]).

        With ``gpus``, a number or the ordinals of some, each GPU has a share of every layer
        (`families.share`), or ``split`` by layers a run of them (`families.stages`): ``device``
        says of which kind they are.

        ``path`` is "demo", a GGUF file, any part of a split one, or a folder as transformers writes
        it, whose matrices become ``quantize`` ("q8_0", "q4_0", ...) while they are loaded.
        ``context`` defaults to the smaller of the model's and 4096 tokens, 0 is the model's. The
        cache stores ``kv_dtype``; ``exact`` keeps activations in f32. Up to ``chunk`` tokens of a
        prompt (2048, split by layers 256) are processed at once, fewer where memory is short. A
        ``memory_share`` of what is free is for many users: the cache has as many pages of
        ``page_len`` tokens (64) as fit it; ``sequences`` (None) then are 256, fewer where recurrent
        layers have large states, some of which are kept for requests that begin alike; the context
        is up to 32768 (`defaults`).
        With ``text`` the file must have a vocabulary, which a thread of its own reads, with
        ``chat`` a chat template as well (None: one that it has must compile); ``chat_template``
        (Jinja, or a name such as "chatml") replaces the file's. ``meanwhile`` is
        called while the weights are loaded, with an engine that must run nothing yet: for
        `Generation.prepare`.
        ``cache_folder`` keeps compiled kernels: "user" is the user's (`user_cache_folder`), None
        keeps none. ``ptx_files`` are folders of edited PTX to use and of PTX to write. ``observer``
        looks at every step. No variable of the environment is read. The file is checked whole
        before a device is opened: what ``text`` and ``chat`` ask for, and a vocabulary that it has;
        the memory it needs against what is free before anything is allocated. Raises ModelError,
        and DriverError for a device that is absent or fails; nothing stays open then, and no thread
        runs.
        """
        if chat_template is not None:
            from urdir.model.text.named_templates import template_text

            chat_template = template_text(chat_template)
        with Opening(driver_loader(device)) as opening:
            process = None if chat is False else opening.template_process()
            # imported while the driver is loaded
            from urdir.model.families.config import Config

            with opening.timed("file"):
                gguf = opening.own(open_file(path, quantize))
                config = Config.from_gguf(gguf)
                tokenizer = opening.tokenizer(gguf, needed=text or chat is not False)
                if process is not None:
                    chat_template = chat_template or template_of(gguf, tokenizer, bool(chat))
                    if chat_template is not None:
                        process.check(chat_template)
            opening.open_devices(partial(open_group, device, gpus, cache_folder, ptx_files))
            # imported while the device is opened
            from urdir.model.engine.defaults import chosen_context, wanted_settings
            from urdir.model.engine.session import Session
            from urdir.model.memory.fitting import fitting_settings
            from urdir.model.memory.weights import Weights, shares_of

            many_users = bool(memory_share)
            context = chosen_context(config, context, many_users=many_users)
            config = config.at_context(context)
            group = opening.group()
            ranks = [*zip(shares_of(config, gguf, len(group), split), group, strict=True)]
            announce(group[0], gguf)
            wanted = wanted_settings(
                *ranks[0],
                context,
                kv_dtype,
                exact=exact,
                sequences=sequences,
                many_users=many_users,
                page_len=page_len,
                pages=pages,
                chunk=chunk,
            )
            settings = fitting_settings(
                gguf,
                ranks,
                wanted,
                memory_share=memory_share,
                fewer_sequences=sequences is None,
            )
            weights = [opening.own(Weights(gguf, share, of)) for share, of in ranks]
            opening.upload(weights, gguf)
            session = opening.own(
                Session(group[0], weights[0], settings, observer=observer, peers=weights[1:])
            )
            if session.exchange is not None:
                group.notes.append(session.exchange.describe_faults)
            engine = cls(
                gguf,
                config,
                group,
                weights,
                session,
                host_sampling,
                tokenizer,
                opening.seconds,
                chat_template,
                process,
            )
            if meanwhile is not None:
                with opening.timed("meanwhile"):
                    meanwhile(engine)
            opening.wait_for_upload()
            engine._owners.push(opening.hand_over())
            return engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokeniser; ModelError where it has none."""
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The chat template, which ends with the engine; NoTemplateError where there is none."""
        if self._template is None:
            from urdir.model.text.chat import ChatTemplate, find_template

            given = self._chat_template
            source = find_template(self.gguf, lambda: self.tokenizer) if given is None else given
            opened = ChatTemplate(source, self.tokenizer, self._process)
            self._template = self._owners.enter_context(opened)
        return self._template

    def chat(
        self,
        messages: Messages,
        *,
        tools: ToolDescriptions | None = None,
        variables: Mapping[str, Any] | None = None,
        settings: SamplingSettings | None = None,
        limit: int | None = None,
        stops: str | Sequence[str] = (),
    ) -> Reply:
        """The model's answer to a conversation of `Message` objects or dictionaries.

        ``tools`` are descriptions in OpenAI's form, ``variables`` what else the template may read
        ("enable_thinking"); ``settings`` say how tokens are chosen (those of `SamplingSettings()`),
        ``limit`` how many at most, ``stops`` at which texts the answer ends. Drawn answers differ
        from call to call unless the settings have a seed: ``reply.statistics.seed`` repeats the
        answer. What the conversation has in common with the one before is in the cache.
        Raises TemplateError for what is no conversation (`conversation`), SettingsError,
        ModelError.
        """
        from urdir.model.engine.reply import reply_to

        def begin(tokens: Sequence[int], shown: frozenset[str]) -> Generation:
            return self.generation(self._request(tokens, settings, limit, stops, shown))

        return reply_to(self.template, messages, tools, variables, begin)

    def generate(
        self,
        prompt: str,
        *,
        settings: SamplingSettings | None = None,
        limit: int | None = None,
        stops: str | Sequence[str] = (),
    ) -> str:
        """How the model continues a plain text, without a template; see `chat`."""
        tokens = self.tokenizer.encode(prompt, parse_special=True, add_bos=True)
        return "".join(self.generation(self._request(tokens, settings, limit, stops)).text())

    def generation(self, request: Request) -> Generation:
        """One answer, token by token. One is open at a time."""
        from urdir.model.engine.generate import Generation
        from urdir.model.engine.requests.choices import draw

        choose = draw if self.host_sampling else None
        return Generation(self.session, self.tokenizer, request, choose)

    def generate_all(
        self,
        prompts: Sequence[str],
        *,
        settings: SamplingSettings | None = None,
        limit: int | None = None,
        stops: str | Sequence[str] = (),
    ) -> Iterator[Continuation]:
        """The same of many prompts, as many at once as there are ``sequences``: their whole
        answers, in the order of the prompts. Drawn answers share a seed and differ by their
        ``nonce``; each has the settings that repeat it."""
        from urdir.model.engine.requests.continuations import continuations
        from urdir.model.engine.sampling_settings import DEFAULTS

        chosen = (settings or DEFAULTS).with_seed()
        encoded = [
            self.tokenizer.encode(prompt, parse_special=True, add_bos=True) for prompt in prompts
        ]
        return continuations(
            self,
            [
                self._request(tokens, replace(chosen, nonce=chosen.nonce + number), limit, stops)
                for number, tokens in enumerate(encoded)
            ],
        )

    def generate_async(
        self,
        prompt: str,
        *,
        settings: SamplingSettings | None = None,
        limit: int | None = None,
        stops: str | Sequence[str] = (),
    ) -> AsyncGenerator[Piece | Ending, None]:
        """`generate` for asyncio: the text in pieces; see `generation_async`."""
        tokens = self.tokenizer.encode(prompt, parse_special=True, add_bos=True)
        return self.generation_async(self._request(tokens, settings, limit, stops))

    def generation_async(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """One answer for asyncio: pieces as they become known, and an ending last.

        Any number may be open in one event loop, of which as many are answered at once as there are
        ``sequences``; nothing else may use the engine meanwhile. Who closes the iterator
        (``contextlib.aclosing``), or cancels the task that iterates, cancels the request. Raises,
        when iterated, ContextFullError, SettingsError, BusyError where too many wait, ModelError,
        DriverError.
        """
        return self._on_demand.generate(request)

    @cached_property
    def _on_demand(self) -> AnswersOnDemand:
        from urdir.model.engine.requests.async_service import AnswersOnDemand

        return AnswersOnDemand(self)

    def _request(
        self,
        tokens: Sequence[int],
        settings: SamplingSettings | None,
        limit: int | None,
        stops: str | Sequence[str],
        shown: frozenset[str] = frozenset(),
    ) -> Request:
        from urdir.model.engine.requests.request import Request
        from urdir.model.engine.sampling_settings import DEFAULTS

        return Request(
            prompt=tuple(tokens),
            settings=settings or DEFAULTS,
            limit=limit,
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            shown=shown,
        )

    @property
    def name(self) -> str:
        """general.name of the file, or its stem."""
        return self.gguf.metadata.optional("general.name", str, Path(self.gguf.path).stem)

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} on {self.device.name}, context {self.session.context}>"

    def close(self) -> None:
        """Free session, weights, device and file, in this order; closing twice does nothing."""
        self._owners.close()
