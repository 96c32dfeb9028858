"""The PTX text of a kernel for a target, and the key that is known without it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

from urdir.ptxgen.ptx.origin import digest, remember
from urdir.ptxgen.render import sources
from urdir.ptxgen.render.kernel import Kernel, text_fields
from urdir.ptxgen.target import Target


def key_of(spec: Kernel, target: str) -> str:
    """A readable stem and a hash, ``normalise-sm_90-5f0c...``, equal in every process.

    Of the kernel's name, every one of its `text_fields`, the ``target``, and digests of the sources
    (template, the spec's module, all of ptxgen).
    """
    fields = (f"{k}={v!r}" for k, v in text_fields(spec).items())
    digests = (
        sources.source_digest(spec.template),
        sources.module_digest(type(spec).__module__),
        sources.generator_digest(),
    )
    text = "\n".join((spec.name, *fields, target, *digests))
    return f"{spec.name}-{target}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def text_of(spec: Kernel, target: Target) -> str:
    """The PTX of ``spec`` for ``target``, the same text in every process; messages about it find
    its template lines (`ptx.origin`)."""
    from urdir.ptxgen.render.frame import render  # late: a key needs no Jinja

    text = render(spec, target)
    remember(digest(text), partial(_template_lines, spec, target))
    return text


def _template_lines(spec: Kernel, target: Target, text: str) -> Sequence[str]:
    from urdir.ptxgen.render.lines import template_lines

    return template_lines(spec, target, text)
