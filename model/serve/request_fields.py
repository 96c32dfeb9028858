"""Every field of a request that the protocols' owners document, and what becomes of it here.

A field that would change the answer is served or refused (`refusals.refuse_unsupported`). Fields
that nobody documents are ignored, as with vLLM, and named in the log at the level of debugging.
The tables of this room's README are written from `FIELDS` (tests/request_fields.py).

Read on 2026-11-24: openai-python 3.54 (`completion_create_params`), vLLM's `protocol.py` of chat
completions, completions and tokenizing, with the guided_* of 0.9, llama-server's README and
`server-schema.cpp`; on 2026-11-28: openai-python 3.57 (`response_create_params`), anthropic 2.14
(`message_create_params`), ollama-python 0.6.3 (`ChatRequest`, `GenerateRequest`, `Options`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from urdir.model.engine.sampling_settings import SETTINGS


class Handling(Enum):
    """What the server does with a field."""

    SERVED = "served"
    REFUSED = "refused"  # but for values that change nothing
    NO_EFFECT = "without effect"  # here, on the text of an answer


@dataclass(frozen=True, slots=True)
class RequestField:
    """A field at some endpoints; "a.b" is the field b of the object a.

    ``note`` says how it is served, why it is refused or what makes it pointless. Of a field that is
    refused ``neutral`` are the values that change nothing, beside null.
    """

    name: str
    endpoints: tuple[str, ...]
    origins: str  # of O (OpenAI), A (Anthropic), M (ollama), V (vLLM), L (llama-server), J (Jina)
    handling: Handling
    note: str
    neutral: tuple[Any, ...] = ()


CHAT, TEXT, TOKENS, DETOKENIZE = "chat", "completions", "tokenize", "detokenize"
MESSAGES, RESPONSES = "messages", "responses"
NATIVE, INFILL = "completion", "infill"
_BOTH = (CHAT, TEXT, NATIVE)
#: One answer to a conversation, in other words than OpenAI's first ones.
_OTHERS = (MESSAGES, RESPONSES)
OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_OPTIONS = "api/chat", "api/generate", "options"
_OLLAMA = (OLLAMA_CHAT, OLLAMA_GENERATE)
EMBEDDINGS, RERANK, SCORE = "embeddings", "rerank", "score"
NATIVE_EMBEDDINGS = "embedding"
OLLAMA_EMBED, OLLAMA_EMBEDDINGS = "api/embed", "api/embeddings"
_POOLED = (EMBEDDINGS, RERANK, SCORE)
_CHATS = (CHAT, TOKENS, *_OTHERS)
ALL = (*_BOTH, *_OTHERS)
_SAMPLERS = (*ALL, OLLAMA_OPTIONS)
UNSET: tuple[Any, ...] = (False, "", [], {})  # what a field has that is left empty
_CHAINS = (  # llama-server's orders of samplers, which is the one here
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
        "adaptive_p",
    ],  # SillyTavern's
    "edskypmxt",
)
_Row = tuple[str, tuple[str, ...], str, str]

#: Notes on sampling settings, by their field or by those who have it.
_SAMPLING_NOTES = {
    "OVL": "OpenAI's defaults: temperature 1, nothing filtered",
    "VL": "as vLLM and llama.cpp have them",
    "L": "looks back on 64 tokens, or as many",
    "logit_bias": "an object of token ids, 300 at most, or llama-server's pairs of an id, or "
    "a text, and a bias",
}


def _sampling_rows() -> Iterator[_Row]:
    """The settings of the table that have fields; those of one note together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, setting in SETTINGS.items():
        if origins := setting.field_of:
            note = _SAMPLING_NOTES.get(name, _SAMPLING_NOTES[origins])
            rows.setdefault((origins, note), []).append(name)
    for (origins, note), names in rows.items():
        yield " ".join(names), ALL, origins, note


