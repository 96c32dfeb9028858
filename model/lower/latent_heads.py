"""Heads of attention that come from one latent vector a token (`families.attention.Latent`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.graph.latent import AttendLatent
from urdir.model.graph.ops import Norm, Product
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.chain import Chain
from urdir.model.lower.experts.per_row import PerRow
from urdir.model.lower.linear import lower_together
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.norms import append_norm
from urdir.model.lower.vectors import rows_of
from urdir.ptxgen.kernels.join import Join

if TYPE_CHECKING:
    from urdir.driver.memory import Region, Slice
    from urdir.model.families.attention import Attention

#: Non-absorbed keys and values of heads (`Attention.written_out`), f16: a cache of the sequence
#: that a step begins, or of a block of its tokens, and its number there for each row, u32.
WRITTEN_KEYS, WRITTEN_VALUES = "written keys", "written values"
WRITTEN_SEQUENCE = "written sequence"

#: What prompts carry from one block of such keys to the next (`PrefillBlock`), f32.
WRITTEN_PARTIAL, WRITTEN_SOFTMAX = "written partial", "written softmax"


def append_absorbed(at: Lowering, of: AttendLatent, rows: int, in_parts: bool) -> None:
    """q, in the workspace, of its parts, as attention takes it, or (``in_parts``) as it does with a
    ``latent_norm``."""
    if of.of.absorb is not None:
        label, matrix = of.name("attn_k_b"), at.matrix(of.of.absorb)
        still, to = at.work["q still"], at.work["q absorbed"]
        if alone := of.mixer.key_is_latent:
            to = at.work["q"]
        PerRow(at, rows).append_in_turn(label, matrix, of.mixer.heads, still, to)
        if not (in_parts or alone):
            _append_joined(at, of, "q", rows * of.mixer.heads, "q absorbed")


def parts_of_heads(at: Lowering, of: AttendLatent) -> dict[str, Slice]:
    """What attention with a ``latent_norm`` takes."""
    weight = at.norm(of.of.norm).weight
    assert weight is not None
    names = ("q rotated", "q absorbed", "k rotated", "latent")
    return {name.replace(" ", "_"): at.work[name] for name in names} | {"latent_norm": weight}


def append_latent_key(at: Lowering, of: AttendLatent) -> None:
    """The value, which is the norm of the latent vector, and the key."""
    value = Tensor("v", of.latent.rows, of.latent.width)
    norm = Norm(of.name("attn_kv_a_norm"), value, of.latent, of.of.norm)
    if of.mixer.key_is_latent:
        append_norm(at, norm.label, norm, at.work["k"])
        return
    append_norm(at, norm.label, norm, at.work["v"])
    if of.q_still is not None:
        _append_joined(at, of, "k", of.latent.rows, "v")


def append_own_heads(at: Lowering, of: AttendLatent, own: Attention) -> dict[str, Slice]:
    """q, in the workspace, and k and v of all heads, of the latent vector and the parts of queries
    and keys (`Attention.written_out`)."""
    work, mixer, rows = at.work, of.mixer, at.rows.count
    rotated = mixer.key_dim - mixer.value_dim
    assert of.of.keys is not None
    append_whole_queries(at, of, rows, own.key_dim, work["q"])
    # queries are put together, and their parts free
    made = {"k": work["q absorbed"], "v": work["expanded"]}
    label, value = of.name("attn_kv_b"), Tensor("v", rows, of.latent.width)
    products = [
        Product(label, Tensor(name, rows, linear.rows), value, linear)
        for name, linear in (("q still", of.of.keys), ("expanded", of.of.expand))
    ]
    chain = Chain(value, products=products, results=[product.y for product in products])
    lower_together(at, chain, [at.matrix(product.of) for product in products])
    pairs = rows * mixer.heads
    kernel = Join(pairs, rotated, own.key_dim - rotated, group=mixer.heads)
    parts = {"a": work["k rotated"], "b": work["q still"]}
    at.launch(kernel, of.name("attention.k_heads"), **parts, y=made["k"])
    return made


def append_whole_queries(
    at: Lowering, of: AttendLatent, rows: int, key_dim: int, q: Region, first: int = 0
) -> None:
    """q of its two parts, for keys of heads of ``key_dim`` values; that of row 0 is made of those
    of row ``first``."""
    mixer = of.mixer
    pairs, rotated = rows * mixer.heads, mixer.key_dim - mixer.value_dim
    kernel = Join(pairs, rotated, key_dim - rotated)
    widths = {"q rotated": mixer.heads * rotated, "q still": mixer.heads * (key_dim - rotated)}
    a, b = (rows_of(at.work[n], first, rows, width) for n, width in widths.items())
    at.launch(kernel, of.name("attention.q"), a=a, b=b, y=q)


def _append_joined(at: Lowering, of: AttendLatent, name: str, pairs: int, still: str) -> None:
    """q or k of its two parts: what rotates, and the latent vector or what is fit for it."""
    mixer = of.mixer
    kernel = Join(pairs, mixer.key_dim - mixer.value_dim, mixer.value_dim)
    parts = {"a": at.work[f"{name} rotated"], "b": at.work[still]}
    at.launch(kernel, of.name(f"attention.{name}"), **parts, y=at.work[name])
