"""Hands the engine's regions to Inductor, each as soon as it is declared, and notes what they become.

``pretend_gpu`` comes first. Weights, caches and results are fake tensors: nothing is computed.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._guards import TracingContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from minivllm.attention import tiles
from minivllm.attention.flex import rule_attention
from minivllm.attention.shared_tiles import shared_attention
from minivllm.batch.layer_caches import kv_groups
from minivllm.batch.paged_model import PagedModel, RunnerLimits
from minivllm.batch.persistent_batch import GroupTables
from minivllm.checkpoints.checkpoint import expected_shapes
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.compilation.compiler import RegionCompiler, compile_fx
from minivllm.compilation.regions import Region, Size, TensorSpec, filled
from minivllm.device.buffers import rounded_capacity
from minivllm.device.policy import DevicePolicy
from minivllm.distributed.communicator import Absent
from minivllm.linear.choose import MethodChooser
from minivllm.models.decoder import Decoder
from minivllm.models.model import token_specs
from minivllm.sampling import sampler
from tests.gpu_code.report import Configuration, RegionReport, read_wrapper
from tests.gpu_code.shapes import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MODELS,
    NUM_BLOCKS,
    ROWS,
    Shape,
)

DTYPE, DEVICE = torch.bfloat16, torch.device("cuda", 0)


class Recorder(logging.Handler):
    """Notes what is compiled, region by region.
    keep: folder for the Python that Inductor writes, None for none."""

    def __init__(self, keep: Path | None = None) -> None:
        super().__init__(logging.WARNING)
        self.reports: list[RegionReport] = []
        self._current: RegionReport | None = None
        self._keep = keep
        logging.captureWarnings(True)
        for package in ("minivllm", "kernels_triton_free", "torch", "py.warnings"):
            logging.getLogger(package).addHandler(self)
        GraphLowering.save_output_code = staticmethod(self._take_wrapper)
        precompile = CachingAutotuner.precompile

        def noted_precompile(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
            precompile(tuner, *args, **kwargs)
            self._take_kernel(tuner)

        CachingAutotuner.precompile = noted_precompile  # type: ignore[method-assign]

    @contextmanager
    def region(self, shape: str, name: str) -> Iterator[None]:
        """What is compiled within belongs to this region; an error is noted in its report."""
        number = 1 + sum(
            report.shape == shape and report.region.partition(" (")[0] == name for report in self.reports
        )
        report = self._current = RegionReport(shape, name if number == 1 else f"{name} ({number})")
        self.reports.append(report)
        try:
            yield
        except Exception as error:
            report.error = _reason(error)
        finally:
            self._current = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._current is not None:
            self._current.warnings.append(record.getMessage())

    def _take_wrapper(self, code: str) -> None:
        report = self._current
        assert report is not None, "a graph was compiled outside of any region"
        report.launches, report.library = read_wrapper(code)
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            (self._keep / (report.name.replace(" ", "_").replace(":", "") + ".py")).write_text(code)

    def _take_kernel(self, tuner: CachingAutotuner) -> None:
        report = self._current
        assert report is not None, "a kernel was compiled outside of any region"
        name = tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__
        for result in tuner.compile_results:
            kernel = result.kernel
            found = kernel.metadata.num_warps, kernel.n_regs, 4 * kernel.n_spills, kernel.metadata.shared
            report.configurations.append(Configuration(name, *found))


def _reason(error: BaseException) -> str:
    """The innermost cause, by the line of it that says most."""
    inner: BaseException | None = error
    while inner is not None:
        error, inner = inner, inner.__cause__ or getattr(inner, "inner_exception", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "out of range" in line]
    return f"{type(error).__name__}: {(telling or lines or [''])[-1][:300]}"


class CompilingAtOnce(RegionCompiler):
    """Compiles a region when it is handed out, with the examples that it declares: these are the sizes of the
    warm-up, by which an engine's regions are compiled. In its place it gives the function, to be called with
    fake tensors."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode, shape: str, verify_size: int = 0) -> None:
        rows = rounded_capacity((verify_size or 1) * max(*ROWS, 64) + 2)  # as ``Worker`` does
        tokens = max(rows, rounded_capacity(MAX_NUM_BATCHED_TOKENS + 2))
        super().__init__(True, most={"tokens": tokens, "tiles": tokens, "rows": rows}, single_rows=True)
        self._recorder, self._mode, self._shape = recorder, mode, shape

    def _make(self, region: Region) -> Callable:
        self._compile(region)
        if region.has_code_for("single"):
            self._compile(region.fixed("single"))

        def run(*args: Any) -> Any:
            with self._mode:
                return region.function(*args)

        return run

    def _compile(self, region: Region) -> None:
        with self._mode:
            examples = iter([spec.example() for _, spec in region.tensors()])
            args = [filled(spec, examples) for spec in region.inputs.values()]
        with self._recorder.region(self._shape, region.name), unset_fake_temporarily(), torch.no_grad():
            self._compiled(region)(*args)

    def _compile_graph(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        # Dynamo hands over the tensors it was called with. Those are fake here, without symbolic sizes, so
        # Inductor gets what Dynamo traced with, and the mode of that. On a GPU AOTAutograd makes them by the
        # same rules.
        traced = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        (mode,) = {value.fake_mode for value in traced if isinstance(value, torch._subclasses.FakeTensor)}
        TracingContext.get().fake_mode = mode
        returned = [node.meta["example_value"] for node in graph.graph.output_node().args[0]]
        compile_fx(graph, traced)
        return lambda *args: returned


class DeclaredModel(PagedModel):
    """A model whose regions and attention are declared as an engine does, without caches and buffers."""

    def __init__(
        self, model: Decoder, limits: RunnerLimits, policy: DevicePolicy, make_attention: Any
    ) -> None:
        self.model, self._limits, self._policy, self._make_attention = model, limits, policy, make_attention
        self._few_tokens = limits.verify_size
        self._launches_ahead = 1
        rows, length = limits.max_num_seqs, limits.max_model_len
        self._groups = [GroupTables(rows, length, group, DEVICE) for group in limits.groups]
        placed = {layer: index for index, group in enumerate(limits.groups) for layer in group.layers}
        self._group_of = [placed[layer] for layer in range(len(model.cache_specs))]
        self.layers = list(zip(model.cache_specs, model.attention_specs, strict=True))
        self._builder: Any = SimpleNamespace(token_specs=token_specs(DEVICE))


class HostBuffer:
    """In the place of a StagingBuffer, whose pinned memory is real."""

    def __init__(self, fields: dict[str, tuple[int, ...]], device: torch.device, depth: int = 1) -> None:
        self.host = {name: np.zeros(shape, dtype=np.int32) for name, shape in fields.items()}
        self.device: dict[str, torch.Tensor] = {}


class FewBatches(DevicePolicy):
    """Some of the numbers of rows that have an attention kernel each."""

    def decode_batches(self, max_num_seqs: int) -> list[int]:
        return list(ROWS)


def compile_model(recorder: Recorder, name: str, shape: Shape) -> None:
    """All regions of a decoder, and its attention if no other shape has the same."""
    policy, mode = FewBatches.of(DEVICE), FakeTensorMode()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape.config))
        config = read_decoder_config(directory, "dummy")
    tiles.StagingBuffer = HostBuffer  # type: ignore[assignment,misc]
    compiler = CompilingAtOnce(recorder, mode, name, shape.verify_size)
    with mode, torch.no_grad():
        choose = MethodChooser(shape.quantization, None, DTYPE, policy, compiled=True)
        model = Decoder(
            config,
            dtype=DTYPE,
            attention_dtype=DTYPE,
            device=DEVICE,
            max_model_len=MAX_MODEL_LEN,
            choose_method=choose,
            communicator=Absent(0, shape.ranks) if shape.ranks > 1 else None,
            divides_experts=shape.ranks > 1,
        )
        shapes = expected_shapes(config)
        model.load_weights((weight, torch.empty(size, dtype=DTYPE)) for weight, size in shapes.items())
        groups = kv_groups(model, BLOCK_SIZE, MAX_MODEL_LEN, elsewhere=model.all_attention_specs)
        limits = RunnerLimits(
            max_num_seqs=max(ROWS),
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            groups=tuple(replace(group, num_blocks=NUM_BLOCKS) for group in groups),
            verify_size=shape.verify_size,
        )
        # Attention is the same whatever the weights are rounded to.
        attention = shared_attention if shape.shares else rule_attention
        is_new = shape.quantization is None and shape.ranks == 1
        make_attention = attention if is_new else lambda context: None
        DeclaredModel(model, limits, policy, make_attention).use_regions(compiler)


def compile_draws(recorder: Recorder, name: str, vocab_size: int) -> None:
    """What ``Sampler.use_regions`` has compiled on a GPU."""
    mode = FakeTensorMode()
    logits = TensorSpec((Size("rows", 5, single=1), vocab_size), DTYPE, DEVICE)
    with mode:
        sampler._compiled_draws(CompilingAtOnce(recorder, mode, name), logits)


def compile_part(recorder: Recorder, part: str) -> None:
    """part: a name of ``shapes.parts``."""
    if part in MODELS:
        compile_model(recorder, part, MODELS[part])
    else:
        compile_draws(recorder, part, int(part.rpartition(" ")[2]))
