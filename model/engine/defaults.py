"""What an engine is opened with where nobody says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.memory.buckets import MOST_CHUNK, MOST_PASSED_CHUNK
from urdir.model.memory.budget import check_context
from urdir.model.memory.session_settings import SessionSettings

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.config import Config
    from urdir.ptxgen.kernels.attention.kv_layout import KvDtype

#: Tokens of context.
DEFAULT_CONTEXT = 4096
#: The same for many users, who share the memory: a sequence takes what it has.
LONG_CONTEXT = 32768
#: Sequences, and tokens of a page, for many users.
SEQUENCES, EMULATED_SEQUENCES, PAGE_LEN = 256, 8, 64


def chosen_context(config: Config, context: int | None, *, many_users: bool = False) -> int:
    """Tokens of context: as many as are asked for, 0 being as many as the model takes. Where none
    are asked for, the smaller of the model's and `DEFAULT_CONTEXT`, or `LONG_CONTEXT` for
    ``many_users``. SettingsError for more than the model's."""
    if context is None:
        return min(LONG_CONTEXT if many_users else DEFAULT_CONTEXT, config.context_length)
    check_context(config, context or config.context_length)
    return context or config.context_length


def wanted_settings(
    config: Config,
    device: Device,
    context: int,
    kv_dtype: KvDtype,
    *,
    exact: bool,
    sequences: int | None,
    many_users: bool,
    page_len: int,
    pages: int | None,
    chunk: int | None,
) -> SessionSettings:
    """The most that is wanted of a session on a device, for what it has of a model (``config``):
    where ``sequences`` or ``chunk`` are None, as many as pay; ``page_len`` 0 is `PAGE_LEN` for
    ``many_users``."""
    most = EMULATED_SEQUENCES if device.is_emulated else SEQUENCES
    return SessionSettings(
        context,
        kv_dtype,
        exact=exact,
        sequences=most if sequences is None else sequences,
        page_len=page_len or (PAGE_LEN if many_users else 0),
        pages=pages,
        chunk=chunk or (MOST_CHUNK if config.stage is None else MOST_PASSED_CHUNK),
    )
