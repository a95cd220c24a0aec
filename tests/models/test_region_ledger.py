"""The regions of every kind of model are those of the ledger:
a change of what is compiled shows in review."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.regions import Region, Size, TensorSpec
from tests.models.region_ledger import LEDGER, SHAPES, TORCH, canonical_graph, cases, comparable, regions_of

REASON = cannot_compile_reason(torch.device("cpu"))
RECORDED: dict[str, Any] = json.loads(LEDGER.read_text(encoding="utf-8"))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [
        pytest.param(
            *case, id=", ".join(case[:2]), marks=() if case[:2] == ("llama", "alone") else pytest.mark.slow
        )
        for case in cases()
    ],
)
def test_regions_are_those_of_the_ledger(
    tiny_model: Callable[..., Path], family: str, name: str, settings: dict[str, Any]
) -> None:
    """`python -m tests.models.region_ledger --write` records a change that is meant."""
    found = regions_of(tiny_model(family, **SHAPES.get(family, {})), **settings)
    version, recorded = RECORDED["torch"], RECORDED[f"{family}, {name}"]
    assert comparable(found, version) == comparable(recorded, version)


def test_the_ledger_has_every_case_and_no_other() -> None:
    assert RECORDED.keys() - {"torch"} == {f"{family}, {name}" for family, name, _ in cases()}


def test_another_version_of_pytorch_compares_all_but_the_graphs() -> None:
    one = [{"between +single aaa": 2, "between bbb": 1, "last ccc": 1}]
    other = [{"between +single ddd": 1, "between +single eee": 1, "between bbb": 1, "last fff": 1}]
    assert comparable(one, TORCH) != comparable(other, TORCH)
    assert comparable(one, "0.1") == comparable(other, "0.1")
    assert comparable(one, "0.1") != comparable([{"between +single aaa": 3, "last ccc": 1}], "0.1")


def test_a_graph_does_not_depend_on_names_order_or_unread_inputs() -> None:
    spec = TensorSpec((Size("rows", 5), 4), torch.float32, torch.device("cpu"))
    weight = TensorSpec((4, 4), torch.float32, torch.device("cpu"))

    def graph(function: Callable, **inputs: TensorSpec) -> str:
        return canonical_graph(Region("r", function, inputs))

    plain = graph(lambda x, w: (x @ w).relu(), x=spec, w=weight)
    assert plain == graph(lambda w, unread, x: (x @ w).relu(), other=weight, unread=weight, names=spec)
    assert plain != graph(lambda x, w: (x @ w).tanh(), x=spec, w=weight)
    assert plain != graph(lambda x, w: (w @ x.T).relu(), x=spec, w=weight)
