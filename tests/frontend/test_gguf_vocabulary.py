"""GGUF vocabularies against llama.cpp:
token ids under every rule of splitting, and tokens that end an answer."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest

from minivllm.gguf.end_of_generation import end_of_generation
from minivllm.gguf.gguf_file import GGUFFile
from minivllm.gguf.vocabulary.split_rules import SPLIT_RULES
from minivllm.tokenizer.tokenizer import load_tokenizer

RANDOM_TEXTS = 1500
JUDGE = "llama-cpp-python is the judge, and is not installed"
PHRASES = [
    *[
        "the",
        " The",
        "I'll",
        "WE'RE",
        "it's",
        "DON'T",
        "'s",
        " 'Tis",
        "O'Reilly",
        "camelCase",
        "HTTPServer",
        "naïve",
    ],
    *["1234567", "12", "3.14159", "1,000,000", "2024-01-31", "٣٤٥", "½ ²³", "Ⅷ", "x86_64", "0xFF"],
    *[
        "  ",
        "   ",
        "\t\t",
        "\n\n",
        "\n \n",
        "\r\n",
        " \r\n ",
        "\u00a0",
        "\u2003",
        "\u3000",
        "\n\n\n\n",
        "        ",
    ],
    *[
        "你好，世界。",
        "漢字かな交じり文",
        "カタカナ",
        "한국어 문장",
        "ㄅㄆㄇ",
        "ไทย ภาษา",
        "မြန်မာ",
        "ភាសា",
        "ລາວ",
    ],
    *["हिन्दी में", "বাংলা", "தமிழ்", "العربية،", "עברית", "Ελληνικά", "Русский", "ქართული", "Հայերեն", "ՀԱՅ"],
    *["e\u0301a\u0308", "ﬁ", "Ǆǅǆ", "ʼn", "ß ẞ", "İıſ", "𝐀𝐛𝟙", "𐐀𐐨", "👩‍👩‍👧", "🇩🇪", "❤️", "\u200b", "\ufeff"],
    *[
        "!?...",
        "$+<=>^~|`",
        "()[]{}",
        "—–‘’“”…",
        "//comment/\n",
        "##\n\n",
        "/* */",
        "→≠∑",
        "¿¡",
        "«»",
        "_-_",
        "#tag",
    ],
    *[
        "<sentinel:12>",
        "IMGIMGABZ",
        "<|im_start|>",
        "<|im_end|>",
        "<tool>",
        "<|im_",
        "\x00\x07\x1c",
        "\x85",
        "\u2028",
    ],
]


@cache
def characters() -> dict[str, list[str]]:
    """Unicode category -> its characters; surrogates, private and unassigned ones left out."""
    found: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category not in ("Cs", "Co", "Cn"):
            found.setdefault(category, []).append(chr(code))
    return found


@cache
def texts() -> list[str]:
    draw = random.Random(0)
    categories = sorted(characters())

    def piece() -> str:
        kind = draw.random()
        if kind < 0.6:
            return draw.choice(PHRASES)
        if kind < 0.8:
            return draw.choice(characters()[draw.choice(categories)]) * draw.choice([1, 1, 1, 2, 3])
        return draw.choice([" ", "\n", "a", "B", "é", "7", "42", "中", "'", ".", "the", "\t"])

    randomly = ["".join(piece() for _ in range(draw.randint(1, 12))) for _ in range(RANDOM_TEXTS)]
    return [*PHRASES, *randomly, "".join(PHRASES), " ".join(PHRASES)]


def byte_letters() -> list[str]:
    """GPT-2's printable letter of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]


SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_vocabulary(tokenizer_json: Path) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges; a few tokens that no merge makes show whether a piece is looked up as a
    whole."""
    model = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    words = [left + right for left, right in (line.split(" ") for line in merges)]
    unmerged = ["ĠQuixotic", "Ġquick", "123", "Ġ'T", "ðŁĩ©", "ĊĊĊĊ"]
    texts = dict.fromkeys([*byte_letters(), *words, *unmerged])
    tokens = [*SPECIAL, *texts, "<tool>"]
    return tokens, [3] * len(SPECIAL) + [1] * len(texts) + [4], merges


def spelt_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a vocabulary whose tokens are text with visible spaces."""
    merges = ["t h", "th e", "▁ the", "▁ ▁", "▁▁ ▁▁", "o m", "k o", "! ?", "1 2", "の ▁"]
    words = [left + right for left, right in (line.split(" ") for line in merges)]
    letters = sorted(
        {letter for line in merges for letter in line.replace(" ", "")} | set("abcdefghij.,'漢字é▁\n")
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = dict.fromkeys([*letters, *words, *("\n" * length for length in range(2, 32))])
    tokens = [*SPECIAL, *bytes_, *(text for text in texts), "<tool>"]
    return tokens, [3] * len(SPECIAL) + [6] * 256 + [1] * len(texts) + [4], merges


def scored_vocabulary() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores of a vocabulary as SentencePiece has them."""
    pairs = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "on",
        "▁w",
        "or",
        "▁wor",
        "ds",
        "qu",
        "qui",
        "'s",
        "12",
        "123",
        "▁▁",
    ]
    letters = sorted(set("".join(pairs)) | set("abcdefghijklmnopqrstuvwxyzABC0123456789.,漢字é\n"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pairs, "▁▁▁▁", *letters]
    num_texts = len(tokens) - 259
    types = [2, 3, 3] + [6] * 256 + [1] * num_texts + [3, 3, 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(num_texts)] + [0.0] * 3
    return [*tokens, "<|im_start|>", "<|im_end|>", "<tool>"], types, scores


def write_vocabulary(
    path: Path, tokens: list[str], types: list[int], merges: list[str], **entries: Any
) -> Path:
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_tokenizer_model("gpt2" if merges else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    for key, value in entries.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@contextmanager
def read_by_llama_cpp(path: Path) -> Iterator[Any]:
    """llama.cpp's reading of the vocabulary of a GGUF file."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=JUDGE)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        yield model
    finally:
        model.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_RULES)
def test_token_ids_are_those_of_llama_cpp(name: str, word_tokenizer: Path, tmp_path: Path) -> None:
    rule = SPLIT_RULES[name]
    byte_level = byte_level_vocabulary(word_tokenizer / "tokenizer.json")
    tokens, types, merges = byte_level if rule.is_byte_level else spelt_vocabulary()
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, tokens, types, merges, pre=name, bos_token_id=0, eos_token_id=1)
    # llama.cpp leaves NFC to its caller
    assert_same_ids(path, [unicodedata.normalize("NFC", text) if rule.composes else text for text in texts()])


@pytest.mark.slow
@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_token_ids_of_scored_vocabularies_are_those_of_llama_cpp(
    add_space_prefix: bool, tmp_path: Path
) -> None:
    tokens, types, scores = scored_vocabulary()
    entries: dict[str, Any] = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, tokens, types, [], add_space_prefix=add_space_prefix, **entries)
    assert_same_ids(path, texts())


def assert_same_ids(path: Path, given: list[str]) -> None:
    ours = load_tokenizer(path)
    with read_by_llama_cpp(path) as theirs:
        for text in given:
            for parse in (True, False):
                wanted = theirs.tokenize(text.encode(), add_bos=True, special=parse)
                assert ours.encode(text, parse_special_tokens=parse) == wanted, (text, parse)


