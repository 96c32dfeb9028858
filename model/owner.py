"""The base of what owns device memory, files or processes: closed by ``with``, or by hand."""

from __future__ import annotations

from typing import Self


class Owner:
    """A context manager that closes itself; ``close`` may come twice. `urdir.driver` has its own
    (`context.Closing`): `files` and `text`, which use this one, import no driver."""

    def close(self) -> None:
        """End it and free what it owns."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
