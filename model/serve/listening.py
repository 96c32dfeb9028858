"""The socket of a server."""

from __future__ import annotations

import errno
import socket

from urdir.model.errors import ModelError

_BACKLOG = 2048  # connections waiting to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at ``host`` (a name or an address); port 0: any free one.

    Raises ModelError if that fails.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ModelError(
            f"cannot listen on {host}: {error.strerror}: give another --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ModelError(
            f"cannot listen on {host}:{port}: {error.strerror}: give another {flag}"
        ) from None
    return listener
