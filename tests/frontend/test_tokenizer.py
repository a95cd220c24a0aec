"""Tokenizers: from a directory as transformers has them,
from GGUF files as brute force and SentencePiece have them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minivllm.errors import ModelError, RequestError
from minivllm.gguf.gguf_file import GGUFFile
from minivllm.gguf.vocabulary.build import merges_from_scores
from minivllm.gguf.vocabulary.split_rules import SPLIT_RULES
from minivllm.tokenizer.gguf_tokenizer import build_gguf_tokenizer
from minivllm.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.model_families import CORPUS

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": GPT2_PATTERN,
    "smollm": GPT2_PATTERN,
    "llama-bpe": SPLIT_RULES["llama-bpe"].patterns[0],
    "qwen2": SPLIT_RULES["qwen2"].patterns[0],
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(
        [*" \n\t0123456789aeiou'.,!?äß中🙂", "the", " The", "  ", "I'll", "WE'RE", "\r\n", "123456"]
    )
).map("".join)


def test_a_directory_tokenizer_is_that_of_transformers(word_tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(word_tokenizer), AutoTokenizer.from_pretrained(word_tokenizer)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) == {0, 1, 2, 3}
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    for text in CORPUS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == text == theirs.decode(ids)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens([10**6]) == [None]
    messages = [{"role": "user", "content": "Hello"}]
    for prompt in (True, False):
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert ours.render_chat(messages, prompt) == wanted
        assert ours.decode(ours.apply_chat_template(messages, prompt), skip_special_tokens=False) == wanted


def test_special_tokens_are_hidden_on_request(word_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer)
    ids = tokenizer.encode("<|im_start|>user")
    assert ids[0] == 2
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user"


def test_text_that_is_not_unicode_is_a_request_error(word_tokenizer: Path) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        load_tokenizer(word_tokenizer).encode("\ud800")


def test_a_template_that_is_missing_or_refuses_is_a_request_error(word_tokenizer: Path) -> None:
    tokenizer = load_tokenizer(word_tokenizer)
    tokenizer._fast.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    tokenizer._fast.chat_template = "{{ messages[0].content.__class__.__mro__ }}"
    with pytest.raises(RequestError, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    tokenizer._fast.chat_template = None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_a_directory_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(tmp_path)


# --- GGUF, byte-level BPE
# -------------------------------------------------------------------------------------------


@cache
def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def merge_naively(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """BPE by its definition: merge the best-ranked neighbours, leftmost first, until none can be merged."""
    while len(symbols) > 1:
        best = min(range(len(symbols) - 1), key=lambda i: ranks.get((symbols[i], symbols[i + 1]), 10**9))
        if (symbols[best], symbols[best + 1]) not in ranks:
            break
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
    return symbols


def encode_naively(text: str, pre: str, tokens: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Split as the pattern says, then merge the bytes of each piece; no special tokens."""
    parts = regex.findall(r"\p{N}|\P{N}+", text) if pre == "smollm" else [text]
    pieces = [piece for part in parts for piece in regex.findall(PATTERNS[pre], part)]
    known = set(tokens)
    result: list[str] = []
    for piece in pieces:
        symbols = [byte_symbols()[byte] for byte in piece.encode()]
        whole = "".join(symbols)
        result += [whole] if pre == "llama-bpe" and whole in known else merge_naively(symbols, ranks)
    return result