@pytest.mark.parametrize("with_entries", [False, True])
@pytest.mark.parametrize(
    "texts",
    [
        *[
            [text]
            for text in ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<EOT>")
        ],
        *[
            [text]
            for text in (
                "<｜end▁of▁sentence｜>",
                "<|eom_id|>",
                "<|fim_pad|>",
                "<|file_sep|>",
                "[EOS]",
                "<tool>",
            )
        ],
        ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"],
        ["<|end|>", "<|calls|>", "<|flush|>"],
        ["<|end|>", "<|return|>"],
        ["<eos>", "<turn|>", "<|tool_response>"],
    ],
)
@pytest.mark.parametrize("kind", [1, 3])
def test_answers_end_where_llama_cpp_ends_them(
    texts: list[str], kind: int, with_entries: bool, tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason=JUDGE)
    tokens = [*SPECIAL[:2], *byte_letters(), "ab", *texts]
    types = [3, 3] + [1] * (len(tokens) - 2 - len(texts)) + [kind] * len(texts)
    entries = {"eot_token_id": 7, "fim_pad_token_id": 9} if with_entries else {}
    path = write_vocabulary(
        tmp_path / "vocabulary.gguf",
        tokens,
        types,
        ["a b"],
        pre="gpt-2",
        bos_token_id=0,
        eos_token_id=1,
        **entries,
    )
    with GGUFFile(path) as file:
        found = end_of_generation(file.metadata)
    with read_by_llama_cpp(path) as theirs:
        vocabulary = llama_cpp.llama_model_get_vocab(theirs.model)
        assert sorted(found) == [
            id for id in range(len(tokens)) if llama_cpp.llama_vocab_is_eog(vocabulary, id)
        ]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "It's 1234  x", ["It", "'s", " 1234", " ", " x"]),
        ("default", "It's 1234  x", ["It", "'", "s", " ", "123", "4", " ", " x"]),
        ("smollm", "It's 1234  x", ["It", "'s", " ", "1", "2", "3", "4", " ", " x"]),
        ("llama-bpe", "It'S 1234  x", ["It", "'S", " ", "123", "4", " ", " x"]),
        ("qwen2", "It'S 1234\n\n x", ["It", "'S", " ", "1", "2", "3", "4", "\n\n", " x"]),
        ("qwen35", "हिन्दी में", ["हिन्दी", " में"]),
        ("tekken", "camelCase it's 12/\n", ["camel", "Case", " it", "'s", " ", "1", "2", "/\n"]),
        ("gpt-4o", "camelCase it's 1234/\n", ["camel", "Case", " it's", " ", "123", "4", "/\n"]),
        ("deepseek-v3", "(ab) 1234漢字x", ["(ab", ")", " ", "123", "4", "漢字", "x"]),
        ("kimi-k2", "漢字ab'll", ["漢字", "ab'll"]),
        ("superbpe", "two words 1234567", ["two words ", "1", "234", "567"]),
        ("tiny_aya", "a 1234567", ["a", " ", "1", "234", "567"]),
        ("gemma4", "two words\n\nx", ["two▁words", "\n\n", "x"]),
    ],
)
def test_a_rule_splits_text_into_these_pieces(
    name: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    letters = sorted(set(byte_letters()) | set("two▁wordsx\n"))
    path = write_vocabulary(
        tmp_path / "vocabulary.gguf", [*letters, "ab"], [1] * (len(letters) + 1), ["a b"], pre=name
    )
    backend = load_tokenizer(path).backend
    normalized = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    found = backend.pre_tokenizer.pre_tokenize_str(normalized)
    spelt = (
        found if not SPLIT_RULES[name].is_byte_level else [(_from_bytes(piece), at) for piece, at in found]
    )
    assert [piece for piece, _ in spelt] == pieces


def _from_bytes(piece: str) -> str:
    """The text that a piece in GPT-2's alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order = [*printable, *(byte for byte in range(256) if byte not in printable)]
    byte_of = dict(zip(byte_letters(), order))
    return bytes(byte_of[letter] for letter in piece).decode()


@pytest.mark.parametrize(
    "name", ["llama-bpe", "tekken", "falcon3", "lfm2", "smaug-bpe", "dbrx", "glm4", "gpt-4o"]
)
def test_a_rule_implies_a_beginning_of_text_and_whole_pieces(name: str, tmp_path: Path) -> None:
    adds_bos = name in ("llama-bpe", "tekken", "falcon3", "lfm2")
    tokens = ["<s>", *byte_letters(), "ab", "xyz"]
    path = write_vocabulary(
        tmp_path / "v.gguf", tokens, [3] + [1] * (len(tokens) - 1), ["a b"], pre=name, bos_token_id=0
    )
    whole = ["xyz"] if adds_bos or name == "glm4" else ["x", "y", "z"]
    tokenizer = load_tokenizer(path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("xyz")) == ["<s>"] * adds_bos + whole


def test_tokens_that_end_an_answer_are_found_by_their_text() -> None:
    def found(*texts: str, **entries: int) -> set[str]:
        named = {f"tokenizer.ggml.{name}_token_id": token for name, token in entries.items()}
        return {texts[token] for token in end_of_generation({"tokenizer.ggml.tokens": list(texts), **named})}

    assert found("a", "<end_of_turn>", "b") == {"<end_of_turn>"}
    assert found("a", "<|im_end|>", "<|eot_id|>", eos=0) == {"a", "<|im_end|>", "<|eot_id|>"}
    assert found("<|end|>", "<|user|>") == {"<|end|>"}
    assert found("<|end|>", "<|return|>", "<|call|>") == {"<|return|>", "<|call|>"}
    assert found("</s>", "<turn|>", "<|tool_response>") == {"<turn|>", "<|tool_response>"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_RULES)
def test_grammars_read_the_tokenizer_of_every_rule(name: str, word_tokenizer: Path, tmp_path: Path) -> None:
    from llguidance import LLTokenizer

    byte_level = byte_level_vocabulary(word_tokenizer / "tokenizer.json")
    tokens, types, merges = byte_level if SPLIT_RULES[name].is_byte_level else spelt_vocabulary()
    path = write_vocabulary(tmp_path / "vocabulary.gguf", tokens, types, merges, pre=name, eos_token_id=1)
    ours, text = load_tokenizer(path), '{"the": "quick", "fox": 123456}\n'
    theirs = LLTokenizer(ours.backend.to_str(), n_vocab=len(tokens), eos_token=[1])
    assert theirs.tokenize_str(text) == ours.encode(text, add_special_tokens=False)
