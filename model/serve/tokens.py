"""/tokenize and /detokenize, with the fields of vLLM and those of llama.cpp."""

from __future__ import annotations

from functools import cache

from urdir.model.errors import ContextFullError
from urdir.model.serve.chats import read_variables, render, template_of
from urdir.model.serve.fields import Fields
from urdir.model.serve.interface import Json, ServedModel
from urdir.model.serve.limits import Limits
from urdir.model.serve.messages import read_messages
from urdir.model.serve.tools import read_tools
from urdir.model.text.tokenizer import Tokenizer


def encode_text(model: ServedModel, text: str, special: bool = True) -> tuple[int, ...]:
    """A plain prompt; ``special`` adds BOS where the model wants one."""
    check_length(model, text)
    return tuple(model.tokenizer.encode(text, parse_special=True, add_bos=special))


def check_length(model: ServedModel, text: str) -> None:
    """Refuse a text that cannot fit before it is tokenised, which takes seconds for a megabyte."""
    if len(text) > model.context * _longest_token(model.tokenizer):
        raise ContextFullError(
            f"a text of {len(text):,} characters does not fit the context of {model.context} tokens"
        )


def check_tokens(model: ServedModel, count: int) -> None:
    """Refuse a prompt of so many tokens that nothing can follow it."""
    if count >= model.context:
        raise ContextFullError(
            f"the prompt has {count} tokens, the context is {model.context} with the answer"
        )


@cache
def _longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def tokenize(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """The tokens of "prompt" (vLLM), "content" (llama.cpp) or "messages"."""
    if fields.raw("messages") is not None:
        template = template_of(model)
        messages = read_messages(fields, template.source, limits)
        prompt = render(model, messages, read_tools(fields, limits), read_variables(fields))
        check_length(model, prompt.text)
        ids = tuple(template.tokens(prompt))
    else:
        name = "content" if fields.raw("content") is not None else "prompt"
        flag = "add_special" if name == "content" else "add_special_tokens"
        # as the two servers have it: llama.cpp adds nothing unless asked
        special = fields.flag(flag) or (name == "prompt" and fields.raw(flag) is None)
        ids = encode_text(model, fields.needed_text(name), special)
    result: Json = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
    if fields.flag("return_token_strs"):
        result["token_strs"] = [model.tokenizer.token_text(token) for token in ids]
    return result


def detokenize(fields: Fields, model: ServedModel, limits: Limits) -> Json:
    """The text of "tokens", as "prompt" (vLLM) and as "content" (llama.cpp)."""
    tokens = fields.raw("tokens")
    if isinstance(tokens, list) and len(tokens) > model.context:
        raise ContextFullError(
            f"{len(tokens)} tokens are more than the context of {model.context} has"
        )
    ids = fields.token_ids("tokens", model.tokenizer.vocab_size)
    text = model.tokenizer.decode(ids, keep_control=True)
    return {"prompt": text, "content": text}
