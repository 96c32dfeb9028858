"""Heads of attention that come from one latent vector a token (`families.attention.Latent`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.experts_alone import ExpertsAlone
from urdir.model.blocks.linear_vectors import rows_of
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.attention import Attention, Latent
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.join import Join

if TYPE_CHECKING:
    from urdir.driver.memory import Region, Slice


def append_absorbed(at: LayerStep, mixer: Attention, latent: Latent, in_parts: bool) -> None:
    """q, in the workspace, of the parts that `append_latent_products` leaves, as attention takes
    it, or (``in_parts``) as it does with a ``latent_norm``."""
    if latent.absorb is not None:
        label, matrix, absorbed = at.name("attn_k_b"), at.matrix(latent.absorb), "q absorbed"
        still, to = at.work["q still"], at.work[absorbed]
        ExpertsAlone(at.linear).append_in_turn(label, matrix, mixer.heads, still, to)
        if not in_parts:
            _append_joined(at, "q", mixer.heads, mixer, absorbed)


def append_latent_parts(
    at: LayerStep, mixer: Attention, latent: Latent, x: Activations, norm: NormLayer | None
) -> None:
    """Of the norm of x, in the workspace: k and v for the cache, and q or the parts of it."""
    append_latent_products(at, mixer, latent, x, norm)
    append_latent_key(at, mixer, latent)


def parts_of_heads(at: LayerStep, latent: Latent) -> dict[str, Slice]:
    """What attention with a ``latent_norm`` takes."""
    of = at.norm(latent.norm)
    assert of is not None
    assert of.weight is not None
    names = ("q rotated", "q absorbed", "k rotated", "latent")
    return {name.replace(" ", "_"): at.work[name] for name in names} | {"latent_norm": of.weight}


def append_latent_products(
    at: LayerStep, mixer: Attention, latent: Latent, x: Activations, norm: NormLayer | None
) -> None:
    """The products of the norm of x, and those of the queries' own vector."""
    work, linear = at.work, at.linear
    assert mixer.k is not None
    # a head all of which rotates is not put together
    q, k = ("q", "k") if latent.q_still is None else ("q rotated", "k rotated")
    of_x, queries = [(mixer.k, k), (latent.down, "latent")], [(mixer.q, q)]
    queries += [] if latent.q_still is None else [(latent.q_still, "q still")]
    of_x += queries if latent.q_down is None else [(latent.q_down, "latent q")]
    if mixer.gate is not None:
        of_x.append((mixer.gate.linear, "attention gate"))
    at.append_products("attn_kv_a", [(of, work[name]) for of, name in of_x], x, norm)
    if latent.q_down is not None:
        products = [(at.matrix(of), work[name]) for of, name in queries]
        down = Activations(work["latent q"])
        linear.append(at.name("attn_q_b"), products, down, at.norm(latent.q_norm))


def append_latent_key(at: LayerStep, mixer: Attention, latent: Latent) -> None:
    """The value, which is the norm of the latent vector, and the key."""
    norm, vector = at.norm(latent.norm), Activations(at.work["latent"])
    assert norm is not None
    label = at.name("attn_kv_a_norm")
    at.linear.append_norm(label, mixer.value_dim, vector, norm, at.work["v"])
    if latent.q_still is not None:
        _append_joined(at, "k", 1, mixer, "v")


def append_written_heads(
    at: LayerStep, mixer: Attention, latent: Latent, written: Attention
) -> dict[str, Slice]:
    """q, in the workspace, and k and v of all heads, of the parts that `append_latent_parts` leaves
    and as attention takes them (`Attention.written_out`)."""
    work, rotated = at.work, mixer.key_dim - mixer.value_dim
    assert latent.keys is not None
    append_whole_queries(at, mixer, written.key_dim, work["q"])
    # queries are put together, and their parts free
    still, own = work["q still"], {"k": work["q absorbed"], "v": work["expanded"]}
    products = [(at.matrix(latent.keys), still), (at.matrix(latent.expand), own["v"])]
    at.linear.append(at.name("attn_kv_b"), products, Activations(work["v"]))
    pairs = at.rows.count * mixer.heads
    kernel = Join(pairs, rotated, written.key_dim - rotated, group=mixer.heads)
    label = at.name("attention.k_heads")
    at.plan.launch(kernel, label, a=work["k rotated"], b=still, y=own["k"])
    return own


def append_whole_queries(
    at: LayerStep, mixer: Attention, key_dim: int, q: Region, first: int = 0
) -> None:
    """q of its two parts, for keys of heads of ``key_dim`` values; that of row 0 is made of those
    of row ``first``."""
    pairs, rotated = at.rows.count * mixer.heads, mixer.key_dim - mixer.value_dim
    kernel = Join(pairs, rotated, key_dim - rotated)
    widths = {"q rotated": mixer.heads * rotated, "q still": mixer.heads * (key_dim - rotated)}
    a, b = (rows_of(at.work[n], first, at.rows.count, width) for n, width in widths.items())
    at.plan.launch(kernel, at.name("attention.q"), a=a, b=b, y=q)


def _append_joined(at: LayerStep, name: str, heads: int, mixer: Attention, still: str) -> None:
    """q or k of its two parts: what rotates, and the latent vector or what is fit for it."""
    rotated = mixer.key_dim - mixer.value_dim
    kernel = Join(at.rows.count * heads, rotated, mixer.value_dim)
    parts, label = (at.work[f"{name} rotated"], at.work[still]), at.name(f"attention.{name}")
    at.plan.launch(kernel, label, a=parts[0], b=parts[1], y=at.work[name])


def append_expanded(at: LayerStep, mixer: Attention, latent: Latent, heads: Slice) -> Slice:
    """The results of heads, which are latent vectors, as each head's own values."""
    to = at.work["expanded"]
    label, matrix = at.name("attn_v_b"), at.matrix(latent.expand)
    ExpertsAlone(at.linear).append_in_turn(label, matrix, mixer.heads, heads, to)
    return to
