"""SentencePiece's normalisation table (tokenizer.ggml.precompiled_charsmap), usually NFKC.

    u32 nbytes  u32 nodes[nbytes / 4]  NUL-terminated replacements

The nodes are Darts-clone's double array: a trie over bytes. In a node, bits 10 to 30 are the offset
of its children (times 256 if bit 9 is set), bit 8 marks the end of a key, and bits 0 to 7 and 31
must equal the byte that leads to it. In a leaf, bits 0 to 30 are the start of its replacement.
Source: Yata and others, https://github.com/s-yata/darts-clone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import TokenizerError
from urdir.model.files.limits import CHARSMAP_NBYTES
from urdir.model.files.metadata import Metadata

_KEY = "tokenizer.ggml.precompiled_charsmap"
#: Largest expansion that a table may have, in bytes per byte. NFKC has 11, for U+FDFA.
MOST_GROWTH = 64
#: Longest key in bytes that the expansion check examines; longer keys count with any replacement.
_LONGEST_KEY = 256


class CharsMap:
    """Replaces the longest matching keys, from left to right; an empty map changes nothing."""

    def __init__(self, nodes: list[int], replacements: bytes, growth: float = 1.0) -> None:
        """``growth`` is the largest expansion, in bytes per byte."""
        self._nodes = nodes
        self._replacements = replacements
        self.growth = growth

    @classmethod
    def read(cls, metadata: Metadata) -> CharsMap:
        """The table of a file; TokenizerError if malformed."""
        stored = metadata.optional(_KEY, np.ndarray, None)
        if stored is None:
            return cls([], b"")
        if stored.dtype.itemsize != 1 or len(stored) < 4:
            raise TokenizerError(f"{_KEY} is not an array of bytes")
        return cls.parse(stored.tobytes())

    @classmethod
    def parse(cls, blob: bytes) -> CharsMap:
        """Parse a stored table; TokenizerError if malformed, or if it expands beyond
        `MOST_GROWTH`."""
        CHARSMAP_NBYTES.check(len(blob), _KEY, TokenizerError)
        nbytes = int.from_bytes(blob[:4], "little")
        if nbytes % 4 or not 0 < nbytes < len(blob) - 4:
            raise TokenizerError(f"{_KEY}: {nbytes} bytes of nodes in {len(blob)} bytes")
        nodes, replacements = np.frombuffer(blob, "<u4", nbytes // 4, 4), blob[4 + nbytes :]
        growth = _growth(nodes, replacements)
        if growth > MOST_GROWTH:
            raise TokenizerError(f"{_KEY} expands text {growth:,.0f} times, at most {MOST_GROWTH}")
        return cls(nodes.tolist(), replacements, growth)

    def replace(self, text: str) -> str:
        """`text` with the longest keys replaced; TokenizerError if the table is inconsistent."""
        if not self._nodes:
            return text
        raw = text.encode()
        pieces: list[bytes] = []
        at = 0
        while at < len(raw):
            length, replacement = self._longest(raw, at)
            if not length:
                length = _character_length(raw[at])
                replacement = raw[at : at + length]
            pieces.append(replacement)
            at += length
        return b"".join(pieces).decode("utf-8", "replace")

    def _longest(self, raw: bytes, at: int) -> tuple[int, bytes]:
        """(length of the longest key at `at`, its replacement); length 0: no key matches."""
        length, leaf = 0, 0
        place = self._children(0)
        for offset in range(at, len(raw)):
            byte = raw[offset]
            place ^= byte
            node = self._node(place)
            if byte == 0 or node & 0x800000FF != byte:
                break
            place ^= self._children(place)
            if node & 0x100:
                length, leaf = offset + 1 - at, self._node(place) & 0x7FFFFFFF
        if not length:
            return 0, b""
        end = self._replacements.find(b"\0", leaf)
        if end < 0:
            raise TokenizerError(f"{_KEY}: no replacement at {leaf}")
        return length, self._replacements[leaf:end]

    def _children(self, place: int) -> int:
        node = self._node(place)
        return node >> 10 << ((node & 0x200) >> 6)

    def _node(self, place: int) -> int:
        if place >= len(self._nodes):
            raise TokenizerError(f"{_KEY}: no node {place}")
        return self._nodes[place]


def _growth(nodes: NDArray[np.uint32], replacements: bytes) -> float:
    """The largest expansion of a key in bytes per byte; at least 1.

    The trie is walked level by level. XOR with its label gives a node the place where its parent's
    children lie: sorted by that, the children of a level are found together. Each node counts once,
    on the first level that reaches it: there its key is shortest.
    """
    index, label = np.arange(len(nodes)), (nodes & 0xFF).astype(np.int64)
    children = index ^ ((nodes >> 10).astype(np.int64) << ((nodes & 0x200) >> 6))
    below = np.flatnonzero((nodes < 1 << 31) & (label != 0))
    below = below[np.argsort(below ^ label[below], kind="stable")]
    families = below ^ label[below]  # sorted
    ends = np.append(np.flatnonzero(np.frombuffer(replacements, np.uint8) == 0), len(replacements))
    seen = np.zeros(len(nodes) + 256, np.bool_)  # labels change only the last eight bits
    most, length, level = 1.0, 0, children[:1]
    while len(level) and length < _LONGEST_KEY:
        length += 1
        level = np.unique(level[level < len(seen)])
        level = level[~seen[level]]
        seen[level] = True
        first, last = (np.searchsorted(families, level, side) for side in ("left", "right"))
        counts = last - first
        skipped = np.repeat(first - np.cumsum(counts) + counts, counts)
        found = below[np.arange(len(skipped)) + skipped]
        level = children[found]
        leaves = level[(nodes[found] & 0x100 != 0) & (level < len(nodes))]
        begins = (nodes[leaves] & 0x7FFFFFFF).astype(np.int64)
        begins = begins[begins < len(replacements)]
        if len(begins):
            nbytes = (ends[np.searchsorted(ends, begins)] - begins).max()
            most = max(most, float(nbytes) / length)
    if len(level):
        most = max(most, float(np.diff(ends, prepend=-1).max()) / (length + 1))
    return most


def _character_length(first: int) -> int:
    """Bytes of the UTF-8 character that begins with `first`."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
