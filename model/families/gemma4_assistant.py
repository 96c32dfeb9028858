"""Gemma 4's assistant: a draft whose layers attend to the keys and values of the model itself.
llama.cpp: `src/models/` gemma4-assistant.cpp.

    x = pre_projection . [the model's embedding of the last token ; h]
    layers as Gemma 4 has them, without keys and values of their own
    logits = token_embd . norm(x), h of the next token = post_projection . norm(x)

The first h is the model's state after its last norm. Windowed layers read the cache of the model's
last layer but one, the others that of its last one. All tokens of a draft are at the position of
the last token and see those before it. Keys: those of `architectures.gemma4`, embedding_length_out
(the model's hidden size). Tensors of a masked_embedding are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import UnsupportedError
from urdir.model.families.architectures.gemma4 import gemma4_layer, layer_ropes
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.description import Description, fields_of
from urdir.model.families.draft_file import DraftConfig, described
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block
from urdir.model.families.parts import rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Linear
from urdir.model.families.windows import flagged_layers
from urdir.model.files.metadata import Metadata
from urdir.model.files.model_file import ModelFile

#: Counts the layers once more.
_EXTRA = "gemma4-assistant.nextn_predict_layers"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Gemma4Assistant(DraftConfig):
    """A draft that begins with ``fc`` of an embedding and a state of the model, and passes on
    ``passed`` of its own."""

    passed: Linear

    def mixer(self, layer: int) -> tuple[Attention, Block]:
        """The attention of a layer, and its block."""
        block = self.layers[layer].blocks[0]
        mixer = block.branches[0].network
        assert isinstance(mixer, Attention)
        return mixer, block

    def network(self, layer: int) -> tuple[Dense, Block]:
        """The network of a layer, and its block."""
        block = self.layers[layer].blocks[1]
        network = block.branches[0].network
        assert isinstance(network, Dense)
        return network, block


def gemma4_assistant(gguf: ModelFile, target: Config) -> Gemma4Assistant:
    """The draft in a file, for the model ``target``; raises as `draft_file.described`."""

    def describe(_: Reader, target: Config) -> Gemma4Assistant:
        values = {name: gguf.metadata[name] for name in gguf.metadata if name != _EXTRA}
        stored = {name: tensor.shape for name, tensor in gguf.tensors.items()}
        metadata = Metadata(values, str(gguf.path))
        return _described(Reader(metadata, gguf.architecture, stored, len(stored) + 1), target)

    return described(gguf, target, describe)


def _described(file: Reader, target: Config) -> Gemma4Assistant:
    norm, hidden, outer = rms_norm(file), file.hidden, file.size("embedding_length_out")
    windowed = flagged_layers(file)
    ropes = layer_ropes(file, windowed)
    file.count("attention.shared_kv_layers")
    sources = [target.n_layers - (2 if local else 1) for local in windowed]
    layers = tuple(
        gemma4_layer(file, index, ropes, local, source)
        for index, (local, source) in enumerate(zip(windowed, sources, strict=True))
    )
    embedding = file.matrix("token_embd", None, target.vocab_size, hidden)
    description = Description(
        architecture=file.architecture,
        layers=layers,
        hidden=hidden,
        vocab_size=target.vocab_size,
        context_length=file.size("context_length"),
        embedding=embedding,
        output=Linear(embedding),
        output_norm=file.norm("output_norm", None, norm),
        unused_tensors=tuple(name for name in file.stored if "masked_embedding" in name),
        ignored_keys=file.ignored_keys,
    )
    found = Gemma4Assistant(
        **fields_of(description),
        target_layers=(),
        target_hidden=outer,
        fc=file.linear("nextn.pre_projection", None, hidden, 2 * outer),
        shares_embedding=False,
        shares_output=False,
        token_map=False,
        passed=file.linear("nextn.post_projection", None, outer, hidden),
    )
    _check_caches(found, target)
    return found


def _check_caches(draft: Gemma4Assistant, target: Config) -> None:
    """Raise UnsupportedError unless the model has the keys and values that the draft reads."""
    for layer in range(draft.n_layers):
        mixer, source = draft.mixer(layer)[0], draft.mixer(layer)[0].shares_cache_of
        assert source is not None
        theirs = target.layers[source].attention if source >= 0 else None
        if not isinstance(draft.layers[layer].blocks[1].branches[0].network, Dense):
            raise UnsupportedError("experts in a draft are not supported")
        shapes = [
            (of.kv_heads, of.key_dim, of.value_dim, bool(of.window)) if of else None
            for of in (mixer, theirs)
        ]
        if shapes[0] != shapes[1] or (theirs is not None and theirs.latent is not None):
            raise UnsupportedError(
                f"a draft that reads keys and values of layer {source} of the model: heads, "
                "their width or window differ"
            )
