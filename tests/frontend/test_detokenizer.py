"""The judge is decoding all ids at once, and for stop strings a reader that goes character by character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minivllm.stop_conditions.stop_strings import StopAutomaton, StopMatch
from minivllm.tokenizer.detokenizer import Detokenizer, TokenDecoder
from tests.frontend.small_tokenizers import FAMILIES, TEXTS, byte_fallback_bpe, byte_level_bpe

pytestmark = pytest.mark.smoke

TOKENIZERS = {name: make() for name, make in FAMILIES.items()}
DECODERS = {name: TokenDecoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
BYTE_LEVEL = TOKENIZERS["byte-level"]

families = st.sampled_from(sorted(FAMILIES))


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some of them unknown to the tokenizer, as a model with a wider head can produce."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=40)


def stream_text(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    stream = TokenDecoder(tokenizer).stream(skip_special_tokens)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@settings(max_examples=600, deadline=None)
@given(st.data(), families, st.booleans())
def test_streamed_text_equals_decoding_all_ids_at_once(data: st.DataObject, family: str, skip: bool) -> None:
    ids = data.draw(ids_of(TOKENIZERS[family]))
    stream = DECODERS[family].stream(skip)
    emitted = "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])
    assert emitted == TOKENIZERS[family].decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
@example([0xF0, 0x9F, 0x98, 0x80, 0xF0, 0x9F, 0x41, 0xED, 0xA0, 0x80, 0xF4, 0x90, 0x80, 0x80])
def test_any_bytes_are_replaced_exactly_where_decoding_at_once_replaces_them(data: list[int]) -> None:
    alphabet = {
        byte: BYTE_LEVEL.token_to_id(char) for char, byte in DECODERS["byte-level"]._byte_of_char.items()
    }
    ids = [alphabet[byte] for byte in data]
    assert "".join(stream_text(BYTE_LEVEL, ids, True)) == bytes(data).decode(errors="replace")
    assert BYTE_LEVEL.decode(ids) == bytes(data).decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30), st.data())
def test_text_is_a_prefix_of_the_whole_text_wherever_the_stream_is_cut(
    text: str, data: st.DataObject
) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    stream = DECODERS["byte-level"].stream(True)
    emitted = "".join(stream.push(token_id) for token_id in ids[:cut])
    whole = BYTE_LEVEL.decode(ids)
    assert whole.startswith(emitted)
    assert len(whole.encode()) - len(emitted.encode()) - len(BYTE_LEVEL.decode(ids[cut:]).encode()) < 4 * 4


@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
@pytest.mark.parametrize("text", TEXTS)
def test_half_characters_are_never_emitted(make: object, text: str) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text).ids
    emitted = stream_text(tokenizer, ids, True)
    assert not any("�" in piece for piece in emitted)
    assert "".join(emitted) == tokenizer.decode(ids) == text


@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_that_is_cut_anywhere_ends_at_the_last_whole_character(make: object, text: str) -> None:
    tokenizer = make()  # type: ignore[operator]
    decoder, ids = TokenDecoder(tokenizer), tokenizer.encode(text).ids
    for cut in range(len(ids) + 1):
        detokenizer = Detokenizer(decoder.stream(True))
        for token_id in ids[:cut]:
            detokenizer.push(token_id)
        detokenizer.flush(is_cut=True)
        known = b"".join(map(decoder.bytes_of, ids[:cut])).decode(errors="ignore")
        assert detokenizer.take() == (known.removeprefix(" ") if make is byte_fallback_bpe else known)


def test_bytes_that_are_no_text_stay_where_a_stream_is_cut_and_a_begun_character_goes() -> None:
    data = [0x41, 0xFF, 0x42, 0xF0, 0x9F]
    alphabet = {
        byte: BYTE_LEVEL.token_to_id(char) for char, byte in DECODERS["byte-level"]._byte_of_char.items()
    }
    detokenizer = Detokenizer(DECODERS["byte-level"].stream(True))
    for byte in data:
        detokenizer.push(alphabet[byte])
    detokenizer.flush(is_cut=True)
    assert detokenizer.take() == "A\ufffdB"


def test_invalid_bytes_do_not_pile_up_unemitted() -> None:
    byte = BYTE_LEVEL.token_to_id(
        next(char for char, b in DECODERS["byte-level"]._byte_of_char.items() if b == 0x80)
    )
    emitted = stream_text(BYTE_LEVEL, [byte] * 1000, True)
    assert all(piece == "�" for piece in emitted[:-1]) and emitted[-1] == ""


def test_token_text_keeps_the_leading_space_and_shows_special_tokens() -> None:
    for family in ("byte-fallback", "metaspace"):
        tokenizer = TOKENIZERS[family]
        assert DECODERS[family].token_text(tokenizer.token_to_id("▁the")) == " the"
    for family in FAMILIES:
        end = TOKENIZERS[family].token_to_id("<|end|>")
        assert DECODERS[family].token_text(end).strip() == "<|end|>"


def test_real_default_tokenizer_streams_what_it_decodes_at_once(smollm2_path: Path) -> None:
    from minivllm.tokenizer.tokenizer import load_tokenizer

    backend = load_tokenizer(smollm2_path).backend
    decoder, draw = TokenDecoder(backend), random.Random(0)
    assert decoder.is_byte_level
    for _ in range(300):
        ids = [draw.randrange(backend.get_vocab_size() + 10) for _ in range(draw.randrange(60))]
        for skip in (True, False):
            stream = decoder.stream(skip)
            emitted = "".join([*(stream.push(token_id) for token_id in ids), stream.flush()])
            assert emitted == backend.decode(ids, skip_special_tokens=skip)


# Stop strings


def first_stop(text: str, stops: list[str], ignore_until: int = 0) -> tuple[int, int, str] | None:
    """(start, end, stop) of the match that is complete first and, among those, longest; brute force."""
    for end in range(ignore_until + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return None


def pushes(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], int]:
    """Emissions one by one with the flush as the last, and how many tokens were pushed."""
    emissions = []
    for position, token_id in enumerate(ids):
        stopped = detokenizer.push(token_id)
        emissions.append(detokenizer.take())
        if stopped:
            return emissions, position + 1
    detokenizer.flush()
    return [*emissions, detokenizer.take()], len(ids)


narrow_texts = st.text("ab é😀", max_size=24)
stop_lists = st.lists(st.text("ab é😀", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=800, deadline=None)
@given(narrow_texts, stop_lists, st.booleans())
@example("xaab", ["aab", "ab"], False)
@example("abcd", ["abcd", "bc"], True)
def test_stop_string_ends_the_text_where_it_is_first_complete(
    text: str, stops: list[str], include: bool
) -> None:
    detokenizer = Detokenizer(
        DECODERS["byte-level"].stream(True), StopAutomaton(stops), include_stop_string=include
    )
    emissions, _ = pushes(detokenizer, BYTE_LEVEL.encode(text).ids)
    found = first_stop(text, stops)
    expected = text if found is None else text[: found[1] if include else found[0]]
    assert "".join(emissions) == expected
    assert detokenizer.stop_match == (None if found is None else StopMatch(found[2], len(found[2])))


@settings(max_examples=300, deadline=None)
@given(narrow_texts, stop_lists, st.randoms(use_true_random=False))
def test_stop_result_does_not_depend_on_how_tokens_cut_the_text(
    text: str, stops: list[str], draw: random.Random
) -> None:
    class Pieces:
        def __init__(self, pieces: list[str]) -> None:
            self.pieces = pieces

        def push(self, token_id: int) -> str:
            return self.pieces[token_id]

        def flush(self) -> str:
            return ""

    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    shuffled = draw.sample(stops, len(stops))
    coarse = Detokenizer(Pieces(pieces), StopAutomaton(shuffled))
    fine = Detokenizer(Pieces(list(text)), StopAutomaton(stops))
    assert "".join(pushes(coarse, list(range(len(pieces))))[0]) == "".join(
        pushes(fine, list(range(len(text))))[0]
    )
    assert coarse.stop_match == fine.stop_match


@settings(max_examples=400, deadline=None)
@given(narrow_texts, stop_lists)
def test_held_back_text_is_exactly_what_may_still_begin_a_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(DECODERS["byte-level"].stream(True), StopAutomaton(stops))
    stream = DECODERS["byte-level"].stream(True)
    emitted = certain = ""
    for token_id in BYTE_LEVEL.encode(text).ids:
        certain += stream.push(token_id)
        if detokenizer.push(token_id):
            break
        emitted += detokenizer.take()
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((len(b) for b in beginnings if certain.endswith(b)), default=0)
        assert emitted == certain[: len(certain) - longest]


@settings(max_examples=400, deadline=None)
@given(narrow_texts, stop_lists, st.integers(0, 8), st.booleans())
def test_stop_strings_that_end_within_min_tokens_do_not_count(
    text: str, stops: list[str], min_tokens: int, include: bool
) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    stream = DECODERS["byte-level"].stream(True)
    ignored = len("".join(stream.push(token_id) for token_id in ids[:min_tokens]))
    detokenizer = Detokenizer(
        DECODERS["byte-level"].stream(True),
        StopAutomaton(stops),
        min_tokens=min_tokens,
        include_stop_string=include,
    )
    emissions, _ = pushes(detokenizer, ids)
    found = first_stop(text, stops, ignored)
    assert "".join(emissions) == (text if found is None else text[: found[1] if include else found[0]])


def test_stop_string_made_of_byte_tokens_is_found_in_the_flush() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    detokenizer = Detokenizer(DECODERS["byte-fallback"].stream(True), StopAutomaton(["😀"]))
    emissions, _ = pushes(detokenizer, tokenizer.encode("ab😀").ids)
    assert "".join(emissions) == "ab"
    assert detokenizer.stop_match == StopMatch("😀", 1)


def test_cumulative_text_is_the_same_as_all_deltas() -> None:
    ids = BYTE_LEVEL.encode("".join(TEXTS)).ids
    whole = Detokenizer(DECODERS["byte-level"].stream(True), StopAutomaton(["END of tex?"]))
    for token_id in ids:
        whole.push(token_id)
        assert "".join(TEXTS).startswith(whole.text())
    whole.flush()
    assert whole.text() == "".join(TEXTS)


def test_long_stop_string_and_long_text_take_one_pass() -> None:
    """Counts the automaton's steps: linear in the text although the stop string nearly matches everywhere."""
    stop = "a" * 500 + "b"
    automaton = StopAutomaton([stop])
    steps = 0
    plain_step = automaton._step

    def counted(state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return plain_step(state, char)

    automaton._step = counted  # type: ignore[method-assign]
    state, num_read, found = automaton.scan(0, "a" * 20_000)
    assert (found, num_read, steps) == (None, 20_000, 20_000)
    assert automaton.num_held(state) == 500
