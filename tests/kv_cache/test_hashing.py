"""Block hashes name contents: equal exactly when everything that decides the contents is equal."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.kv_cache.blocks.hashing import block_extras, extend_block_hashes, hash_block
from minivllm.messages import EngineRequest
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams

pytestmark = pytest.mark.smoke

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=6)
extras = st.lists(
    st.one_of(st.binary(max_size=4), st.text(max_size=4), st.integers(-300, 300)), max_size=3
).map(tuple)
blocks = st.tuples(st.sampled_from([b"", b"\0" * 32, bytes(range(32))]), tokens, extras)


def typed(block: tuple) -> tuple:
    parent, token_ids, parts = block
    return parent, tuple(token_ids), tuple((type(part), part) for part in parts)


def make_request(token_ids: list[int], salt: str | None = None) -> Request:
    return Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(),
            max_tokens=8,
            seed=0,
            arrival_time=0.0,
            cache_salt=salt,
        )
    )


@given(blocks, blocks)
def test_hashes_are_equal_exactly_when_parent_tokens_and_extras_are(first: tuple, second: tuple) -> None:
    assert (hash_block(*first) == hash_block(*second)) == (typed(first) == typed(second))


def test_parts_cannot_be_shifted_into_each_other() -> None:
    assert hash_block(b"", [], ("ab", "c")) != hash_block(b"", [], ("a", "bc"))
    assert hash_block(b"", [], ("1",)) != hash_block(b"", [], (1,)) != hash_block(b"", [], (b"1",))
    assert hash_block(b"", [1], ()) != hash_block(struct.pack("<I", 1), [], ())


def test_the_hashed_bytes_are_canonical() -> None:
    data = struct.pack("<QQ", 0, 3) + struct.pack("<3I", 5, 6, 7) + b"s" + struct.pack("<Q", 4) + b"salt"
    assert hash_block(b"", [5, 6, 7], ("salt",)) == hashlib.sha256(data).digest()


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=40),
    st.lists(st.integers(0, 99), max_size=40),
    st.integers(1, 9),
)
def test_hashing_block_by_block_equals_hashing_at_once(
    prompt: list[int], output: list[int], block_size: int
) -> None:
    growing = make_request(prompt, "salt")
    for token_id in output:
        extend_block_hashes(growing, block_size)
        growing.append_output_token(token_id)
    extend_block_hashes(growing, block_size)
    whole = make_request(prompt + output, "salt")
    extend_block_hashes(whole, block_size)
    assert growing.block_hashes == whole.block_hashes
    assert len(whole.block_hashes) == len(prompt + output) // block_size


def test_a_salt_separates_every_block_of_the_chain() -> None:
    salted, other, plain = (make_request(list(range(8)), salt) for salt in ("a", "b", None))
    for request in (salted, other, plain):
        extend_block_hashes(request, 2)
    assert len({*salted.block_hashes, *other.block_hashes, *plain.block_hashes}) == 12
    assert block_extras(salted, 0, 4) == ("cache_salt", "a") and block_extras(salted, 4, 8) == ()


def test_a_salt_of_broken_unicode_is_hashed_like_any_other() -> None:
    lone = make_request([1, 2], "\ud800")
    extend_block_hashes(lone, 2)
    assert len(lone.block_hashes[0]) == 32
