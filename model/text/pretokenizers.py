"""How byte-level BPE cuts text into words before it merges, by tokenizer.ggml.pre.

The expressions are those of the models' own tokenizer.json (Oniguruma syntax). Several are applied
one after the other, each within the pieces that the one before left; what an expression does not
match stays a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text into words."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken as it is, merges or not
    adds_bos: bool = False  # default of tokenizer.ggml.add_bos_token


_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# A word may change from capitals to small letters once: "HTTPServer" is "HTTPServer".
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT_2 = PreTokenizer(_GPT2)
_LLAMA3 = (rf"{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}",)
_LLAMA_3 = PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((rf"{_WORDS}|\p{{N}}|{_PUNCTUATION}|{_SPACES}",))
_DIGITS = PreTokenizer((r"\p{N}", *_GPT2))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]"))
_TEKKEN = PreTokenizer(
    (rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_PUNCTUATION}|{_SPACES}",),
    whole_words=True,
    adds_bos=True,
)
_GPT_4O = PreTokenizer(
    (
        rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}"
        rf"|\p{{N}}{{1,3}}|{_CASED_PUNCTUATION}|{_SPACES}",
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
)
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _GPT_2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA_3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), PreTokenizer(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS),
    "falcon": _FALCON,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry for a tokenizer.ggml.pre; UnsupportedError names one that is unknown."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"pre-tokeniser {name!r} (tokenizer.ggml.pre) is unknown; "
            f"known: {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None
