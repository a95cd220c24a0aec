"""Every method multiplies what it was given:
products and looked-up rows equal float64 over the restored weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import minivllm.linear.methods.groups
import minivllm.linear.methods.int8
from kernels_triton_free.linear import single_row_sums
from kernels_triton_free.packed.rows import MAX_ROWS
from kernels_triton_free.packed.tiles import can_tile
from kernels_triton_free.packed.whole_numbers import MOST_INPUTS
from kernels_triton_free.quantized_linear import INT4_MAX_ROWS, can_multiply_int4
from minivllm.errors import ModelError
from minivllm.linear.layer import Linear, Shard
from minivllm.linear.methods.exact import PackedLinear
from minivllm.linear.methods.float8 import Float8Linear
from minivllm.linear.methods.groups import DequantizedGroupLinear, OrderedInputs, SpreadGroups
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.int8 import DequantizedInt8Linear, Int8Linear, RoundedInputs, WholeInt8Linear
from minivllm.linear.methods.method import LinearMethod, forget_uncompiled_copies, largest_inputs
from minivllm.linear.methods.words import (
    LoopedInt4Linear,
    RestoredInt4Linear,
    RoundedInt4Linear,
    TiledInt4Linear,
    WholeInt4Linear,
)
from minivllm.weights.stored_weight import (
    GroupedWeight,
    RestoredWeight,
    RowScaledWeight,
    StoredWeight,
    round_to_float8_rows,
    round_to_groups,
    round_to_int8_rows,
    stack,
)

needs_int4 = pytest.mark.skipif(
    not can_multiply_int4(), reason="this CPU's order of 4-bit weights is not known"
)
BIASES = pytest.mark.parametrize("has_bias", [False, True])
OUT, IN = 100, 128  # no multiple of the 64 rows that the 4-bit operator takes


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(bits: int, group: int, rows: int = OUT) -> GroupedWeight:
    generator = torch.Generator().manual_seed(bits + group)
    codes = torch.randint(0, 2**bits, (rows, IN), generator=generator, dtype=torch.uint8)
    return GroupedWeight(
        codes, random(rows, IN // group, seed=1), random(rows, IN // group, seed=2), bits=bits
    )


def values_of(weight: GroupedWeight) -> Tensor:
    """Element by element, float64."""
    out = torch.empty(weight.codes.shape, dtype=torch.float64)
    for column in range(out.shape[1]):
        group = column // (out.shape[1] // weight.scale.shape[1])
        out[:, column] = (
            weight.codes[:, column] * weight.scale[:, group].double() + weight.offset[:, group].double()
        )
    return out


def check(method: LinearMethod, weight: object, values: Tensor, has_bias: bool, rows: int) -> None:
    bias, x = random(values.shape[0], seed=3), random(rows, values.shape[1], seed=4)
    tensors = method.prepare(weight, bias if has_bias else None)  # type: ignore[arg-type]
    expected = x.double() @ values.T + (bias.double() if has_bias else 0)
    out = method.apply(x, tensors)
    assert out.shape == expected.shape and out.dtype == x.dtype
    assert (out.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
    if isinstance(method, OrderedInputs):
        return
    indices = torch.tensor([0, 63, 64, values.shape[0] - 1, 5])
    assert method.gathers_rows
    rows_found = method.rows(indices, tensors).double()
    assert (rows_found - values[indices]).abs().max() <= 1e-6 * values.abs().max()


@BIASES
@pytest.mark.parametrize("rows", [1, 2, INT4_MAX_ROWS, INT4_MAX_ROWS + 1])
@pytest.mark.parametrize(
    ("stored_group", "group", "bits"), [(32, 32, 4), (128, 128, 4), (128, 32, 4), (32, 32, 8), (64, 32, 8)]
)
@needs_int4
def test_the_4_bit_operator_multiplies_groups_of_4_and_8_bits(
    rows: int, stored_group: int, group: int, bits: int, has_bias: bool
) -> None:
    weight = grouped(bits, stored_group)
    check(Int4Linear(OUT, group, bits, torch.float32), weight, values_of(weight), has_bias, rows)


BFLOAT16 = torch.bfloat16


def is_product(method: LinearMethod, weight: GroupedWeight, tensors: tuple[Tensor, ...], x: Tensor) -> bool:
    """Whether it is, up to what scales and a result of bfloat16 are rounded by. tensors[-1]: bias."""
    exact = x.double() @ values_of(weight).T + tensors[-1].double()
    return bool((method.apply(x, tensors).double() - exact).norm() < 6e-3 * exact.norm())


def are_read(method: LinearMethod, rows: int, tensors: tuple[Tensor, ...]) -> list[bool]:
    """Which tensors compiled code for so many rows reads."""
    read = {id(tensor) for tensor in method.read_by(rows, tensors)}
    return [id(tensor) in read for tensor in tensors]


def without(tensors: tuple[Tensor, ...], *places: int) -> tuple[Tensor, ...]:
    """The tensors with zeros in some places."""
    return tuple(
        torch.zeros_like(tensor) if place in places else tensor for place, tensor in enumerate(tensors)
    )


@pytest.mark.parametrize("rows", [1, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("bits", [4, 8])
@needs_int4
def test_compiled_code_for_few_rows_reads_words_and_for_more_tiles(
    rows: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, method = grouped(bits, 32, rows=128), TiledInt4Linear(128, 32, bits, BFLOAT16)
    tensors = method.prepare(weight, random(128, seed=3).bfloat16())
    x = random(rows, IN, seed=4).bfloat16()
    assert method.has_loops and are_read(method, rows, tensors) == [
        rows <= MAX_ROWS,
        rows > MAX_ROWS,
        rows > MAX_ROWS,
        True,
    ]
    assert is_product(method, weight, tensors, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_product(method, weight, tensors, x)
    assert is_product(method, weight, without(tensors, 1, 2), x) == (rows <= MAX_ROWS)
    assert is_product(method, weight, without(tensors, 0), x) == (rows > MAX_ROWS)
    assert method.without_tiles() == Int4Linear(128, 32, bits, BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("outputs", [100, 112, 128])
@pytest.mark.parametrize(("rows", "bits"), [(1, 4), (MAX_ROWS + 1, 8), (70, 4)])
@needs_int4
def test_without_products_of_bfloat16_all_compiled_code_reads_words(
    rows: int, bits: int, outputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, method = grouped(bits, 32, rows=outputs), LoopedInt4Linear(outputs, 32, bits, dtype)
    tensors = method.kept(method.prepare(weight, random(outputs, seed=3).to(dtype)))
    x = random(rows, IN, seed=4).to(dtype)
    assert len(tensors) == 2 and method.has_loops and all(are_read(method, rows, tensors))
    assert is_product(method, weight, tensors, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_product(method, weight, tensors, x)
    assert not is_product(method, weight, without(tensors, 0), x)
    indices = torch.tensor([0, outputs - 1, 64])
    values = values_of(weight)[indices]
    assert (method.rows(indices, tensors).double() - values).norm() < 6e-3 * values.norm()
    assert method.without_tiles() == Int4Linear(outputs, 32, bits, dtype)


@pytest.mark.parametrize("rows", [1, 2, MAX_ROWS + 1])
@pytest.mark.skipif(not can_tile(128, IN), reason="this CPU multiplies no tiles of bfloat16")
def test_a_head_is_restored_for_several_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, method = grouped(8, 32, rows=128), RestoredInt4Linear(128, 32, 8, BFLOAT16)
    tensors = method.kept(method.prepare(weight, random(128, seed=3).bfloat16()))
    x = random(rows, IN, seed=4).bfloat16()
    assert are_read(method, rows, tensors) == [rows == 1, rows > 1, True]
    assert is_product(method, weight, tensors, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_product(method, weight, tensors, x)
    assert is_product(method, weight, without(tensors, 0), x) == (rows > 1)
    indices = torch.tensor([0, 127, 64])
    off = method.rows(indices, tensors).double() - values_of(weight)[indices]
    assert off.norm() < 6e-3 * values_of(weight)[indices].norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 20])
@needs_int4
def test_compiled_code_for_several_rows_rounds_to_8_bits(
    rows: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, method = grouped(bits, 32, rows=128), RoundedInt4Linear(128, 32, bits, BFLOAT16)
    tensors, x = method.prepare(weight, random(128, seed=3).bfloat16()), random(rows, IN, seed=4).bfloat16()
    assert are_read(method, rows, tensors) == [rows == 1, rows > 1, rows > 1, rows > 1, True]
    assert is_product(method, weight, tensors, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_product(method, weight, without(tensors, 1, 2, 3), x) == (rows == 1)
    exact = x.double() @ values_of(weight).T
    assert (method.apply(x, tensors).double() - exact - tensors[-1].double()).norm() < 2e-2 * exact.norm()
    for own, bias in ((tensors[:-1], 0), (tensors, tensors[-1].double())):
        halves = method.apply_halves(x, own)
        assert [half.shape for half in halves] == [(rows, 64)] * 2
        assert (torch.cat(halves, 1).double() - exact - bias).norm() < 2e-2 * exact.norm()
    assert method.without_tiles() == Int4Linear(128, 32, bits, BFLOAT16)


@pytest.mark.parametrize(("bits", "rounded_bits", "allowed"), [(4, 8, 2e-2), (8, 10, 5e-3)])
@pytest.mark.parametrize("outputs", [100, 128])
@pytest.mark.parametrize("rows", [1, 2, 20])
@needs_int4
def test_compiled_code_for_several_rows_multiplies_whole_numbers(
    rows: int, outputs: int, bits: int, rounded_bits: int, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = grouped(bits, 32, rows=outputs)
    method = WholeInt4Linear(outputs, 32, bits, torch.float32, rounded_bits)
    tensors, x = method.prepare(weight, random(outputs, seed=3)), random(rows, IN, seed=4)
    assert are_read(method, rows, tensors) == [rows == 1, rows > 1, rows > 1, True]
    assert method.has_loops
    assert is_product(method, weight, tensors, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert is_product(method, weight, without(tensors, 1, 2), x) == (rows == 1)
    exact = x.double() @ values_of(weight).T + tensors[-1].double()
    assert (method.apply(x, tensors).double() - exact).norm() < allowed * exact.norm()
    indices = torch.tensor([0, outputs - 1, 64])
    off = method.rows(indices, tensors).double() - values_of(weight)[indices]
    assert off.norm() < 1e-6 * values_of(weight)[indices].norm()
    assert method.without_tiles() == Int4Linear(outputs, 32, bits, torch.float32)


@BIASES
@pytest.mark.parametrize("inputs", [IN, 3 * MOST_INPUTS // 2])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_compiled_code_multiplies_whole_numbers_of_8_bits(
    dtype: torch.dtype, inputs: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, weight = WholeInt8Linear(dtype), random(OUT, inputs, seed=1)
    bias, x = random(OUT, seed=3).to(dtype), random(20, inputs, seed=4).to(dtype)
    tensors = method.prepare(weight, bias if has_bias else None)
    exact = x.double() @ (tensors[0].double() * tensors[1].double()).T + (bias.double() if has_bias else 0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out = method.apply(x, tensors)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() < (2e-4 if dtype == torch.float32 else 4e-3) * exact.norm()


@needs_int4
def test_code_that_is_not_compiled_packs_words_once_and_compiled_code_takes_over() -> None:
    method = TiledInt4Linear(128, 32, 4, BFLOAT16)
    tensors = method.prepare(grouped(4, 32, rows=128), None)
    x = random(3, IN).bfloat16()
    with patch.object(
        Int4Linear, "_for_operator", autospec=True, side_effect=Int4Linear._for_operator
    ) as packs:
        first = method.apply(x, tensors)
        assert torch.equal(method.apply(x, tensors), first) and packs.call_count == 1
        forget_uncompiled_copies()
        assert torch.equal(method.apply(x, tensors), first) and packs.call_count == 2
        method.apply(x, method.prepare(grouped(4, 32, rows=128), None))
        assert packs.call_count == 3, "copies belong to their words"


@BIASES
@pytest.mark.parametrize("rows", [1, INT4_MAX_ROWS + 1])
@needs_int4
def test_groups_that_are_too_small_are_filled_up_with_zeros(rows: int, has_bias: bool) -> None:
    weight = grouped(4, 16)
    check(
        SpreadGroups(Int4Linear(OUT, 32, 4, torch.float32), 16, 32), weight, values_of(weight), has_bias, rows
    )


@BIASES
@pytest.mark.parametrize(
    "method", [Int4Linear(OUT, 32, 4, torch.float32), DequantizedGroupLinear(32, 4, torch.float32)]
)
@needs_int4
def test_inputs_in_another_order_meet_their_own_weights(method: LinearMethod, has_bias: bool) -> None:
    stored = grouped(4, 32)
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(5))
    values = torch.empty(OUT, IN, dtype=torch.float64)
    for place, column in enumerate(order.tolist()):
        values[:, column] = values_of(stored)[:, place]
    weight = replace(stored, order=order)
    assert (weight.restore(torch.float32).double() - values).abs().max() < 1e-5
    check(OrderedInputs(method), weight, values, has_bias, 3)


@BIASES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", [Int8Linear, DequantizedInt8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_8_bits_are_rounded_token_by_token(
    kind: type[Int8Linear], rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    values, scale = round_to_int8_rows(random(OUT, IN), dtype)
    weight, bias = RowScaledWeight(values, scale.float(), rounds_inputs=True), random(OUT, seed=3).to(dtype)
    x = (random(rows, IN, seed=4) * torch.logspace(-3, 2, rows)[:, None]).to(dtype)
    x[-1] = 0
    # In float32: the largest input lies on the border between two numbers,
    # and which one it gets is part of the format.
    steps = x.float().abs().amax(1, keepdim=True) / 127.5
    numbers = (x.float() / steps.clamp(min=1e-30)).round().clamp(-128, 127)
    expected = (numbers.double() * steps) @ (values.double() * scale.double()).T + (
        bias.double() if has_bias else 0
    )
    method = RoundedInputs(kind(dtype))
    out = method.apply(x, method.prepare(weight, bias if has_bias else None))
    assert out.dtype == dtype
    assert (
        (out.double() - expected).abs().amax(1).le(4 * torch.finfo(dtype).eps * expected.abs().amax(1)).all()
    )


@pytest.mark.parametrize("kind", [Int8Linear, DequantizedInt8Linear])
def test_parts_of_inputs_of_8_bits_add_up_where_the_largest_is_agreed_on(kind: type[Int8Linear]) -> None:
    values, scale = round_to_int8_rows(random(OUT, IN), torch.float32)
    weight, x = RowScaledWeight(values, scale, rounds_inputs=True), random(5, IN, seed=4)
    method = RoundedInputs(kind(torch.float32))
    expected = method.apply(x, method.prepare(weight, None))
    parts = [slice(0, 32), slice(32, IN)]
    tensors = [method.prepare(weight.part(slice(None), part), None) for part in parts]
    largest = torch.stack([largest_inputs(x[:, part]) for part in parts]).amax(0)
    agreed = sum(method.apply_part(x[:, part], own, largest) for part, own in zip(parts, tensors))
    torch.testing.assert_close(agreed, expected)
    apart = sum(method.apply(x[:, part], own) for part, own in zip(parts, tensors))
    assert (apart - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (SpreadGroups(Int4Linear(OUT, 32, 4, torch.float32), 16, 32), grouped(4, 16)),
        (
            OrderedInputs(Int4Linear(OUT, 32, 4, torch.float32)),
            replace(grouped(4, 32), order=torch.arange(IN).flip(0)),
        ),
        (
            RoundedInputs(Int8Linear(torch.float32)),
            RowScaledWeight(*round_to_int8_rows(random(OUT, IN), torch.float32), rounds_inputs=True),
        ),
    ],
)
@needs_int4
def test_wrapped_methods_are_traced_as_one_graph_for_any_number_of_rows(
    method: LinearMethod, weight: StoredWeight
) -> None:
    tensors = method.prepare(weight, None)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    traced = torch.compile(method.apply, backend=count, fullgraph=True, dynamic=True)
    for rows in (5, 7, INT4_MAX_ROWS + 1):  # sizes that no tensor of the weight has
        x = random(rows, IN, seed=rows)
        torch.testing.assert_close(traced(x, tensors), method.apply(x, tensors))
    assert len(graphs) == 1


@BIASES
@pytest.mark.parametrize(("group", "bits"), [(16, 4), (32, 8)])
def test_plain_pytorch_multiplies_groups(group: int, bits: int, has_bias: bool) -> None:
    weight = grouped(bits, group)
    check(DequantizedGroupLinear(group, bits, torch.float32), weight, values_of(weight), has_bias, 3)


@BIASES
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("kind", [Int8Linear, DequantizedInt8Linear])
def test_8_bits_with_one_scale_per_row(kind: type[LinearMethod], rows: int, has_bias: bool) -> None:
    weight = random(OUT, IN)
    values, scale = round_to_int8_rows(weight, torch.float32)
    check(kind(torch.float32), weight, values.double() * scale.double(), has_bias, rows)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "method", [Int4Linear(OUT, 32, 4, torch.float32), DequantizedGroupLinear(32, 4, torch.float32)]
)
@needs_int4
def test_a_plain_weight_is_rounded_to_4_bits(method: LinearMethod) -> None:
    weight = random(OUT, IN)
    check(method, weight, values_of(round_to_groups(weight, 32, torch.float32)), False, 3)


@pytest.mark.parametrize("stored", [False, True])
@BIASES
def test_float8_products_equal_those_of_the_rounded_operands(stored: bool, has_bias: bool) -> None:
    """Rows whose activations are numbers of float8 lose nothing,
    so only the sum and the output are rounded."""
    weight, bias = random(32, 64), random(32, seed=3).bfloat16()
    values, scale = round_to_float8_rows(weight)
    x = random(5, 64, seed=4).to(torch.float8_e4m3fn).float()
    x[:, 0] = 448.0  # the largest activation of each token: its scale is 1
    tensors = Float8Linear().prepare(
        RowScaledWeight(values, scale) if stored else weight, bias if has_bias else None
    )
    try:
        out = Float8Linear().apply(x.bfloat16(), tensors)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no float8 product with scales per row on this device: {error}")
    expected = x.double() @ (values.double() * scale.double()).T + (bias.double() if has_bias else 0)
    assert (out.double() - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_methods_with_equal_settings_are_equal_and_others_are_not() -> None:
    assert Int4Linear(8, 32, 4, torch.float32) == Int4Linear(8, 32, 4, torch.float32)
    assert (
        len({Int4Linear(8, 32, bits, torch.float32) for bits in (4, 8, 4)} | {Int8Linear(torch.float32)}) == 3
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [slice(None), slice(25, 50)])
@pytest.mark.parametrize("columns", [slice(None), slice(0, 64), slice(64, 128), slice(32, 48)])
def test_a_part_of_a_quantised_weight_is_that_part_of_its_values(
    bits: int, rows: slice, columns: slice
) -> None:
    weight = grouped(bits, 64)
    values = weight.part(rows, columns).restore(torch.float32).double()
    torch.testing.assert_close(values, values_of(weight)[rows, columns], rtol=1e-6, atol=1e-5)
    ordered = replace(weight, order=torch.randperm(IN, generator=torch.Generator().manual_seed(6)))
    part = ordered.part(rows, columns).restore(torch.float32)
    assert torch.equal(part, ordered.restore(torch.float32)[rows, columns])
    eights = RowScaledWeight(*round_to_float8_rows(random(OUT, IN)))
    assert torch.equal(
        eights.part(rows, columns).restore(torch.float32), eights.restore(torch.float32)[rows, columns]
    )


def named(*parts: object) -> dict[str, StoredWeight]:
    return {f"part {index}": part for index, part in enumerate(parts)}  # type: ignore[misc]


def test_layers_that_share_an_input_must_agree_whether_it_is_rounded() -> None:
    values, scale = round_to_int8_rows(random(7, IN), torch.float32)
    rounding = RowScaledWeight(values, scale, rounds_inputs=True)
    assert isinstance(stack(named(rounding, rounding), torch.float32), RowScaledWeight)
    for other in (random(7, IN), RowScaledWeight(values, scale), grouped(8, 32)):
        with pytest.raises(
            ModelError, match=r"part 0, part 1 are computed as one product.*quantise them alike"
        ):
            stack(named(other, rounding), torch.float32)


def test_stacked_weights_keep_their_form_where_they_share_one_and_their_values_always() -> None:
    four, eight, coarse = grouped(4, 32), grouped(8, 32), grouped(4, 64)
    plain, eights = random(7, IN), RowScaledWeight(*round_to_float8_rows(random(9, IN)))
    ordered, ints = (
        replace(four, order=torch.randperm(IN)),
        RowScaledWeight(*round_to_int8_rows(plain, torch.float32)),
    )
    for parts, kind in (
        ([four, four], GroupedWeight),
        ([four, eight], GroupedWeight),
        ([eights, eights], RowScaledWeight),
        ([four, coarse], GroupedWeight),
        ([four, grouped(8, 16)], GroupedWeight),
        ([four, grouped(4, 8)], RestoredWeight),
        ([ordered, ordered], GroupedWeight),
        ([four, ordered], RestoredWeight),
        ([ints, ints], RowScaledWeight),
        ([ints, eights], RestoredWeight),
        ([four, plain], RestoredWeight),
        ([four, eights], RestoredWeight),
    ):
        stacked = stack(named(*parts), torch.float32)
        assert isinstance(stacked, kind)
        values = [part if isinstance(part, Tensor) else part.restore(torch.float32) for part in parts]  # type: ignore[attr-defined]
        assert torch.equal(stacked.restore(torch.float32), torch.cat(values))
    both = stack(named(four, eight), torch.float32)
    assert isinstance(both, GroupedWeight) and both.bits == 8


@pytest.mark.parametrize("split", ["column", "row"])
def test_shards_of_a_quantised_layer_add_up_to_the_whole(split: str) -> None:
    weight, x = grouped(4, 64, rows=64), random(3, IN, seed=4)
    outs = []
    for rank in range(2):
        layer = Linear(
            {"o_proj": 64},
            IN,
            bias=False,
            split=split,  # type: ignore[arg-type]
            shard=Shard(rank, 2),
            dtype=torch.float32,
            device=torch.device("cpu"),
            choose=lambda name, part: DequantizedGroupLinear(part.group_size, 4, torch.float32),  # type: ignore[union-attr]
        )
        layer.load("o_proj", "weight", weight)
        own = x.chunk(2, dim=1)[rank] if split == "row" else x
        outs.append(layer.method.apply(own.contiguous(), layer.tensors))
    whole = outs[0] + outs[1] if split == "row" else torch.cat(outs, dim=1)
    torch.testing.assert_close(whole.double(), x.double() @ values_of(weight).T, rtol=1e-4, atol=1e-4)


def test_only_methods_whose_weight_can_be_read_look_up_rows() -> None:
    assert not PackedLinear(8).gathers_rows and not Float8Linear().gathers_rows
    with pytest.raises(NotImplementedError, match="PackedLinear"):
        PackedLinear(8).rows(torch.tensor([0]), ())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "method",
    [DequantizedInt8Linear(torch.float32), *(DequantizedGroupLinear(32, n, torch.float32) for n in (4, 8))],
)
def test_a_single_row_summed_as_on_a_gpu_equals_the_product(
    method: LinearMethod, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(40, 128, generator=generator), torch.randn(1, 128, generator=generator)
    tensors = method.prepare(weight, torch.randn(40, generator=generator) if has_bias else None)
    expected = method.apply(x, tensors)
    calls = []

    def summed(*operands: Any) -> Tensor:
        calls.append(operands)
        return single_row_sums(*operands)

    for module in (minivllm.linear.methods.groups, minivllm.linear.methods.int8):
        monkeypatch.setattr(module, "sums_single_row", lambda x: True)
        monkeypatch.setattr(module, "single_row_sums", summed)
    torch.testing.assert_close(method.apply(x, tensors), expected, rtol=1e-4, atol=1e-4)
    assert calls
