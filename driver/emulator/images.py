"""The emulator's own "cubin": PTX text for one target, with a magic number and a checksum."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from dataclasses import dataclass

from urdir.driver.emulator.calls import Refused

MAGIC = b"\x7fURDIRPTX\n"
#: Magic, format, length of target name, length of PTX text, checksum of all that follows.
_HEADER = struct.Struct("<10sHIQ16s")
_FORMAT = 1
_ELF = b"\x7fELF"
_FATBIN = b"\x50\xed\x55\xba"


@dataclass(frozen=True, slots=True)
class Image:
    """PTX that was checked for ``target`` ("sm_90")."""

    target: str
    ptx: str

    def encode(self) -> bytes:
        """The image as bytes, the same in every process."""
        target, text = self.target.encode(), self.ptx.encode()
        head = (MAGIC, _FORMAT, len(target), len(text), _checksum(target + text))
        return _HEADER.pack(*head) + target + text

    @staticmethod
    def decode(data: bytes) -> Image:
        """Read an image; INVALID_IMAGE when it is damaged, NO_BINARY_FOR_GPU when foreign."""
        if data[:4] in (_ELF, _FATBIN):
            raise Refused("CUDA_ERROR_NO_BINARY_FOR_GPU", "machine code of a GPU, not an image")
        if len(data) < _HEADER.size or not data.startswith(MAGIC):
            raise Refused("CUDA_ERROR_INVALID_IMAGE", "neither an image nor PTX")
        _, version, target_size, text_size, checksum = _HEADER.unpack_from(data)
        payload = data[_HEADER.size : _HEADER.size + target_size + text_size]
        if version != _FORMAT or _checksum(payload) != checksum:
            raise Refused("CUDA_ERROR_INVALID_IMAGE", "the image is damaged or of another version")
        return Image(payload[:target_size].decode(), payload[target_size:].decode())


def read_input(data: object, address: int, size: int | None = None) -> bytes:
    """The bytes of an image or a PTX text.

    ``data`` is the caller's argument and ``address`` its address; data without a length (an
    address) has it in a header, or ends with a NUL if it is text. Without ``size`` an ELF yields
    its first 64 bytes, enough to refuse it.
    """
    if not address:
        raise Refused("CUDA_ERROR_INVALID_VALUE", "a null image")
    if size is not None:
        return ctypes.string_at(address, size)
    if not isinstance(data, int):
        return bytes(memoryview(data))  # type: ignore[arg-type]
    if ctypes.string_at(address, 4) in (_ELF, _FATBIN):
        return ctypes.string_at(address, 64)
    if ctypes.string_at(address, len(MAGIC)) != MAGIC:
        return ctypes.string_at(address)
    _, _, target_size, text_size, _ = _HEADER.unpack(ctypes.string_at(address, _HEADER.size))
    return ctypes.string_at(address, _HEADER.size + target_size + text_size)


def is_text(data: bytes) -> bool:
    """Whether data could be PTX: printable, and with a .version (the driver checks no more)."""
    head = data[:4096].rstrip(b"\0")
    return b".version" in data and not any(b < 9 or 13 < b < 32 for b in head)


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