#: Names, endpoints, origins, note. Names of a row are served together.
_SERVED: tuple[_Row, ...] = (
    ("model", ALL, "OAVL",
     "a name of the model, or of a LoRA adapter; another one is a 404, none is that model"),
    ("lora", ALL, "L",
     "a list of `{id, scale}`: the adapters of this answer, by their place in /lora-adapters"),
    ("messages", (CHAT, TOKENS), "OVL",
     "text only: parts of type `text` are joined by line breaks. `developer` becomes `system` "
     "where the template does not know it. A last message by the assistant is continued, unless "
     "`continue_final_message` is false or `add_generation_prompt` is given"),
    ("continue_final_message", _CHATS, "VL",
     "true, or the field of the last message that goes on: `content`, `reasoning_content`. Not "
     "with `add_generation_prompt`"),
    ("add_generation_prompt", _CHATS, "VL", "false: the prompt ends with the last message"),
    ("chat_template_kwargs", _CHATS, "VL",
     "variables of the template, such as `enable_thinking`"),
    ("reasoning_effort", (CHAT, TOKENS, MESSAGES), "OVL",
     "the template's variable; `none` sets `enable_thinking` to false, others to true. Refused "
     "where the template has neither"),
    ("thinking_budget_tokens reasoning_budget_tokens", ALL, "L",
     "the most tokens of reasoning in a message, which then ends; 0: none, -1: no limit"),
    ("thinking_token_budget", ALL, "V", "vLLM's name of it"),
    ("documents", _CHATS, "V", "the template's variable; refused where it has none"),
    ("echo", (CHAT,), "VL", "the answer begins with the message that it continues"),
    ("tools tool_choice parallel_tool_calls", (CHAT, TOKENS, RESPONSES), "OVL",
     "calls are read in the model's own form, which is derived from its template, and arguments "
     "come as they are written. A template without calls gets tools as text. `required` or a named "
     "function constrains the answer. /v1/responses leaves out OpenAI's other tools beside "
     "functions"),
    ("prompt", (TEXT, NATIVE), "OVL",
     "a text, token ids, or a list of either; control tokens in it are parsed"),
    ("prompt add_special_tokens return_token_strs", (TOKENS,), "V",
     "a text; BOS, where the model wants one (default: true); whether `token_strs` come, too"),
    ("content add_special parse_special with_pieces", (TOKENS,), "L",
     "a text; BOS (default: false); control tokens (default: true); whether tokens come as `{id, "
     "piece}`"),
    ("tokens", (DETOKENIZE,), "VL", "token ids"),
    ("echo", (TEXT,), "OVL",
     "texts begin with the prompts; with `logprobs` those of the prompts' tokens come as well, the "
     "first one's being null"),
    ("prompt_logprobs", (TEXT,), "V",
     "up to 20, not in a stream; ranks of the likely tokens alone"),
    ("add_special_tokens", (TEXT,), "V", "false: no BOS before a text"),
    ("max_tokens max_completion_tokens n_predict", _BOTH, "OVL",
     "default: 16 for completions, the rest of the context for chats. -1 and -2: no limit. 0, not "
     "for chats: the prompt is computed and kept, no token comes"),
    ("n", _BOTH, "OVL", "prompts times `n` are 128 at most"),
    ("n_cmpl", _BOTH, "L", "`n`"),
    ("best_of", _BOTH, "OV", "must be `n`: nothing is chosen"),
    *_sampling_rows(),
    ("repetition_penalty", ALL, "V", "looks back on all tokens"),
    ("ignore_eos", ALL, "VL", "as vLLM and llama.cpp have it"),
    ("speculative.n_max", ALL, "L",
     "0: no drafts for this answer; else the limit of the server counts. Answers are the same"),
    ("speculative.p_min", ALL, "L",
     "drafts of a draft model end before a token less likely, where the server does that at all. "
     "Answers are the same"),
    ("stop", _BOTH, "OVL", "up to 16; `stop_reason` of a choice says which it was"),
    ("logprobs top_logprobs", (CHAT,), "OVL", "up to 20"),
    ("logprobs", (TEXT,), "OVL", "a number, up to 20"),
    ("stream", ALL, "OAVL", "server-sent events"),
    ("stream_options", _BOTH, "OVL", "with `stream`"),
    ("stream_options.include_usage", _BOTH, "OVL",
     "usage has `prompt_tokens_details.cached_tokens`"),
    ("cache_salt", ALL, "V",
     "up to 256 characters. Prompts share their beginnings with those of the same salt alone"),
    ("response_format", ALL, "OVL",
     "`text`, `json_object`, `json_schema`, whose objects have the named properties alone unless "
     "`additionalProperties` says otherwise, also with llama-server's `schema`; a model may think "
     "first, or call one of `tools`"),
    ("structured_outputs", ALL, "V",
     "one of `json`, `json_object`, `regex`, `grammar`, `choice`"),
    ("structured_outputs.json structured_outputs.json_object structured_outputs.regex "
     "structured_outputs.grammar structured_outputs.choice",
     ALL, "V",
     "grammars are llama.cpp's (GBNF) or llguidance's (Lark)"),
    ("guided_json guided_regex guided_choice guided_grammar", ALL, "V",
     "vLLM's old names of these"),
    ("guided_whitespace_pattern structured_outputs.whitespace_pattern "
     "structured_outputs.disable_any_whitespace", ALL, "V",
     "blanks between the parts of JSON"),
    ("json_schema grammar", ALL, "L", "llama-server's names of these"),
    ("n_probs", (NATIVE, INFILL), "L", "up to 20, in `completion_probabilities`"),
    ("return_tokens", (NATIVE, INFILL), "L", "true, or a stream: `tokens` has the ids"),
    ("input_prefix input_suffix input_extra", (INFILL,), "L",
     "texts before and after the gap, and of other files, for models with such tokens"),
    ("prompt", (INFILL,), "L", "goes on from the text before the gap"),
    ("n_predict temperature top_k top_p min_p seed stop stream", (INFILL,), "L",
     "as for /completion"),
    ("input instructions", (RESPONSES,), "O",
     "a text, or items: `message`, `reasoning`, `function_call`, `function_call_output`, and "
     "`item_reference` to one of an answer that is kept"),
    ("previous_response_id", (RESPONSES,), "O",
     "goes on from a response, which is kept for an hour after its last use while there is room"),
    ("store", (RESPONSES,), "O", "false: the response is not kept"),
    ("background", (RESPONSES,), "O",
     "true: it is written without a connection, and asked for at /v1/responses/ID"),
    ("max_output_tokens", (RESPONSES,), "O", "default: the rest of the context"),
    ("reasoning.effort", (RESPONSES,), "O", "as `reasoning_effort`"),
    ("text.format", (RESPONSES,), "O", "`text`, `json_object`, `json_schema`"),
    ("stream_options", (RESPONSES,), "O", "with `stream`"),
    ("messages system", (MESSAGES,), "A",
     "blocks of `text`, `thinking`, `tool_use` and `tool_result`"),
    ("max_tokens", (MESSAGES,), "A", "default: the rest of the context"),
    ("stop_sequences", (MESSAGES,), "A", "up to 16"),
    ("tools tool_choice", (MESSAGES,), "A",
     "`custom` tools; `auto`, `any`, `tool`, `none`, with `disable_parallel_tool_use`"),
    ("thinking", (MESSAGES,), "A",
     "the template's `enable_thinking`; `budget_tokens` limits the reasoning, which then ends"),
    ("messages tools", (OLLAMA_CHAT,), "M",
     "text only; calls have `tool_calls`, results `tool_name`"),
    ("prompt system context", (OLLAMA_GENERATE,), "M",
     "a text; the tokens of a conversation, which an answer has at its end"),
    ("suffix", (OLLAMA_GENERATE,), "M",
     "the text after a gap that is filled, for models with such tokens"),
    ("raw", (OLLAMA_GENERATE,), "M", "true: without the template"),
    ("format", _OLLAMA, "M", "`json`, or a schema"),
    ("think", _OLLAMA, "M",
     "the template's `enable_thinking`, and `reasoning_effort` for `low`, `medium`, `high`"),
    ("stream", _OLLAMA, "M", "lines of JSON; the default"),
    ("logprobs top_logprobs", _OLLAMA, "M", "up to 20"),
    ("model options", _OLLAMA, "M",
     "a name of the model, also with `:latest`; settings, by ollama's names"),
    ("temperature top_k top_p min_p repeat_penalty repeat_last_n presence_penalty "
     "frequency_penalty seed stop", (OLLAMA_OPTIONS,), "M", "as elsewhere; `stop` has up to 16"),
    ("num_predict", (OLLAMA_OPTIONS,), "M", "default, 0, -1 and -2: the rest of the context"),
    ("output_config output_config.effort output_config.format", (MESSAGES,), "A",
     "the template's `reasoning_effort`; a `json_schema`"),
    ("model", (*_POOLED, NATIVE_EMBEDDINGS), "OVL", "a name of the model; another one is a 404"),
    ("input", (EMBEDDINGS, NATIVE_EMBEDDINGS), "OVL",
     "a text, token ids, or a list of either, 2048 at most"),
    ("content", (NATIVE_EMBEDDINGS,), "L", "`input`"),
    ("embd_normalize", (NATIVE_EMBEDDINGS,), "L",
     "0: the largest value is 32760; p: a p-norm of 1, up to 64. Default: 2"),
    ("encoding_format", (EMBEDDINGS,), "OVL", "`float`, or `base64`: little-endian f32"),
    ("dimensions", (EMBEDDINGS, OLLAMA_EMBED), "OVM",
     "the length of each embedding: its first values, normalised again"),
    ("query documents", (RERANK,), "VL", "a text; texts or `{text}`, 2048 at most"),
    ("top_n", (RERANK,), "VL", "how many of the best (default: all)"),
    ("return_documents", (RERANK,), "J", "true: results have their text"),
    ("text_1 text_2", (SCORE,), "V",
     "texts, 2048 at most; one on the left is paired with all on the right"),
    ("model input", (OLLAMA_EMBED,), "M", "a name of the model; a text, or texts"),
    ("model prompt", (OLLAMA_EMBEDDINGS,), "M",
     "a name of the model; a text, which is cut where it is too long"),
    ("truncate", (OLLAMA_EMBED,), "M", "false: texts that are too long are refused, not cut"),
)  # fmt: skip

