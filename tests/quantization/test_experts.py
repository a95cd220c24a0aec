"""Stacked experts in every format against a loop in float64 over the weights that the format stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton_free.experts.products import MOST_TURNS
from kernels_triton_free.experts.routing import Routing, route
from kernels_triton_free.linear import can_pack
from kernels_triton_free.packed.rows import MAX_ROWS, is_readable
from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm.compilation.regions import Region, flatten
from minivllm.errors import ConfigError, ModelError
from minivllm.linear.experts import experts as experts_module
from minivllm.linear.experts import methods
from minivllm.linear.experts.experts import Experts, _choose_restorable
from minivllm.linear.experts.methods import (
    ClampedSwiglu,
    ExpertActivation,
    GroupedExperts,
    LoopedExperts,
    StackedPackedLinear,
    activate,
)
from minivllm.linear.layer import ChooseMethod, Shard, never_quantized
from minivllm.linear.methods.exact import PlainLinear
from minivllm.linear.methods.float8 import Float8Linear
from minivllm.linear.methods.groups import DequantizedGroupLinear
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.int8 import DequantizedInt8Linear, Int8Linear
from minivllm.linear.methods.method import LinearMethod
from minivllm.weights.stored_weight import (
    GroupedWeight,
    QuantizedWeight,
    RestoredWeight,
    StoredWeight,
    round_to_groups,
)

EXPERTS, HIDDEN, INNER, TOP_K = 5, 64, 96, 2
BF16 = torch.bfloat16
Weights = dict[tuple[int, str], StoredWeight]

needs_int4 = pytest.mark.skipif(
    not can_multiply_int4(), reason="this CPU's order of 4-bit weights is not known"
)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_weights() -> Weights:
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        (expert, part): randn(17 * expert + len(part), *shape).div(shape[1] ** 0.5).to(BF16)
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }


def random_biases() -> dict[tuple[int, str], Tensor]:
    sizes = {"gate_proj": INNER, "up_proj": INNER, "down_proj": HIDDEN}
    return {
        (e, part): randn(1000 + 17 * e + len(part), n) for e in range(EXPERTS) for part, n in sizes.items()
    }


def make(
    weights: Weights,
    biases: dict[tuple[int, str], Tensor] | None = None,
    choose: ChooseMethod = never_quantized,
    dtype: torch.dtype = torch.float32,
    activation: ExpertActivation = "silu",
    shard: Shard | None = None,
) -> Experts:
    experts = Experts(
        EXPERTS,
        HIDDEN,
        INNER,
        bias=biases is not None,
        activation=activation,
        shard=shard or Shard(),
        dtype=dtype,
        device=torch.device("cpu"),
        choose=choose,
    )
    for (expert, part), weight in weights.items():
        experts.load(expert, part, "weight", weight)
        if biases is not None:
            experts.load(expert, part, "bias", biases[expert, part])
    return experts


def values_of(weight: StoredWeight) -> Tensor:
    return (weight.restore(torch.float32) if isinstance(weight, QuantizedWeight) else weight).double()


def expected_output(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    weights: Weights,
    biases: dict[tuple[int, str], Tensor] | None,
    activation: ExpertActivation = "silu",
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, factor in zip(ids[token].tolist(), factors[token].double()):

            def product(row: Tensor, part: str, expert: int = expert) -> Tensor:
                bias = 0.0 if biases is None else biases[expert, part].double()
                return values_of(weights[expert, part]) @ row + bias

            gate_up = torch.cat([product(row, "gate_proj"), product(row, "up_proj")])
            out[token] += factor * product(activate(gate_up[None], activation)[0], "down_proj")
    return out


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    ids, factors = route(randn(5, tokens, EXPERTS), Routing(top_k=TOP_K, normalized=True))
    return randn(6, tokens, HIDDEN).to(dtype), ids, factors


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("activation", ["silu", ClampedSwiglu(1.7, 0.5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_experts_equal_the_definition(
    tokens: int, activation: ExpertActivation, has_bias: bool
) -> None:
    weights, biases = random_weights(), random_biases() if has_bias else None
    experts = make(weights, biases, activation=activation)
    x, ids, factors = inputs(tokens, torch.float32)
    out = experts.method.apply(x, ids, factors, experts.tensors)
    expected = expected_output(x, ids, factors, weights, biases, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    if biases is not None:
        assert not torch.allclose(
            expected_output(x, ids, factors, weights, None, activation), expected, atol=0.1
        )


@pytest.mark.skipif(not can_pack(BF16), reason="oneDNN cannot pack bfloat16 weights on this CPU")
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_experts_equal_the_definition(tokens: int, has_bias: bool) -> None:
    """In any order of loading; and their weights can be replaced one by one."""
    weights, biases = random_weights(), random_biases() if has_bias else None
    weights = dict(sorted(weights.items(), key=lambda item: -item[0][0]))
    experts = make(weights, biases, dtype=BF16)
    assert all(isinstance(own, StackedPackedLinear) for own in (experts.method.gate_up, experts.method.down))
    x, ids, factors = inputs(tokens, BF16)
    out = experts.method.apply(x, ids, factors, experts.tensors).double()
    expected = expected_output(x, ids, factors, weights, biases)
    assert (out - expected).norm() <= 0.02 * expected.norm()
    moved = make(random_weights(), biases, dtype=BF16)
    moved.tensors = tuple(tensor.clone() for tensor in experts.tensors)
    assert torch.equal(moved.method.apply(x, ids, factors, moved.tensors).double(), out)


def test_weights_are_not_packed_where_their_bytes_cannot_be_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "can_restore", lambda: False)
    weights = random_weights()
    experts = make(weights, dtype=BF16)
    assert experts.method.gate_up == experts.method.down == PlainLinear()
    x, ids, factors = inputs(7, BF16)
    out, expected = (
        experts.method.apply(x, ids, factors, experts.tensors),
        expected_output(x, ids, factors, weights, None),
    )
    assert (out.double() - expected).norm() <= 0.02 * expected.norm()


def as_declared(calls: list[tuple[int, int]], region: Region) -> Callable:
    """In place of a compiler. calls: gets the rows and the experts of every call."""

    def run(*args: Any) -> Tensor:
        rows, hit = args[0].shape[:2]
        assert region.has_code_for("single") and rows in (1, MAX_ROWS) and hit >= 2
        tensors: list[Tensor] = []
        flatten(args, tensors)
        (region.fixed("single") if rows == 1 else region).check(tensors)
        calls.append((rows, hit))
        out: Tensor = region.function(*args)
        return out

    return run


def routed(how: str, tokens: int) -> Tensor:
    """int64 [tokens, TOP_K]: "random"; all to the "same" experts;
    to "one" expert and now and then another."""
    ids = inputs(tokens, BF16)[1]
    if how == "same":
        return torch.tensor([[3, 1]]).repeat(tokens, 1)
    return torch.stack([torch.full((tokens,), 4), torch.arange(tokens) // 3 % 4], 1) if how == "one" else ids


@pytest.mark.skipif(not is_readable(64, 96), reason="oneDNN packs in another order on this CPU")
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 7, 40])
@pytest.mark.parametrize("how", ["random", "same", "one"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_part", [False, True], ids=["all experts", "some experts"])
def test_experts_of_few_rows_equal_the_definition(
    tokens: int, how: str, has_bias: bool, is_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of loops over packed weights takes the place of all of oneDNN's products where experts have so
    few rows that a few turns of MAX_ROWS do; where one has more, of those of the others that need no more
    than one."""
    monkeypatch.setattr(methods, "_few_rows", {})
    weights, biases = random_weights(), random_biases() if has_bias else None
    experts = make(weights, biases, dtype=BF16)
    method = replace(experts.method, is_part=is_part)
    x, _, factors = inputs(tokens, BF16)
    ids = expected_ids = routed(how, tokens)
    expected_factors = factors
    if is_part:
        ids = torch.where((ids + torch.arange(tokens)[:, None]) % 3 == 0, EXPERTS, ids)
        expected_factors = torch.where(ids == EXPERTS, 0, factors)
        expected_ids = torch.where(ids == EXPERTS, 0, ids)
    assert isinstance(method, LoopedExperts)
    calls: list[tuple[int, int]] = []
    method.compile_few_rows(partial(as_declared, calls), HIDDEN, INNER)
    out = method.apply(x, ids, factors, experts.tensors).double()
    expected = expected_output(x, expected_ids, expected_factors, weights, biases)
    assert (out - expected).norm() <= 0.02 * expected.norm()
    counts = [int((ids == expert).sum()) for expert in range(EXPERTS)]
    few = sum(0 < count <= MAX_ROWS for count in counts)
    if tokens > 1 and max(counts) <= MOST_TURNS * MAX_ROWS:
        few = sum(-(-count // MAX_ROWS) for count in counts)
    assert calls == ([(1 if tokens == 1 else MAX_ROWS, max(few, 2))] if few else [])


def test_nothing_is_written_out_for_few_rows_without_a_compiler_or_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(methods, "_few_rows", {})
    for dtype in (BF16, torch.float32):
        make(random_weights(), dtype=dtype).compile_few_rows(lambda region: region.function)
    make(random_weights()).compile_few_rows(partial(as_declared, []))
    assert not methods._few_rows


def grouped_weights(bits: int) -> Weights:
    def one(weight: StoredWeight) -> GroupedWeight:
        assert isinstance(weight, Tensor)
        four = round_to_groups(weight, 32, BF16)
        return four if bits == 4 else GroupedWeight(four.codes * 17, four.scale / 17, four.offset, bits=8)

    return {place: one(weight) for place, weight in random_weights().items()}


@needs_int4
@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_groups_keep_the_values_that_are_stored(tokens: int, bits: int) -> None:
    weights = grouped_weights(bits)
    experts = make(weights, random_biases(), lambda name, w: Int4Linear(w.shape[0], 32, bits, BF16), BF16)
    assert experts.tensors[0].dtype == torch.uint8
    x, ids, factors = inputs(tokens, BF16)
    out = experts.method.apply(x, ids, factors, experts.tensors).double()
    expected = expected_output(x, ids, factors, weights, random_biases())
    assert (out - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (Int8Linear(BF16), 0.02),
        (DequantizedInt8Linear(BF16), 0.02),
        (DequantizedGroupLinear(32, 4, BF16), 0.15),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_rounded_experts_are_near_and_both_ways_of_computing_them_agree(
    method: LinearMethod, tolerance: float, tokens: int
) -> None:
    weights = random_weights()
    experts = make(weights, random_biases(), lambda name, weight: method, BF16)
    x, ids, factors = inputs(tokens, BF16)
    looped = experts.method
    assert isinstance(looped, LoopedExperts)
    grouped = GroupedExperts(**vars(looped))
    expected = expected_output(x, ids, factors, weights, random_biases())
    outs = [way.apply(x, ids, factors, experts.tensors).double() for way in (looped, grouped)]
    for out in outs:
        assert (out - expected).norm() <= tolerance * expected.norm()
    assert (outs[0] - outs[1]).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_groups_leave_out_what_other_workers_compute(has_bias: bool, tokens: int) -> None:
    """As expert parallelism on a GPU has it: choices of others have the id after the last one here."""
    weights, biases = random_weights(), random_biases() if has_bias else None
    experts = make(weights, biases, lambda name, weight: DequantizedInt8Linear(BF16), BF16)
    x, ids, factors = inputs(tokens, BF16)
    is_elsewhere = (ids + torch.arange(tokens)[:, None]) % 3 == 0
    grouped = GroupedExperts(**vars(replace(experts.method, is_part=True)))
    out = grouped.apply(x, torch.where(is_elsewhere, EXPERTS, ids), factors, experts.tensors).double()
    expected = expected_output(x, ids, torch.where(is_elsewhere, 0, factors), weights, biases)
    assert is_elsewhere.any() and (out - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_shards_of_experts_add_up(has_bias: bool) -> None:
    weights, biases = random_weights(), random_biases() if has_bias else None
    x, ids, factors = inputs(7, torch.float32)
    out = torch.zeros(x.shape)
    for rank in range(2):
        experts = make(weights, biases, shard=Shard(rank, 2))
        out += experts.method.apply(x, ids, factors, experts.tensors)
    expected = expected_output(x, ids, factors, weights, biases)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_methods_compare_by_value_and_tensors_can_be_replaced() -> None:
    one, other = (
        make(random_weights()),
        make(random_weights(), choose=lambda name, weight: Int8Linear(torch.float32)),
    )
    assert one.method == make(random_weights()).method != other.method
    assert repr(one.method) != repr(other.method) != repr(replace(other.method, activation="gelu"))
    x, ids, factors = inputs(3, torch.float32)
    one.tensors = tuple(torch.zeros_like(tensor) for tensor in one.tensors)
    assert not one.method.apply(x, ids, factors, one.tensors).any()


def test_experts_stored_in_different_ways_are_refused_in_a_sentence() -> None:
    weights = random_weights()
    weights[1, "down_proj"] = RestoredWeight(values_of(weights[1, "down_proj"]).float())
    with pytest.raises(ModelError, match="experts of one layer are stored in different ways"):
        make(
            weights,
            choose=lambda name, weight: Int8Linear(torch.float32) if isinstance(weight, Tensor) else None,
        )


@pytest.mark.parametrize(
    ("dtype", "inner", "message"),
    [(torch.float16, INNER, "use dtype='bfloat16'"), (BF16, 100, "multiples of 8")],
)
def test_what_a_gpu_cannot_multiply_is_refused_before_memory_is_allocated(
    dtype: torch.dtype, inner: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Experts(
            EXPERTS,
            HIDDEN,
            inner,
            bias=False,
            activation="silu",
            shard=Shard(),
            dtype=dtype,
            device=torch.device("cuda"),
        )


def test_experts_are_not_rounded_to_what_cannot_be_restored() -> None:
    with pytest.raises(ConfigError, match="use quantization='int8' or 'int4'"):
        _choose_restorable(lambda name, weight: Float8Linear(), "down_proj", torch.ones(16, 16))
    stored = RestoredWeight(torch.ones(16, 16))
    assert _choose_restorable(lambda name, weight: Float8Linear(), "down_proj", stored) is None
