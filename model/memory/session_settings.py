"""The settings of a session, on whatever devices it runs; numpy is not imported."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from urdir.model.errors import SettingsError
from urdir.model.memory.buckets import MOST_CHUNK
from urdir.model.memory.draft_settings import DraftSettings
from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES, MIN_PAGE_LEN, KvDtype

if TYPE_CHECKING:
    from urdir.model.memory.draft_model import DraftModel

#: What each of several ranks has of a model: a share of every layer, or a run of layers.
Split = Literal["tensors", "layers"]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Room for ``sequences`` of up to ``context`` tokens each; SettingsError names the field and
    the value that is out of range.

    Caches store keys as ``kv_dtype`` and values as ``value_dtype``; ``exact`` keeps activations in
    f32. With a ``page_len`` caches are made of ``pages`` of as many tokens, by default enough for
    all sequences at once.
    Prompt steps have room for ``chunk`` tokens, if the context has. A sequence of a model with
    recurrent layers keeps a state, to which it can be cut. With ``shared_states`` it can be cut
    to 0 only: they are kept for requests with a common prefix. Pages that are evicted move to
    ``prefix_host_memory`` bytes, of all devices together. With ``drafts`` steps verify
    drafts of the next tokens, those of ``draft_model`` or of earlier text.
    """

    context: int
    kv_dtype: KvDtype = "f16"
    _: KW_ONLY
    value_dtype: KvDtype | None = None  # None: as keys
    exact: bool = False
    sequences: int = 1
    page_len: int = 0  # 0: contiguous; else a power of two
    pages: int | None = None
    chunk: int = MOST_CHUNK
    shared_states: int | None = None  # None: each sequence has its own
    prefix_host_memory: int = 0  # bytes
    drafts: DraftSettings | None = None  # None: every step takes one token of a sequence
    draft_model: DraftModel | None = None

    def __post_init__(self) -> None:
        for name in ("kv_dtype", "value_dtype"):
            if (dtype := getattr(self, name)) not in (*KV_DTYPES, None):
                raise SettingsError(f"{name} is {dtype!r}: expected {', '.join(KV_DTYPES)}")
        for name in ("context", "sequences", "chunk"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: expected 1 or more")
        if self.shared_states is not None and self.shared_states < 0:
            raise SettingsError(f"shared_states is {self.shared_states}: expected 0 or more")
        if self.prefix_host_memory < 0 or (self.prefix_host_memory and not self.page_len):
            wanted = "0 or more bytes, beside pages"
            raise SettingsError(
                f"prefix_host_memory is {self.prefix_host_memory}: expected {wanted}"
            )
        length = self.page_len
        if length and (length < MIN_PAGE_LEN or length & (length - 1)):
            raise SettingsError(
                f"page_len is {length}: expected 0 or a power of two from {MIN_PAGE_LEN} on"
            )
        if self.pages is not None and (self.pages < 1 or not length):
            wanted = "1 or more pages" if length else "pages of a length"
            raise SettingsError(f"pages is {self.pages}, page_len is {length}: expected {wanted}")
