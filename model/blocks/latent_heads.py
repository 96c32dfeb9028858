"""Heads of attention that come from one latent vector a token (`families.description.Latent`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.experts_alone import ExpertsAlone
from urdir.model.blocks.linear import Activations
from urdir.model.blocks.parts import LayerStep
from urdir.model.families.attention import Attention, Latent
from urdir.model.families.stored import Linear
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.join import Join

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_latent_heads(
    at: LayerStep, mixer: Attention, latent: Latent, x: Activations, norm: NormLayer | None
) -> None:
    """q, k and v of the norm of x, in the workspace, as attention takes them."""
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
    of_latent = at.norm(latent.norm)
    assert of_latent is not None
    vector = Activations(work["latent"])
    linear.append_norm(at.name("attn_kv_a_norm"), mixer.value_dim, vector, of_latent, work["v"])
    if latent.absorb is not None:
        _append_joined(at, mixer, latent.absorb)


def _append_joined(at: LayerStep, mixer: Attention, absorb: Linear) -> None:
    """q and k of their two parts: what rotates, and the latent vector or what is fit for it."""
    work, label, matrix = at.work, at.name("attn_k_b"), at.matrix(absorb)
    absorbed = work["q absorbed"]
    ExpertsAlone(at.linear).append_in_turn(label, matrix, mixer.heads, work["q still"], absorbed)
    for name, heads, still in (("q", mixer.heads, "q absorbed"), ("k", 1, "v")):
        rotated = mixer.key_dim - mixer.value_dim
        kernel = Join(at.rows.count * heads, rotated, mixer.value_dim)
        label, parts = at.name(f"attention.{name}"), (work[f"{name} rotated"], work[still])
        at.plan.launch(kernel, label, a=parts[0], b=parts[1], y=work[name])


def append_expanded(at: LayerStep, mixer: Attention, latent: Latent, heads: Slice) -> Slice:
    """The results of heads, which are latent vectors, as each head's own values."""
    to = at.work["expanded"]
    label, matrix = at.name("attn_v_b"), at.matrix(latent.expand)
    ExpertsAlone(at.linear).append_in_turn(label, matrix, mixer.heads, heads, to)
    return to
