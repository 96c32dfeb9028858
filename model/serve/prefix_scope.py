"""Isolation of the prefix cache: prompts share prefixes within one API key and one `cache_salt`.

Cached token counts and response times reveal that a prompt was sent before. This scope limits that
to clients with the same key and salt. Keys are stored as digests.
"""

from __future__ import annotations

from hashlib import blake2b

#: Key of an ASGI scope that holds the digest of the request's API key.
CALLER = "urdir.caller"
#: Callers without a key.
ANYBODY = b""


def digest(key: bytes) -> bytes:
    """Digest of an API key, (32,) bytes."""
    return blake2b(key, digest_size=32).digest()


def prefix_scope(caller: bytes, salt: str | None) -> bytes:
    """`Request.scope` of a caller (a `digest` or `ANYBODY`) with ``salt``.

    JSON strings may be invalid Unicode; these are valid salts too.
    """
    if salt is None:
        return caller
    return blake2b(salt.encode("utf-8", "surrogatepass"), key=caller, digest_size=32).digest()
