"""Quantised products on a GPU, eager and compiled, against float64 over the same rounded weights."""

from __future__ import annotations

import pytest
import torch

from minivllm.device.policy import DevicePolicy
from minivllm.linear.methods.float8 import Float8Linear
from minivllm.linear.methods.groups import DequantizedGroupLinear
from minivllm.linear.methods.int8 import DequantizedInt8Linear
from minivllm.linear.methods.method import LinearMethod
from minivllm.weights.stored_weight import round_to_float8_rows, round_to_groups, round_to_int8_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def restored(method: LinearMethod, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(method, DequantizedGroupLinear):
        return round_to_groups(weight, method.group_size, BF16).restore(torch.float32).double()
    rounded = (
        round_to_float8_rows(weight) if isinstance(method, Float8Linear) else round_to_int8_rows(weight, BF16)
    )
    return rounded[0].double() * rounded[1].double()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [1, 2, 17, 128])
@pytest.mark.parametrize(
    "method", [DequantizedInt8Linear(BF16), DequantizedGroupLinear(32, 4, BF16), Float8Linear()]
)
def test_products_equal_float64_over_the_rounded_weight(
    method: LinearMethod, rows: int, compiled: bool
) -> None:
    if isinstance(method, Float8Linear) and not DevicePolicy.of(torch.device("cuda")).multiplies_float8:
        pytest.skip("this GPU has no float8 products")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(256, 512, generator=generator).to(BF16).cuda()
    x = torch.randn(rows, 512, generator=generator).to(BF16).cuda()
    apply = torch.compile(method.apply, fullgraph=True) if compiled else method.apply
    out = apply(x, method.prepare(weight, None)).double()
    expected = x.double() @ restored(method, weight).T
    # float8 rounds every activation to three bits, too: 2 ** -4 each, which averages out over 512 of them.
    tolerance = 0.06 if isinstance(method, Float8Linear) else 0.02
    assert (out - expected).norm() <= tolerance * expected.norm()
