"""EAGLE-3 drafts (Li et al. 2025, arXiv 2503.01840) for a model: one layer that reads the streams
of some of the model's layers. llama.cpp: `src/models/eagle3.cpp`.

    g = fc . [the streams before the target layers]           with norm_before_fc: fc . norm([..])
    a = [norm(embedding of the next token) ; norm(g)]
    x = g + O attention(rope(Q a), rope(K a), V a)            with norm_before_residual: norm(g) +
    x += down(silu(gate x') * up x')                          x' = norm(x)
    logits of the token after the next = output . norm(x)

When the draft continues from a drafted token, x replaces g. Keys: those of `parts` and `rope`,
attention.layer_norm_rms_epsilon; those of `draft_file`, without target_layers the second layer,
that in the middle and the third from the end; norm_before_fc, norm_before_residual. Tensors: those
of `draft_file`, enc.output_norm (before fc), attn_norm (of the embedding), attn_norm_2 (of g).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.draft_file import DraftConfig, described, draft_fields, read_target_layers
from urdir.model.families.feed_forward import Dense
from urdir.model.families.parts import dense, head_dims, heads, rms_norm, sequential
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.stored import Linear, Normalization
from urdir.model.files.model_file import ModelFile


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Eagle3(DraftConfig):
    """A draft of one layer, whose attention's matrices have twice as many columns."""

    streams_norm: Normalization | None
    token_norm: Normalization
    hidden_norm: Normalization
    norm_before_residual: bool

    @property
    def mixer(self) -> Attention:
        """The attention of its layer."""
        mixer = self.layers[0].attention
        assert mixer is not None
        return mixer

    @property
    def network(self) -> tuple[Dense, Normalization]:
        """The network of its layer, and the norm before it."""
        branch = self.layers[0].blocks[1].branches[0]
        assert isinstance(branch.network, Dense)
        assert branch.norm is not None
        return branch.network, branch.norm


def eagle3(gguf: ModelFile, target: Config) -> Eagle3:
    """The draft in a file, for the model ``target``; raises as `draft_file.described`."""
    return described(gguf, target, describe_eagle3)


def describe_eagle3(file: Reader, target: Config) -> Eagle3:
    """The draft as a file describes it, which is not checked."""
    if file.layer_count() != 1:
        raise UnsupportedError(f"a draft of {file.layer_count()} layers: one is supported")
    norm, target_layers = rms_norm(file), _target_layers(file, target)
    before_fc = file.optional("norm_before_fc", bool, False)
    residual = file.optional("norm_before_residual", bool, False)
    network = dense(file, 0, bias="absent"), (None, file.norm("ffn_norm", 0, norm))
    layers = (sequential(_attention(file), *network),)
    fields = draft_fields(file, target, layers, norm, target_layers)
    streams = file.norm("enc.output_norm", None, norm, fields["fc"].cols) if before_fc else None
    return Eagle3(
        **fields,
        streams_norm=streams,
        token_norm=file.norm("attn_norm", 0, norm),
        hidden_norm=file.norm("attn_norm_2", 0, norm),
        norm_before_residual=residual,
    )


def _target_layers(file: Reader, target: Config) -> tuple[int, ...]:
    """Those of the file, or those that checkpoints without any are trained with."""
    if file.has_key("target_layers"):
        return read_target_layers(file)
    count = target.n_layers
    return 2, count // 2, count - 3


def _attention(file: Reader) -> Attention:
    (queries, keys), (dim, value_dim) = heads(file, 0), head_dims(file)
    hidden = file.hidden

    def product(name: str, rows: int) -> Linear:
        return file.linear(f"attn_{name}", 0, rows, 2 * hidden)

    return Attention(
        heads=queries,
        kv_heads=keys,
        key_dim=dim,
        value_dim=value_dim,
        scale=1.0 / math.sqrt(dim),
        q=product("q", queries * dim),
        k=product("k", keys * dim),
        v=product("v", keys * value_dim),
        o=file.linear("attn_output", 0, hidden, queries * value_dim),
        rope=read_rope(file, "interleaved", dim),
    )
