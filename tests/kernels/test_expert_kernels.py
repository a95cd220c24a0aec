"""Routing, sorting and products of experts against plain loops in float64,
and against transformers' own routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.activation import clamped_swiglu, gated_activation
from kernels_triton_free.experts.products import (
    define_loop,
    gathered_product,
    grouped_product,
    loop,
    run_loop,
    sort_by_expert,
    weighted_sum,
)
from kernels_triton_free.experts.routing import Routing, route

HIDDEN, INNER = 16, 24


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_route(logits: Tensor, routing: Routing, correction: Tensor | None) -> list[dict[int, float]]:
    """Expert -> weight of every token, number by number."""
    result = []
    for row in logits.double():
        scores = row.softmax(0) if routing.scores == "softmax" else 1 / (1 + torch.exp(-row))
        preferred = dict(enumerate((scores if correction is None else scores + correction).tolist()))
        size = len(row) // routing.groups
        groups = [list(range(first, first + size)) for first in range(0, len(row), size)]
        if routing.groups > 1:
            groups.sort(key=lambda group: -sum(sorted(preferred[e] for e in group)[-routing.group_best :]))
            groups = groups[: routing.groups_kept]
        allowed = [expert for group in groups for expert in group]
        chosen = sorted(allowed, key=lambda expert: -preferred[expert])[: routing.top_k]
        total = sum(float(scores[expert]) for expert in chosen) if routing.normalized else 1.0
        result.append({expert: float(scores[expert]) / total * routing.scale for expert in chosen})
    return result


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int, bool]:
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(2, 5))
    kept = draw(st.integers(1, groups))
    return (
        Routing(
            top_k=draw(st.integers(1, kept * size)),
            scores=draw(st.sampled_from(["softmax", "sigmoid"])),
            normalized=draw(st.booleans()),
            scale=draw(st.sampled_from([1.0, 2.5])),
            groups=groups,
            groups_kept=kept,
            group_best=draw(st.integers(1, 2)),
        ),
        groups * size,
        draw(st.booleans()),
    )


@given(routings(), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=150)
def test_routing_equals_a_plain_loop(drawn: tuple[Routing, int, bool], tokens: int, seed: int) -> None:
    routing, experts, corrected = drawn
    logits = randn(seed, tokens, experts)
    correction = randn(seed + 1, experts) if corrected else None
    ids, weights = route(logits, routing, correction)
    assert ids.shape == weights.shape == (tokens, routing.top_k)
    for row_ids, row_weights, expected in zip(
        ids.tolist(), weights, plain_route(logits, routing, correction)
    ):
        assert sorted(row_ids) == sorted(expected)
        wanted = torch.tensor([expected[expert] for expert in row_ids])
        torch.testing.assert_close(row_weights, wanted, rtol=1e-4, atol=1e-6)


def by_expert(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[tokens, experts] with every weight in its expert's column, whatever the order of the choices was."""
    return torch.zeros(ids.shape[0], experts).scatter_(1, ids, weights)


def transformers_router(model: str, name: str, config: dict[str, Any]) -> Any:
    import importlib

    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    settings_class = getattr(
        importlib.import_module(f"transformers.models.{model}.configuration_{model}"),
        "".join(part.capitalize() for part in model.split("_")) + "Config",
    )
    router = getattr(module, name)(settings_class(hidden_size=HIDDEN, **config))
    for index, parameter in enumerate([*router.parameters(), *router.buffers()]):
        parameter.data = randn(100 + index, *parameter.shape)
    return router


GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 12, "routed_scaling_factor": 2.5}


@pytest.mark.parametrize(
    ("model", "name", "config", "routing"),
    [
        ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": 12, "norm_topk_prob": False}, Routing(top_k=3)),
        (
            "qwen3_moe",
            "Qwen3MoeTopKRouter",
            {"num_experts": 12, "norm_topk_prob": True},
            Routing(top_k=3, normalized=True),
        ),
        ("mixtral", "MixtralTopKRouter", {"num_local_experts": 12}, Routing(top_k=3, normalized=True)),
        ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": 12}, Routing(top_k=3, normalized=True)),
        (
            "glm4_moe",
            "Glm4MoeTopkRouter",
            {**GROUPS, "norm_topk_prob": True},
            Routing(top_k=3, scores="sigmoid", normalized=True, scale=2.5, groups=4, groups_kept=2),
        ),
        (
            "glm4_moe",
            "Glm4MoeTopkRouter",
            {**GROUPS, "norm_topk_prob": False},
            Routing(top_k=3, scores="sigmoid", scale=2.5, groups=4, groups_kept=2),
        ),
    ],
)
@torch.inference_mode()
def test_routing_equals_the_routers_of_transformers(
    model: str, name: str, config: dict[str, Any], routing: Routing
) -> None:
    router = transformers_router(model, name, {**config, "num_experts_per_tok": 3})
    x = randn(0, 40, HIDDEN)
    _, their_weights, their_ids = router(x)
    logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))
    correction = getattr(router, "e_score_correction_bias", None)
    expected = by_expert(their_ids, their_weights, 12)
    torch.testing.assert_close(
        by_expert(*route(logits, routing, correction), 12), expected, rtol=1e-5, atol=1e-6
    )
    without: list[tuple[Tensor, Routing, Tensor | None]] = []
    if correction is not None:
        without.append((logits, routing, None))
    if routing.normalized:
        without.append((logits, Routing(**{**vars(routing), "normalized": False}), correction))
    if routing.groups > 1:
        without.append((logits, Routing(**{**vars(routing), "groups": 1}), correction))
    for changed in without:
        assert not torch.allclose(by_expert(*route(*changed), 12), expected, rtol=1e-3), (
            "a piece makes no difference"
        )


