"""DFlash drafts (arXiv 2602.06036): a few layers that draft a block of tokens at once, beside what
they keep of the model's streams; DSpark drafts choose these tokens one after the other. llama.cpp:
`src/models/dflash.cpp`.

    c = norm(fc . [the streams before the target layers])       keys and values of c in each layer
    x = embedding of [last token, mask, mask, ...]
    x += O attention(rope(norm(Q x')), rope(norm(K x')), V x')  x' = norm(x); heads are normed
    x += down(silu(gate x') * up x')                            x' = norm(x)
    logits of the token at a mask's place = output . norm(x)

    DSpark: logits + markov_w2 . markov_w1[the token before]
    how likely its token is: sigmoid(conf_proj . [norm(x) ; markov_w1[the token before]] + bias)

Each row of a block attends to all that is kept and to the whole block, or with attention.causal to
what is not later. Keys: those of `parts`, `rope`, `windows` and `draft_file`,
attention.layer_norm_rms_epsilon; block_size (the most rows), attention.causal, tokenizer.ggml.
mask_token_id; sample_from_anchor (the last token's row proposes as well), has_confidence_head.
Tensors: those of `draft_file`, enc.output_norm (of c), markov_w1 and markov_w2, conf_proj.
DFlash2 drafts have more: `dflash2`.
"""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.dflash2 import Convolution, Selector, read_convolutions, read_selector
from urdir.model.families.draft_file import (
    MAP,
    DraftConfig,
    described,
    draft_fields,
    read_target_layers,
)
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import (
    attention,
    dense,
    head_dims,
    required_head_norms,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.model.families.stored import Linear, Normalization, StoredMatrix
from urdir.model.families.windows import optional_window, optional_windows
from urdir.model.files.limits import WIDTH
from urdir.model.files.model_file import ModelFile

MASK = "tokenizer.ggml.mask_token_id"
#: Of a DSpark draft: embeddings of the token before, and their products with each token.
_PREVIOUS, _NEXT = "markov_w1", "markov_w2"
_CONFIDENCE = "conf_proj"


@dataclass(frozen=True, slots=True)
class Markov:
    """What the token before adds to the logits of the next one: the product ``next`` of its row of
    ``previous``. ``confidence`` says how likely the next one is, of the last state and that row."""

    previous: StoredMatrix
    next: Linear
    confidence: Linear | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DFlash(DraftConfig):
    """A draft of blocks of up to ``block`` rows: the last token, and ``mask`` in the others. Where
    it is ``anchored``, the last token's row proposes the first token, else it proposes none. With
    ``markov``, or with a ``selector``, tokens are chosen one after the other. ``convolutions`` are
    those around the networks of each layer, if there are any."""

    given_norm: Normalization
    block: int
    mask: int
    causal: bool
    markov: Markov | None
    anchored: bool
    convolutions: tuple[tuple[Convolution, Convolution], ...] = ()
    selector: Selector | None = None

    @property
    def most(self) -> int:
        """The most tokens of a block."""
        return self.block if self.anchored else self.block - 1

    @property
    def chooses_in_turn(self) -> bool:
        """Whether each token depends on the one before."""
        return self.markov is not None or self.selector is not None

    @property
    def dynamic_width(self) -> int:
        """Weights of convolutions that are made for a row."""
        return max((of.dynamic.rows for pair in self.convolutions for of in pair), default=0)

    def mixer(self, layer: int) -> tuple[Attention, Normalization]:
        """The attention of a layer, and the norm before it."""
        branch = self.layers[layer].blocks[0].branches[0]
        assert isinstance(branch.network, Attention)
        assert branch.norm is not None
        return branch.network, branch.norm

    def around(self, layer: int) -> tuple[Convolution | None, Convolution | None]:
        """The convolutions around attention and around the other network of a layer."""
        return self.convolutions[layer] if self.convolutions else (None, None)

    def network(self, layer: int) -> tuple[Dense, Normalization]:
        """The network of a layer, and the norm before it."""
        branch = self.layers[layer].blocks[1].branches[0]
        assert isinstance(branch.network, Dense)
        assert branch.norm is not None
        return branch.network, branch.norm


def dflash(gguf: ModelFile, target: Config) -> DFlash:
    """The draft in a file, for the model ``target``; raises as `draft_file.described`."""

    def describe(file: Reader, target: Config) -> DFlash:
        return _described(file, target, gguf.metadata.require(MASK, int))

    return described(gguf, target, describe)


def _described(file: Reader, target: Config, mask: int) -> DFlash:
    norm, layers = rms_norm(file), read_target_layers(file)
    block = file.size("block_size")
    causal = file.optional("attention.causal", bool, False)
    if block < 2:
        raise ConfigError(f"metadata key '{file.key('block_size')}' is {block}, expected 2 or more")
    if not 0 <= mask < target.vocab_size:
        raise UnsupportedError(f"'{MASK}' is {mask}, the model has {target.vocab_size} tokens")
    own, markov, selector = _layers(file), _markov(file, target), read_selector(file, target)
    file.optional("has_confidence_head", bool, False)
    anchored = file.optional("sample_from_anchor", bool, False)
    if anchored and markov is None:
        raise ConfigError(f"'{file.key('sample_from_anchor')}' without the tensor '{_PREVIOUS}'")
    return DFlash(
        **draft_fields(file, target, own, norm, layers),
        given_norm=file.norm("enc.output_norm", None, norm),
        block=block,
        mask=mask,
        causal=causal,
        markov=markov,
        anchored=anchored,
        convolutions=read_convolutions(file),
        selector=selector,
    )


def _markov(file: Reader, target: Config) -> Markov | None:
    if not file.has(f"{_PREVIOUS}.weight"):
        return None
    vocab, shape = target.vocab_size, file.stored[f"{_PREVIOUS}.weight"]
    if file.has(MAP) or vocab % 4:
        raise UnsupportedError(
            f"'{_PREVIOUS}' with a vocabulary of the draft's own, or one of {vocab} tokens: "
            "a multiple of 4 is supported"
        )
    rank = shape[-1]
    WIDTH.check(rank, f"tensor '{_PREVIOUS}.weight'", ConfigError)
    confidence = None
    if file.has(f"{_CONFIDENCE}.weight"):
        confidence = file.linear(_CONFIDENCE, None, 1, file.hidden + rank, bias="optional")
    previous = file.matrix(_PREVIOUS, None, vocab, rank)
    return Markov(previous, file.linear(_NEXT, None, vocab, rank), confidence)


def _layers(file: Reader) -> tuple[LayerConfig, ...]:
    norm, dim = rms_norm(file), head_dims(file)[0]
    rope, window = read_rope(file, "half", dim), optional_window(file)
    windowed = optional_windows(file, window, 1)

    def layer(index: int) -> LayerConfig:
        heads = required_head_norms(file, index, norm, dim)
        size = window if windowed[index] else 0
        attends = attention(
            file, index, rope, window=size, qk_norm=heads, qkv_bias="absent", output_bias="absent"
        )
        norms = file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)
        return sequential(attends, dense(file, index, bias="absent"), norms)

    return tuple(map(layer, range(file.layer_count())))
