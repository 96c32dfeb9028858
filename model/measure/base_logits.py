"""Log-probabilities of a base model in a file, in llama.cpp's format, for KL divergence.

    "_logits_"  context i32  vocabulary i32  chunks i32  tokens i32 (chunks, context)
    a row for each scored token: scale f32, least f32, then u16 for each token of the vocabulary,
    padded to an even number

A log-probability is least + scale * u16; those more than 16 below the highest count as that.
(`--kl-divergence-base` of llama-perplexity writes and reads it.)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from urdir.model.engine.sampling import Logits
from urdir.model.errors import ModelError
from urdir.model.files.written import whole_file
from urdir.model.measure.perplexity import Chunk, Floats, log_probabilities
from urdir.model.owner import Owner

_MAGIC = b"_logits_"
_HEADER = struct.Struct("<8s3i")
_SPAN = 16.0  # between the highest and the lowest log-probability that is kept
_MOST = 65535
_MOST_TOKENS = 1 << 28


def _row_type(vocab: int) -> np.dtype[np.void]:
    return np.dtype([("scale", "<f4"), ("least", "<f4"), ("steps", "<u2", (vocab + vocab % 2,))])


def packed(logits: Logits) -> npt.NDArray[np.void]:
    """Rows of the file for ``logits`` (n, n_vocab)."""
    count, vocab = logits.shape
    rows = np.zeros(count, _row_type(vocab))
    for row, of in zip(rows, logits, strict=True):
        logs = log_probabilities(of)
        least = max(float(logs.min()), float(logs.max()) - _SPAN)
        scale = (float(logs.max()) - least) / _MOST
        row["scale"], row["least"] = scale, least
        if scale:
            row["steps"][:vocab] = np.clip(np.rint((logs - least) / scale), 0, _MOST)
    return rows


@contextmanager
def writing(path: Path, chunks: Sequence[Chunk], vocab: int) -> Iterator[BinaryIO]:
    """A new file with its header, to which `packed` rows are written; it has its name once it is
    whole. Raises ModelError where it cannot be written."""
    with whole_file(path) as part, part.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, len(chunks[0].tokens), vocab, len(chunks)))
        file.write(np.array([chunk.tokens for chunk in chunks], "<i4").tobytes())
        yield file


class BaseLogits(Owner):
    """A file of a base model: its ``chunks`` and the log-probabilities of each."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Read the header. Raises ModelError for a file of another kind or length."""
        self._file = file
        head = file.read(_HEADER.size)
        magic, context, self.vocab, count = (
            _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0, 0)
        )
        if magic != _MAGIC:
            raise ModelError(f"{path}: no saved log-probabilities: it begins otherwise")
        if context < 4 or self.vocab < 1 or not 1 <= count <= _MOST_TOKENS // context:
            raise ModelError(
                f"{path}: {count} chunks of {context} tokens of {self.vocab}: the header is damaged"
            )
        self.context = context
        self._row = _row_type(self.vocab)
        wanted = _HEADER.size + count * (
            4 * context + (context - 1 - context // 2) * self._row.itemsize
        )
        if (size := os.fstat(file.fileno()).st_size) != wanted:
            raise ModelError(f"{path}: {size:,} bytes, not {wanted:,}: it was not written whole")
        tokens = np.frombuffer(file.read(4 * count * context), "<i4").reshape(count, context)
        self.chunks = [Chunk(tuple(row)) for row in tokens.tolist()]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file. Raises ModelError."""
        try:
            file = path.open("rb")
        except OSError as exc:
            raise ModelError(f"{path}: cannot be read: {exc.strerror}") from exc
        try:
            return cls(path, file)
        except BaseException:
            file.close()
            raise

    def rows(self) -> Iterator[Floats]:
        """The log-probabilities (n_scored, n_vocab) of each chunk, once."""
        for chunk in self.chunks:
            count = len(chunk.scored)
            rows = np.frombuffer(self._file.read(count * self._row.itemsize), self._row)
            steps = rows["steps"][:, : self.vocab].astype(np.float64)
            yield rows["least"][:, None] + rows["scale"][:, None].astype(np.float64) * steps

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()
