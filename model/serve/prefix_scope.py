"""Whose prompts share what is known of their beginnings: those of one API key and one `cache_salt`.

How many tokens were found, and how long an answer takes, tell that the same was asked before. They
tell it to those who have the key, and the salt where there is one. Keys are kept as digests.
"""

from __future__ import annotations

from hashlib import blake2b

#: Where an ASGI scope has the digest of the key that a request came with.
CALLER = "urdir.caller"
#: Callers without a key.
ANYBODY = b""


def digest(key: bytes) -> bytes:
    """Of an API key, (32,) bytes."""
    return blake2b(key, digest_size=32).digest()


def prefix_scope(caller: bytes, salt: str | None) -> bytes:
    """`Request.scope` of a caller, a `digest` or `ANYBODY`, who sends ``salt``.

    JSON has strings that are no valid Unicode: they are salts like all others.
    """
    if salt is None:
        return caller
    return blake2b(salt.encode("utf-8", "surrogatepass"), key=caller, digest_size=32).digest()
