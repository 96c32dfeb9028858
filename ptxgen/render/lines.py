"""Template lines of a rendered text, found by rendering it once more with marks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.render.frame import body_lines, render_body
from urdir.ptxgen.render.jinja import make_environment
from urdir.ptxgen.render.kernel import Kernel
from urdir.ptxgen.render.sources import TEMPLATES, read_template, split_name
from urdir.ptxgen.target import Target

#: A mark: a template line between two characters that no PTX has.
_MARK = re.compile("\x01([^\x02]*)\x02")
_FIRST_WORD = re.compile(r"^[ \t]*(?=\S)", re.MULTILINE)


def template_lines(spec: Kernel, target: Target, text: str) -> Sequence[str]:
    """The template line ("linear/gemv.ptx.j2:12") of every line of ``text``, the PTX of ``spec``.

    "" for lines of the frame, and those made of expressions alone. Empty if the marks change the
    text, or if the template has changed since.
    """
    env = make_environment(jinja2.FunctionLoader(lambda name: read_template(split_name(name))))
    env.add_extension(_Marks)
    try:
        marked = render_body(env, spec, target)
    except (jinja2.TemplateError, PtxgenError):
        return ()
    lines, plain = text.split("\n"), _MARK.sub("", marked)
    marks = [m[1] if (m := _MARK.search(line)) else "" for line in marked.split("\n")]
    numbers = body_lines(plain)
    first = len(lines) - 2 - len(numbers)  # a brace and an empty line end the text
    if first < 0 or [plain.split("\n")[n] for n in numbers] != lines[first:-2]:
        return ()
    return [*[""] * first, *(marks[n] for n in numbers), "", ""]


class _Marks(Extension):
    """Marks the first word of every line of a template's text with the line's place."""

    priority = 200  # after the preprocessing of other extensions

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """See `jinja2.ext.Extension.filter_stream`."""
        package, file = split_name(stream.name or "")
        where = file if package == TEMPLATES else f"{package}/{file}"
        for token in stream:
            if token.type != "data":
                yield token
                continue
            marked = [
                _FIRST_WORD.sub(f"\\g<0>\x01{where}:{number}\x02", line)
                for number, line in enumerate(token.value.split("\n"), token.lineno)
            ]
            yield Token(token.lineno, token.type, "\n".join(marked))
