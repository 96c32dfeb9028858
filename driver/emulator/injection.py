"""Fault injection: make the n-th event of a kind, or call of a function, fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import cuda.bindings.driver as cuda

#: Kind of event -> default error.
KINDS: Mapping[str, str] = {
    "init": "CUDA_ERROR_NO_DEVICE",
    "allocation": "CUDA_ERROR_OUT_OF_MEMORY",
    "host_allocation": "CUDA_ERROR_OUT_OF_MEMORY",
    "link": "CUDA_ERROR_OUT_OF_MEMORY",
    "module_load": "CUDA_ERROR_INVALID_IMAGE",
    "instantiate": "CUDA_ERROR_OUT_OF_MEMORY",
    "launch": "CUDA_ERROR_ILLEGAL_ADDRESS",
}
#: The default error of a function given by name.
_OF_A_CALL = "CUDA_ERROR_UNKNOWN"


class Injections:
    """Pending faults: per kind, number of events until which error.

    ``functions`` are names that are kinds too: each call is an event, which fails before it does
    anything. ``counts`` are the numbers of events of each kind.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[tuple[int, str]]] = {}
        self.functions: frozenset[str] = frozenset()
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, nth: int = 1, code: str | None = None) -> None:
        """The ``nth`` event of ``kind`` from now on (1 is the next) fails with ``code``."""
        if kind not in KINDS and kind not in self.functions:
            raise ValueError(f"no fault {kind!r}: a function or one of {', '.join(KINDS)}")
        if nth < 1:
            raise ValueError("events are counted from 1, the next one")
        if code is not None and code not in cuda.CUresult.__members__:
            raise ValueError(f"no error {code!r}: a CUresult such as {_OF_A_CALL}")
        self._pending.setdefault(kind, []).append((nth, code or KINDS.get(kind, _OF_A_CALL)))

    def strike(self, kind: str) -> str | None:
        """Count one event of ``kind``; the error to raise, or None."""
        self.counts[kind] += 1
        pending = self._pending.get(kind)
        if not pending:
            return None
        due = [code for left, code in pending if left == 1]
        self._pending[kind] = [(left - 1, code) for left, code in pending if left > 1]
        return due[0] if due else None

    def pending(self) -> tuple[str, ...]:
        """The kinds of pending faults, one entry per fault."""
        return tuple(kind for kind, faults in self._pending.items() for _ in faults)
