"""Embeddings by sentence-transformers and by urdir, of the same folders and texts in one run.

    PYTHONPATH=.src python -m tests.gpu.embeddings_compared bge-large modernbert-large
    PYTHONPATH=.src python -m tests.gpu.embeddings_compared tiny-bert --texts 8 -dev emulator

A folder has random weights in F16 and a made vocabulary (`made_embedder`). Both start with texts
on the host and end with vectors of unit length there; of the repeats after a run to warm up the
median and the best are printed. "Batches alone" are the model's own calls with tokens on the device
and one state of each text copied back: no tokenising, sorting, pooling and normalising. Exit code
1: the two libraries' vectors differ, or urdir's of a text and its tokens, or of two repeats.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.gpu.made_embedder import EMBEDDERS, texts_of, write_embedder
from urdir.model import Engine

_BATCHES = (32, 64, 128, 256, 512)  # the first is sentence-transformers' default
_LEAST_COSINE = 0.999
#: Of vectors of a text and of its tokens: steps of texts have other sizes at first, whose kernels
#: round to f16 at other places. Both are 3e-6 from the other library's.
_LEAST_OF_TOKENS = 1 - 6e-6

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of each repeat, what was made, and whether that was the same bits each time."""

    seconds: list[float]
    made: Floats
    steady: bool

    @property
    def best(self) -> float:
        """Seconds of the best repeat."""
        return min(self.seconds)


def timed(call: Callable[[], Any], repeats: int) -> Timed:
    """Time a call that returns when its vectors are on the host, after one to warm up."""
    first, seconds, steady = np.asarray(call(), np.float32), list[float](), True
    for _ in range(repeats):
        start = time.perf_counter()
        made = call()
        seconds.append(time.perf_counter() - start)
        steady &= np.array_equal(made, first)
    return Timed(seconds, first, steady)


def of_sentence_transformers(
    folder: Path, texts: Sequence[str], ids: Sequence[Sequence[int]], repeats: int
) -> Iterator[tuple[str, Timed]]:
    """The rows of sentence-transformers, in every batch size."""
    import torch
    from sentence_transformers import SentenceTransformer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(
        str(folder), device=device, model_kwargs={"dtype": torch.float16}, local_files_only=True
    )
    sizes = [size for size in _BATCHES if size == _BATCHES[0] or size <= len(texts)]
    for size in sizes:

        def encode(size: int = size) -> Any:
            return model.encode(list(texts), batch_size=size, show_progress_bar=False)

        yield f"sentence-transformers, batches of {size}", timed(encode, repeats)
    tokens = torch.tensor(ids, device=device)
    mask = torch.ones_like(tokens)
    for size in sizes:

        def forward(size: int = size) -> Any:
            with torch.inference_mode():
                states = [
                    model[0].auto_model(
                        input_ids=tokens[i : i + size], attention_mask=mask[i : i + size]
                    )
                    for i in range(0, len(texts), size)
                ]
                return torch.cat([of.last_hidden_state[:, 0] for of in states]).cpu().float()

        yield f"batches alone, of {size}", timed(forward, repeats)


def of_urdir(
    folder: Path, texts: list[str], ids: list[list[int]], repeats: int, device: str
) -> Iterator[tuple[str, Timed]]:
    """The rows of urdir."""
    with Engine.open(folder, device=device) as engine:
        yield "urdir, texts", timed(lambda: engine.embed(texts), repeats)
        yield "urdir, token ids", timed(lambda: engine.embed(ids), repeats)


def print_table(rows: dict[str, Timed], tokens: int) -> None:
    """The time of each row, and how much longer it is than urdir's with texts."""
    ours = rows["urdir, texts"].best
    print(f"| {'':38} | median ms |  best ms | tokens/s | of urdir |")
    print(f"| {':':-<38} | {':':->9} | {':':->8} | {':':->8} | {':':->8} |")
    for name, row in rows.items():
        usual, best = 1e3 * median(row.seconds), 1e3 * row.best
        rate, ratio = tokens / row.best, row.best / ours
        print(f"| {name:38} | {usual:9.2f} | {best:8.2f} | {rate:8,.0f} | {ratio:8.2f} |")
    theirs = [row.best for name, row in rows.items() if name.startswith("sentence")]
    print(
        f"urdir makes {theirs[0] / ours:.2f} x the tokens/s of sentence-transformers in batches of "
        f"{_BATCHES[0]}, its default, and {min(theirs) / ours:.2f} x of its best batches"
    )


def agree(ours: Floats, theirs: Floats) -> bool:
    """Print the least cosine of the two vectors of a text, beside that of different texts."""
    lengths = np.linalg.norm(theirs, axis=1, keepdims=True) * np.linalg.norm(ours, axis=1)
    cosines = theirs @ ours.T / lengths
    same = cosines.diagonal()
    others = cosines[~np.eye(len(ours), dtype=bool)]
    print(
        f"cosine of the two libraries' vectors of a text: {same.min():.6f} at least; of different "
        f"texts: {others.mean():.3f}, {others.max():.3f} at most"
    )
    return bool(same.min() > _LEAST_COSINE)


def compare(shape: str, chosen: argparse.Namespace) -> bool:
    """Make the folder of a shape, time both, and print. Whether the vectors agree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        device = "cpu" if chosen.device.startswith("emulator") else "cuda"
        tokenizer, words = write_embedder(folder, EMBEDDERS[shape], device)
        texts = texts_of(tokenizer, words, chosen.texts, chosen.tokens)
        ids = [made.ids for made in tokenizer.encode_batch(texts)]
        rows = dict(of_sentence_transformers(folder, texts, ids, chosen.repeats))
        rows |= of_urdir(folder, texts, ids, chosen.repeats, chosen.device)
    print(f"{shape}, {chosen.texts} texts of {chosen.tokens} tokens:")
    print_table(rows, chosen.texts * chosen.tokens)
    ours, of_ids = rows["urdir, texts"], rows["urdir, token ids"]
    steady = ours.steady and of_ids.steady
    if not steady:
        print("vectors differ from call to call")
    least = float(np.einsum("ij,ij->i", ours.made, of_ids.made, dtype=np.float64).min())
    print(f"cosine of the vectors of a text and of its tokens: {least:.9f} at least")
    default = rows[f"sentence-transformers, batches of {_BATCHES[0]}"].made
    return agree(ours.made, default) and steady and least > _LEAST_OF_TOKENS


def main() -> int:
    """Compare every shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=EMBEDDERS)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("-dev", "--device", default="auto", help="urdir's device")
    chosen = parser.parse_args()
    agreeing = [compare(shape, chosen) for shape in chosen.shapes]
    return 0 if all(agreeing) else 1


if __name__ == "__main__":
    sys.exit(main())
