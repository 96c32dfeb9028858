"""POST /v1/embeddings, /v1/rerank, /v1/score, llama-server's /embedding, ollama's /api/embed and
its older /api/embeddings: requests and answers."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.model.serve.fields import Fields, is_whole_list
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.ollama import named
from urdir.model.serve.parameters import check_model
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import (
    EMBEDDINGS,
    NATIVE_EMBEDDINGS,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    RERANK,
    SCORE,
)
from urdir.model.serve.tokens import check_length

Rows = npt.NDArray[np.float32]
#: Most texts of a request.
MOST_TEXTS = 2048
_ENCODINGS = ("float", "base64")
#: The highest p of a norm that embeddings may have: f64 holds powers of that.
_MOST_ORDER = 64


@dataclass(frozen=True, slots=True)
class Embeds:
    """What a request wants: embeddings of ``texts`` or tokens, or scores of ``pairs`` of texts.

    ``shape`` makes the answer of the rows and the number of tokens. Embeddings are to have
    ``dimensions`` at least. Tokens of texts that are too long are left out with ``truncates``.
    """

    shape: Callable[[Rows, int], Any]
    texts: tuple[str | tuple[int, ...], ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    dimensions: int | None = None
    truncates: bool = False


def read_embeddings(fields: Fields, model: ServedModel, limits: Limits) -> Embeds:
    """Read a request of /v1/embeddings; ApiError if it is invalid."""
    refuse_unsupported(fields, EMBEDDINGS)
    check_model(fields.text("model"), model)
    encoding = fields.choice("encoding_format", _ENCODINGS)
    width = fields.whole("dimensions", 1)
    encoded = _base64 if encoding == "base64" else _floats

    def shape(rows: Rows, tokens: int) -> Json:
        rows = _shortened(rows, width)
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(row)}
            for index, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model.names[0], "usage": usage}

    return Embeds(shape, _read_inputs(fields, model), dimensions=width)


def read_native_embeddings(fields: Fields, model: ServedModel, limits: Limits) -> Embeds:
    """Read a request of llama-server's /embedding or /embeddings; ApiError if it is invalid."""
    refuse_unsupported(fields, NATIVE_EMBEDDINGS)
    check_model(fields.text("model"), model)
    order = fields.whole("embd_normalize", 0, _MOST_ORDER)
    name = "input" if fields.raw("content") is None else "content"

    def shape(rows: Rows, tokens: int) -> Any:
        made = _of_norm(rows, 2 if order is None else order)
        return [{"index": index, "embedding": [_floats(row)]} for index, row in enumerate(made)]

    return Embeds(shape, _read_inputs(fields, model, name))


def _of_norm(rows: Rows, order: int) -> Rows:
    """Embeddings by llama.cpp's ``embd_normalize``: of a p-norm of 1, or with 0 of a largest
    absolute value of 32760."""
    if order == 2:
        return rows
    wide = np.abs(rows.astype(np.float64))
    if order == 0:
        sizes = wide.max(axis=1) / 32760.0
    else:
        sizes = (wide**order).sum(axis=1) ** (1.0 / order)
    made: Rows = (rows / np.where(sizes > 0, sizes, np.inf)[:, None]).astype(np.float32)
    return made


def read_ollama_embed(fields: Fields, model: ServedModel, limits: Limits) -> Embeds:
    """Read a request of /api/embed; ApiError if it is invalid. Texts that are too long are cut
    unless "truncate" is false."""
    refuse_unsupported(fields, OLLAMA_EMBED)
    check_model(named(fields), model)
    start = time.perf_counter()
    width = fields.whole("dimensions", 1)

    def shape(rows: Rows, tokens: int) -> Json:
        rows = _shortened(rows, width)
        return {
            "model": model.names[0],
            "embeddings": [_floats(row) for row in rows],
            "total_duration": round(1e9 * (time.perf_counter() - start)),
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }

    cuts = fields.raw("truncate") is None or fields.flag("truncate")
    texts = _read_texts(fields, "input", model, cuts=cuts)
    return Embeds(shape, texts, dimensions=width, truncates=cuts)


def read_ollama_embedding(fields: Fields, model: ServedModel, limits: Limits) -> Embeds:
    """Read a request of /api/embeddings, which older clients of ollama send: one text, which is cut
    where it is too long. ApiError if it is invalid."""
    refuse_unsupported(fields, OLLAMA_EMBEDDINGS)
    check_model(named(fields), model)
    text = fields.needed_text("prompt")
    if not text:
        fields.fail("prompt", "is empty")
    return Embeds(lambda rows, tokens: {"embedding": _floats(rows[0])}, (text,), truncates=True)


