"""What an embedding or ranking model makes of the states of a text, described.

Keys: pooling_type (0 none, 1 mean, 2 the first token, 3 the last one, 4 a score),
classifier.pooling_type (of a score: 1 the mean), classifier.output_labels (their number is that of
the scores), dense_2_feat_out. Tensors: cls, cls.norm and cls.output of a score; dense_2 and dense_3
after pooling. llama.cpp: `llm_graph_context::build_pooling` and `build_dense_out` of
`src/llama-graph.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from urdir.model.errors import ConfigError
from urdir.model.families.pooling import POOLINGS, Pooling
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Linear, Normalization
from urdir.ptxgen.kernels.norm import Norm

#: What llama.cpp writes for a pooling that is not known: -1.
_UNSPECIFIED = 2**32 - 1
_NUMBERS: dict[int, Pooling] = dict(enumerate(POOLINGS))


@dataclass(frozen=True, slots=True)
class Scorer:
    """The scores of a text: ``output`` of norm(f(``dense`` x)), where x is the state that
    ``reads`` names; f is tanh, or GELU with ``gelu``. With ``softmax`` they sum to 1. Without
    ``output`` the scores are those of ``dense``."""

    dense: Linear | None
    norm: Normalization | None
    output: Linear | None
    reads: Literal["mean", "cls", "last"]
    gelu: bool = False
    softmax: bool = False

    @property
    def labels(self) -> int:
        """Number of scores."""
        last = self.output or self.dense
        assert last is not None
        return last.rows


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embeddings of texts: states after the output norm, pooled as the file says (``pooling``; None
    where it does not), then the matrices ``dense``. A ranking model has a ``scorer``; ``labels``
    are the names of its scores, if the file has them."""

    pooling: Pooling | None
    dense: tuple[Linear, ...] = ()
    scorer: Scorer | None = None
    labels: tuple[str, ...] = ()


def read_embedding(file: Reader, *, causal: bool) -> Embedding | None:
    """The embedding of a file; None of a decoder without any of its keys and tensors."""
    pooling = read_pooling(file)
    labels = file.strings("classifier.output_labels")
    scorer = _scorer(file, causal, max(1, len(labels)))
    if pooling is None and scorer is None and causal:
        return None
    if pooling == "rank" and scorer is None:
        raise ConfigError(
            f"tensor 'cls.output.weight' (or 'cls.weight') is missing: {file.key('pooling_type')} "
            "is 4 (rank)"
        )
    return Embedding(pooling, _dense(file), scorer, labels)


def read_pooling(file: Reader) -> Pooling | None:
    """The pooling_type of a file, None without one."""
    number = file.unless("pooling_type", _UNSPECIFIED)
    if number is None:
        return None
    if number not in _NUMBERS:
        raise ConfigError(f"metadata key '{file.key('pooling_type')}' is {number}: expected 0 to 4")
    return _NUMBERS[number]


def _scorer(file: Reader, causal: bool, labels: int) -> Scorer | None:
    """The score of a file that has one. In decoders the last token's state is read."""
    has_dense, has_output = file.has("cls.weight"), file.has("cls.output.weight")
    if not (has_dense or has_output):
        return None
    hidden, is_modern = file.hidden, file.architecture == "modern-bert"
    width = hidden if has_output or file.stored["cls.weight"] == (hidden, hidden) else 1
    norm = Norm("layer", file.number("attention.layer_norm_epsilon", 1e-5))
    number = file.unless("classifier.pooling_type", _UNSPECIFIED)
    if number is None and is_modern:
        number = 1
    return Scorer(
        file.linear("cls", None, width, hidden, bias="optional") if has_dense else None,
        file.norm("cls.norm", None, norm) if file.has("cls.norm.weight") else None,
        file.linear("cls.output", None, labels, hidden, bias="optional") if has_output else None,
        reads="mean" if number == 1 else "last" if causal else "cls",
        gelu=is_modern,
        softmax=file.architecture in ("qwen3", "qwen3vl"),
    )


def _dense(file: Reader) -> tuple[Linear, ...]:
    """The matrices dense_2 and dense_3 after pooling (EmbeddingGemma, and folders)."""
    known = file.of_folder or file.architecture == "gemma-embedding"
    if not known or not file.has("dense_2.weight"):
        return ()
    for name in ("dense_2_feat_in", "dense_3_feat_in", "dense_3_feat_out"):
        file.count(name)  # the tensors have these sizes, too
    hidden, inner = file.hidden, file.size("dense_2_feat_out")
    first = file.linear("dense_2", None, inner, hidden)
    if not file.has("dense_3.weight"):
        return (first,)
    return first, file.linear("dense_3", None, hidden, inner)
