r"""The names of ``tokenizer.ggml.pre``:
how each splits text before pairs are merged, and what else it implies.

A GGUF file names its rule only, so the rules are llama.cpp's: its letters, digits and quirks decide the token
ids. The patterns are regular expressions of Oniguruma. Rules that differ from a model's tokenizer.json follow
llama.cpp; NFC is the exception: llama.cpp leaves out what Qwen's tokenizers do to letters with combining
marks.
"""

from dataclasses import dataclass

# Alternatives that several patterns share. Their order decides: the first that matches is taken.
_SHORT_FORMS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTER, _LETTER_OR_MARK = r"\p{L}", r"\p{L}\p{M}"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_BLANKS = r"\s+(?!\S)|\s+"
_LINES_AND_BLANKS = rf"\s*[\r\n]+|{_BLANKS}"
_REST = rf"{_SYMBOLS}[\r\n]*|{_LINES_AND_BLANKS}"
_ASCII_SYMBOLS = r"[!-/:-@\[-`{-~]"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_THREE_FROM_THE_RIGHT = r"(?<=\p{N})(?=(?:\p{N}{3})*(?!\p{N}))"
_LINES = r"[^\n]+|\n+"

_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}"
    r"\x{2F800}-\x{2FA1F}"
)
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_EAST_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}"
    r"\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_DEEPSEEK_EAST_ASIAN = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}&&[^\s]]+"
# Letters with a case, without the scripts that DeepSeek's first list of them leaves out.
_DEEPSEEK_LETTERS = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D8F}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}"
    r"]]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+"
_WITHOUT_SENTENCE_MARKS = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"


def _by_case(letters: str, short_forms: str = "") -> str:
    """A run of capitals before a run of small letters; letters outside ASCII count as both."""
    capitals, small = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{capitals}*{small}+{short_forms}|{before}{capitals}+{small}*{short_forms}"


_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|{_BLANKS}"
_LLAMA3 = rf"{_SHORT_FORMS}|{_LETTERS}|{_THREE_DIGITS}|{_REST}"
_QWEN2 = rf"{_SHORT_FORMS}|{_LETTERS}|{_DIGIT}|{_REST}"
_QWEN35 = (
    rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    rf"{_LINES_AND_BLANKS}"
)
_JAIS2 = (
    rf"{_SHORT_FORMS}|{_LETTERS}|{_THREE_DIGITS}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|"
    + "".join(
        rf"\s{{{length}}}(?!\S)|" for length in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
    )
    + r"\s"
)
_OPTIONAL_SHORT_FORMS = rf"{_SHORT_FORMS}?"
_SYMBOLS_AND_SLASHES = rf"{_SYMBOLS}[\r\n/]*|{_LINES_AND_BLANKS}"
_TEKKEN = f"{_by_case(_LETTER)}|{_DIGIT}|{_SYMBOLS_AND_SLASHES}"
_GPT4O = f"{_by_case(_LETTER, _OPTIONAL_SHORT_FORMS)}|{_THREE_DIGITS}|{_SYMBOLS_AND_SLASHES}"
_GRANITE_EMBEDDING = (
    f"{_by_case(_LETTER_OR_MARK, _OPTIONAL_SHORT_FORMS)}|{_THREE_DIGITS}|{_SYMBOLS_AND_SLASHES}"
)
_MARKED_LETTERS = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_OPTIONAL_SHORT_FORMS}"
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_OPTIONAL_SHORT_FORMS}|{_THREE_DIGITS}|{_REST}"
)
_DEEPSEEK3_WORDS = rf"{_ASCII_SYMBOLS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_BLANKS}"


