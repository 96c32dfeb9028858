"""Fault injection: make the n-th call of a kind fail, or take functions away."""

from __future__ import annotations

from collections.abc import Mapping

#: Kind of event -> the error it gives unless another is asked for.
KINDS: Mapping[str, str] = {
    "init": "CUDA_ERROR_NO_DEVICE",
    "allocation": "CUDA_ERROR_OUT_OF_MEMORY",
    "host_allocation": "CUDA_ERROR_OUT_OF_MEMORY",
    "link": "CUDA_ERROR_OUT_OF_MEMORY",
    "module_load": "CUDA_ERROR_INVALID_IMAGE",
    "instantiate": "CUDA_ERROR_OUT_OF_MEMORY",
    "launch": "CUDA_ERROR_ILLEGAL_ADDRESS",
}


class Injections:
    """Faults still to come: per kind, how many events until which error."""

    def __init__(self) -> None:
        self._pending: dict[str, list[tuple[int, str]]] = {}
        self.missing: set[str] = set()

    def add(self, kind: str, nth: int = 1, code: str | None = None) -> None:
        """The ``nth`` event of ``kind`` from now on (1 is the next) fails with ``code``."""
        if kind not in KINDS:
            raise ValueError(f"no fault {kind!r}: one of {', '.join(KINDS)}")
        if nth < 1:
            raise ValueError("events are counted from 1, the next one")
        self._pending.setdefault(kind, []).append((nth, code or KINDS[kind]))

    def strike(self, kind: str) -> str | None:
        """Count one event of ``kind``; the error to fail it with, None to let it pass."""
        pending = self._pending.get(kind)
        if not pending:
            return None
        due = [code for left, code in pending if left == 1]
        self._pending[kind] = [(left - 1, code) for left, code in pending if left > 1]
        return due[0] if due else None

    def pending(self) -> tuple[str, ...]:
        """The kinds of the faults that have not struck yet, one entry a fault."""
        return tuple(kind for kind, faults in self._pending.items() for _ in faults)
