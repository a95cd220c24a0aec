"""Shards of a linear layer add up to the whole:
columns concatenated, rows summed, merged parts in their places."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from kernels_triton_free.linear import can_pack
from kernels_triton_free.packed.rows import MAX_ROWS, is_readable
from kernels_triton_free.packed.tiles import can_tile
from minivllm.device.policy import DevicePolicy
from minivllm.linear.choose import MethodChooser
from minivllm.linear.layer import Linear, Shard
from minivllm.linear.methods.exact import (
    LoopedLinear,
    PackedLinear,
    PlainLinear,
    TiledLinear,
    choose_linear_method,
    looped,
)
from minivllm.linear.methods.method import forget_uncompiled_copies, uncompiled_copies
from minivllm.weights.stored_weight import RestoredWeight

CPU = torch.device("cpu")
FOR_LOOPS = DevicePolicy(type="cpu", multiplies_whole_numbers=True)
PARTS = {"q_proj": 24, "k_proj": 8, "v_proj": 8}
IN = 48

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-5),
        pytest.param(
            torch.bfloat16,
            2e-2,
            marks=pytest.mark.skipif(
                not can_pack(torch.bfloat16), reason="this CPU cannot pack bfloat16 weights"
            ),
        ),
    ],
)


def checkpoint(
    dtype: torch.dtype, parts: dict[str, int] = PARTS
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(size, IN, generator=generator) / IN**0.5).to(dtype) for name, size in parts.items()
    }
    biases = {name: torch.randn(size, generator=generator).to(dtype) for name, size in parts.items()}
    return weights, biases, torch.randn(5, IN, generator=generator).to(dtype)


def loaded(
    parts: dict[str, int],
    split: Literal["column", "row"],
    shard: Shard,
    weights: dict[str, Tensor],
    biases: dict[str, Tensor] | None,
    dtype: torch.dtype,
) -> Linear:
    layer = Linear(parts, IN, bias=biases is not None, split=split, shard=shard, dtype=dtype, device=CPU)
    tensors = [(name, "weight", tensor) for name, tensor in weights.items()]
    tensors += [(name, "bias", tensor) for name, tensor in (biases or {}).items()]
    # Checkpoints hold their tensors in any order.
    for name, kind, tensor in sorted(tensors, key=lambda item: item[1] + item[0][::-1]):
        layer.load(name, kind, tensor)
    return layer


def product(layer: Linear, x: Tensor) -> Tensor:
    return layer.method.apply(x, layer.tensors)


def whole_product(
    x: Tensor, weights: dict[str, Tensor], biases: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """Float64, part by part."""
    out = {name: x.double() @ weight.double().T for name, weight in weights.items()}
    return out if biases is None else {name: part + biases[name].double() for name, part in out.items()}


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_shards_put_side_by_side_equal_the_whole(
    size: int, has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    weights, biases, x = checkpoint(dtype)
    own_biases = biases if has_bias else None
    shards = [loaded(PARTS, "column", Shard(rank, size), weights, own_biases, dtype) for rank in range(size)]
    # Every shard holds its share of q, then of k, then of v.
    split = [product(shard, x).split(list(shard.sizes.values()), dim=-1) for shard in shards]
    for index, expected in enumerate(whole_product(x, weights, own_biases).values()):
        together = torch.cat([parts[index] for parts in split], dim=-1)
        torch.testing.assert_close(together.double(), expected, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sum_of_row_shards_equals_the_whole_with_its_bias_added_once(
    size: int, has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    parts = {"o_proj": 40}
    weights, biases, x = checkpoint(dtype, parts)
    own_biases = biases if has_bias else None
    total = torch.zeros(5, 40, dtype=torch.float64)
    for rank in range(size):
        layer = loaded(parts, "row", Shard(rank, size), weights, own_biases, dtype)
        assert layer.in_features == IN // size and layer.out_features == 40
        total += product(layer, x[:, rank * IN // size : (rank + 1) * IN // size]).double()
    expected = whole_product(x, weights, own_biases)["o_proj"]
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)


def test_tensors_appear_when_the_last_one_has_arrived_and_the_originals_are_dropped() -> None:
    weights, _, _ = checkpoint(torch.float32)
    layer = Linear(PARTS, IN, bias=False, split="column", shard=Shard(), dtype=torch.float32, device=CPU)
    layer.load("v_proj", "weight", weights["v_proj"])
    layer.load("q_proj", "weight", weights["q_proj"])
    assert layer.tensors == ()
    layer.load("k_proj", "weight", weights["k_proj"])
    assert len(layer.tensors) == 1 and not layer._weights and not layer._biases
    whole = torch.cat(list(weights.values()))
    assert torch.equal(layer.method.rows(torch.arange(len(whole)), layer.tensors), whole)


def test_methods_compare_by_value_so_that_equal_layers_share_a_region() -> None:
    assert PlainLinear() == PlainLinear() and PackedLinear(8) == PackedLinear(8) != PackedLinear(9)
    assert len({PlainLinear(), PlainLinear(), PackedLinear(8), PackedLinear(8)}) == 2


def test_the_method_follows_dtype_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.linear.methods.exact.can_pack", lambda dtype: dtype == torch.bfloat16)
    assert choose_linear_method(8, 8, torch.float32, CPU) == PlainLinear()
    assert choose_linear_method(8, 8, torch.bfloat16, CPU) == PackedLinear(8)
    assert choose_linear_method(8, 8, torch.bfloat16, torch.device("cuda")) == PlainLinear()
    monkeypatch.setattr("minivllm.linear.methods.exact.can_pack", lambda dtype: False)
    assert choose_linear_method(8, 8, torch.bfloat16, CPU) == PlainLinear()


@pytest.mark.skipif(not can_tile(96, 128), reason="this CPU multiplies no tiles of bfloat16")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shards", [1, 4, 8])
def test_compiled_code_has_tiles_and_code_that_is_not_a_copy(
    shards: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a worker whose part of the inputs is not what a tile takes,
    and of a weight that is stored wide."""
    choose = MethodChooser(None, None, torch.bfloat16, DevicePolicy(type="cpu"), compiled=True)
    how = {"bias": has_bias, "split": "row", "dtype": torch.bfloat16, "device": CPU, "choose": choose}
    layer = Linear({"gate_proj": 96, "up_proj": 96}, 128, shard=Shard(0, shards), **how)  # type: ignore[arg-type]
    whole, bias = torch.randn(192, 128), torch.randn(192).bfloat16()
    for part, name in enumerate(layer.sizes):
        layer.load(name, "weight", whole[96 * part : 96 * (part + 1)])
        if has_bias:
            layer.load(name, "bias", bias[96 * part : 96 * (part + 1)])
    assert layer.method == TiledLinear(192)
    own = whole[:, : 128 // shards].bfloat16()
    forget_uncompiled_copies()
    for rows in (1, MAX_ROWS, MAX_ROWS + 1):
        x = torch.randn(rows, 128 // shards).bfloat16()
        expected = x.double() @ own.double().T + (bias.double() if has_bias else 0)
        for is_compiled in (False, True):
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda own=is_compiled: own)
            assert (len(uncompiled_copies) > 0) == is_compiled
            whole_out, halves = (
                layer.product(x, layer.arguments),
                layer.product.halves(x, layer.arguments, None),
            )
            for out in (whole_out, torch.cat(halves, dim=1)):
                assert (out.double() - expected).norm() <= 0.01 * expected.norm()
        forget_uncompiled_copies()


def test_what_has_no_tiles_stays_as_it_is_where_code_is_compiled() -> None:
    cpu, cuda = DevicePolicy(type="cpu"), DevicePolicy(type="cuda")
    for policy, dtype, shape in (
        (cpu, torch.bfloat16, (81, 64)),
        (cpu, torch.bfloat16, (96, 40)),
        (cpu, torch.float16, (96, 64)),
        (cuda, torch.bfloat16, (96, 64)),
    ):
        assert MethodChooser(None, None, dtype, policy, compiled=True)("o_proj", torch.randn(shape)) is None
    assert MethodChooser(None, None, torch.bfloat16, cpu)("o_proj", torch.randn(96, 64)) is None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("inputs", [54, 27])
@pytest.mark.parametrize(
    ("stored", "dtype", "bits"),
    [
        (torch.bfloat16, torch.bfloat16, 16),
        (torch.bfloat16, torch.float32, 16),
        (torch.float32, torch.float32, 32),
        (torch.float32, torch.bfloat16, 16),
    ],
)
def test_for_loops_a_weight_lies_in_as_many_bits_as_its_values_need(
    stored: torch.dtype,
    dtype: torch.dtype,
    bits: int,
    inputs: int,
    has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of two workers has a part of the inputs, which may be an odd number of them."""
    choose = MethodChooser(None, None, dtype, FOR_LOOPS, compiled=True)
    how = {"bias": has_bias, "split": "row", "dtype": dtype, "device": CPU, "choose": choose}
    layer = Linear({"o_proj": 45}, 2 * inputs, shard=Shard(1, 2), **how)  # type: ignore[arg-type]
    weight, bias = torch.randn(45, 2 * inputs).to(stored), torch.randn(45).to(stored)
    layer.load("o_proj", "weight", weight)
    if has_bias:
        layer.load("o_proj", "bias", bias)  # which the first worker adds
    assert layer.method == LoopedLinear(45, bits, dtype) and layer.method.has_loops
    x, own = torch.randn(3, inputs).to(dtype), weight[:, inputs:].to(dtype)
    expected = x.double() @ own.double().T
    for is_compiled in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda own=is_compiled: own)
        out = layer.product(x, layer.arguments)
        assert out.dtype == dtype and out.shape == expected.shape
        allowed = 1e-5 if dtype == torch.float32 else 2**-7
        assert (out.double() - expected).abs().max() <= allowed * expected.abs().max()
    if inputs % 2 == 0:
        assert torch.equal(layer.method.rows(torch.tensor([44, 0]), layer.tensors), own[[44, 0]])


def test_float16_and_what_is_stacked_stay_as_they_are_with_loops() -> None:
    weight = torch.randn(8, 8)
    assert looped(weight, torch.float16) is None
    assert looped(torch.randn(8, 7).bfloat16(), torch.bfloat16) == LoopedLinear(8, 32, torch.bfloat16)
    restored = RestoredWeight(weight)
    assert looped(restored, torch.float32) == LoopedLinear(8, 32, torch.float32)
    tensors = LoopedLinear(8, 32, torch.float32).prepare(restored, None)
    assert torch.equal(LoopedLinear(8, 32, torch.float32).rows(torch.arange(8), tensors), weight)
    assert MethodChooser(None, None, torch.float32, FOR_LOOPS)("o_proj", weight) is None
    chooser = MethodChooser(None, None, torch.float32, FOR_LOOPS, compiled=True)
    assert chooser("o_proj", weight) == LoopedLinear(8, 32, torch.float32)


@pytest.mark.skipif(not is_readable(64, 96), reason="oneDNN packs in another order on this CPU")
@pytest.mark.parametrize("has_bias", [False, True])
def test_up_to_four_rows_of_compiled_code_read_the_words_and_nothing_else_does(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of another weight shows who reads it. It has no owner, and goes where the weight goes."""
    weight, other = (
        torch.randn(64, 96, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(2)
    )
    bias = torch.randn(64).bfloat16() if has_bias else None
    method = choose_linear_method(64, 96, torch.bfloat16, CPU)
    assert method == PackedLinear(64, reads_words=True)
    tensors, others = (method.kept(method.prepare(w, bias)) for w in (weight, other))
    assert [id(tensor) for tensor in method.read_by(1, tensors)] == [id(tensors[0]), *map(id, tensors[2:])]
    moved = method.mapped(tensors, lambda tensor: tensor.clone() if tensor.is_mkldnn else tensor)
    assert torch.equal(moved[1], tensors[1]) and moved[1].data_ptr() != tensors[1].data_ptr()
    mixed = (tensors[0], others[1], *tensors[2:])
    x = torch.randn(MAX_ROWS + 1, 96).bfloat16()

    def near(out: Tensor, rows: Tensor, weight: Tensor) -> bool:
        expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
        return bool((out.double() - expected).norm() <= 0.01 * expected.norm())

    assert near(method.apply(x[:1], mixed), x[:1], weight)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert near(method.apply(x, mixed), x, weight)
    for rows in (1, 2, MAX_ROWS):
        assert near(method.apply(x[:rows], mixed), x[:rows], other)
        assert near(method.apply(x[:rows], tensors), x[:rows], weight)
