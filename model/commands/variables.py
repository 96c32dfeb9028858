"""Flags from the environment.

A flag for which llama.cpp documents a variable (tools/server/README.md) has that one, most of them
``LLAMA_ARG_`` and its name. Every other flag that is served has ``URDIR_ARG_`` and its name;
``--otlp-endpoint`` has OpenTelemetry's variable. As in llama.cpp a flag on the command line wins,
an empty variable is none, switches take 1, true, on and enabled or 0, false, off and disabled, and
``LLAMA_ARG_NO_X`` means the opposite of the switch X whatever it holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from urdir.model.commands.flags import FlagAction
from urdir.model.engine.sampling_settings import SETTINGS

_YES, _NO = ("1", "true", "on", "enabled"), ("0", "false", "off", "disabled")
#: What a value is that says neither.
_EXPECTED = f"expected {', '.join(_YES)} or {', '.join(_NO)}"
_LLAMA, _OWN = "LLAMA_ARG_", "URDIR_ARG_"

#: Flags whose variable is `_LLAMA` and their name, beside those of sampling settings.
_BY_NAME = """
--agent --alias --api-key-file --api-prefix --backend-sampling --cache-idle-slots --cache-prompt
--cache-ram --cache-reuse --cache-type-k --cache-type-v --chat-template --chat-template-file
--chat-template-kwargs --cont-batching --context-shift --cors-credentials --cors-headers
--cors-methods --cors-origins --cpu-moe --ctx-checkpoints --ctx-size --defrag-thold --device
--docker-repo --draft-max --draft-min --embeddings --fit --fit-ctx --fit-target --flash-attn
--hf-file --hf-repo --host --image-max-tokens --image-min-tokens --jinja
--kv-offload --kv-unified --kv-unified-per-slot --lazy-mode --load-mode --log-colors --log-file
--log-jsonl --log-prefix --log-timestamps --log-verbosity --main-gpu --mcp-servers-config
--mcp-servers-json --mlock --mmap --mmproj --mmproj-auto --mmproj-offload --mmproj-url
--model --model-url --models-autoload --models-dir --models-max --models-preset
--mtmd-batch-max-tokens --n-cpu-ffn --n-cpu-moe --n-gpu-layers --n-gpu-layers-draft --n-predict
--no-host --numa --offline --override-tensor --perf --pooling --port --prefill-assistant
--reasoning --reasoning-effort --reasoning-preserve --repack
--reranking --reuse-port --rope-freq-base --rope-freq-scale --rope-scale --rpc --show-timings
--skip-chat-parsing --slot-save-path --spec-draft-backend-sampling --spec-draft-cpu-moe
--spec-draft-model --spec-draft-n-cpu-moe --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min
--spec-draft-p-split --spec-synth-len --spec-synth-rates --spec-type --split-mode
--sse-ping-interval --ssl-cert-file --ssl-key-file --swa-full --tags --tensor-split
--threads --threads-http --timeout --tools --tools-runtime --ui --ui-config
--ui-config-file --ui-mcp-proxy --video-ffmpeg-dir --video-fps --video-timestamp-interval
--yarn-attn-factor --yarn-beta-fast --yarn-beta-slow --yarn-ext-factor --yarn-orig-ctx
"""
_SAMPLING = tuple(of.flags.split()[-1] for of in SETTINGS.values() if of.has_variable)
#: The variables that llama.cpp documents, by flag.
DOCUMENTED: Mapping[str, str] = {
    **{
        flag: _LLAMA + flag[2:].upper().replace("-", "_")
        for flag in (*_BY_NAME.split(), *_SAMPLING)
    },
    "--api-key": "LLAMA_API_KEY",
    "--batch-size": "LLAMA_ARG_BATCH",
    "--checkpoint-min-step": "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    "--direct-io": "LLAMA_ARG_DIO",
    "--metrics": "LLAMA_ARG_ENDPOINT_METRICS",
    "--parallel": "LLAMA_ARG_N_PARALLEL",
    "--path": "LLAMA_ARG_STATIC_PATH",
    "--props": "LLAMA_ARG_ENDPOINT_PROPS",
    "--reasoning-budget": "LLAMA_ARG_THINK_BUDGET",
    "--reasoning-budget-message": "LLAMA_ARG_THINK_BUDGET_MESSAGE",
    "--reasoning-format": "LLAMA_ARG_THINK",
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--slots": "LLAMA_ARG_ENDPOINT_SLOTS",
    "--spec-draft-hf": "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
    "--spec-draft-type-k": "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    "--spec-draft-type-v": "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    "--ubatch-size": "LLAMA_ARG_UBATCH",
}
#: Those that others document.
_OTHERS = {"--otlp-endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT"}


class VariableError(Exception):
    """A variable has a value that its flag cannot have."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, its flag, and the flag that means the opposite, if there is one."""

    name: str
    flag: str
    action: argparse.Action
    opposite: str | None = None

    def source(self, environ: Mapping[str, str]) -> str | None:
        """The variable that is set, this one or its negation; None where neither is."""
        negated = self.name.replace(_LLAMA, f"{_LLAMA}NO_", 1)
        if self.opposite is not None and negated != self.name and negated in environ:
            return negated
        return self.name if environ.get(self.name) else None

    def word(self, source: str, environ: Mapping[str, str]) -> str | None:
        """The flag as a word of a command line, with its value; None where it is off. Raises
        VariableError for a switch that is neither on nor off."""
        value = environ[source]
        if source != self.name:
            return self.opposite
        said = "on" if value in _YES else "off" if value in _NO else None
        if self.action.nargs != 0:
            switches = said is not None and {"on", "off"} <= {*(self.action.choices or ())}
            return f"{self.flag}={said if switches else value}"
        if said is None:
            raise VariableError(_EXPECTED)
        return self.flag if said == "on" else self.opposite


def variables(flags: Mapping[str, argparse.Action]) -> Iterator[Variable]:
    """The variables of a parser's flags, which are given by each of their names."""
    opposites = {
        flag: f"--no-{flag[2:]}"
        for flag, action in flags.items()
        if action.nargs in (0, "?") and f"--no-{flag[2:]}" in flags
    }
    documented = {flags[flag] for flag in DOCUMENTED if flag in flags}
    documented |= {flags[opposites[flag]] for flag in DOCUMENTED if flag in opposites}
    for flag, name in DOCUMENTED.items():
        if flag in flags:
            yield Variable(name, flag, flags[flag], opposites.get(flag))
    negative = {flags[flag] for flag in opposites.values()}
    for action in dict.fromkeys(flags.values()):
        is_table_s = isinstance(action, FlagAction | argparse._HelpAction)
        if is_table_s or action in documented or action in negative:
            continue
        flag = next(name for name in action.option_strings if name.startswith("--"))
        name = _OTHERS.get(flag, _OWN + flag[2:].upper().replace("-", "_"))
        yield Variable(name, flag, action, opposites.get(flag))
