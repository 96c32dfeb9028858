"""Slots in host memory for what was evicted from the device; bookkeeping only."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

#: What has a slot: a node of a tree.
_Node = TypeVar("_Node")


@dataclass(frozen=True, slots=True)
class Move(Generic[_Node]):
    """A node's ``slot`` in host memory, and its ``pages`` on the device, of each group of arrays
    (None: none)."""

    node: _Node
    slot: int
    pages: tuple[int | None, ...]


class HostSlots(Generic[_Node]):
    """``count`` slots for nodes; the first one that was filled is evicted first: a node before its
    parent, which was evicted from the device after it. Bookkeeping only."""

    def __init__(self, count: int) -> None:
        self.count = count
        # a prefix is evicted from its end on: its slots then have the order of its pages
        self._unused = list(range(count))
        self._slots: OrderedDict[_Node, int] = OrderedDict()

    def has(self, node: _Node) -> bool:
        """Whether a node has a slot."""
        return node in self._slots

    @property
    def used(self) -> int:
        """Number of nodes that have a slot."""
        return len(self._slots)

    def put(self, node: _Node) -> tuple[int, _Node | None] | None:
        """A slot for a node, and the node that has to leave it; None if all are claimed."""
        lost = None
        if self._unused:
            slot = self._unused.pop()
        elif self._slots:
            lost, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[node] = slot
        return slot, lost

    def claim(self, node: _Node) -> int:
        """The slot of a node, which leaves it; it stays filled until it is freed."""
        return self._slots.pop(node)

    def free(self, slot: int) -> None:
        """A claimed slot is of no use any more, once queued copies have run."""
        self._unused.append(slot)

    def drop(self, node: _Node) -> None:
        """A node that may have a slot has left the tree."""
        if (slot := self._slots.pop(node, None)) is not None:
            self._unused.append(slot)