def write_vocabulary(path: Path, model: str, tokens: list[str], types: list[int], **entries: Any) -> Path:
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in entries.items():
        {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)](f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def byte_level(word_tokenizer: Path) -> tuple[list[str], list[int], list[str]]:
    """Tokens, types and merges of a small byte-level BPE in GGUF's spelling."""
    model = json.loads((word_tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token.startswith("<|") else 1 for token in tokens]
    return tokens, types, [" ".join(pair) for pair in model["merges"]]


@pytest.fixture(scope="module", params=list(PATTERNS))
def gguf_bpe(
    request: pytest.FixtureRequest,
    byte_level: tuple[list[str], list[int], list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Tokenizer, list[str], dict[tuple[str, str], int]]:
    tokens, types, merges = byte_level
    path = tmp_path_factory.mktemp("bpe") / "vocabulary.gguf"
    entries: dict[str, Any] = {"merges": merges, "pre": request.param, "bos_token_id": 0, "eos_token_id": 1}
    write_vocabulary(path, "gpt2", tokens, types, **entries, add_bos_token=False)
    ranks = {(left, right): rank for rank, (left, right) in enumerate(line.split(" ") for line in merges)}
    return request.param, load_tokenizer(path), tokens, ranks


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
@example("The quick brown fox, 12345 times;  it's\n\n  DON'T ½ ²³ café e\u0301")
def test_byte_level_bpe_equals_brute_force(
    gguf_bpe: tuple[str, Tokenizer, list[str], dict[tuple[str, str], int]], text: str
) -> None:
    pre, tokenizer, tokens, ranks = gguf_bpe
    text = unicodedata.normalize("NFC", text)  # qwen2 normalises by itself; the others take text as it comes
    if "<|" in text:
        return
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == encode_naively(text, pre, tokens, ranks)
    assert tokenizer.decode(ids) == text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
def test_the_default_models_tokenizer_equals_brute_force(smollm2_path: Path, text: str) -> None:
    tokenizer, tokens, ranks = default_model_vocabulary(smollm2_path)
    if "<" not in text:
        wanted = encode_naively(text, "smollm", tokens, ranks)
        # Its vocabulary lacks a few bytes of rare planes; like transformers, it leaves them out.
        known = [token for token in wanted if token in known_tokens(smollm2_path)]
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == known
        assert known != wanted or tokenizer.decode(tokenizer.encode(text)) == text


@cache
def default_model_vocabulary(path: Path) -> tuple[Tokenizer, list[str], dict[tuple[str, str], int]]:
    with GGUFFile(path) as file:
        merges = [tuple(line.split(" ")) for line in file.metadata["tokenizer.ggml.merges"]]
        return (
            load_tokenizer(path),
            file.metadata["tokenizer.ggml.tokens"],
            {pair: i for i, pair in enumerate(merges)},
        )


@cache
def known_tokens(path: Path) -> frozenset[str]:
    return frozenset(default_model_vocabulary(path)[1])


def test_the_default_model_brings_its_special_tokens_and_chat_template(smollm2_path: Path) -> None:
    tokenizer, _, _ = default_model_vocabulary(smollm2_path)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (49152, 1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 42"}])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert "<|im_start|>user\nHi 42<|im_end|>\n" in text
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_the_default_models_tokenizer_agrees_with_transformers_reading_of_the_file(
    smollm2_path: Path,
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    ours, _, _ = default_model_vocabulary(smollm2_path)
    for text in (
        re.sub(r"\d", "", line) for line in CORPUS
    ):  # transformers does not split digits for GGUF files
        assert ours.encode(text) == theirs(text).input_ids


def test_begin_and_end_tokens_follow_the_files_flags(
    byte_level: tuple[list[str], list[int], list[str]], tmp_path: Path
) -> None:
    tokens, types, merges = byte_level
    common: dict[str, Any] = {"merges": merges, "bos_token_id": 0, "eos_token_id": 1}

    def encode(**entries: Any) -> list[int]:
        path = write_vocabulary(tmp_path / "flags.gguf", "gpt2", tokens, types, **common, **entries)
        return load_tokenizer(path).encode("hi")

    plain = encode(pre="gpt-2")
    assert encode(pre="gpt-2", add_bos_token=True) == [0, *plain]
    assert encode(pre="gpt-2", add_bos_token=True, add_eos_token=True) == [0, *plain, 1]
    assert encode(pre="llama-bpe") == [0, *plain]


@pytest.mark.parametrize(
    ("model", "entries", "expected"),
    [
        ("t5", {}, "'t5'"),
        ("gpt2", {"pre": "unheard-of"}, "'unheard-of'"),
        ("gpt2", {"pre": "gpt-2"}, "no merges"),
        ("gpt2", {"pre": "gpt-2", "merges": ["a zzz"]}, "a zzz"),
        ("gpt2", {"pre": "gpt-2", "merges": ["a b"], "eos_token_id": "b"}, "eos_token_id"),
        ("llama", {}, "scores"),
        ("llama", {"scores": [0.0]}, "scores"),
    ],
)
def test_vocabularies_that_cannot_work_are_refused(
    model: str, entries: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = write_vocabulary(tmp_path / "bad.gguf", model, ["a", "b", "ab"], [1, 1, 1], **entries)
    with pytest.raises(ModelError, match=expected) as caught:
        load_tokenizer(path)
    assert "bad.gguf" in str(caught.value)


def test_what_llama_cpp_warns_of_in_a_vocabulary_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries: dict[str, Any] = {"merges": ["a b"], "bos_token_id": 0, "eos_token_id": 99}
    tokenizer = load_tokenizer(
        write_vocabulary(tmp_path / "v.gguf", "gpt2", ["a", "b", "ab"], [1, 1, 1], **entries)
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, None)
    assert "eos_token_id is 99, but there are 3 tokens" in caplog.text
    assert "names no rule by which text is split" in caplog.text


def test_repeated_or_missing_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="twice"):
        load_tokenizer(write_vocabulary(tmp_path / "a.gguf", "gpt2", ["a", "a"], [1, 1]))
    with pytest.raises(ModelError, match="length"):
        load_tokenizer(write_vocabulary(tmp_path / "b.gguf", "gpt2", ["a", "b"], [1]))


# --- GGUF, SentencePiece BPE
# ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A small SentencePiece BPE model, and our tokenizer of the same vocabulary written as GGUF."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=1.0,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = theirs.get_piece_size()
    tokens = [theirs.id_to_piece(token) for token in range(size)]
    types = [
        2
        if theirs.is_unknown(token)
        else 3
        if theirs.is_control(token)
        else 6
        if theirs.is_byte(token)
        else 1
        for token in range(size)
    ]
    path = tmp_path_factory.mktemp("spm") / "vocabulary.gguf"
    scores = [float(theirs.get_score(token)) for token in range(size)]
    write_vocabulary(path, "llama", tokens, types, scores=scores, bos_token_id=1, eos_token_id=2)
    return theirs, load_tokenizer(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from(sorted(set("".join(CORPUS)) | set("äñΩ漢🎈"))), min_size=1, max_size=60))
def test_sentencepiece_bpe_equals_sentencepiece(sentencepiece_pair: tuple[Any, Tokenizer], text: str) -> None:
    theirs, ours = sentencepiece_pair
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    assert ours.encode(text) == [1, *theirs.encode(text)]
    assert ours.decode(ours.encode(text)) == text


def test_merges_follow_scores_and_leave_special_tokens_out() -> None:
    tokens = ["<s>", "a", "b", "ab", "aba", "<0x41>"]
    assert merges_from_scores(tokens, [3, 1, 1, 1, 1, 6], [0.0, -9.0, -9.0, -1.0, -0.5, 0.0]) == [
        ("ab", "a"),
        ("a", "b"),
    ]


# --- GGUF, kept on disk
# ---------------------------------------------------------------------------------------------


def test_what_is_built_from_a_gguf_file_is_what_transformers_would_make_of_it(smollm2_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = build_gguf_tokenizer(smollm2_path)
    theirs = PreTrainedTokenizerFast(tokenizer_object=ours.backend_tokenizer, **ours.special_tokens)
    assert theirs.backend_tokenizer.to_str() == ours.backend_tokenizer.to_str()
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
    assert len(theirs) == len(ours)
    assert theirs.special_tokens_map == ours.special_tokens


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file that has not changed for a while."""
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    path = write_vocabulary(
        tmp_path / "a.gguf", "gpt2", ["a", "b", "ab", "<e>"], [1, 1, 1, 3], merges=["a b"], eos_token_id=3
    )
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


def test_a_second_start_reads_the_tokenizer_that_the_first_one_built(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_tokenizer(kept)
    monkeypatch.setattr("minivllm.tokenizer.gguf_tokenizer.build_gguf_tokenizer", None)
    second = load_tokenizer(kept)
    assert second.backend.to_str() == first.backend.to_str()
    assert (second.eos_token_id, second.special_ids, second.vocab_size) == (3, frozenset({3}), 4)
    assert second.encode("ab<e>") == [2, 3]


def test_a_file_that_changed_or_a_damaged_copy_is_built_again(kept: Path) -> None:
    assert load_tokenizer(kept).encode("ab") == [2]
    (copy,) = (kept.parent / "home/tokenizers").iterdir()
    copy.write_text(copy.read_text().replace("ab", "ba"))
    assert load_tokenizer(kept).encode("ab") == [2]
    write_vocabulary(kept, "gpt2", ["b", "a", "ab", "<e>"], [1, 1, 1, 3], merges=["a b"], eos_token_id=3)
    assert load_tokenizer(kept).encode("a") == [1]
    os.utime(kept, (1_000_000_001, 1_000_000_001))
    assert load_tokenizer(kept).encode("a") == [1]


def test_the_tokenizer_of_a_gguf_file_needs_no_transformers(kept: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from minivllm.tokenizer.gguf_tokenizer import "
        "load_gguf_tokenizer;"
        f"load_gguf_tokenizer(Path({str(kept)!r})); print('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "False", result.stderr