#: Names, endpoints, origins, why; then the values that change nothing.
_REFUSED: tuple[tuple[str, tuple[str, ...], str, str, tuple[Any, ...]], ...] = (
    ("mirostat", _SAMPLERS, "LM", "no such sampler: use `top_p` or `min_p`", (0,)),
    ("typical_p", _SAMPLERS, "LM", "no such sampler: use `top_p` or `min_p`", (1,)),
    ("xtc_probability dynatemp_range", ALL, "L", "no such sampler: use `temperature`", (0,)),
    ("top_n_sigma adaptive_target", ALL, "L", "no such sampler: use `min_p`", (-1, -0.01, 0)),
    ("dry_multiplier", ALL, "L",
     "no such sampler: use `repeat_penalty` or `frequency_penalty`", (0,)),
    ("samplers", ALL, "L",
     "the order of samplers is llama.cpp's usual one, with those that there are", _CHAINS),
    ("min_keep n_indent", ALL, "L", "not supported by the samplers", (0,)),
    ("n_probs", (CHAT, TEXT, *_OTHERS), "L", "use `logprobs`", (0,)),
    ("post_sampling_probs", ALL, "L", "log-probabilities are the model's", UNSET),
    ("t_max_predict_ms", ALL, "L", "use `max_tokens`", (0, -1)),
    ("return_tokens", (CHAT, TEXT, *_OTHERS), "L",
     "token ids are not returned: use /tokenize", UNSET),
    ("return_token_ids return_tokens_as_token_ids", ALL, "V",
     "token ids are not returned: use /tokenize", UNSET),
    ("return_prompt_text", (CHAT,), "V", "prompts are not returned: use /tokenize", UNSET),
    ("grammar_lazy grammar_triggers", ALL, "L", "a grammar holds from the first token", UNSET),
    ("parse_tool_calls", ALL, "L", "calls are always read where `tools` are given", (True,)),
    ("chat_parser generation_prompt", ALL, "L", "the chat template decides", UNSET),
    ("reasoning_format", ALL, "L", "thoughts come as `reasoning_content`", ("auto", "deepseek")),
    ("reasoning_control", ALL, "L",
     "a running answer cannot be told to end its thoughts", UNSET),
    ("include_reasoning", (CHAT,), "V",
     "leave `reasoning_content` unread, or use `reasoning_effort`", (True,)),
    ("use_beam_search", ALL, "V", "answers are sampled", UNSET),
    ("prompt_logprobs", (CHAT, NATIVE, *_OTHERS), "V",
     "use /v1/completions with the prompt of /apply-template", ()),
    ("logprob_token_ids", ALL, "V", "only likely tokens have log-probabilities", ()),
    ("stop_token_ids allowed_token_ids bad_words", ALL, "V",
     "use `stop`, `logit_bias` or `structured_outputs`", ([],)),
    ("include_stop_str_in_output", ALL, "V", "`stop_reason` says which it was", UNSET),
    ("skip_special_tokens", ALL, "V", "control tokens are no text of an answer", (True,)),
    ("truncate_prompt_tokens", ALL, "V", "a prompt that is too long is refused", ()),
    ("add_special_tokens", (CHAT,), "V", "the chat template has them", UNSET),
    ("chat_template", (CHAT, TOKENS), "V",
     "the server's own template is used", UNSET),
    ("prompt_embeds", (TEXT,), "V", "prompts are text or token ids", UNSET),
    ("logits_processors", ALL, "V", "use `logit_bias` or `structured_outputs`", UNSET),
    ("watermarking repetition_detection vllm_xargs", ALL, "V", "not supported", UNSET),
    ("kv_transfer_params ec_transfer_params", ALL, "V", "caches are not transferred", UNSET),
    ("priority", ALL, "V", "requests are answered in the order of their arrival", (0,)),
    ("structural_tag structured_outputs.structural_tag", ALL, "V",
     "use `tools`, or a grammar", UNSET),
    ("structured_outputs.disable_additional_properties", ALL, "V",
     "objects are closed unless they have `additionalProperties`", (*UNSET, True)),
    ("stream_options.continuous_usage_stats", ALL, "V", "usage comes at the end", UNSET),
    ("suffix", (TEXT,), "OV", "text can only be continued", UNSET),
    ("audio", (CHAT,), "O", "this server answers with text", UNSET),
    ("modalities", (CHAT,), "OL", "this server answers with text", (["text"],)),
    ("web_search_options", (CHAT,), "O", "this server has no search", ()),
    ("moderation", (CHAT,), "O", "this server has no moderation", UNSET),
    ("verbosity", (CHAT,), "O", "say in a message how long the answer is to be", ("medium",)),
    ("functions", (CHAT, TOKENS), "OV", "use `tools`", UNSET),
    ("function_call", (CHAT, TOKENS), "OV", "use `tool_choice`", (*UNSET, "none", "auto")),
    ("n n_cmpl best_of", (*_OTHERS, OLLAMA_OPTIONS), "V", "there is one answer", (1,)),
    ("background_options conversation prompt", (RESPONSES,), "O",
     "send the whole conversation, or `previous_response_id`", UNSET),
    ("top_logprobs", (RESPONSES,), "O", "items have no log-probabilities", (0,)),
    ("text.verbosity", (RESPONSES,), "O", "say in a message how long the answer is to be",
     ("medium",)),
    ("moderation image", (RESPONSES,), "O", "this server answers with text", UNSET),
    ("tfs_z", (OLLAMA_OPTIONS,), "M", "no such sampler: use `top_p` or `min_p`", (1,)),
    ("template", (OLLAMA_GENERATE,), "M", "the server's own template is used", UNSET),
    ("images width height steps", (OLLAMA_GENERATE,), "M", "only text is supported", ([], 0)),
    ("container mcp_servers", (MESSAGES,), "A", "the server has no tools", UNSET),
    ("truncate_prompt_tokens", _POOLED, "V", "a text that is too long is refused", ()),
    ("add_special_tokens", _POOLED, "V", "texts have the model's special tokens", (True,)),
    ("normalize", (EMBEDDINGS,), "V", "embeddings have length 1", (True,)),
    ("embd_normalize", (EMBEDDINGS,), "L", "embeddings have length 1", (2,)),
    ("use_activation activation", _POOLED, "V", "scores are those of the model", ()),
    ("embed_dtype", (EMBEDDINGS,), "V", "values are f32", ("float32",)),
    ("endianness", (EMBEDDINGS,), "V", "values are little-endian", ("native", "little")),
    ("messages", (EMBEDDINGS,), "V", "send texts as `input`", UNSET),
    ("data_1 data_2", (SCORE,), "V", "use `text_1` and `text_2`", UNSET),
)  # fmt: skip

