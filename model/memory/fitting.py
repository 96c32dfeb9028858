"""How large a session is to be, so that a model and it fit every device that has a share of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from urdir.model.memory.buckets import MOST_CHUNK
from urdir.model.memory.budget import (
    SessionBudget,
    fitting_budget,
    most_pages,
    most_sequences,
)

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.families.description import Config
    from urdir.model.files.model_file import ModelFile


@dataclass(frozen=True, slots=True)
class SessionSize:
    """What a `Session` is opened with: how many sequences and pages (None: as many as they fill),
    and the tokens of the largest prompt step."""

    sequences: int
    pages: int | None
    chunk: int


def fitting_size(
    gguf: ModelFile,
    ranks: Sequence[tuple[Config, Device]],
    budget: Callable[..., SessionBudget],
    *,
    sequences: int | None,
    most: int,
    memory_share: float,
    pages: int | None,
    chunk: int | None,
) -> SessionSize:
    """The size for a model, of which each of ``ranks`` has a share on a device of its own.

    ``budget`` takes a share, and as keywords what is looked for. Where ``sequences`` is None, there
    are ``most`` of them, or fewer. With a ``memory_share`` of what is free, there are as many
    ``pages`` as fit it, unless they are given. Steps have up to ``chunk`` tokens of prompts
    (`MOST_CHUNK`). Raises ModelError where the model and the least session do not fit.
    """
    own = [(share, device, partial(budget, share)) for share, device in ranks]
    if sequences is None:
        part = memory_share or 1.0
        sequences = min(most_sequences(gguf, *rank, part, most) for rank in own)
    own = [(share, device, partial(of, sequences=sequences)) for share, device, of in own]
    if memory_share and pages is None:
        found = [most_pages(gguf, *rank, memory_share) for rank in own]
        pages = min((count for count in found if count is not None), default=None)

    def largest(share: Config, device: Device, of: Callable[..., SessionBudget]) -> int:
        steps = fitting_budget(
            gguf, share, device, lambda rows: of(chunk=rows, pages=pages), chunk or MOST_CHUNK
        )
        return steps.chunks[-1]

    return SessionSize(sequences, pages, min(largest(*rank) for rank in own))
