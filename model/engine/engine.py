"""A model opened for use: file, device, weights and sequences, with their lifetimes tied."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from math import exp
from typing import TYPE_CHECKING, Literal, overload

from urdir.model.engine.adapter_pool import adapter_reader
from urdir.model.engine.loading import Loading, answering, embedding, filling_masks, finished
from urdir.model.engine.options import EngineOptions, from_keywords
from urdir.model.errors import SettingsError
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from typing import NoReturn, Unpack

    import numpy as np
    from numpy.typing import NDArray

    from urdir.model.engine.adapters import Adapters
    from urdir.model.engine.answer_options import AnswerOptions, ChatOptions
    from urdir.model.engine.diffusion import DiffusionSettings
    from urdir.model.engine.encoding.encoder import Encoder, Floats
    from urdir.model.engine.generate import Generation
    from urdir.model.engine.reply import AsyncReply, Messages, Reply, ReplyStream
    from urdir.model.engine.requests.async_service import AnswersOnDemand
    from urdir.model.engine.requests.continuations import Continuation
    from urdir.model.engine.requests.request import Ending, Piece, Request
    from urdir.model.engine.sampling import Logits
    from urdir.model.engine.sampling_settings import SamplingSettings
    from urdir.model.engine.session import Session
    from urdir.model.families.pooling import Pooling
    from urdir.model.text.chat import ChatTemplate
    from urdir.model.text.tokenizer import Tokenizer


def _refuse_pickling(engine: object) -> NoReturn:
    raise TypeError("an Engine has a device of its own: open one in each process")


class Engine(Owner):
    """Everything that turns tokens into tokens; a context manager that frees the device.

    ``file``, ``config``, ``group``, ``device``, ``weights`` and ``session`` are its parts; an
    engine for embeddings has an ``encoder`` in place of the session. Where there are several GPUs,
    ``device`` and ``weights`` are those of rank 0, and ``weight_nbytes`` are of all. ``seconds`` is
    what opening each of "device", "file", "tokenizer", "weights" (upload and repacking) took,
    beside the others; ``host_sampling`` whether tokens are chosen on the host.
    """

    def __init__(self, loading: Loading) -> None:
        """Wait for the weights; the engine then owns what ``loading`` did. Raises ModelError,
        DriverError."""
        parts, self._owners = finished(loading)
        self.file = parts.file
        self.config = parts.config
        self.group = parts.group
        self.device = parts.group[0]
        self.weights = parts.weights[0]
        self.weight_nbytes = sum(each.nbytes for each in parts.weights)
        self._session, self._encoder = parts.session, parts.encoder
        self.seconds = parts.seconds
        self.host_sampling = parts.host_sampling
        self._texts = parts.texts

    @classmethod
    @from_keywords(EngineOptions)
    def open(cls, options: EngineOptions) -> Engine:
        """Open a model; `urdir.model.EngineOptions` says what each argument means.

        No variable of the environment is read. Raises SettingsError for an argument that is out of
        range, and what `Loading` does.
        """
        with Loading(options) as loading:
            return cls(loading)

    @classmethod
    @from_keywords(EngineOptions)
    def opening(cls, options: EngineOptions) -> Loading:
        """The same in two phases, for work that does not need the weights: the graphs of a first
        request, say.

            with Engine.opening("model.gguf", text=True) as loading:
                request = Request(prompt=tuple(loading.tokenizer.encode("Once")))
                loading.prepare(request)
                engine = Engine(loading)
        """
        return Loading(options)

    @property
    def session(self) -> Session:
        """The sequences. Raises UnsupportedError in an engine for embeddings or masks."""
        return answering(self._session, self.config)

    @property
    def encoder(self) -> Encoder:
        """What makes embeddings. Raises UnsupportedError in an engine for answers."""
        return embedding(self._encoder)

    @property
    def makes_embeddings(self) -> bool:
        """Whether it is an engine for embeddings."""
        return self._encoder is not None

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> Floats:
        """Embeddings of texts, or of their tokens: (n, width) f32, of unit length with
        ``normalize``.

        ``pooling`` replaces the file's: "mean", "cls" (the first token), "last", "none" (the states
        of all tokens, text after text), or "rank", the scores (n, labels) of a ranking model, which
        are not normalised. Raises UnsupportedError, SettingsError, ContextFullError for a text that
        is too long, ModelError, DriverError. A list of tokens of a wrong length is refused before
        any step; a text, and a token outside the vocabulary, when its turn has come: texts are
        tokenised while the device has those before.
        """
        from urdir.model.engine.encoding.texts import embeddings

        return embeddings(self.encoder, lambda: self.tokenizer, texts, pooling, normalize)

    def rerank(self, query: str, documents: Sequence[str]) -> Floats:
        """How well each of the documents fits the query, by a ranking model: (n,) f32, higher is
        better. Raises as `embed`."""
        from urdir.model.engine.encoding.texts import documents_in

        return self.score([(query, of) for of in documents_in(documents)], pooling="rank")

    def score(self, pairs: Sequence[tuple[str, str]], *, pooling: Pooling | None = None) -> Floats:
        """How well the texts of each pair fit: (n,) f32, higher is better. A ranking model reads
        the two together, a query and a document; others give the cosine of their embeddings, by
        ``pooling`` as in `embed`. Raises as `embed`."""
        from urdir.model.engine.encoding.texts import scores

        return scores(self.encoder, self.tokenizer, self.file.metadata, pairs, pooling)

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokeniser, built at first use. Raises ModelError if it has none."""
        return self._texts.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The chat template, which the engine closes. Raises NoTemplateError without one."""
        return self._texts.template

    def tokenize(self, text: str | Sequence[int]) -> list[int]:
        """Token ids of a text, BOS first where the model wants one; names of control tokens are
        these tokens. Token ids stay as they are. Raises ModelError."""
        from urdir.model.engine.answer_options import token_ids

        return token_ids(lambda: self.tokenizer, text)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of token ids, with the names of control tokens. Raises ModelError for an id
        outside the vocabulary, SettingsError for anything but a sequence of ids."""
        from urdir.model.engine.answer_options import ids_in

        ids = ids_in(tokens, "not a list of token ids")
        return self.tokenizer.decode(ids, keep_control=True)

    def logits(self, text: str | Sequence[int], *, decoder: Sequence[int] | None = None) -> Logits:
        """The logits after each token of a text, or of token ids: (n_tokens, n_vocab) f32. Of an
        encoder-decoder the text is what its encoder reads, and the logits are those after each of
        the tokens ``decoder`` (None: the start token). A model that fills masks sees the whole text
        at each token.

        Each token takes a step otherwise. Raises ContextFullError, ModelError for no tokens or an
        unknown one and while an answer is open, SettingsError, DriverError.
        """
        from urdir.model.engine.logits import decoder_logits, logits_of

        tokens = self.tokenize(text)
        if self.config.source is not None:
            of_text = self.tokenizer if isinstance(text, str) else None
            return decoder_logits(self.session, tokens, of_text, decoder)
        if decoder is not None:
            raise SettingsError("decoder: its tokens are the text, there is no encoder")
        if self.config.diffuses:
            return self.encoder.logits(tokens, range(len(tokens)))
        return logits_of(self.session, tokens)

    def logprobs(self, text: str | Sequence[int]) -> NDArray[np.float64]:
        """ln p of each token of a text, or of token ids, after the first: (n_tokens - 1,) f64, with
        errors of about 1e-5. Raises as `logits`, and for fewer than two tokens, UnsupportedError
        for an encoder-decoder and a model that fills masks."""
        from urdir.model.engine.logits import logprobs_of

        return logprobs_of(self.session, self.tokenize(text))

    def perplexity(self, text: str | Sequence[int]) -> float:
        """exp of the mean of - `logprobs` of a text that fits the context.

        Each token is predicted by all before it; ``urdir perplexity`` measures long texts in
        chunks, as llama.cpp does. Raises as `logprobs`."""
        return float(exp(-self.logprobs(text).mean()))

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> Reply: ...
    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> ReplyStream: ...
    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Reply | ReplyStream:
        """The model's answer to a conversation of `Message` objects or dictionaries, with
        ``stream`` as it comes.

        ``options`` are `ChatOptions`; ``response_format``, ``grammar`` and ``regex`` apply after
        the reasoning, and a call may take the place of what they describe. Drawn answers differ
        from call to call unless the settings have a seed: ``reply.statistics.seed`` repeats the
        answer. The prefix shared with the previous conversation is read from the cache. Raises
        TemplateError for malformed messages (`conversation`), SettingsError, ConstraintError,
        ModelError.
        """
        from urdir.model.engine.reply import ChatPrompt, ReplyStream

        prompt = ChatPrompt.of(self.template, messages, options)
        request = prompt.request(self.default_settings, options)
        reply = ReplyStream(self.generation(request), prompt.parser)
        return reply if stream else reply.whole()

    def chat_async(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncReply:
        """`chat` for asyncio: ``await`` the reply whole, or iterate over its deltas; see
        `generation_async`."""
        from urdir.model.engine.reply import AsyncReply, ChatPrompt

        prompt = ChatPrompt.of(self.template, messages, options)
        request = prompt.request(self.default_settings, options)
        return AsyncReply(request, self.generation_async(request), prompt.parser)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[AnswerOptions]) -> str:
        """How the model continues a plain text, or token ids, without a template; see `chat`."""
        return "".join(self.generation(self._request(prompt, options)).text())

    def diffuse(
        self,
        prompt: str | Sequence[int],
        *,
        length: int = 128,
        settings: SamplingSettings | None = None,
        diffusion: DiffusionSettings | None = None,
    ) -> str:
        """A text of up to ``length`` tokens after a prompt, by a model that fills masked tokens
        (Dream, LLaDA, RND1): see `diffusion`. It ends before the first end token."""
        tokens = self.tokenize(prompt)
        *_, filled = self.diffusion(tokens, length=length, settings=settings, diffusion=diffusion)
        ends = self.tokenizer.end_ids
        return self.tokenizer.decode(takewhile(lambda of: of not in ends, filled[len(tokens) :]))

    def diffusion(
        self,
        prompt: Sequence[int],
        *,
        length: int = 128,
        settings: SamplingSettings | None = None,
        diffusion: DiffusionSettings | None = None,
    ) -> Iterator[list[int]]:
        """The tokens of prompt and answer after each step of `DiffusionSettings`, masks among them.
        Raises UnsupportedError for a model that does not fill masks, ContextFullError,
        SettingsError, ModelError."""
        from urdir.model.engine.diffusion import DiffusionSettings, diffuse

        how, chosen = diffusion or DiffusionSettings(), settings or self.default_settings
        encoder = filling_masks(self._encoder, self.config)
        return diffuse(encoder, self.file.metadata, prompt, length, chosen, how)

    def generation(self, request: Request) -> Generation:
        """One answer, token by token. One is open at a time."""
        from urdir.model.engine.generate import Generation
        from urdir.model.engine.requests.choices import draw

        choose = draw if self.host_sampling else None
        return Generation(self.session, self.tokenizer, request, choose)

    def generate_all(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[AnswerOptions]
    ) -> Iterator[Continuation]:
        """Whole continuations of many prompts, in their order; up to ``sequences`` run at once.

        Sampled answers share a seed and differ by ``nonce``; each has the settings that
        reproduce it. Raises what `generate` raises, with a note which prompt it is about."""
        from urdir.model.engine.requests.continuations import continuations, noting, several

        chosen = (options.get("settings") or self.default_settings).with_seed()
        requests = []
        for number, prompt in enumerate(several(prompts)):
            options["settings"] = replace(chosen, nonce=chosen.nonce + number)
            with noting(number):
                requests.append(self._request(prompt, options))
        return continuations(self, requests)

    def generate_async(
        self, prompt: str | Sequence[int], **options: Unpack[AnswerOptions]
    ) -> AsyncGenerator[Piece | Ending, None]:
        """`generate` for asyncio: the text in pieces; see `generation_async`."""
        return self.generation_async(self._request(prompt, options))

    def generation_async(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """One answer for asyncio: pieces as they become known, and an ending last.

        Any number may be open in one event loop; up to ``sequences`` of them run at once, and
        nothing else may use the engine meanwhile. Closing the iterator (``contextlib.aclosing``)
        or cancelling the task that iterates cancels the request. Raises, when iterated,
        ContextFullError, SettingsError, BusyError if too many requests wait, ModelError,
        DriverError.
        """
        return self._on_demand.generate(request)

    @cached_property
    def _on_demand(self) -> AnswersOnDemand:
        from urdir.model.engine.requests.async_service import AnswersOnDemand

        return AnswersOnDemand(self)

    def load_adapter(self, path: str | os.PathLike[str], name: str | None = None) -> str:
        """Load a LoRA adapter, for requests that name it; its name.

        Raises ModelError for one that is not of the model, needs more room than there is, or has
        the name of another one."""
        adapters = self._adapters()
        adapter = adapter_reader(self.file, self.config)(path)
        adapters.add(name or adapter.name, adapter)
        return name or adapter.name

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of LoRA adapters that requests may choose: those loaded, and those of the
        ``adapter_folder``."""
        adapters = self.session.adapters
        return () if adapters is None else adapters.known_names()

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; answers that use it go on. Raises SettingsError without it."""
        self._adapters().remove(name)

    def _adapters(self) -> Adapters:
        if (adapters := self.session.adapters) is None:
            raise SettingsError("no room for adapters: open the model with max_adapters")
        return adapters

    def _request(self, prompt: str | Sequence[int], options: AnswerOptions) -> Request:
        from urdir.model.engine.answer_options import AnswerOptions, check_options, make_request

        check_options(options, AnswerOptions)
        return make_request(self.tokenize(prompt), self.default_settings, options)

    @property
    def default_settings(self) -> SamplingSettings:
        """How tokens are chosen where a call does not say: as the file recommends, then as
        `SamplingSettings()`."""
        from urdir.model.engine.sampling_settings import DEFAULTS

        return DEFAULTS.of_file(self.file.metadata)

    @property
    def name(self) -> str:
        """general.name of the file, or its stem."""
        return self._texts.name

    def __repr__(self) -> str:
        user = self._session or self._encoder
        assert user is not None
        state = f"context {user.context}" if self._texts.is_open else "closed"
        return f"<Engine {self.name!r} on {self.device.name}, {state}>"

    def close(self) -> None:
        """Free session, weights, device and file, in this order. Idempotent."""
        self._owners.close()

    __reduce__ = _refuse_pickling
