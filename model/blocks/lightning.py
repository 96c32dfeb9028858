"""Lightning attention as a network: linear attention whose states decay at rates of their own."""

from __future__ import annotations

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.blocks.recurrent import SILU
from urdir.model.blocks.states import launch_heads
from urdir.model.families.recurrent import Lightning
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.gated_norm import GatedNorm


def append_lightning(
    at: LayerStep, mixer: Lightning, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """o (norm(recurrence) * sigmoid(gate x')), x' being the norm of x; see `Lightning`."""
    work, y, gate = at.work, at.work["heads"], at.work["recurrent gate"]
    products = [(at.matrix(of), work[f"mixed {name}"]) for name, of in mixer.parts.items()]
    at.linear.append(at.name("attn_qkv"), products, x, norm, SILU)
    at.linear.append(at.name("attn_gate"), [(at.matrix(mixer.gate), gate)], x, norm)
    launch_heads(
        at,
        "attention",
        mixer,
        a=at.parts.weights.rates[mixer.slopes],
        y=y,
        **{f"{name}_heads": work[f"mixed {name}"] for name in mixer.parts},
    )
    of, width = mixer.norm, mixer.heads * mixer.dim
    assert of.weight is not None
    kernel = GatedNorm(at.rows.count, width, of.norm.eps, activation=Activation("sigmoid"))
    weight = at.vector(of.weight)
    at.plan.launch(kernel, at.name("attn_norm_2"), x=y, gate=gate, weight=weight, y=y)
    return at.finish("attn_output", at.matrix(mixer.o), Activations(y), to)
