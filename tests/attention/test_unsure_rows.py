"""Rows whose positions only the device knows: they attend as the definitions say for where they really are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels_triton_free.attention
import minivllm.attention.tiles
from minivllm.attention import AttentionBackend, FlexAttention, SdpaAttention, StepRows
from tests.attention.backends import attend_to_listed_blocks, listed_attention
from tests.attention.test_attention_specs import VERIFY_SIZE, Case, cases


def attend_behind(
    case: Case, make: Callable[..., AttentionBackend], device: str, behind: list[int], more: list[int]
) -> tuple[Tensor, Tensor]:
    """(o, the definitions) of a step whose rows of few tokens lie ``behind`` positions before those that the
    host assumes, where ``more`` would have been possible. A row has so many tokens less than its span."""
    firsts = np.cumsum([0, *(count for _, count in case.spans)])
    rows = []
    for slot, (start, total), first, back, further in zip(case.slots, case.spans, firsts, behind, more):
        back = min(back, total - 1)
        back = back if total - back <= VERIFY_SIZE else 0  # longer rows belong to prompts
        unsure = min(back + further, start + back) if total - back <= VERIFY_SIZE else 0
        rows.append((int(slot), start, total - back, back, unsure, int(first)))
    rows.sort(key=lambda row: (row[2] > 1, row[2] > VERIFY_SIZE))
    slots, starts, counts, shifts, unsure, first = (np.array(column) for column in zip(*rows))
    few = int(((counts > 1) & (counts <= VERIFY_SIZE)).sum())
    tokens = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(first, counts)])
    step = StepRows(slots, starts + shifts, counts, int((counts == 1).sum()), few, max(2, len(tokens)))
    step = step._replace(unsure=unsure, shift=torch.from_numpy(np.repeat(shifts, counts)))
    backend = case.backend(make, device)
    assert backend.settles  # type: ignore[attr-defined]
    q = torch.nn.functional.pad(case.q[tokens], (0, 0, 0, 0, 0, 0, 0, step.num_padded - len(tokens)))
    o = backend.attend(backend.prepare(step), case.cache, case.spec, q, case.sinks)
    return o[: len(tokens)].double(), case.by_definition()[tokens]


@pytest.mark.parametrize(
    ("make", "device"), [(SdpaAttention, "cpu"), (FlexAttention, "cpu"), (FlexAttention, "cuda")]
)
def test_every_query_sees_what_it_should_wherever_it_is(
    make: Callable[..., AttentionBackend], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minivllm.attention.tiles, "paged_flex_attention", listed_attention)
    monkeypatch.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)
    distances = st.lists(st.integers(0, 3), min_size=4, max_size=4)

    @settings(max_examples=100, deadline=None)
    @given(case=cases(), behind=distances, more=distances)
    @torch.inference_mode()
    def check(case: Case, behind: list[int], more: list[int]) -> None:
        case = replace(case, spec=case.spec._replace(looks_ahead=False), runs=[])
        o, expected = attend_behind(case, make, device, behind, more)
        torch.testing.assert_close(o, expected, rtol=0, atol=2e-5)

    check()