_NO_EFFECT: tuple[_Row, ...] = (
    ("mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent dry_base dry_allowed_length "
     "dry_penalty_last_n dry_sequence_breakers adaptive_decay",
     ALL, "L",
     "parts of samplers that are refused"),
    ("length_penalty", ALL, "V", "of beams, which are refused"),
    ("reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags "
     "reasoning_budget_message",
     ALL, "L",
     "the template's tags, and the server's message"),
    ("spaces_between_special_tokens truncation_side", ALL, "V", "parts of what is refused"),
    ("guided_decoding_backend", ALL, "V", "there is one"),
    ("grammar_type preserved_tokens chat_format", ALL, "L",
     "llama-server's own, between its parts"),
    ("n_keep n_discard", ALL, "L", "an answer ends where the context is full"),
    ("id_slot cache_prompt n_cache_reuse", ALL, "L",
     "caches are shared wherever prompts begin alike"),
    ("backend_sampling speculative.n_min speculative.type "
     "speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits "
     "speculative.ngram_min_hits",
     ALL, "L",
     "matters of speed"),
    ("timings_per_token return_progress sse_ping_interval response_fields verbose", ALL, "L",
     "reports beside the answer, which do not come"),
    ("stream_interval", ALL, "V", "events come as tokens do"),
    ("stream_options.include_obfuscation", ALL, "O", "events have no padding"),
    ("request_id session_id", ALL, "V", "names for a log"),
    ("routed_experts_prompt_start return_token_offsets return_mm_kwargs", ALL, "V",
     "of other endpoints of vLLM"),
    ("media_io_kwargs mm_processor_kwargs", (CHAT, TOKENS), "V",
     "of images and sound, which are refused"),
    ("user", ALL, "OV", "any client may send any: it keeps nobody apart"),
    ("safety_identifier prompt_cache_key", (CHAT,), "O",
     "any client may send any: it keeps nobody apart"),
    ("metadata store service_tier prompt_cache_options prompt_cache_retention", (CHAT,), "O",
     "OpenAI's accounting"),
    ("prediction", (CHAT,), "O", "a matter of speed"),
    ("model", (TOKENS, DETOKENIZE), "V", "there is one; of several models it says which"),
    ("samplers n_indent t_max_prompt_ms t_max_predict_ms cache_prompt id_slot n_cache_reuse",
     (INFILL,), "L", "matters of speed, which editors send"),
    ("keep_alive", (*_OLLAMA, OLLAMA_EMBED, OLLAMA_EMBEDDINGS), "M",
     "the server's flags say how long a model stays; of several models 0 unloads it"),
    ("numa num_ctx num_batch num_gpu main_gpu low_vram logits_all vocab_only use_mmap use_mlock "
     "embedding_only num_thread num_keep", (OLLAMA_OPTIONS,), "M",
     "flags of the server decide how a model is loaded"),
    ("mirostat_tau mirostat_eta penalize_newline", (OLLAMA_OPTIONS,), "M",
     "parts of samplers that are refused"),
    ("cache_control", (MESSAGES,), "A", "caches are shared wherever prompts begin alike"),
    ("metadata service_tier inference_geo speed diagnostics user_profile_id workspace_id",
     (MESSAGES,), "A", "Anthropic's accounting"),
    ("metadata service_tier prompt_cache_key prompt_cache_options prompt_cache_retention "
     "safety_identifier access_programs", (RESPONSES,), "O", "OpenAI's accounting"),
    ("include max_tool_calls reasoning.summary", (RESPONSES,), "O",
     "of tools and forms that the server does not have"),
    ("truncation", (RESPONSES,), "O", "a prompt that is too long is refused"),
    ("context_management", (MESSAGES, RESPONSES), "AO", "an answer ends where the context is full"),
    ("user", _POOLED, "OV", "any client may send any: it keeps nobody apart"),
    ("encoding_format", (NATIVE_EMBEDDINGS,), "L", "embeddings are numbers"),
    ("priority", _POOLED, "V", "large requests take turns with others"),
    ("request_id cache_salt", _POOLED, "V", "nothing is kept between requests"),
    ("mm_processor_kwargs", _POOLED, "V", "of images and sound"),
    ("options", (OLLAMA_EMBED, OLLAMA_EMBEDDINGS), "M",
     "flags of the server decide how a model is loaded"),
)  # fmt: skip


def _all() -> Iterator[RequestField]:
    for names, endpoints, origins, note in _SERVED:
        for name in names.split():
            yield RequestField(name, endpoints, origins, Handling.SERVED, note)
    for names, endpoints, origins, note, neutral in _REFUSED:
        for name in names.split():
            yield RequestField(name, endpoints, origins, Handling.REFUSED, note, neutral)
    for names, endpoints, origins, note in _NO_EFFECT:
        for name in names.split():
            yield RequestField(name, endpoints, origins, Handling.NO_EFFECT, note)


FIELDS: tuple[RequestField, ...] = tuple(_all())
