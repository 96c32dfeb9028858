"""Pre-tokenisers: how BPE splits text into words before merging, by tokenizer.ggml.pre.

The expressions are those of the models' own tokenizer.json (Oniguruma syntax); llama.cpp's differ
where its regex engine is more limited. The mapping of models to expressions is that of llama.cpp's
llama-vocab.cpp. Several expressions apply in sequence, each within the pieces of the previous one;
text that an expression does not match stays a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from urdir.model.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A way to split text into words.

    `byte_level` words use the 256 printable characters that stand for bytes; the others are text in
    which U+2581 stands for a space.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is not merged
    whole_newlines: bool = False  # the same for words of newlines only
    adds_bos: bool = False  # default of tokenizer.ggml.add_bos_token
    always_adds_bos: bool = False  # overrides tokenizer.ggml.add_bos_token
    byte_level: bool = True

    def splitter(self) -> Any:
        """The `tokenizers` pre-tokeniser for these expressions; its pieces concatenate to the
        text."""
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        )


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_DIGIT, _UP_TO_3_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


def _one_of(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased(ending: str, mark: str = "") -> str:
    """Words with at most one change from capitals to small letters: "HTTPServer" stays whole."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{mark}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{mark}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


_CASED_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED_3_DIGITS = _one_of(_cased(_CONTRACTION + "?"), _UP_TO_3_DIGITS, _CASED_PUNCTUATION, _SPACES)
_LLAMA3_WORDS = _one_of(_CONTRACTION, _LETTERS, _UP_TO_3_DIGITS, _PUNCTUATION, _SPACES)
_QWEN2_WORDS = _one_of(_CONTRACTION, _LETTERS, _DIGIT, _PUNCTUATION, _SPACES)
_KANJI_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3_LETTERS = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
)
_DEEPSEEK3_WORDS = _one_of(_DEEPSEEK3_LETTERS, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES)
_LINES = r"[^\n]+|\n+"

# Alphabets with capitals, as DeepSeek's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
# Han, kana, Thai, Lao, Khmer, Burmese and Hangul, as AFMoE's tokenizer.json lists them.
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
# 512, 256, ... spaces before 8, 4, 2 and 1
_CASCADE = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
_BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"

_GPT2 = PreTokenizer((_GPT2_WORDS,))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_WORDS,))
_DIGITS = PreTokenizer((_DIGIT, _GPT2_WORDS))
_GPT4O = PreTokenizer((_CASED_3_DIGITS,))
_DEEPSEEK3 = PreTokenizer((_UP_TO_3_DIGITS, _KANJI_AND_KANA, _DEEPSEEK3_WORDS))
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _CASED_3_DIGITS))
_BLOOM = PreTokenizer((_BLOOM_WORDS,))
_GEMMA4 = PreTokenizer((_LINES,), whole_newlines=True, always_adds_bos=True, byte_level=False)
_BAILING = PreTokenizer(
    (
        _one_of(
            r"'(?i:[sdmt]|ll|ve|re)",
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            _DIGIT,
            r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    )
)

# One entry per behaviour; its names are values of tokenizer.ggml.pre.
_NAMES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "default",
    ),
    (
        _GPT2,
        "gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion granite-docling "
        "modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
    ),
    (
        _LLAMA3,
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3_WORDS,)), "smaug-bpe dbrx chatglm-bpe"),
    (PreTokenizer((_LLAMA3_WORDS,), whole_words=True), "glm4 glm5"),
    (
        _QWEN2,
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    ),
    (
        PreTokenizer(
            (
                _one_of(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    _DIGIT,
                    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                    _SPACES,
                ),
            )
        ),
        "qwen35",
    ),
    (PreTokenizer((_one_of(_LETTERS, _DIGIT, _PUNCTUATION, _SPACES),)), "ufakzeka"),
    (PreTokenizer((_LINES, _QWEN2_WORDS)), "laguna"),
    (
        PreTokenizer(
            (
                _one_of(
                    _CONTRACTION,
                    _LETTERS,
                    _DIGIT,
                    r" ?[^\s\p{L}\p{N}\r\n]+",
                    _SPACES,
                ),
            )
        ),
        "seed-coder",
    ),
    (
        PreTokenizer(
            (
                _UP_TO_3_DIGITS,
                _one_of(_CONTRACTION, _LETTERS, r"\p{N}+", _PUNCTUATION, _SPACES),
            ),
            whole_words=True,
        ),
        "minicpm5",
    ),
    (
        PreTokenizer(
            (
                _one_of(
                    _CONTRACTION, _LETTERS, _UP_TO_3_DIGITS, _PUNCTUATION, r"\s*[\r\n]+", _CASCADE
                ),
            )
        ),
        "jais-2",
    ),
    (
        PreTokenizer(
            (
                _one_of(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    _DIGIT,
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            )
        ),
        "exaone-moe",
    ),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (
        _DIGITS,
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")),
        "falcon",
    ),
    (
        PreTokenizer(
            (_one_of(_cased(""), _DIGIT, _CASED_PUNCTUATION, _SPACES),),
            whole_words=True,
            adds_bos=True,
        ),
        "tekken",
    ),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_CASED_3_DIGITS,), whole_words=True), "granite-embed-multi-97m"),
    (_TINY_AYA, "tiny_aya cohere2moe"),
    (
        PreTokenizer(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
                _one_of(_cased(_CONTRACTION + "?"), _DIGIT, _CASED_PUNCTUATION, _SPACES),
            ),
            whole_words=True,
        ),
        "youtu",
    ),
    (
        PreTokenizer(
            (
                _one_of(
                    r"\p{Han}+",
                    _cased(_CONTRACTION + "?", r"&&[^\p{Han}]"),
                    _UP_TO_3_DIGITS,
                    _PUNCTUATION,
                    _SPACES,
                ),
            )
        ),
        "kimi-k2",
    ),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
    (
        PreTokenizer((_THREES_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3_WORDS)),
        "afmoe",
    ),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _HAN_AND_HANGUL,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, _DIGIT)),
        "deepseek-coder",
    ),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (
        PreTokenizer(
            (
                _UP_TO_3_DIGITS,
                _KANJI_AND_KANA,
                _one_of(_DEEPSEEK3_LETTERS, r" ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"),
                _DIGIT,
            )
        ),
        "spark2_5",
    ),
    (_BLOOM, "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM_WORDS, _DIGIT)), "viking"),
    (
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2_WORDS,
            ),
            adds_bos=True,
        ),
        "chameleon",
    ),
    (_GEMMA4, "gemma4 granite-embed-multi-311m"),
    (PreTokenizer((_LINES,), byte_level=False), "sarvam-moe"),
)

PRE_TOKENIZERS = {name: entry for entry, names in _NAMES for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry for a tokenizer.ggml.pre; UnsupportedError names one that is unknown."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"pre-tokeniser {name!r} (tokenizer.ggml.pre) is unknown; "
            f"known: {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None
