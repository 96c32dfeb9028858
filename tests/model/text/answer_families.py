"""Chat templates in the forms of published families, and an answer in each form.

Each template writes turns, calls and thoughts as its family does, and nothing else of it. The
answers are written by hand: two calls as the family's models write them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from urdir.model.errors import TemplateError
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.template_forms import find_answer_format
from urdir.model.text.template_worker import _environment


@dataclass(frozen=True)
class Family:
    """A template, and what its models answer with: thoughts, if it has any, then `CALLS`."""

    template: str
    answer: str
    thinks: tuple[str, str] | None = None
    many: bool = True  # whether an answer may have several calls
    names: tuple[str, ...] = ()  # templates that are alike


#: The calls of all answers.
CALLS: list[tuple[str, dict[str, Any]]] = [("f", {"a": "é 1", "n": 7}), ("g", {"a": "x"})]
ONE = CALLS[:1]
_ARGS = "c.function.arguments"


def turns(
    head: str, user_end: str, end: str, calls: str, thought: str = "", before: str = ""
) -> str:
    """A template whose assistant turns are ``head thought content calls end``. ``before`` begins
    the answer of a prompt."""
    think = f"{{% if m.reasoning_content %}}{thought}{{% endif %}}" if thought else ""
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + head
        + think
        + "{{ m.content or '' }}{% if m.tool_calls %}"
        + calls
        + "{% endif %}"
        + end
        + "{% else %}{{ m.role }}: {{ m.content }}"
        + user_end
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + head
        + before
        + "{% endif %}"
    )


def each(call: str, between: str = "") -> str:
    """``call`` for each call, as ``c``."""
    gap = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for c in m.tool_calls %}}{call}{gap}{{% endfor %}}"


def nl(text: str) -> str:
    """A text whose line feeds Jinja keeps."""
    return re.sub(r"\{?\n", lambda found: repr(found[0]).join(("{{ ", " }}")), text)


_NAME, _JSON = "{{ c.function.name }}", f"{{{{ {_ARGS} | tojson }}}}"
_OBJECT = f'{{"name": "{_NAME}", "arguments": {_JSON}}}'
_THINK = nl("<think>\n{{ m.reasoning_content }}\n</think>\n\n")


def im(calls: str, thought: str = "", before: str = "") -> str:
    """A template in ChatML."""
    return turns(
        nl("<|im_start|>assistant\n"), nl("<|im_end|>\n"), nl("<|im_end|>\n"), nl(calls), thought,
        nl(before),
    )  # fmt: skip


def tagged(begin: str, assign: str, end: str) -> str:
    """Each argument between tags; those that are no text as JSON."""
    value = "{{ v if v is string else v | tojson }}"
    return (
        f"{{% for k, v in {_ARGS} | items %}}{begin}{{{{ k }}}}{assign}{value}{end}{{% endfor %}}"
    )


_PYTHON = (
    f"{_NAME}({{% for k, v in {_ARGS} | items %}}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_GEMMA = (
    f"<|tool_call>call:{_NAME}{{{{ '{{' }}}}{{% for k, v in {_ARGS} | items %}}{{{{ k }}}}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>"
)
_QWEN_CODER = nl(f"\n<tool_call>\n<function={_NAME}>\n") + tagged(
    "<parameter=", nl(">\n"), nl("\n</parameter>\n")
) + nl("</function>\n</tool_call>")  # fmt: skip
_LLAMA = (nl("<|start_header_id|>assistant<|end_header_id|>\n\n"), "<|eot_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜Assistant｜>", "", "<｜end▁of▁sentence｜>")
_COMMAND = (
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
_SINGLE = (
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set c = m.tool_calls[0] %}"
)
_F, _G = '{"a": "é 1", "n": 7}', '{"a": "x"}'
_FO, _GO = f'{{"name": "f", "arguments": {_F}}}', f'{{"name": "g", "arguments": {_G}}}'
_FP = f'{{"name": "f", "parameters": {_F}}}'


def _hermes(begin: str, end: str, between: str = "\n") -> str:
    return each(nl(begin) + _OBJECT + nl(end), nl(between))


FAMILIES: dict[str, Family] = {
    "hermes": Family(
        im(_hermes("<tool_call>\n", "\n</tool_call>")),
        f"<tool_call>\n{_FO}\n</tool_call>\n<tool_call>\n{_GO}\n</tool_call>",
    ),
    "qwen3": Family(
        im(_hermes("<tool_call>\n", "\n</tool_call>"), _THINK),
        f"<think>\nhm\n</think>\n\n<tool_call>\n{_FO}\n</tool_call>\n"
        f"<tool_call>\n{_GO}\n</tool_call>",
        ("<think>", "</think>"),
    ),
    "qwen3-coder": Family(
        im(each(_QWEN_CODER)),
        "<tool_call>\n<function=f>\n<parameter=a>\né 1\n</parameter>\n<parameter=n>\n7\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=a>\nx\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "nemotron-3": Family(  # the prompt begins the thought
        im(each(_QWEN_CODER), _THINK, "<think>\n"),
        "hm\n</think>\n<tool_call>\n<function=f>\n<parameter=a>\né 1\n</parameter>\n"
        "<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
        ("<think>", "</think>"),
    ),
    "glm-4.5": Family(
        turns(
            "<|assistant|>", "", "",
            nl(each(f"\n<tool_call>{_NAME}\n" + tagged(
                "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n") + "</tool_call>")),
            nl("\n<think>{{ m.reasoning_content }}</think>\n"),
        ),
        "<think>hm</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>é 1</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>\n<tool_call>g\n"
        "<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ("<think>", "</think>"),
    ),
    "kimi-k2": Family(
        turns(
            "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>", "<|im_end|>",
            "<|tool_calls_section_begin|>" + each(
                "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + _JSON
                + "<|tool_call_end|>") + "<|tool_calls_section_end|>",
        ),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{_F}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{_G}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "minimax-m2": Family(
        turns(
            nl("]~b]ai\n"), nl("[e~[\n"), nl("[e~[\n"),
            nl("\n<minimax:tool_call>\n" + each(
                f'<invoke name="{_NAME}">\n' + tagged('<parameter name="', '">', "</parameter>\n")
                + "</invoke>\n") + "</minimax:tool_call>"),
            _THINK, nl("<think>\n"),
        ),
        'hm\n</think>\n\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">é 1'
        '</parameter>\n<parameter name="n">7</parameter>\n</invoke>\n<invoke name="g">\n'
        '<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>',
        ("<think>", "</think>"),
    ),
    "minimax-m1": Family(
        im("<tool_calls>\n" + each(_OBJECT + "\n") + "</tool_calls>"),
        f"<tool_calls>\n{_FO}\n{_GO}\n</tool_calls>",
    ),
    "gemma-4": Family(
        turns(
            nl("<|turn>model\n"), nl("<turn|>\n"), nl("<turn|>\n"), each(_GEMMA),
            before=nl("{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"),
        ),
        '<|channel>thought\nhm\n<channel|><|tool_call>call:f{a:<|"|>é 1<|"|>,n:7}<tool_call|>'
        '<|tool_call>call:g{a:<|"|>x<|"|>}<tool_call|>',
        ("<|channel>thought", "<channel|>"),
    ),
    "deepseek-r1": Family(  # arguments as text
        turns(
            *_DEEPSEEK,
            nl("<｜tool▁calls▁begin｜>" + each(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n"
                f"{{{{ '' + {_ARGS} }}}}\n```<｜tool▁call▁end｜>", "\n") + "<｜tool▁calls▁end｜>"),
            before=nl("<think>\n{# the answer's </think> is cut out of contents #}"),
        ),
        "hm</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        f"{_F}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{_G}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<think>", "</think>"),
    ),
    "deepseek-v3.1": Family(
        turns(
            *_DEEPSEEK,
            "<｜tool▁calls▁begin｜>" + each(
                f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>")
            + "<｜tool▁calls▁end｜>",
            before="{% if enable_thinking %}<think>{% else %}</think>{% endif %}",
        ),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{_F}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>g<｜tool▁sep｜>{_G}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<think>", "</think>"),
    ),
    "deepseek-v3.2": Family(
        turns(
            *_DEEPSEEK,
            nl("\n\n<｜DSML｜function_calls>\n" + each(
                f'<｜DSML｜invoke name="{_NAME}">\n' + tagged(
                    '<｜DSML｜parameter name="',
                    "\" string=\"{{ 'true' if v is string else 'false' }}\">",
                    "</｜DSML｜parameter>\n") + "</｜DSML｜invoke>\n")
               + "</｜DSML｜function_calls>"),
        ),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" '
        'string="true">é 1</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">7'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n'
        '<｜DSML｜parameter name="a" '
        'string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    "mistral": Family(  # ids of nine letters and digits
        turns(
            "", "[/INST]", "</s>",
            "[TOOL_CALLS] [" + each(
                "{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
                f'{{"name": "{_NAME}", "arguments": {_JSON}, "id": "{{{{ c.id }}}}"}}', ", ") + "]",
        ),
        f'[TOOL_CALLS] [{_FO[:-1]}, "id": "abcdefghi"}}, {_GO}]',
    ),
    "mistral-named": Family(
        turns(
            "", "[/INST]", "</s>",
            each(f"[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_JSON}"),
            before="{# [THINK] and [/THINK] are parts of contents #}",
        ),
        f"[THINK]hm[/THINK][TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{_F}"
        f"[TOOL_CALLS]g[CALL_ID]bcdefghij[ARGS]{_G}",
        ("[THINK]", "[/THINK]"),
    ),
    "devstral": Family(
        turns("", "[/INST]", "</s>", each(f"[TOOL_CALLS]{_NAME}[ARGS]{_JSON}")),
        f"[TOOL_CALLS]f[ARGS]{_F}[TOOL_CALLS]g[ARGS]{_G}",
    ),
    "granite-3": Family(  # it describes tools, and does not write calls
        turns("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>", "<|end_of_text|>", "")
        .replace("m.tool_calls", "false") + "{# answer with <|tool_call|> and a list #}",
        f"<|tool_call|>[{_FO}, {_GO}]",
    ),
    "granite-4": Family(
        turns("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>", "<|end_of_text|>",
              nl(_hermes("<tool_call>\n", "\n</tool_call>"))),
        f"<tool_call>\n{_FO}\n</tool_call>\n<tool_call>\n{_GO}\n</tool_call>",
    ),
    "command-r": Family(
        turns(
            *_COMMAND,
            nl("Action:\n```json\n[\n" + each(
                '    {\n        "tool_name": "' + _NAME + '",\n        "parameters": '
                + f"{{{{ {_ARGS} | tojson(indent=4) | indent(8) }}}}" + "\n    }", ",\n")
               + "\n]```"),
        ),
        'Action:\n```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {\n'
        '            "a": "é 1",\n            "n": 7\n        }\n    },\n    {\n'
        '        "tool_name": "g",\n        "parameters": {\n            "a": "x"\n        }\n'
        "    }\n]```",
    ),
    "command-a": Family(
        turns(
            *_COMMAND,
            nl("<|START_ACTION|>[\n" + each(
                '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + _NAME
                + '", "parameters": ' + _JSON + "}", ",\n") + "\n]<|END_ACTION|>"),
            "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
        ).replace(
            "{{ m.content or '' }}",
            "{% if m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}",
        ),
        '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
        f'"tool_name": "f", "parameters": {_F}}},\n    {{"tool_call_id": "1", "tool_name": "g", '
        f'"parameters": {_G}}}\n]<|END_ACTION|>',
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "llama-3": Family(
        turns(*_LLAMA, _SINGLE + f'{{"name": "{_NAME}", "parameters": {_JSON}}}')
        + "{# <|python_tag|> #}",
        _FP,
        many=False,
    ),
    "llama-3-pythonic": Family(
        turns(*_LLAMA, "[" + each(_PYTHON, ", ") + "]"),
        '[f(a="é 1", n=7), g(a="x")]',
    ),
    "llama-4": Family(
        turns(nl("<|header_start|>assistant<|header_end|>\n\n"), "<|eot|>", "<|eot|>",
              "<|python_start|>[" + each(_PYTHON, ", ") + "]<|python_end|>"),
        "<|python_start|>[f(a='é 1', n=7), g(a='x')]<|python_end|>",
    ),
    "functionary-3.1": Family(
        turns(*_LLAMA, each(f"<function={_NAME}>{_JSON}</function>")),
        f"<function=f>{_F}</function><function=g>{_G}</function>",
    ),
    "functionary-3.2": Family(
        turns(*_LLAMA, each(nl(f"{_NAME}\n{_JSON}"), ">>>"), before="").replace(
            "<|end_header_id|>{{ '\\n' }}{{ '\\n' }}",
            "<|end_header_id|>{{ '\\n' }}{{ '\\n' }}>>>").replace(
            "{{ m.content or '' }}", "{% if m.content %}all{{ '\\n' }}{{ m.content }}{% endif %}"),
        f"f\n{_F}>>>g\n{_G}",
    ),
    "firefunction": Family(
        turns(*_LLAMA, " functools[" + each(_OBJECT, ", ") + "]"),
        f" functools[{_FO}, {_GO}]",
    ),
    "phi-4-mini": Family(
        turns("<|assistant|>", "<|end|>", "<|end|>", "").replace("m.tool_calls", "false")
        .replace("{{ t | tojson }}", "<|tool|>{{ t | tojson }}<|/tool|>"),
        f"<|tool_call|>[{_FO}, {_GO}]<|/tool_call|>",
    ),
    "nemotron-2": Family(
        turns(nl("<SPECIAL_11>Assistant\n"), nl("<SPECIAL_12>\n"), nl("<SPECIAL_12>\n"),
              "<TOOLCALL>[" + each(_OBJECT, ", ") + "]</TOOLCALL>"),
        f"<TOOLCALL>[{_FO}, {_GO}]</TOOLCALL>",
    ),
    "apertus": Family(
        turns("<|assistant_start|>", "<|user_end|>", "<|assistant_end|>",
              "<|tools_prefix|>[" + each(f'{{"{_NAME}": {_JSON}}}', ", ") + "]<|tools_suffix|>",
              "<|inner_prefix|>{{ m.reasoning_content }}<|inner_suffix|>"),
        f'<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{{"f": {_F}}}, {{"g": {_G}}}]'
        "<|tools_suffix|>",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "seed-oss": Family(
        turns(
            nl("<seed:bos>assistant\n"), "<seed:eos>", "<seed:eos>",
            nl(each("<seed:tool_call>\n<function=" + _NAME + ">\n" + tagged(
                "<parameter=", ">", "</parameter>\n") + "</function>\n</seed:tool_call>", "\n")),
            nl("<seed:think>{{ m.reasoning_content }}</seed:think>\n"),
        ),
        "<seed:think>hm</seed:think>\n<seed:tool_call>\n<function=f>\n<parameter=a>é 1"
        "</parameter>\n<parameter=n>7</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=g>\n<parameter=a>x</parameter>\n</function>\n"
        "</seed:tool_call>",
        ("<seed:think>", "</seed:think>"),
    ),
    "hunyuan": Family(
        turns(
            "<|hy_Assistant|>", "", "<|hy_eos|>",
            nl("<tool_calls>\n" + each(
                f"<tool_call>{_NAME}\n```json\n{_JSON}\n```</tool_call>", "\n")
               + "\n</tool_calls>"),
        ),
        f"<tool_calls>\n<tool_call>f\n```json\n{_F}\n```</tool_call>\n<tool_call>g\n```json\n{_G}\n"
        "```</tool_call>\n</tool_calls>",
    ),
    "ernie-4.5": Family(
        turns("<|assistant|>", "", "<|end_of_sentence|>",
              nl(_hermes("\n<tool_call>\n", "\n</tool_call>\n", ""))),
        f"<tool_call>\n{_FO}\n</tool_call>\n\n<tool_call>\n{_GO}\n</tool_call>\n",
    ),
    "lfm2": Family(
        im("").replace("m.tool_calls", "false")
        .replace("{{ t | tojson }}", "<|tool_list_start|>{{ t | tojson }}<|tool_list_end|>"),
        '<|tool_call_start|>[f(a="é 1", n=7), g(a="x")]<|tool_call_end|>',
    ),
    "lfm2.5": Family(
        im("<|tool_call_start|>[" + each(_PYTHON, ", ") + "]<|tool_call_end|>"),
        "<|tool_call_start|>[f(a='é 1', n=7), g(a='x')]<|tool_call_end|>",
    ),
    "olmo-3": Family(
        im("<function_calls>" + each(_PYTHON, "\n") + "</function_calls>"),
        '<function_calls>f(a="é 1", n=7)\ng(a="x")</function_calls>',
    ),
    "kimi-k3": Family(
        turns(
            '<|open|>message role="assistant"<|sep|>', "<|end_of_msg|>",
            "<|close|>message<|sep|><|end_of_msg|>",
            "<|open|>tools<|sep|>" + each(
                f'<|open|>call tool="{_NAME}" index="{{{{ loop.index }}}}"<|sep|>' + tagged(
                    '<|open|>argument key="',
                    "\" type=\"{{ 'string' if v is string else 'number' if v is number else "
                    "'boolean' if v is boolean else 'other' }}\"<|sep|>",
                    "<|close|>argument<|sep|>") + "<|close|>call<|sep|>")
            + "<|close|>tools<|sep|>",
        ),
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" '
        'type="string"<|sep|>é 1<|close|>argument<|sep|><|open|>argument key="n" type="number"'
        '<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="g" index="2"'
        '<|sep|><|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|><|close|>'
        "call<|sep|><|close|>tools<|sep|>",
    ),
    "minimax-m3": Family(  # a key is in its value's end, too
        im(each("<tool_call><invoke name=\"" + _NAME + '">' + tagged("<", ">", "</{{ k }}>")
                + "</invoke></tool_call>")),
        '<tool_call><invoke name="f"><a>é 1</a><n>7</n></invoke></tool_call><tool_call>'
        '<invoke name="g"><a>x</a></invoke></tool_call>',
    ),
    "solar": Family(  # an id in front of the name
        turns("<|begin|>assistant", "<|end|>", "<|end|>",
              "<|tool_calls|>" + each(
                  "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>" + _NAME
                  + f"<|tool_call:args|>{_JSON}<|tool_call:end|>") + "<|calls|>"),
        f"<|tool_calls|><|tool_call:begin|>abc<|tool_call:name|>f<|tool_call:args|>{_F}"
        f"<|tool_call:end|><|tool_call:begin|>bcd<|tool_call:name|>g<|tool_call:args|>{_G}"
        "<|tool_call:end|><|calls|>",
    ),
    "gpt-oss": Family(
        "<|start|>assistant<|channel|>analysis<|message|>{{ messages }}",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.f <|constrain|>json<|message|>{_F}",
        many=False,
    ),
}  # fmt: skip


def renderer(template: str) -> Callable[..., str]:
    """Renders turns, tools and variables by a template, in this process."""
    compiled = _environment().from_string(template)

    def render(messages: list[Any], tools: Any, variables: Mapping[str, Any]) -> str:
        try:
            return compiled.render({"messages": messages, "tools": tools, **variables})
        except Exception as error:
            raise TemplateError(str(error)) from None

    return render


def derived(name: str, controls: Collection[str] = ()) -> AnswerFormat:
    """The format of a family's answers, from its template."""
    template = FAMILIES[name].template
    return find_answer_format(template, renderer(template), controls)


FORMATS = {name: derived(name) for name in FAMILIES}
