"""Whether two files have the same vocabulary, so that a draft's tokens are its model's."""

from __future__ import annotations

from itertools import zip_longest

from urdir.model.errors import UnsupportedError
from urdir.model.files.metadata import StringArray
from urdir.model.files.model_file import ModelFile

#: As in llama.cpp (`common/speculative.cpp`): how many more tokens one of them may have, padding of
#: the embedding, and where texts begin to count: control tokens before may have other names.
MOST_MORE, FIRST_COMPARED = 128, 5
_SHOWN = 40


def check_same_vocabulary(model: ModelFile, draft: ModelFile) -> None:
    """Raise UnsupportedError for a draft of another vocabulary, with the first difference: kind of
    tokeniser, texts of tokens, begin and end of a text. Nothing is known of a file without any."""
    of_model, of_draft = (_tokens(file) for file in (model, draft))
    if of_model is None or of_draft is None:
        return
    kinds = [str(file.metadata.get("tokenizer.ggml.model")) for file in (model, draft)]
    if kinds[0] != kinds[1]:
        _refuse(draft, f"a tokeniser {kinds[1]!r}, the model has {kinds[0]!r}")
    if abs(len(of_model) - len(of_draft)) > MOST_MORE:
        _refuse(draft, f"{len(of_draft)} tokens, the model has {len(of_model)}")
    for name in ("bos", "eos"):
        _check_added(model, draft, name)
    pairs = zip_longest(of_model.decoded(), of_draft.decoded())
    for token, (text, other) in enumerate(pairs):
        both = text is not None and other is not None
        if token >= FIRST_COMPARED and both and text != other:
            _refuse(draft, f"{other[:_SHOWN]!r} as token {token}, the model {text[:_SHOWN]!r}")


def _tokens(file: ModelFile) -> StringArray | None:
    return file.metadata.optional("tokenizer.ggml.tokens", StringArray, None)


def _check_added(model: ModelFile, draft: ModelFile, name: str) -> None:
    """A token that is added to every text has to be the same."""
    adds, ids = f"tokenizer.ggml.add_{name}_token", f"tokenizer.ggml.{name}_token_id"
    first, second = (
        file.metadata.optional(ids, int, None)
        if file.metadata.optional(adds, bool, False)
        else None
        for file in (model, draft)
    )
    if first != second:
        _refuse(draft, f"{second} as the {name} token that is added, the model {first}")


def _refuse(draft: ModelFile, what: str) -> None:
    raise UnsupportedError(f"{draft.path}: the draft has another vocabulary: {what}")
