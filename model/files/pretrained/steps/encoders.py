"""Fields of config.json that are no rename: encoders and the heads that rank."""

from __future__ import annotations

import numpy as np

from urdir.model.errors import ConfigError
from urdir.model.files.limits import TOKENS
from urdir.model.files.metadata import StringArray
from urdir.model.files.pretrained.family import Found
from urdir.model.files.pretrained.fields import Fields
from urdir.model.files.pretrained.steps.common import FULL, layer_kinds, layers_of, number

#: The class of a model that ranks or classifies, at its end.
RANKING = "ForSequenceClassification"
#: The same of an encoder without its decoder.
ENCODING = "EncoderModel"
_RANK = 4
_POOLINGS = {"mean": 1, "cls": 2}


def labels(fields: Fields, found: Found) -> None:
    """The names of the scores."""
    named = fields.given("id2label", dict, {"0": "LABEL_0", "1": "LABEL_1"})
    TOKENS.check(len(named), f"{fields.path}: 'id2label'", ConfigError)
    numbers = {str(number) for number in range(len(named))}
    if set(map(str, named)) != numbers or not all(isinstance(of, str) for of in named.values()):
        raise fields.wrong("id2label", named)
    names = [named[str(number)] for number in range(len(named))]
    found["classifier.output_labels"] = StringArray.of(names)
    found["pooling_type"] = _RANK
    if (pooling := fields.take("classifier_pooling", str)) is not None:
        if pooling not in _POOLINGS:
            raise fields.refused("classifier_pooling", "mean and cls are supported")
        found["classifier.pooling_type"] = _POOLINGS[pooling]


def without_padding(fields: Fields, found: Found) -> None:
    """Positions of RoBERTa begin after that of padding, and count no tokens of padding."""
    positions = number(found, "context_length") or 514
    padding = fields.given("pad_token_id", int, 1)
    if not 0 <= padding <= positions - 2:
        raise fields.wrong("pad_token_id", padding)
    found["own.padding"], found["context_length"] = padding, positions - padding - 1


def half_windows(fields: Fields, found: Found) -> None:
    """A causal ModernBERT has half of the windows."""
    found["attention.sliding_window"] = window = number(found, "attention.sliding_window") // 2
    fields.fix("sliding_window", (window,))
    fields.drop("sliding_window")


def modern_windows(fields: Fields, found: Found) -> None:
    """ModernBERT's windows, and the bases of RoPE in layers with and without them."""
    layers = layers_of(fields, found)
    window = fields.size("local_attention", 128)
    every = fields.size("global_attn_every_n_layers", 3)
    kinds = layer_kinds(fields, found, FULL, "sliding_attention")
    flags = [layer % every != 0 for layer in range(layers)]
    if kinds is not None:
        flags = [kind != FULL for kind in kinds]
    found["attention.sliding_window"] = window
    found["attention.sliding_window_pattern"] = np.array(flags)
    base = fields.given("global_rope_theta", float, 160000.0)
    found["rope.freq_base"] = base
    found["rope.freq_base_swa"] = fields.given("local_rope_theta", float, base)
    fields.take("classifier_pooling", str)  # of a head that ranks
