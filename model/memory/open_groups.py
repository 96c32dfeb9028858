"""The groups of layers of a cache, by its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.memory.block_table import BlockTable
from urdir.model.memory.cache_groups import Group, LeadingGroup
from urdir.model.memory.cache_shape import CacheShape, table_name
from urdir.model.memory.pages import PagePool
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.memory.window_group import WindowGroup

if TYPE_CHECKING:
    from urdir.driver.memory import Arena
    from urdir.driver.stream import Stream


def open_groups(
    arena: Arena, stream: Stream, shape: CacheShape, writes: QueuedWrites
) -> Sequence[Group]:
    """The groups of `CacheShape.groups`, in that order; after them the leading one, if all layers
    of a paged cache have windows."""
    by_number: dict[int, Group] = {}
    windows: list[WindowGroup] = []
    whole = []
    for number, indices in enumerate(shape.groups):
        layers = {index: shape.layers[index] for index in indices}
        first = layers[indices[0]]
        if not first.layout.is_paged:
            by_number[number] = Group(arena, stream, layers, first.layout)
        elif first.window is None:
            whole.append((number, layers, first.layout))
        else:
            table = BlockTable(arena[table_name(number)], first.layout, writes)
            by_number[number] = group = WindowGroup(arena, stream, layers, first.window, table)
            windows.append(group)
    pools = [group.pool for group in windows]
    for number, layers, layout in whole:
        table = BlockTable(arena[table_name(number)], layout, writes)
        pool = PagePool(layout.pages, layout.page_len, pools)
        by_number[number] = LeadingGroup(arena, stream, layers, layout, pool, table)
    groups = [group for _, group in sorted(by_number.items())]
    if windows and not whole:
        layout = windows[0].layout
        pages = layout.sequences * layout.blocks + sum(pool.pages for pool in pools)
        layout = replace(layout, pages=pages, kv_heads=1)  # no memory: only their number counts
        pool = PagePool(pages, layout.page_len, pools)
        groups.append(LeadingGroup(arena, stream, {}, layout, pool, None))
    return groups
