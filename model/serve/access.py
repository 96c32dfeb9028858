"""Who may ask a server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from urdir.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a server's certificate (with the chain, PEM) and of its private key."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Read them. Raises ModelError if they cannot be, or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(
                self.certificate, self.key, lambda: ""
            )  # no prompt for a passphrase
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            if isinstance(error, ssl.SSLError):
                why = f"no certificate with its private key, in PEM ({error.reason or why})"
            raise ModelError(f"{self.certificate} and {self.key}: {why}") from error
        return context


@dataclass(frozen=True, slots=True)
class Access:
    """Access control. ``hosts`` are the names that browsers may use for the server, against DNS
    rebinding: pages that point a name of their own at this machine. None: any name.
    """

    api_keys: tuple[str, ...] = ()  # empty: no key needed
    #: Of other pages with access (CORS); "*" of all, "localhost" of those of this machine.
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    page: bool = True  # whether the chat page is served
    tls: Tls | None = None