def read_rerank(fields: Fields, model: ServedModel, limits: Limits) -> Embeds:
    """Read a request of /v1/rerank as Jina and Cohere have it; ApiError if it is invalid."""
    refuse_unsupported(fields, RERANK)
    check_model(fields.text("model"), model)
    query, documents = fields.needed_text("query"), _read_documents(fields)
    most = fields.whole("top_n", 1) or len(documents)
    returned = fields.flag("return_documents")
    for text in (query, *documents):
        check_length(model, text)

    def shape(rows: Rows, tokens: int) -> Json:
        scores = rows[:, 0].astype(np.float64)
        order = np.argsort(-scores, kind="stable")[:most].tolist()
        results = [{"index": i, "relevance_score": float(scores[i])} for i in order]
        if returned:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        made = {"id": f"rerank-{secrets.token_hex(12)}", "model": model.names[0], "object": "list"}
        return {**made, "usage": usage, "results": results}

    return Embeds(shape, pairs=tuple((query, document) for document in documents))


def read_score(fields: Fields, model: ServedModel, limits: Limits) -> Embeds:
    """Read a request of /v1/score as vLLM has it: a text with each of others, or as many texts on
    both sides. ApiError if it is invalid."""
    refuse_unsupported(fields, SCORE)
    check_model(fields.text("model"), model)
    first, second = (fields.texts(name, MOST_TEXTS) for name in ("text_1", "text_2"))
    for name, texts in (("text_1", first), ("text_2", second)):
        if not texts:
            fields.fail(name, "is missing")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        fields.fail("text_2", f"has {len(second)} texts for {len(first)}: give as many, or one")
    for text in (*first, *second):
        check_length(model, text)

    def shape(rows: Rows, tokens: int) -> Json:
        data = [
            {"index": index, "object": "score", "score": float(row[0])}
            for index, row in enumerate(rows)
        ]
        made = {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
        }
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {**made, "model": model.names[0], "data": data, "usage": usage}

    return Embeds(shape, pairs=tuple(zip(first, second, strict=True)))


def _read_inputs(
    fields: Fields, model: ServedModel, name: str = "input"
) -> tuple[str | tuple[int, ...], ...]:
    """A text, texts, the tokens of a text, or of several."""
    value = fields.raw(name)
    size = model.tokenizer.vocab_size
    if is_whole_list(value) and value:
        return (fields.token_ids(name, size),)
    if isinstance(value, list) and value and all(is_whole_list(item) for item in value):
        _check_count(fields, name, len(value))
        return tuple(Fields({name: item}).token_ids(name, size) for item in value)
    return _read_texts(fields, name, model)


def _read_texts(
    fields: Fields, name: str, model: ServedModel, *, cuts: bool = False
) -> tuple[str, ...]:
    texts = fields.texts(name, MOST_TEXTS)
    if not texts:
        fields.fail(name, "is missing or empty")
    for text in texts:
        if not cuts:
            check_length(model, text)
    return texts


def _read_documents(fields: Fields) -> tuple[str, ...]:
    """Texts, or objects with a text."""
    value = fields.raw("documents")
    if not isinstance(value, list) or not value:
        fields.fail("documents", "must be a list of texts, or of objects with a text")
    _check_count(fields, "documents", len(value))
    texts = [item.get("text") if isinstance(item, dict) else item for item in value]
    found = tuple(text for text in texts if isinstance(text, str))
    if len(found) < len(texts):
        fields.fail("documents", "must be a list of texts, or of objects with a text")
    return found


def _check_count(fields: Fields, name: str, count: int) -> None:
    if count > MOST_TEXTS:
        fields.fail(name, f"has {count} entries, at most {MOST_TEXTS} are allowed")


def _shortened(rows: Rows, width: int | None) -> Rows:
    """Embeddings of fewer dimensions, of unit length again."""
    from urdir.model.engine.encoding.texts import normalized

    return rows if width is None else normalized(rows[:, :width])


def _floats(row: Rows) -> list[float]:
    made: list[float] = row.tolist()
    return made


def _base64(row: Rows) -> str:
    """Little-endian f32, as OpenAI's clients read them."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
