"""The options of an engine: the keywords of `Engine.open`, their defaults and their bounds.

numpy is not imported: it would delay the driver, which is loaded first.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar, get_args

from urdir.model.engine.adapter_pool import is_scaled
from urdir.model.errors import SettingsError
from urdir.model.memory.buckets import MOST_CHUNK, MOST_PASSED_CHUNK
from urdir.model.memory.session_settings import SessionSettings, Split

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.ptx_files import PtxFiles
    from urdir.model.engine.runner import Observer
    from urdir.model.families.config import Config
    from urdir.model.families.feed_forward import RandomRouting
    from urdir.model.families.placement import Placement
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.draft_settings import DraftSettings
    from urdir.ptxgen.kernels.attention.kv_types import KvDtype

#: Tokens of context.
DEFAULT_CONTEXT = 4096
#: The same for many users, who share the memory: a sequence takes what it has.
LONG_CONTEXT = 32768
#: Sequences, and tokens of a page, for many users.
SEQUENCES, EMULATED_SEQUENCES, PAGE_LEN = 256, 8, 64

#: Values of ``draft`` that are no files: of earlier text, and of the model's own heads.
NGRAM, HEADS = "ngram", ("mtp", "nextn")
#: The most adapters, and the highest rank, that room is made for.
MOST_RANK = 1024
#: Drafts of a sequence in a step by a draft model, by default.
MODEL_DRAFTS = 3

#: Options that are whole numbers, and paths.
_WHOLE = (
    *("context", "sequences", "page_len", "pages", "chunk", "prefix_host_memory"),
    *("device_memory", "host_memory", "max_adapters", "max_adapter_rank", "max_host_adapters"),
)
_PATHS = ("path", "draft", "adapter_folder", "cache_folder", "prefix_dir", "stream_dir")

#: See `EngineOptions`.
PromptArithmetic = Literal["f16", "int8", "auto"]
PROMPT_ARITHMETIC: tuple[str, ...] = get_args(PromptArithmetic)

_Parameters = ParamSpec("_Parameters")
_Options = TypeVar("_Options")
_Class = TypeVar("_Class")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `Engine.open` takes; SettingsError names the option that is out of range.

    ``path``: "demo" (and None), a GGUF file, any part of a split one, or a folder as transformers
    writes it, whose matrices become ``quantize`` ("q8_0", "q4_0", ...) while they are loaded. Or a
    model that is open, which the engine closes: a `Gguf`, a `MemoryModel`.

    ``device``: auto, cuda[:i] or emulator[:sm_NN]. With ``gpus``, a number or the ordinals of some,
    each GPU has a share of every layer (`families.share`), or ``split`` by layers a run of them
    (`families.stages`); ``device`` then says of which kind they are.

    ``context``: tokens of a sequence. None is the smaller of the model's and 4096, 0 the model's.
    ``prompt_arithmetic`` is that of prompts and of many sequences together, on sm_80 and newer:
    "f16"; "int8": weights and activations become signed bytes, with a scale a row and a vector,
    where a matrix allows it; "auto": in those that lose little, of models without experts
    (`memory.matrix_bytes`).

    The cache stores keys as ``kv_dtype`` and values as ``value_dtype`` (None: as keys): f32, f16,
    bf16, q8_0, fp8 or q4_0 (`kv_formats`). ``exact`` keeps activations in f32. ``sequences`` fit at
    once. Their cache is made of ``pages`` of ``page_len`` tokens (0: contiguous). Up to ``chunk``
    tokens of a prompt (2048, split by layers 256 unless weights are streamed) are processed at
    once, fewer where memory is short.

    ``memory_share``, of the free memory, is for many users: the cache has as many pages of
    ``page_len`` tokens (64) as fit; ``sequences`` (None) are 256, fewer if recurrent layers have
    large states, some of which are kept for requests with a common prefix; the context is up to
    32768. Pages of prefixes that make room for others move to ``prefix_host_memory`` bytes of
    page-locked host memory (0: none), and back when a prompt begins with them.
    `Service.act_on_slot` saves prefixes to files of the folder ``prefix_dir``.

    ``placement`` says which matrices lie in host memory, and are copied to the device before each
    use (None: none). Of each device ``device_memory`` bytes are used at most (None: what is free),
    and of the host ``host_memory`` by weights. Layers that exceed the latter are read from files
    before each use: in the folder ``stream_dir``, where they are written at first.
    ``random_routing``, to measure: rows choose experts at random, the first half of them with this
    share of all choices, or with the "locality" of a trace (`memory.local_choices`), and answers
    mean nothing.

    ``drafts``: steps verify drafts of the next tokens, so that one may take several: the answers
    are the same (`DraftSettings`). ``draft`` says whose: "ngram", those of earlier text; "mtp", of
    the model's own heads; or the file of a draft model (EAGLE-3, DFlash, Gemma 4's assistant, or a
    model with the same vocabulary). On several GPUs each has all of a draft model, which
    must have an output and a cache of its own; models split by layers take no drafts.

    ``adapters`` are LoRA adapters with their scales, GGUF files or peft folders, of all requests
    that name none. There is room for ``max_adapters`` at once (None: for these), of up to a rank of
    ``max_adapter_rank`` (None: theirs, together unless a scale is 0); more can be loaded later
    (`Engine.load_adapter`). Those of ``adapter_folder``, GGUF files and peft folders, are read when
    a request first names them: ``max_host_adapters`` of them stay in host memory (None: all), the
    most recently used.

    ``text``: the file must have a vocabulary, which is read in a thread of its own. ``chat``: it
    must have a chat template as well (None: one that it has must compile). ``chat_template``, Jinja
    or a name such as "chatml", replaces the file's.

    ``cache_folder`` keeps compiled kernels: "user" is the user's (`user_cache_folder`), None keeps
    none. ``ptx_files`` are folders of edited PTX to use and of PTX to write. ``host_sampling``
    chooses tokens on the host. ``observer`` looks at every step. ``warms_up``: graphs will be
    recorded ahead, so where no kernel was ever compiled, the processes that compile start before
    the weights have memory: they use what a ``memory_share`` leaves.

    ``embeddings``: the model makes embeddings or scores of texts (`Engine.embed`), and no answers.
    None: encoders do, and models whose file says how embeddings are pooled. ``context`` is then
    that of a text (None: up to 8192), ``chunk`` the tokens of all texts in a step.
    """

    path: str | os.PathLike[str] | ModelFile | None = None
    _: KW_ONLY
    quantize: str | None = None
    device: str = "auto"
    gpus: int | Sequence[int] | None = None
    split: Split = "tensors"
    prompt_arithmetic: PromptArithmetic = "f16"
    context: int | None = None
    kv_dtype: KvDtype = "f16"
    value_dtype: KvDtype | None = None
    exact: bool = False
    sequences: int | None = 1
    memory_share: float = 0.0
    page_len: int = 0
    pages: int | None = None
    chunk: int | None = None
    prefix_host_memory: int = 0
    prefix_dir: str | os.PathLike[str] | None = None
    placement: Placement | None = None
    device_memory: int | None = None
    host_memory: int | None = None
    stream_dir: str | os.PathLike[str] | None = None
    random_routing: RandomRouting | None = None
    drafts: DraftSettings | None = None
    draft: str | os.PathLike[str] | ModelFile | None = None
    adapters: Sequence[tuple[str | os.PathLike[str], float]] = ()
    max_adapters: int | None = None
    max_adapter_rank: int | None = None
    adapter_folder: str | os.PathLike[str] | None = None
    max_host_adapters: int | None = None
    text: bool = False
    chat: bool | None = False
    chat_template: str | None = None
    cache_folder: str | os.PathLike[str] | None = "user"
    ptx_files: PtxFiles | None = None
    host_sampling: bool = False
    warms_up: bool = False
    embeddings: bool | None = None
    observer: Observer | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.split not in get_args(Split):
            expected = " or ".join(get_args(Split))
            raise SettingsError(f"split is {self.split!r}: expected {expected}")
        if self.draft is not None and self.drafts is None:
            object.__setattr__(self, "drafts", _usual_drafts(self.draft))
        if self.prompt_arithmetic not in PROMPT_ARITHMETIC:
            expected = ", ".join(PROMPT_ARITHMETIC)
            raise SettingsError(
                f"prompt_arithmetic is {self.prompt_arithmetic!r}: expected one of {expected}"
            )
        for name in ("max_adapters", "max_adapter_rank"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_RANK:
                raise SettingsError(f"{name} is {value}: expected 1 to {MOST_RANK}")
        if self.max_adapter_rank is not None and not self.adapters and self.max_adapters is None:
            raise SettingsError(
                f"max_adapter_rank is {self.max_adapter_rank}, without adapters: give max_adapters"
            )
        self._check_adapters()
        if not 0 <= self.memory_share <= 1:
            raise SettingsError(f"memory_share is {self.memory_share}: expected 0 (off) to 1")
        self._session(self.context or DEFAULT_CONTEXT, SEQUENCES, MOST_CHUNK)

    def _check_kinds(self) -> None:
        """Refuse values of another type, which would fail later and without a name."""
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and not _is_whole(value):
                raise SettingsError(f"{name} is {value!r}: expected a whole number")
        for name in _PATHS:
            value = getattr(self, name)
            # a model without a file has its tensors
            if not (value is None or isinstance(value, str | os.PathLike)
                    or hasattr(value, "tensors")):  # fmt: skip
                raise SettingsError(f"{name} is {value!r:.80}: expected a path")
        if not isinstance(self.device, str):
            raise SettingsError(f"device is {self.device!r}: expected a text, such as 'cuda:0'")
        if not isinstance(self.memory_share, Real):
            raise SettingsError(f"memory_share is {self.memory_share!r}: expected a number")
        gpus = self.gpus
        ordinals = [gpus] if gpus is None or isinstance(gpus, Integral | str) else [*gpus]
        if gpus is not None and not all(map(_is_whole, ordinals)):
            raise SettingsError(
                f"gpus is {gpus!r:.80}: expected a number of GPUs, or a list of their ordinals"
            )

    def _check_adapters(self) -> None:
        if not all(is_scaled(each, str | os.PathLike) for each in self.adapters):
            given = f"{self.adapters!r:.80}"
            raise SettingsError(
                f"adapters are {given}: expected pairs of a file and a scale: [('a.gguf', 1.0)]"
            )
        room = self.max_adapters, self.max_adapter_rank
        if self.adapter_folder is not None and None in room:
            raise SettingsError(
                "adapter_folder: say with max_adapters and max_adapter_rank how many "
                "have room on the device at once, and of which rank at most"
            )
        if self.max_host_adapters is not None and (
            self.adapter_folder is None or self.max_host_adapters < 1
        ):
            raise SettingsError(
                f"max_host_adapters is {self.max_host_adapters}: expected 1 or more, with an "
                "adapter_folder"
            )

    def makes_embeddings(self, config: Config) -> bool:
        """Whether a model is opened for steps of whole texts: embeddings, or masks that are filled.
        Raises SettingsError for an encoder that is not."""
        if config.diffuses:
            return True
        if self.embeddings is None:
            of = config.embedding_of_texts
            return not config.is_causal or (of is not None and of.pooling is not None)
        if not (self.embeddings or config.is_causal):
            raise SettingsError(
                f"'{config.architecture}' models are encoders: they make embeddings or scores of "
                "texts (embed, rerank), and no answers"
            )
        return self.embeddings

    def chosen_context(self, config: Config) -> int:
        """Tokens of context for a model; see `chosen_context`."""
        most = LONG_CONTEXT if self.memory_share else DEFAULT_CONTEXT
        return chosen_context(config, self.context, most)

    def session(self, config: Config, device: Device, context: int) -> SessionSettings:
        """The most that is wanted of a session on a device that has ``config`` of a model: where
        ``sequences`` or ``chunk`` are None, as many as pay."""
        sequences = EMULATED_SEQUENCES if device.is_emulated else SEQUENCES
        # a prompt in one chunk uses each transfer once
        is_passed = config.stage is not None and config.streaming is None
        chunk = MOST_PASSED_CHUNK if is_passed else MOST_CHUNK
        return self._session(context, sequences, chunk)

    def _session(self, context: int, sequences: int, chunk: int) -> SessionSettings:
        """The settings of a session, with these where the options leave them open."""
        return SessionSettings(
            context,
            self.kv_dtype,
            value_dtype=self.value_dtype,
            exact=self.exact,
            sequences=sequences if self.sequences is None else self.sequences,
            page_len=self.page_len or (PAGE_LEN if self.memory_share else 0),
            pages=self.pages,
            chunk=self.chunk or chunk,
            prefix_host_memory=self.prefix_host_memory,
            drafts=self.drafts,
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _usual_drafts(draft: str | os.PathLike[str] | ModelFile) -> DraftSettings:
    """Draft settings where only the draft is given. Those of models have fewer tokens: each takes
    time, unlike those of earlier text."""
    from urdir.model.memory.draft_settings import DraftSettings

    return DraftSettings() if draft == NGRAM else DraftSettings(kind="model", most=MODEL_DRAFTS)


def chosen_context(config: Config, context: int | None, most: int = DEFAULT_CONTEXT) -> int:
    """Tokens of context for a model: ``context``, 0 being the model's, or where that is None the
    smaller of the model's and ``most``. SettingsError for more than the model's."""
    from urdir.model.engine.budget import check_context

    if context is None:
        return min(most, config.context_length)
    check_context(config, context or config.context_length)
    return context or config.context_length


def from_keywords(
    make: Callable[_Parameters, _Options],
) -> Callable[
    [Callable[[type[_Class], _Options], _Result]],
    Callable[Concatenate[type[_Class], _Parameters], _Result],
]:
    """Let a class method that takes options take the arguments of ``make``, which makes them.

    Type checkers read them from ``make``, `inspect.signature` and ``help`` too.
    """

    def decorate(
        method: Callable[[type[_Class], _Options], _Result],
    ) -> Callable[Concatenate[type[_Class], _Parameters], _Result]:
        @wraps(method)
        def call(
            cls: type[_Class], /, *args: _Parameters.args, **keywords: _Parameters.kwargs
        ) -> _Result:
            if unknown := keywords.keys() - inspect.signature(make).parameters.keys():
                raise TypeError(_unknown(f"{cls.__name__}.{method.__name__}", min(unknown), make))
            return method(cls, make(*args, **keywords))

        own = inspect.signature(method)
        own_class, _ = own.parameters.values()
        taken = inspect.signature(make).parameters.values()
        vars(call)["__signature__"] = own.replace(parameters=[own_class, *taken])
        return call

    return decorate


#: What options of other libraries are here.
_OTHER_NAMES = {
    **dict.fromkeys(("n_ctx", "ctx_size", "max_model_len", "num_ctx"), "context"),
    **dict.fromkeys(("model", "model_path", "filename", "repo_id"), "path"),
    **dict.fromkeys(("tensor_parallel_size", "n_gpu", "num_gpus"), "gpus"),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers"), "placement"),
    **dict.fromkeys(("dtype", "quantization"), "quantize"),
    **dict.fromkeys(("lora_path", "lora"), "adapters"),
    **dict.fromkeys(("n_batch", "max_num_batched_tokens"), "chunk"),
    **dict.fromkeys(("max_num_seqs", "n_parallel"), "sequences"),
    "gpu_memory_utilization": "memory_share",
    "draft_model": "draft",
    "type_k": "kv_dtype",
    "type_v": "value_dtype",
}


def _unknown(of: str, name: str, make: Callable[..., object]) -> str:
    """What is said of an option that does not exist, with the nearest one."""
    near = get_close_matches(name, inspect.signature(make).parameters, 1)
    found = _OTHER_NAMES.get(name, near[0] if near else None)
    return f"{of} has no option {name!r}: " + (
        "help(EngineOptions) lists them" if found is None else f"did you mean {found}?"
    )
