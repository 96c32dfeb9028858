"""Prompts of attention by a latent vector: written out where they begin a sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from urdir.driver.operation import Launch
from urdir.model.engine.batch import StepShape
from urdir.model.engine.engine import Engine
from urdir.model.engine.session import Session
from urdir.ptxgen.kernels.attention.prompt import PromptAttention


def kv_heads(session: Session, shape: StepShape) -> set[int]:
    """KV heads of attention over prompts in a step."""
    kernels = (op.kernel for op in session.steps.bound(shape).plan if isinstance(op, Launch))
    return {kernel.layout.kv_heads for kernel in kernels if isinstance(kernel, PromptAttention)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek2-moe",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("kimi-linear-moe", "kimi-k3-moe", "mistral4-moe", "bailingmoe3-moe")
        ),
    ],
)
def test_default_prompts_divided_anywhere_are_as_near_as_llama_cpp_s(
    name: str, check_divided_prompts: Callable[..., None]
) -> None:
    """A prompt's first step has keys and values for each head, those after it one latent vector."""

    def look(engine: Engine) -> None:
        session = engine.session
        (heads,) = {mixer.heads for mixer in engine.config.attentions}
        assert kv_heads(session, session.shapes.prompt(0, 44)[0]) == {heads}
        assert kv_heads(session, session.shapes.prompt(1, 45)[0]) == {1}

    check_divided_prompts(name, [[31, 12, 1], [1, 13]], look)
