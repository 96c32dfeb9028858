"""How a folder that sentence-transformers wrote makes an embedding of a text: pooling, and matrices
after it."""

from __future__ import annotations

from pathlib import Path

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.metadata import Value
from urdir.model.files.pretrained.fields import shown
from urdir.model.files.pretrained.places import Place
from urdir.model.files.pretrained.tokens import read_json
from urdir.model.files.safetensors import StoredTensor, read_folder

_POOLINGS = {
    "pooling_mode_mean_tokens": 1,
    "pooling_mode_cls_token": 2,
    "pooling_mode_lasttoken": 3,
}
_NAMES = {"mean": 1, "cls": 2, "lasttoken": 3}
#: Names of the matrices after pooling, in their order.
_DENSE = ("dense_2", "dense_3")
#: The one activation that is supported; sentence-transformers has tanh where a file names none.
_IDENTITY = "torch.nn.modules.linear.Identity"


def sentence_metadata(folder: Path) -> dict[str, Value]:
    """The pooling of the module's configuration ("1_Pooling"), as a key; none without one.

    Raises SafetensorsError for a malformed one, UnsupportedError for another pooling.
    """
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


def dense_after_pooling(folder: Path) -> tuple[dict[str, Place], dict[str, StoredTensor]]:
    """The matrices that follow pooling ("2_Dense" and "3_Dense"): their places, and the stored
    tensors there.

    Raises SafetensorsError for a missing file and a tensor that is no matrix, UnsupportedError for
    more matrices, and for biases and activations.
    """
    places: dict[str, Place] = {}
    stored: dict[str, StoredTensor] = {}
    modules = sorted(folder.glob("[0-9]_Dense"))
    if len(modules) > len(_DENSE):
        raise UnsupportedError(f"{modules[-1]}: two matrices after pooling are supported")
    for module, name in zip(modules, _DENSE, strict=False):
        activation = read_json(module / "config.json").get("activation_function")
        if activation != _IDENTITY:
            raise UnsupportedError(f"{module}: activation {shown(activation)} is not supported")
        tensors = read_folder(module)
        if set(tensors) != {"linear.weight"}:
            found = shown(", ".join(sorted(tensors)))
            raise UnsupportedError(f"{module}: tensors {found}; linear.weight alone is supported")
        if len(shape := tensors["linear.weight"].shape) != 2:
            raise SafetensorsError(f"{module}: tensor 'linear.weight' {shape} is not a matrix")
        stored[f"{module.name}.linear.weight"] = tensors["linear.weight"]
        places[f"{name}.weight"] = Place((f"{module.name}.linear.weight",))
    return places, stored
