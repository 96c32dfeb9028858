"""Writes tests/data/families/errors.json: how far each golden's logits are from llama.cpp's.

    python tests/family_errors.py                       by the numpy reference
    python tests/family_errors.py --device cuda         by the engine: exact mode, f32 cache
    python tests/family_errors.py --device emulator plamo2-dense      of some; the others stay

An error is the root mean square of the differences over the standard deviation of llama.cpp's
logits, all tokens of the golden taken one by one. The file says by what the errors were found:

    {"by": "numpy reference", "errors": {"llama-dense": 2.1e-07, ...}, "others": {}}

and ``others`` which of them were found by something else, and by what.

Each error is printed. A golden whose model cannot be run is left out, and named on stderr. Then
the table of families in model/MODELS.md must be rewritten: python tests/family_table.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.model.partial_sort import WHOLE_POOLS
from tests.model.reference import Reference
from tests.model.stepping import logits_of_each
from urdir.driver.errors import DriverError
from urdir.model.engine.engine import Engine
from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.verify.conformance import relative_rms
from urdir.ptxgen.errors import PtxgenError

FOLDER = Path(__file__).parent / "data" / "families"
FOLDERS = (FOLDER, FOLDER.with_name("encoder_decoders"))
FILE = FOLDER / "errors.json"
#: What llama.cpp allocated for the goldens; LongRoPE has other factors for it than for less.
CONTEXT = 512
Logits = np.ndarray[Any, Any]


def names() -> list[str]:
    """The goldens."""
    paths = (path for folder in FOLDERS for path in sorted(folder.glob("*.gguf.xz")))
    return [path.name.removesuffix(".gguf.xz") for path in paths]


def stored(file: str) -> Path:
    """Where a golden's file is."""
    return next(path for folder in FOLDERS if (path := folder / file).exists())


def unpack(name: str, folder: Path) -> Path:
    """A golden's GGUF file, written to a folder."""
    path = folder / f"{name}.gguf"
    path.write_bytes(lzma.decompress(stored(f"{name}.gguf.xz").read_bytes()))
    return path


def by_reference(path: Path, tokens: list[int], source: list[int]) -> Logits:
    """Logits (tokens, vocab) of `tests/model/reference.py`, which runs no encoder for a source."""
    if source:
        raise NotImplementedError("encoder-decoders")
    with Gguf(path) as file:
        logits: Logits = Reference(file, Config.of(file), CONTEXT).logits(tokens)
    return logits


def by_engine(device: str) -> Callable[[Path, list[int], list[int]], Logits]:
    """The same of the engine in exact mode with an f32 cache, on that device."""

    def logits(path: Path, tokens: list[int], source: list[int]) -> Logits:
        with Engine.open(path, device=device, exact=True, kv_dtype="f32") as engine:
            if source:
                return engine.logits(source, decoder=tokens)
            return logits_of_each(engine.session, tokens)

    return logits


def error_of(name: str, logits_of: Callable[[Path, list[int], list[int]], Logits]) -> float:
    """A golden's error."""
    golden = np.load(stored(f"{name}.npz"))
    source = golden["encoder_tokens"].tolist() if "encoder_tokens" in golden else []
    tokens = golden["tokens"][: WHOLE_POOLS.get(name)]
    with TemporaryDirectory() as folder:
        logits = logits_of(unpack(name, Path(folder)), tokens.tolist(), source)
    return relative_rms(logits, golden["logits"][: len(logits)])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", help="run the engine there (default: the numpy reference)")
    parser.add_argument("names", nargs="*", help="goldens (default: all)")
    options = parser.parse_args()
    device = options.device
    by = f"engine on {device}" if device else "numpy reference"
    found: dict[str, Any] = {"by": by, "errors": {}, "others": {}}
    if options.names:
        found = json.loads(FILE.read_text(encoding="utf-8"))
    for name in options.names or names():
        try:
            error = error_of(name, by_engine(device) if device else by_reference)
        except (ModelError, PtxgenError, DriverError, NotImplementedError) as reason:
            print(f"{name}: {type(reason).__name__} {reason}", file=sys.stderr)
            continue
        found["errors"][name] = float(f"{error:.1e}")
        print(f"{name}: {error:.1e}, {by}", flush=True)
        found["others"].pop(name, None)
        if by != found["by"]:
            found["others"][name] = by
    for part in ("errors", "others"):
        found[part] = dict(sorted(found[part].items()))
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
