"""POST /tokenize and /detokenize, with the fields of vLLM and of llama.cpp."""

from __future__ import annotations

from functools import cache

from urdir.model.errors import ContextFullError
from urdir.model.serve.conversations import read_conversation, template_of
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.refusals import refuse_unsupported
from urdir.model.serve.request_fields import DETOKENIZE, TOKENS
from urdir.model.text.tokenizer import Tokenizer

_SPECIAL = ("add_special_tokens", "add_special")  # vLLM's name and llama.cpp's


def encode_text(
    model: ServedModel, text: str, special: bool = True, parse: bool = True
) -> tuple[int, ...]:
    """Tokenise a plain prompt; ``special`` adds BOS if the model wants it, ``parse`` parses control
    tokens."""
    check_length(model, text)
    return tuple(model.tokenizer.encode(text, parse_special=parse, add_bos=special))


def check_length(model: ServedModel, text: str) -> None:
    """Refuse a text that cannot fit before tokenising it, which takes seconds for a megabyte."""
    if len(text) > model.context * longest_token(model.tokenizer):
        raise _does_not_fit(model, f"a text of {len(text):,} characters does not fit it")


def check_tokens(model: ServedModel, count: int) -> None:
    """Refuse a prompt that leaves no room for an answer."""
    if count >= model.context:
        raise _does_not_fit(model, f"the prompt has {count} tokens, and an answer is to follow")


def _does_not_fit(model: ServedModel, why: str) -> ContextFullError:
    """The error in OpenAI's words, by which LiteLLM and others know it."""
    return ContextFullError(f"this model's maximum context length is {model.context} tokens: {why}")


@cache
def longest_token(tokenizer: Tokenizer) -> int:
    """Length of the longest token in bytes."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def tokenize(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """The tokens of "prompt" (vLLM), "content" (llama.cpp) or "messages"."""
    refuse_unsupported(fields, TOKENS)
    ids = _tokens(fields, model, limits)
    tokens = _pieces(model, ids) if fields.flag("with_pieces") else ids
    result: Json = {"tokens": tokens, "count": len(ids), "max_model_len": model.context}
    if fields.flag("return_token_strs"):
        result["token_strs"] = [model.tokenizer.token_text(token) for token in ids]
    return result


def _tokens(fields: Fields, model: ServedModel, limits: Limits) -> tuple[int, ...]:
    if fields.raw("messages") is not None:
        if fields.flag("add_special_tokens"):
            fields.fail(
                "add_special_tokens",
                "cannot be used with messages: the chat template has special tokens",
            )
        prompt = read_conversation(fields, model, limits).render(model)
        check_length(model, prompt.text)
        return tuple(template_of(model).tokens(prompt))
    name = "content" if fields.raw("content") is not None else "prompt"
    given = [flag for flag in _SPECIAL if fields.raw(flag) is not None]
    # as in the two servers: llama.cpp adds nothing by default
    special = fields.flag(given[0]) if given else name == "prompt"
    parse = fields.raw("parse_special") is None or fields.flag("parse_special")
    return encode_text(model, fields.needed_text(name), special, parse)


def _pieces(model: ServedModel, ids: tuple[int, ...]) -> list[Json]:
    """llama.cpp's objects: the text of a token, or its bytes if they are not UTF-8."""
    pieces: list[Json] = []
    for token in ids:
        raw = model.tokenizer.token_bytes(token)
        try:
            pieces.append({"id": token, "piece": raw.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token, "piece": list(raw)})
    return pieces


def detokenize(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """The text of "tokens", as "prompt" (vLLM) and as "content" (llama.cpp)."""
    refuse_unsupported(fields, DETOKENIZE)
    tokens = fields.raw("tokens")
    if isinstance(tokens, list) and len(tokens) > model.context:
        raise ContextFullError(
            f"{len(tokens)} tokens are more than the context of {model.context} has"
        )
    ids = fields.token_ids("tokens", model.tokenizer.vocab_size)
    text = model.tokenizer.decode(ids, keep_control=True)
    return {"prompt": text, "content": text}
