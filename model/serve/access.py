"""Who may ask a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """Access control. ``hosts`` are the names that browsers may use for the server, against DNS
    rebinding: pages that point a name of their own at this machine. None: any name.
    """

    api_keys: tuple[str, ...] = ()  # empty: no key needed
    origins: tuple[str, ...] = ()  # of other pages with access (CORS)
    hosts: frozenset[str] | None = None
    page: bool = True  # whether the chat page is served
