"""SentencePiece's table of replacements (tokenizer.ggml.precompiled_charsmap), NFKC as a rule.

    u32 nbytes  u32 nodes[nbytes / 4]  NUL-terminated replacements

The nodes are Darts-clone's double array: a trie over bytes. Of a node, bits 10 to 30 are the offset
of its children (times 256 if bit 9 is set), bit 8 says that a key ends here, and bits 0 to 7 and 31
must be the byte that leads here. Of a leaf, bits 0 to 30 are where its replacement begins.
Source: Yata and others, https://github.com/s-yata/darts-clone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import TokenizerError
from urdir.model.files.limits import CHARSMAP_NBYTES
from urdir.model.files.metadata import Metadata

_KEY = "tokenizer.ggml.precompiled_charsmap"
#: Bytes that a table may make of one. NFKC makes 11, of U+FDFA.
MOST_GROWTH = 64
#: Bytes of the longest keys that are looked at; for longer ones any replacement counts.
_LONGEST_KEY = 256


class CharsMap:
    """Replaces the longest keys it knows, from the left; an empty one changes nothing."""

    def __init__(self, nodes: list[int], replacements: bytes, growth: float = 1.0) -> None:
        """``growth`` is how many bytes the table can make of one."""
        self._nodes = nodes
        self._replacements = replacements
        self.growth = growth

    @classmethod
    def read(cls, metadata: Metadata) -> CharsMap:
        """The table of a file; TokenizerError for one that is no table."""
        stored = metadata.optional(_KEY, np.ndarray, None)
        if stored is None:
            return cls([], b"")
        if stored.dtype.itemsize != 1 or len(stored) < 4:
            raise TokenizerError(f"{_KEY} is no table of bytes")
        return cls.parse(stored.tobytes())

    @classmethod
    def parse(cls, blob: bytes) -> CharsMap:
        """The table as it is stored; TokenizerError for one that is no table, or makes more than
        `MOST_GROWTH` bytes of one."""
        CHARSMAP_NBYTES.check(len(blob), _KEY, TokenizerError)
        nbytes = int.from_bytes(blob[:4], "little")
        if nbytes % 4 or not 0 < nbytes < len(blob) - 4:
            raise TokenizerError(f"{_KEY}: {nbytes} bytes of nodes in {len(blob)} bytes")
        nodes, replacements = np.frombuffer(blob, "<u4", nbytes // 4, 4), blob[4 + nbytes :]
        growth = _growth(nodes, replacements)
        if growth > MOST_GROWTH:
            raise TokenizerError(f"{_KEY} makes {growth:,.0f} bytes of one, at most {MOST_GROWTH}")
        return cls(nodes.tolist(), replacements, growth)

    def replace(self, text: str) -> str:
        """`text` with the longest keys replaced; TokenizerError if the table leads astray."""
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
        """(length of the longest key at `at`, its replacement); length 0: there is none."""
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
    """The most bytes that a key is replaced by, for each of its own; at least 1.

    The trie is walked level by level. The place of a node, but for its label, is where its parent
    says that children lie: sorted by that, the children of a level are found at once. Children
    count once, at the first level that leads to them: there their keys are shortest.
    """
    index, label = np.arange(len(nodes)), (nodes & 0xFF).astype(np.int64)
    children = index ^ ((nodes >> 10).astype(np.int64) << ((nodes & 0x200) >> 6))
    below = np.flatnonzero((nodes < 1 << 31) & (label != 0))
    below = below[np.argsort(below ^ label[below], kind="stable")]
    families = below ^ label[below]  # sorted
    ends = np.append(np.flatnonzero(np.frombuffer(replacements, np.uint8) == 0), len(replacements))
    seen = np.zeros(len(nodes) + 256, np.bool_)  # labels change the last eight bits alone
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