@dataclass(frozen=True)
class SplitRule:
    """How the text of one vocabulary becomes pieces within which pairs are merged.

    patterns: each splits the pieces of the pattern before; a match is a piece, and so is the text between
    matches. ignores_merges: a piece that is a token as a whole stays whole. adds_bos: the beginning-of-text
    token is added unless the file says otherwise. composes: text is first brought into Unicode's form NFC.
    is_byte_level: tokens are spelt in GPT-2's alphabet of bytes; otherwise in text whose spaces are visible
    (``▁``).
    joins_line_ends: a run of line ends is the token of that run, which no merge makes.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    composes: bool = False
    is_byte_level: bool = True
    joins_line_ends: bool = False


SPLIT_RULES: dict[str, SplitRule] = {
    name: rule
    for names, rule in {
        "default": SplitRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert exaone4 "
        "roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code": SplitRule((_GPT2,)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": SplitRule((_DIGIT, _GPT2)),
        "falcon": SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": SplitRule(
            (_LLAMA3,), ignores_merges=True, adds_bos=True
        ),
        "dbrx smaug-bpe chatglm-bpe": SplitRule((_LLAMA3,)),
        "glm4 glm5": SplitRule((_LLAMA3,), ignores_merges=True),
        "jais-2": SplitRule((_JAIS2,)),
        "minicpm5": SplitRule(
            (_THREE_DIGITS, rf"{_SHORT_FORMS}|{_LETTERS}|\p{{N}}+|{_REST}"), ignores_merges=True
        ),
        "qwen2": SplitRule((_QWEN2,), composes=True),
        "qwen35": SplitRule((_QWEN35,), composes=True),
        "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": SplitRule((_QWEN2,)),
        "ufakzeka": SplitRule((rf"{_LETTERS}|{_DIGIT}|{_REST}",)),
        "laguna": SplitRule((_LINES, _QWEN2)),
        "bailingmoe bailingmoe2 llada-moe": SplitRule(
            (
                rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_LETTERS}|{_DIGIT}|{_SYMBOLS}[\r\n]*|\s*[\r\n]|"
                rf"{_BLANKS}",
            )
        ),
        "seed-coder": SplitRule(
            (rf"{_SHORT_FORMS}|{_LETTERS}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_BLANKS}",)
        ),
        "exaone-moe": SplitRule(
            (
                rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}\p{{M}}*(?: ?\p{{L}}\p{{M}}*)*|{_DIGIT}|"
                rf"{_SYMBOLS}[\r\n/]?|\s*[\r\n]|{_BLANKS}",
            )
        ),
        "tekken": SplitRule((_TEKKEN,), ignores_merges=True, adds_bos=True),
        "gpt-4o llama4 kanana2 talkie minimax-m2": SplitRule((_GPT4O,)),
        "granite-embed-multi-97m": SplitRule((_GRANITE_EMBEDDING,), ignores_merges=True),
        "tiny_aya cohere2moe": SplitRule(
            (_THREE_FROM_THE_RIGHT, rf"{_MARKED_LETTERS}|{_THREE_DIGITS}|{_SYMBOLS_AND_SLASHES}")
        ),
        "youtu": SplitRule(
            (
                r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}"
                r"\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|"
                + _HAN_AND_KANA,
                rf"{_MARKED_LETTERS}|{_DIGIT}|{_SYMBOLS_AND_SLASHES}",
            ),
            ignores_merges=True,
        ),
        "kimi-k2": SplitRule((_KIMI,)),
        "deepseek-llm": SplitRule(
            (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+\z", _DEEPSEEK_EAST_ASIAN, r"\p{N}+")
        ),
        "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_EAST_ASIAN, _DIGIT)),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": SplitRule((_THREE_DIGITS, _HAN_AND_KANA, _DEEPSEEK3)),
        "spark2_5": SplitRule(
            (
                _THREE_DIGITS,
                _HAN_AND_KANA,
                rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_BLANKS}",
                _DIGIT,
            )
        ),
        "afmoe": SplitRule((_THREE_FROM_THE_RIGHT, _EAST_ASIAN, _DEEPSEEK3)),
        "superbpe": SplitRule((r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))")),
        "bloom poro-chat gpt3-finnish": SplitRule((_WITHOUT_SENTENCE_MARKS,)),
        "viking": SplitRule((_WITHOUT_SENTENCE_MARKS, _DIGIT)),
        "chameleon": SplitRule(
            (
                r"<sentinel:[0-9]+>",
                r"IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
        "gemma4 granite-embed-multi-311m": SplitRule(
            (_LINES,), adds_bos=True, is_byte_level=False, joins_line_ends=True
        ),
        "sarvam-moe": SplitRule((_LINES,), is_byte_level=False),
    }.items()
    for name in names.split()
}
