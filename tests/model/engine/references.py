"""References of a folder, in any of the layouts of `tests/data`.

- families: ``NAME.gguf.xz`` (or ``NAME.gguf``) and ``NAME.npz``, which has ``tokens``, ``logits``
  and ``native``, the error of llama.cpp's own kernels;
- golden: the same without ``native``; of `tests/data/golden` most files are written by
  `golden_files`;
- drafts: ``NAME.npz`` has ``draft_logits``; the draft is ``NAME.draft.gguf.xz``, or a part of
  ``NAME.gguf.xz``, and its model ``NAME.target.gguf.xz``, or what `target_of` names;
- adapters: ``NAME.gguf.xz``, ``NAME.adapter.gguf.xz``, and ``NAME.npz`` with ``logits_scale_1.0``
  and ``logits_scale_0.5``;
- encoder_decoders: as families, with the ``encoder_tokens``;
- encoders: ``NAME.npz`` has ``lengths`` of texts, ``embedding_`` and a pooling, or ``score``;
- folders: ``NAME/config.json``, weights, and ``NAME/golden.npz`` with ``logits``;
- folders of few bits: those that have ``logits_w8a8``, too, whose activations are rounded as the
  quantisation says;
- encoder folders: the same with an ``embedding`` or a ``score``.

What needs something that is not implemented is named with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.golden_files import FILES, FOLDER

#: Endings of names: what another file needs, and the logits of which are in the other's npz.
_PARTS = {
    ".draft": "drafts have tests of their own",
    ".adapter": "adapters have tests of their own",
}
_TARGET = ".target"
#: Drafts that are models by themselves, and those that draft a block in one pass.
_PLAIN, _BLOCK = "simple-", ("dflash-", "dflash2-", "dspark-")


def golden_of(folder: Path, name: str) -> Path:
    """Where a file's logits are."""
    return folder / f"{name.removesuffix(_TARGET)}.npz"


def found_in(folder: Path, kind: str) -> list[Any]:
    """The names of the references of a kind, as `pytest.param`; those that cannot be run are
    skipped with the reason."""
    kinds = {"folders": _folders, "drafts": _drafts}
    kinds |= {"plain drafts": _plain_drafts, "block drafts": _block_drafts}
    kinds |= {"adapters": _adapters, "encoders": _encoders, "encoder_decoders": _encoder_decoders}
    kinds |= {"encoder folders": _encoder_folders, "folders of few bits": _folders_of_few_bits}
    found = kinds.get(kind)
    pairs = _files(folder, kind) if found is None else found(folder)
    return [
        pytest.param(
            name, marks=[pytest.mark.skip(reason=f"{name}: {why}")] if why else [], id=name
        )
        for name, why in pairs
    ]


def target_of(folder: Path, name: str) -> str:
    """The model of a draft: its own, or that of all drafts, or of those of its kind that are
    accepted often."""
    if name.startswith("mtp-"):
        return name
    if any(folder.glob(f"{name}{_TARGET}.gguf*")):
        return f"{name}{_TARGET}"
    if not name.endswith("-high"):
        return "target-any"
    return "target-close" if name.startswith(_PLAIN) else "target-high"


def parts_of(folder: Path, name: str) -> tuple[str, str | None]:
    """The names of the model of a draft and of its own file, if it has one."""
    return target_of(folder, name), None if name.startswith("mtp-") else f"{name}.draft"


def _drafts(folder: Path) -> Iterator[tuple[str, str]]:
    kinds = ("mtp-", "eagle3-", "gemma4assistant-")
    for path in sorted(folder.glob("*.npz")):
        name = path.stem
        is_draft = name.startswith("mtp-") or any(folder.glob(f"{name}.draft.gguf*"))
        if not is_draft or name.startswith((_PLAIN, *_BLOCK)):
            continue
        why = "" if name.startswith(kinds) else "drafts of this kind are not implemented"
        yield name, why


def _block_drafts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(path for kind in _BLOCK for path in folder.glob(f"{kind}*.npz")):
        yield path.stem, ""


def _plain_drafts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob(f"{_PLAIN}*.npz")):
        yield path.stem, ""


def _adapters(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.adapter.gguf*")):
        yield path.name.partition(".")[0], ""


def _encoders(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            if "lengths" in file.files:
                yield path.stem, ""


def _encoder_decoders(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            if "encoder_tokens" in file.files:
                yield path.stem, ""


def _files(folder: Path, kind: str) -> Iterator[tuple[str, str]]:
    packed = {path.name.removesuffix(".gguf.xz") for path in folder.glob("*.gguf.xz")}
    names = packed | {path.stem for path in folder.glob("*.gguf")}
    for name in sorted(names | {name for name in FILES if folder == FOLDER}):
        golden = golden_of(folder, name)
        parts = [why for ending, why in _PARTS.items() if name.endswith(ending)]
        if parts or not golden.exists():
            if kind == "golden":
                yield name, parts[0] if parts else f"there is no {golden.name}"
            continue
        with np.load(golden) as file:
            fields = {*file.files}
        if fields & {"lengths", "encoder_tokens"}:
            continue  # of `_encoders` and `_encoder_decoders`
        if kind == ("families" if "native" in fields else "golden"):
            yield name, _lacking(fields)


def _folders(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*/golden.npz")):
        with np.load(path) as file:
            if not _is_encoded({*file.files}):
                yield path.parent.name, _lacking({*file.files})


def _encoder_folders(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*/golden.npz")):
        with np.load(path) as file:
            if _is_encoded({*file.files}):
                yield path.parent.name, ""


def _folders_of_few_bits(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*/golden.npz")):
        with np.load(path) as file:
            if "logits_w8a8" in file.files:
                yield path.parent.name, ""


def _is_encoded(fields: set[str]) -> bool:
    return bool(fields & {"embedding", "score"})


def _lacking(fields: set[str]) -> str:
    return "" if "logits" in fields else "there are no logits of every token"
