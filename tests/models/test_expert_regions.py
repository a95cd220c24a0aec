"""A block of experts as compiled code:
the package of a region finds the loop over the experts by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels_triton_free.experts.routing import Routing
from minivllm.compilation.package_keys import package_key
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler, find_package
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.linear.factory import LinearFactory
from minivllm.linear.layer import ChooseMethod, never_quantized
from minivllm.linear.methods.int8 import Int8Linear
from minivllm.models.bound_program import no_attention
from minivllm.models.feed_forward.experts import MixtureOfExperts
from minivllm.models.mixers.mixer import LayerContext
from minivllm.program.fuse import FusedPieces, fuse
from minivllm.program.program import World
from minivllm.program.runner import Runner
from minivllm.specs.layers import MlpSpec, MoeSpec

HIDDEN, EXPERTS = 32, 6
SPEC = MoeSpec(
    num_experts=EXPERTS,
    inner=24,
    routing=Routing(top_k=2, scores="sigmoid", normalized=True, scale=1.5, groups=3, groups_kept=2),
    bias=True,
    router_bias=True,
    has_correction=True,
    shared=MlpSpec(inner=40),
    shared_gate=True,
)


def random_block(dtype: torch.dtype, choose: ChooseMethod) -> MixtureOfExperts:
    """With every piece that a block of experts may have."""
    factory = LinearFactory(dtype, torch.device("cpu"), choose)
    block, generator = MixtureOfExperts(SPEC, HIDDEN, factory), torch.Generator().manual_seed(0)

    def load(name: str, *shape: int) -> None:
        block.load(name, torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

    load("gate.weight", EXPERTS, HIDDEN)
    load("gate.bias", EXPERTS)
    load("gate.e_score_correction_bias", EXPERTS)
    load("shared_expert_gate.weight", 1, HIDDEN)
    for expert in range(EXPERTS):
        for part, shape in (("gate", (24, HIDDEN)), ("up", (24, HIDDEN)), ("down", (HIDDEN, 24))):
            load(f"experts.{expert}.{part}_proj.weight", *shape)
            load(f"experts.{expert}.{part}_proj.bias", shape[0])
    for part, shape in (("gate", (40, HIDDEN)), ("up", (40, HIDDEN)), ("down", (HIDDEN, 40))):
        load(f"shared_expert.{part}_proj.weight", *shape)
    return block


@pytest.mark.parametrize(
    ("dtype", "choose", "tolerance"),
    [
        pytest.param(torch.float32, lambda name, weight: Int8Linear(torch.float32), 1e-5, id="int8"),
        pytest.param(torch.bfloat16, never_quantized, 0.02, id="packed", marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_packaged_experts_compute_what_uncompiled_ones_do(
    tmp_path: Path, dtype: torch.dtype, choose: ChooseMethod, tolerance: float
) -> None:
    """And so they do for another compiler, which finds the package on disk."""
    block = random_block(dtype, choose)
    stream = TensorSpec((Size("tokens", 13), HIDDEN), dtype, torch.device("cpu"))
    program = block.program(LayerContext(0, 0, dict, lambda: torch.empty(0), stream), "h", is_shared=False)
    part = fuse(program, {"h": stream, "adapters": None}, results=("x",)).body
    [region] = [step.region() for step in part.steps if isinstance(step, FusedPieces)]
    world, uncompiled = World(no_attention), Runner(part, lambda region: region.function)
    for is_kept in (False, True):
        compiler = PackagedRegionCompiler(tmp_path)
        runner = Runner(part, compiler)
        assert compiler.is_complete is is_kept
        compiler.build()
        assert find_package(tmp_path, package_key(region)) is not None
        for tokens in (2, 7, 64):
            x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
            (expected,), (found,) = uncompiled([x], world), runner([x], world)
            assert (found - expected).norm() <= tolerance * expected.norm()
