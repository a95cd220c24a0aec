"""Expressions that name layers mean what Python's ``re`` says, and end soon whatever they are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.stop_conditions.name_pattern import name_pattern

NAMES = [
    "model.layers.10.self_attn.q_proj",
    "model.layers.1.mlp.experts.3.gate_proj",
    "lm_head",
    "visual.blocks.0.qkv",
]
PATTERNS = [
    r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj",
    r".*layers\..*\.mlp\..*\.gate.*",
    r"^model\.layers\.(\d+)\.(.*)\.(gate|up)_proj$",
    r"(^lm_head$|^model(\.\w+)*proj$)",
    r"(?:\w+\.)+blocks(?:\.\d+)?(?:\.q)*kv",
    r".*(attn|head)$|.*(?:q|k)_proj",
    r"re.*visual.*",
    r".*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_name_matches_as_in_re(pattern: str) -> None:
    for name in NAMES:
        assert name_pattern(pattern).begins(name) == bool(re.match(pattern, name)), name
        assert name_pattern(pattern).is_all_of(name) == bool(re.fullmatch(pattern, name)), name


atoms = st.sampled_from(["a", "b", r"\.", ".", "[ab]", r"\w", "a$"])
expressions = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        )
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(expressions, st.booleans(), st.text(st.sampled_from("ab."), max_size=10))
def test_every_expression_matches_as_in_re(pattern: str, is_anchored: bool, name: str) -> None:
    pattern = f"^{pattern}" if is_anchored else pattern
    assert name_pattern(pattern).begins(name) == bool(re.match(pattern, name))
    assert name_pattern(pattern).is_all_of(name) == bool(re.fullmatch(pattern, name))


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(.*)*x", r".*.*.*.*.*.*x", r"(\w+\s?)*\$"])
def test_expressions_that_keep_a_backtracking_engine_busy_end_soon(pattern: str) -> None:
    assert not name_pattern(pattern).begins("a" * 256)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(", "no regular expression"),
        ("a" * 2000, "more than 1024 characters"),
        ("(" * 60 + ")" * 60, "too deep"),
        (r"(?=a)(a+)+b", "lookaround"),
        (r"(a{100}){100}", "more than 512 elements"),
    ],
)
def test_what_cannot_be_matched_is_refused(pattern: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        name_pattern(pattern)
