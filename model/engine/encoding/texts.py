"""Tokens of texts and of pairs of texts, and what is done with embeddings on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.engine.encoding.encoder import Encoder, Floats
    from urdir.model.families.pooling import Pooling
    from urdir.model.files.metadata import Metadata
    from urdir.model.text.tokenizer import Tokenizer

#: The template of a query and a document that a ranking model was trained with.
_TEMPLATE = "tokenizer.chat_template.rerank"


def embeddings(
    encoder: Encoder,
    tokenizer: Callable[[], Tokenizer],
    texts: str | Sequence[str] | Sequence[Sequence[int]],
    pooling: Pooling | None,
    normalize: bool,
) -> Floats:
    """See `Engine.embed`."""
    made = encoder.encode(tokens_of(tokenizer, texts), pooling)
    is_score = encoder.chosen_pooling(pooling) == "rank"
    return normalized(made) if normalize and not is_score else made


def scores(
    encoder: Encoder,
    tokenizer: Tokenizer,
    metadata: Metadata,
    pairs: Sequence[tuple[str, str]],
    pooling: Pooling | None,
) -> Floats:
    """See `Engine.score`."""
    if encoder.chosen_pooling(pooling) == "rank":
        return encoder.encode(pair_tokens(tokenizer, metadata, pairs), "rank")[:, 0]
    texts = [text for pair in pairs for text in pair]
    both = embeddings(encoder, lambda: tokenizer, texts, pooling, normalize=True)
    found: Floats = (both[0::2] * both[1::2]).sum(axis=1)
    return found


def tokens_of(
    tokenizer: Callable[[], Tokenizer], texts: str | Sequence[str] | Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """The tokens of each text; those that are given stay as they are."""
    if isinstance(texts, str):
        texts = [texts]
    return [tokenizer().encode_whole(text) if isinstance(text, str) else text for text in texts]


def pair_tokens(
    tokenizer: Tokenizer, metadata: Metadata, pairs: Iterable[tuple[str, str]]
) -> list[Sequence[int]]:
    """The tokens of queries, each with a document: by the file's template, or side by side."""
    template = metadata.optional(_TEMPLATE, str, "")
    if not template:
        return [tokenizer.encode_pair(*pair) for pair in pairs]
    before, found, rest = template.partition("{query}")
    between, also, after = rest.partition("{document}")
    if not (found and also):
        raise ModelError(f"{_TEMPLATE} lacks {{query}} before {{document}}")
    made: list[Sequence[int]] = []
    for query, document in pairs:
        head = f"{before}{query}{between}"
        hidden = [
            (len(before), len(before) + len(query)),
            (len(head), len(head) + len(document)),
        ]
        text = f"{head}{document}{after}"
        made.append(tokenizer.encode(text, parse_special=True, add_bos=True, opaque=hidden))
    return made


def normalized(vectors: Floats) -> Floats:
    """Vectors (n, width) of unit length; those of zeros stay so."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    made: Floats = (vectors / np.where(lengths > 0.0, lengths, 1.0)).astype(np.float32)
    return made
