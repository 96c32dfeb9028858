"""Compiled templates in a folder, so that a process need not compile them before its first text."""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
import tempfile
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

_DIGEST_BYTES = hashlib.sha256().digest_size


class TemplateCache(jinja2.BytecodeCache):
    """One file a template in ``folder``: a digest, then its code.

    The digest is of the code and of all that it comes from: the template's text, the version of
    Python and of Jinja, and ``environment``, which stands for the environment's options. A file
    with another one counts as missing, so that a damaged or outdated one is never run. Whatever
    goes wrong with the disk costs a compilation, never the run.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        self._folder = folder
        self._identity = f"{jinja2.__version__} {sys.version} {environment}"

    def load_bytecode(self, bucket: Bucket) -> None:
        """Give ``bucket`` its code, where there is a good file."""
        with contextlib.suppress(OSError):
            data = self._path(bucket).read_bytes()
            digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if digest == self._digest(bucket, code):
                bucket.code = marshal.loads(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write the code of ``bucket``; another process sees all of it or none."""
        code = marshal.dumps(bucket.code)
        with contextlib.suppress(OSError):
            handle, temporary = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(self._digest(bucket, code) + code)
                os.replace(temporary, self._path(bucket))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise

    def _path(self, bucket: Bucket) -> Path:
        return self._folder / f"{bucket.key}.{sys.implementation.cache_tag}"

    def _digest(self, bucket: Bucket, code: bytes) -> bytes:
        source = f"{self._identity} {bucket.checksum}\n".encode()
        return hashlib.sha256(source + code).digest()
