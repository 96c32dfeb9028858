"""Pages with reference counts; unreferenced ones are unused, or kept for a prefix until evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from urdir.model.errors import ContextFullError


class CountedPages(ABC):
    """``pages`` pages of ``page_len`` tokens, numbered from 0; bookkeeping only, without device.

    Taking and releasing a page take constant time. ``evictions`` counts the evicted pages.
    """

    def __init__(self, pages: int, page_len: int) -> None:
        self.page_len = page_len
        self.evictions = 0
        self._users = [0] * pages
        self._unused = list(reversed(range(pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # the first to be evicted first

    @property
    def pages(self) -> int:
        """All pages."""
        return len(self._users)

    @property
    def free(self) -> int:
        """Number of pages that can be taken: unused, or kept for their prefixes only."""
        return len(self._unused) + len(self._kept)

    @property
    def kept(self) -> int:
        """Number of unreferenced pages that keep a prefix."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Number of referenced pages."""
        return self.pages - self.free

    def is_shared(self, page: int) -> bool:
        """Whether a page has several references, so that writes need a copy."""
        return self._users[page] > 1

    def unreferenced(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` have no reference."""
        return sum(not self._users[page] for page in pages)

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless ``count`` pages can be taken."""
        if count > self.free:
            raise ContextFullError(
                f"the KV cache is full: {count} pages of {self.page_len} tokens are needed, "
                f"{self.free} of {self.pages} are free"
            )

    def take(self, count: int) -> list[int]:
        """Take ``count`` unreferenced pages, evicting their prefixes. Raises ContextFullError,
        without effect, and DriverError, without taking a page."""
        self.check_room(count)
        if len(self._unused) < count:
            while len(self._unused) < count:
                self._evict(next(iter(self._kept)))
            self._evicted()
        taken = [self._unused.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to referenced or kept pages."""
        for page in pages:
            if not self._users[page]:
                del self._kept[page]
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a sequence's references, in order of position. Pages without references stay as
        cached prefixes if they are in the tree."""
        for page in pages:
            assert self._users[page], f"page {page} has no reference"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._is_known(page):
                self._kept[page] = None
            else:
                self._unused.append(page)

    @abstractmethod
    def forget(self, page: int, filled: int) -> None:
        """The only user of a page writes tokens into it from index ``filled`` on: it keeps no
        prefix with other tokens there."""

    @abstractmethod
    def _is_known(self, page: int) -> bool:
        """Whether a page keeps a part of a prefix."""

    @abstractmethod
    def _evict(self, page: int) -> None:
        """Make a kept page unused."""

    @abstractmethod
    def _evicted(self) -> None:
        """All pages that had to be evicted are, and nothing has been written to them yet. Raises
        DriverError."""
