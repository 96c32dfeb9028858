"""How a folder that sentence-transformers wrote makes an embedding of a text."""

from __future__ import annotations

from pathlib import Path

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.tokens import read_json

_POOLINGS = {
    "pooling_mode_mean_tokens": 1,
    "pooling_mode_cls_token": 2,
    "pooling_mode_lasttoken": 3,
}
_NAMES = {"mean": 1, "cls": 2, "lasttoken": 3}


def sentence_metadata(folder: Path) -> dict[str, Value]:
    """The pooling of the module's configuration ("1_Pooling"), as a key; none without one.

    Raises SafetensorsError for a malformed one, UnsupportedError for another pooling, and for
    matrices after it.
    """
    dense = sorted(folder.glob("[0-9]_Dense"))
    if dense:
        raise UnsupportedError(f"{dense[0]}: matrices after pooling are not supported in a folder")
    files = sorted(folder.glob("[0-9]_Pooling/config.json"))
    if not files:
        return {}
    if len(files) > 1:
        raise SafetensorsError(f"{folder}: {len(files)} poolings")
    fields = read_json(files[0])
    chosen = [name for name, on in fields.items() if name.startswith("pooling_mode_") and on]
    if isinstance(named := fields.get("pooling_mode"), str):
        found = [_NAMES.get(named)]
    else:
        found = [_POOLINGS.get(name) for name in chosen]
    if len(found) != 1 or found[0] is None:
        raise UnsupportedError(
            f"{files[0]}: pooling '{shown(named or ' + '.join(chosen))}': mean, cls and lasttoken "
            "are supported"
        )
    return {"pooling_type": found[0]}
