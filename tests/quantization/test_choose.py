"""Which method a layer gets, on devices this machine does not have as well,
and the sentences where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import minivllm.linear.choose
from kernels_triton_free.packed.int8_tiles import can_tile_int8
from kernels_triton_free.packed.tiles import can_tile
from kernels_triton_free.packed.whole_numbers import can_multiply_whole_numbers
from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm.device.policy import DevicePolicy
from minivllm.errors import ConfigError
from minivllm.linear.choose import MethodChooser
from minivllm.linear.methods.float8 import Float8Linear
from minivllm.linear.methods.groups import DequantizedGroupLinear, OrderedInputs, SpreadGroups
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.int8 import DequantizedInt8Linear, Int8Linear, RoundedInputs, WholeInt8Linear
from minivllm.linear.methods.method import LinearMethod
from minivllm.linear.methods.words import (
    LoopedInt4Linear,
    RestoredInt4Linear,
    RoundedInt4Linear,
    TiledInt4Linear,
    WholeInt4Linear,
)
from minivllm.weights.stored_weight import GroupedWeight, RestoredWeight, RowScaledWeight

BF16 = torch.bfloat16
CPU = DevicePolicy(type="cpu", multiplies_int4=True)
FAST_CPU = replace(CPU, multiplies_bfloat16=True)
OLD_CPU = DevicePolicy(type="cpu")
AMPERE = DevicePolicy(type="cuda", capability=(8, 0))
ADA, HOPPER = DevicePolicy(type="cuda", capability=(8, 9)), DevicePolicy(type="cuda", capability=(9, 0))
PLAIN = torch.ones(64, 96)
EIGHTS = RowScaledWeight(PLAIN.to(torch.float8_e4m3fn), torch.ones(64, 1), rounds_inputs=True)
INTS = RowScaledWeight(PLAIN.to(torch.int8), torch.ones(64, 1))


def grouped(group: int, bits: int = 4, inputs: int = 96) -> GroupedWeight:
    scale = torch.ones(64, inputs // group)
    return GroupedWeight(torch.ones(64, inputs, dtype=torch.uint8), scale, scale, bits=bits)


def chosen(quantization: str | None, policy: DevicePolicy, name: str, weight: object) -> LinearMethod | None:
    return MethodChooser(quantization, None, BF16, policy)(name, weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quantization", "policy", "name", "expected"),
    [
        (None, CPU, "o_proj", None),
        ("int8", CPU, "o_proj", Int8Linear(BF16)),
        ("int8", OLD_CPU, "o_proj", Int8Linear(BF16)),
        ("int8", AMPERE, "o_proj", DequantizedInt8Linear(BF16)),
        ("int4", CPU, "o_proj", LoopedInt4Linear(64, 32, 4, BF16)),
        ("int4", FAST_CPU, "in_proj", TiledInt4Linear(64, 32, 4, BF16)),
        ("int4", CPU, "lm_head", Int8Linear(BF16)),
        ("int4", HOPPER, "o_proj", DequantizedGroupLinear(32, 4, BF16)),
        ("int4", HOPPER, "lm_head", DequantizedInt8Linear(BF16)),
        ("fp8", ADA, "o_proj", Float8Linear()),
        ("fp8", HOPPER, "o_proj", Float8Linear()),
        ("fp8", HOPPER, "lm_head", DequantizedInt8Linear(BF16)),
    ],
)
def test_a_plain_weight_is_rounded_as_asked_for(
    quantization: str | None, policy: DevicePolicy, name: str, expected: LinearMethod | None
) -> None:
    assert chosen(quantization, policy, name, PLAIN) == expected


@pytest.mark.parametrize(
    ("policy", "weight", "expected"),
    [
        (CPU, grouped(32), LoopedInt4Linear(64, 32, 4, BF16)),
        (CPU, grouped(32, bits=8), LoopedInt4Linear(64, 32, 8, BF16)),
        (FAST_CPU, grouped(32, bits=8), TiledInt4Linear(64, 32, 8, BF16)),
        (FAST_CPU, grouped(16), SpreadGroups(Int4Linear(64, 32, 4, BF16), 16, 32)),
        (
            CPU,
            grouped(96),
            LoopedInt4Linear(64, 32, 4, BF16),
        ),  # one group per row becomes three with the same scale
        (CPU, grouped(128, inputs=256), LoopedInt4Linear(64, 128, 4, BF16)),
        (CPU, grouped(512, inputs=512), LoopedInt4Linear(64, 256, 4, BF16)),
        (CPU, grouped(16), SpreadGroups(LoopedInt4Linear(64, 32, 4, BF16), 16, 32)),
        (CPU, grouped(16, bits=8), None),
        (CPU, grouped(8), None),
        (CPU, replace(grouped(32), order=torch.arange(96)), OrderedInputs(LoopedInt4Linear(64, 32, 4, BF16))),
        (OLD_CPU, replace(grouped(32), order=torch.arange(96)), None),
        (
            AMPERE,
            replace(grouped(32), order=torch.arange(96)),
            OrderedInputs(DequantizedGroupLinear(32, 4, BF16)),
        ),
        (CPU, INTS, Int8Linear(BF16)),
        (AMPERE, INTS, DequantizedInt8Linear(BF16)),
        (OLD_CPU, replace(INTS, rounds_inputs=True), RoundedInputs(Int8Linear(BF16))),
        (AMPERE, replace(INTS, rounds_inputs=True), RoundedInputs(DequantizedInt8Linear(BF16))),
        (OLD_CPU, grouped(32), None),
        (AMPERE, grouped(16), DequantizedGroupLinear(16, 4, BF16)),
        (HOPPER, EIGHTS, Float8Linear()),
        (AMPERE, EIGHTS, None),
        (CPU, EIGHTS, None),
        (HOPPER, replace(EIGHTS, rounds_inputs=False), None),
        (HOPPER, RowScaledWeight(EIGHTS.values[:40], EIGHTS.scale[:40], rounds_inputs=True), None),
        (CPU, RestoredWeight(PLAIN), None),
    ],
)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_quantised_weight_is_multiplied_as_it_is_or_restored_but_never_rounded(
    quantization: str | None, policy: DevicePolicy, weight: object, expected: LinearMethod | None
) -> None:
    if not (quantization == "int4" and policy == OLD_CPU):
        assert chosen(quantization, policy, "o_proj", weight) == expected


def test_layers_that_bear_it_are_rounded_to_8_bits_where_the_cpu_gains_by_it() -> None:
    gains = can_tile_int8(64, 96)
    for name in ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj"):
        expected = (RoundedInt4Linear if gains else TiledInt4Linear)(64, 32, 4, BF16)
        assert chosen("int4", FAST_CPU, name, PLAIN) == chosen(None, FAST_CPU, name, grouped(32)) == expected
        assert chosen("int4", CPU, name, grouped(32)) == LoopedInt4Linear(64, 32, 4, BF16)
        assert isinstance(chosen("int4", FAST_CPU, name, grouped(32, bits=8)), TiledInt4Linear)
    for bits in (4, 8):
        head = chosen(None, FAST_CPU, "lm_head", grouped(32, bits))
        assert (head == RoundedInt4Linear(64, 32, bits, BF16)) == gains
    assert isinstance(chosen("int4", FAST_CPU, "in_proj", PLAIN), TiledInt4Linear)


def test_with_avx2_and_no_more_4_bits_and_the_head_become_whole_numbers_for_several_rows() -> None:
    policy = replace(CPU, multiplies_whole_numbers=True)
    assert chosen("int4", policy, "o_proj", PLAIN) == WholeInt4Linear(64, 32, 4, BF16, 8)
    assert chosen(None, policy, "q_proj+k_proj+v_proj", grouped(96)) == WholeInt4Linear(64, 32, 4, BF16, 8)
    assert chosen(None, policy, "o_proj", grouped(16)) == SpreadGroups(
        WholeInt4Linear(64, 32, 4, BF16, 8), 16, 32
    )
    assert chosen(None, policy, "lm_head", grouped(32, bits=8)) == WholeInt4Linear(64, 32, 8, BF16, 10)
    assert chosen(None, policy, "down_proj", grouped(32, bits=8)) == LoopedInt4Linear(64, 32, 8, BF16)
    chooser = MethodChooser("int4", None, torch.float16, policy)
    assert chooser("o_proj", PLAIN) == Int4Linear(64, 32, 4, torch.float16)
    assert (
        chosen("int8", policy, "o_proj", PLAIN)
        == chosen("int4", policy, "lm_head", PLAIN)
        == WholeInt8Linear(BF16)
    )
    assert chosen(None, policy, "o_proj", INTS) == WholeInt8Linear(BF16)
    rounds_inputs = replace(INTS, rounds_inputs=True)
    assert chosen(None, policy, "o_proj", rounds_inputs) == RoundedInputs(Int8Linear(BF16))


def test_a_head_of_8_bits_that_is_not_rounded_is_restored_where_the_cpu_multiplies_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(minivllm.linear.choose, "can_tile_int8", lambda *_: False)
    weight = grouped(32, bits=8)
    kind = RestoredInt4Linear if can_tile(64, 96) else TiledInt4Linear
    assert chosen("int4", FAST_CPU, "lm_head", weight) == kind(64, 32, 8, BF16)
    assert chosen("int4", FAST_CPU, "lm_head", grouped(32)) == TiledInt4Linear(64, 32, 4, BF16)
    assert chosen("int4", CPU, "lm_head", weight) == LoopedInt4Linear(64, 32, 8, BF16)


def test_scales_of_float16_are_left_to_the_operator() -> None:
    chooser = MethodChooser("int4", None, torch.float16, CPU)
    assert chooser("o_proj", PLAIN) == Int4Linear(64, 32, 4, torch.float16)


@pytest.mark.parametrize(
    ("quantization", "stored", "dtype", "policy", "sentence"),
    [
        ("int4", "AWQ", BF16, CPU, r"'int4'.*quantised with AWQ already: leave quantization out"),
        ("fp8", None, BF16, CPU, r"'fp8' needs a GPU of compute capability 8\.9.*use int8 or int4"),
        ("fp8", None, BF16, AMPERE, r"'fp8' needs a GPU of compute capability 8\.9.*use int8 or int4"),
        ("fp8", None, torch.float16, HOPPER, r"computes in bfloat16, but dtype is torch\.float16"),
        ("int4", None, BF16, OLD_CPU, r"AVX2 or AVX-512.*use int8"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(
    quantization: str, stored: str | None, dtype: torch.dtype, policy: DevicePolicy, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        MethodChooser(quantization, stored, dtype, policy)


@pytest.mark.parametrize(
    ("quantization", "policy", "shape", "sentence"),
    [
        ("int4", CPU, (64, 40), r"multiple of 32 inputs, but down_proj has 40: use int8"),
        ("fp8", HOPPER, (64, 40), r"multiples of 16, but down_proj is \[64, 40\]: use int8"),
        ("fp8", HOPPER, (40, 64), r"multiples of 16, but down_proj is \[40, 64\]: use int8"),
    ],
)
def test_a_shape_that_the_quantisation_cannot_have_is_refused_by_its_layer(
    quantization: str, policy: DevicePolicy, shape: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        chosen(quantization, policy, "down_proj", torch.ones(shape))


def test_this_cpu_is_described_by_what_its_operator_does() -> None:
    assert DevicePolicy.of(torch.device("cpu")) == DevicePolicy(
        type="cpu",
        multiplies_int4=can_multiply_int4(),
        multiplies_bfloat16=torch.cpu._is_avx512_bf16_supported(),
        multiplies_whole_numbers=can_multiply_whole_numbers(),
    )


def test_a_gpu_is_described_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert DevicePolicy.of(torch.device("cuda")) == HOPPER
    assert HOPPER.multiplies_float8 and ADA.multiplies_float8 and not AMPERE.multiplies_float8
