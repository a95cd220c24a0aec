"""The table of families: rows from outside may be added, never replaced."""

from __future__ import annotations

import pytest

from minivllm.models.families.registry import FAMILIES, register_family


def test_a_family_of_the_table_cannot_be_replaced() -> None:
    known = FAMILIES["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="LlamaForCausalLM is in the table already"):
        register_family(known)
    assert FAMILIES["LlamaForCausalLM"] is known
