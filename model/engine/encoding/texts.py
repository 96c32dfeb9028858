"""Tokens of texts and of pairs of texts, and what is done with embeddings on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from urdir.model.engine.encoding.encoder import Encoder, Floats
    from urdir.model.families.pooling import Pooling
    from urdir.model.files.metadata import Metadata
    from urdir.model.text.tokenizer import Tokenizer

#: Characters that are cut into tokens together: those of a first step, and then a quarter of the
#: largest ones.
_FIRST, _TOGETHER = 1 << 13, 1 << 14
#: The template of a query and a document that a ranking model was trained with.
_TEMPLATE = "tokenizer.chat_template.rerank"


def embeddings(
    encoder: Encoder,
    tokenizer: Callable[[], Tokenizer],
    texts: str | Sequence[str | Sequence[int]],
    pooling: Pooling | None,
    normalize: bool,
) -> Floats:
    """See `Engine.embed`."""
    if not isinstance(texts, Iterable):
        raise SettingsError(f"texts are {texts!r:.80}: expected a text or several")
    texts = [texts] if isinstance(texts, str) else [*texts]
    tokens = _given_tokens(texts)
    if tokens is None:  # else `encode` checks them
        encoder.check_lengths(texts)
    is_score = encoder.chosen_pooling(pooling) == "rank"
    each = normalized if normalize and not is_score else np.copy
    return encoder.encode(tokens or tokens_of(tokenizer, texts), pooling, each)


def _given_tokens(texts: Sequence[str | Sequence[int]]) -> Sequence[Sequence[int]] | None:
    """The texts, where all of them are tokens."""
    tokens = [text for text in texts if not isinstance(text, str)]
    return tokens if len(tokens) == len(texts) else None


def scores(
    encoder: Encoder,
    tokenizer: Tokenizer,
    metadata: Metadata,
    pairs: Sequence[tuple[str, str]],
    pooling: Pooling | None,
) -> Floats:
    """See `Engine.score`."""
    _check_pairs(pairs)
    if encoder.chosen_pooling(pooling) == "rank":
        return encoder.encode(pair_tokens(tokenizer, metadata, pairs), "rank")[:, 0]
    texts = [text for pair in pairs for text in pair]
    both = embeddings(encoder, lambda: tokenizer, texts, pooling, normalize=True)
    found: Floats = (both[0::2] * both[1::2]).sum(axis=1)
    return found


def _check_pairs(pairs: object) -> None:
    """Raise SettingsError for what is not pairs of texts: a text would be a pair of letters."""
    each = pairs if isinstance(pairs, Sequence) else [pairs]
    if isinstance(pairs, str) or not all(_is_pair(pair) for pair in each):
        raise SettingsError(f"pairs are {pairs!r:.80}: expected two texts each")


def _is_pair(pair: object) -> bool:
    is_two = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
    return is_two and all(isinstance(text, str) for text in pair)  # type: ignore[attr-defined]


def documents_in(documents: object) -> list[str]:
    """The documents, checked to be in a sequence. Raises SettingsError."""
    if isinstance(documents, str) or not isinstance(documents, Iterable):
        raise SettingsError(f"documents are {documents!r:.80}: expected a list of texts")
    return [*documents]


def tokens_of(
    tokenizer: Callable[[], Tokenizer], texts: str | Sequence[str | Sequence[int]]
) -> Iterator[Sequence[int]]:
    """The tokens of each text, made as they are asked for, so that the device works on some while
    the host cuts the next ones; tokens that are given stay as they are."""
    waiting, size, most = list[str](), 0, min(_FIRST, _TOGETHER)
    for text in [texts] if isinstance(texts, str) else texts:
        if isinstance(text, str):
            waiting.append(text)
            size += len(text)
            if size < most:
                continue
        if waiting:
            yield from tokenizer().encode_each(waiting)
            waiting, size, most = [], 0, _TOGETHER
        if not isinstance(text, str):
            yield text
    if waiting:
        yield from tokenizer().encode_each(waiting)


def pair_tokens(
    tokenizer: Tokenizer, metadata: Metadata, pairs: Iterable[tuple[str, str]]
) -> Iterator[Sequence[int]]:
    """The tokens of queries, each with a document: by the file's template, or side by side. Made as
    they are asked for."""
    template = metadata.optional(_TEMPLATE, str, "")
    if not template:
        yield from (tokenizer.encode_pair(*pair) for pair in pairs)
        return
    before, found, rest = template.partition("{query}")
    between, also, after = rest.partition("{document}")
    if not (found and also):
        raise ModelError(f"{_TEMPLATE} lacks {{query}} before {{document}}")
    for query, document in pairs:
        head = f"{before}{query}{between}"
        hidden = [
            (len(before), len(before) + len(query)),
            (len(head), len(head) + len(document)),
        ]
        text = f"{head}{document}{after}"
        yield tokenizer.encode(text, parse_special=True, add_bos=True, opaque=hidden)


def normalized(vectors: Floats) -> Floats:
    """Vectors (n, width) of unit length; those of zeros stay so."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    made: Floats = vectors / np.where(lengths > 0.0, lengths, 1.0).astype(np.float32)[:, None]
    return made
