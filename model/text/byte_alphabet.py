"""Byte-level BPE's alphabet: a printable character for each byte."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, bytes]:
    """The printable characters that GPT-2's encoder.py writes bytes as."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    chars = {chr(byte): bytes([byte]) for byte in printable}
    return chars | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


#: Bytes by the character that stands for them.
BYTES = _byte_alphabet()