@given(st.integers(1, 30), st.integers(1, 4), st.integers(4, 9), st.integers(0, 2**31))
@settings(max_examples=100)
def test_choices_are_sorted_by_expert_and_stay_in_order(
    tokens: int, top_k: int, experts: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    order, ends = sort_by_expert(ids, experts)
    assert torch.equal(order, ids.flatten().argsort(stable=True))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [int((ids <= expert).sum()) for expert in range(experts)]


def stacks(
    seed: int, experts: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights and biases of gate_up and down."""
    return (
        randn(seed, experts, 2 * INNER, HIDDEN, dtype=dtype),
        randn(seed + 1, experts, 2 * INNER, dtype=dtype),
        randn(seed + 2, experts, HIDDEN, INNER, dtype=dtype),
        randn(seed + 3, experts, HIDDEN, dtype=dtype),
    )


def in_float64(x: Tensor, ids: Tensor, weights: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    gate_up, gate_up_bias, down, down_bias = (part.double() for part in parts)
    out = torch.zeros(x.shape[0], HIDDEN, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double()):
            inner = gated_activation(
                (gate_up[expert] @ x[token].double() + gate_up_bias[expert])[None], "silu"
            )[0]
            out[token] += weight * (down[expert] @ inner + down_bias[expert])
    return out


def looped(
    x: Tensor, ids: Tensor, weights: Tensor, parts: tuple[Tensor, ...], nobody: int | None = None
) -> Tensor:
    gate_up, gate_up_bias, down, down_bias = parts
    linear = torch.nn.functional.linear
    return loop(
        x,
        ids,
        weights,
        lambda rows, expert: linear(rows, gate_up[expert], gate_up_bias[expert]),
        lambda rows: gated_activation(rows, "silu"),
        lambda rows, expert: linear(rows, down[expert], down_bias[expert]),
        nobody,
    )


@given(st.integers(1, 20), st.integers(1, 3), st.integers(3, 7), st.integers(0, 2**31))
@settings(max_examples=60)
def test_the_loop_equals_the_definition_in_float64(tokens: int, top_k: int, experts: int, seed: int) -> None:
    x, parts = randn(seed, tokens, HIDDEN), stacks(seed + 1, experts)
    ids, weights = route(randn(seed + 9, tokens, experts), Routing(top_k=top_k, normalized=True))
    out = looped(x, ids, weights, parts)
    torch.testing.assert_close(out.double(), in_float64(x, ids, weights, parts), rtol=1e-3, atol=1e-3)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(3, 7), st.data())
@settings(max_examples=60)
def test_loops_over_parts_of_the_experts_add_up(
    tokens: int, top_k: int, experts: int, data: st.DataObject
) -> None:
    """Biases, too, are those of chosen experts only: what a part does not have adds exactly nothing there."""
    border, seed = data.draw(st.integers(1, experts - 1)), data.draw(st.integers(0, 2**31))
    x, parts = randn(seed, tokens, HIDDEN), stacks(seed + 1, experts)
    ids, weights = route(randn(seed + 9, tokens, experts), Routing(top_k=top_k, normalized=True))
    outs = []
    for own in (range(border), range(border, experts)):
        places = torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, len(own))
        outs.append(looped(x, places, weights, tuple(part[own.start : own.stop] for part in parts), len(own)))
        assert not outs[-1][(places == len(own)).all(1)].any()
    torch.testing.assert_close(
        (outs[0] + outs[1]).double(), in_float64(x, ids, weights, parts), rtol=1e-3, atol=1e-3
    )


@given(st.integers(2, 20), st.integers(1, 3), st.integers(3, 7), st.integers(0, 2**31))
@settings(max_examples=40)
def test_grouped_and_gathered_products_equal_the_loop(
    tokens: int, top_k: int, experts: int, seed: int
) -> None:
    dtype = torch.bfloat16
    x, parts = randn(seed, tokens, HIDDEN, dtype=dtype), stacks(seed + 1, experts, dtype)
    gate_up, gate_up_bias, down, down_bias = parts
    ids, weights = route(randn(seed + 9, tokens, experts), Routing(top_k=top_k, normalized=True))
    expected = in_float64(x, ids, weights, parts)
    order, ends = sort_by_expert(ids, experts)
    owner = ids.flatten()[order]
    inner = gated_activation(grouped_product(x[order // top_k], gate_up, gate_up_bias[owner], ends), "silu")
    values = grouped_product(inner, down, down_bias[owner], ends)
    grouped = weighted_sum(torch.empty_like(values).index_copy_(0, order, values), weights)
    flat = ids.flatten()
    rows = x.repeat_interleave(top_k, 0)
    inner = gated_activation(gathered_product(rows, gate_up[flat], gate_up_bias[flat]), "silu")
    gathered = weighted_sum(gathered_product(inner, down[flat], down_bias[flat]), weights)
    for out in (grouped, gathered, looped(x, ids, weights, parts)):
        assert (out.double() - expected).norm() <= 0.02 * expected.norm()


def test_a_loop_behind_an_operator_is_found_by_its_name() -> None:
    define_loop("twice", lambda x, ids, weights, tensors: x * 2 + tensors[0])
    x = randn(0, 3, HIDDEN)
    out = run_loop(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), [torch.ones(HIDDEN)], "twice")
    assert torch.equal(out, x * 2 + 1)


@torch.inference_mode()
def test_the_clamped_activation_equals_that_of_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    theirs = GptOssExperts(GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=2))
    interleaved = 6 * randn(0, 50, 2 * INNER)
    halves = torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], dim=1)
    assert (interleaved.abs() > 7).any()
    torch.testing.assert_close(clamped_swiglu(halves, 1.702, 7.0), theirs._apply_gate(interleaved))
