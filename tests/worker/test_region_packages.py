"""Packaged regions: built once, the same results as eager, found again,
and rebuilt when they are not sound."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_triton_free.attention import TileLists, paged_flex_attention
from kernels_triton_free.linear import can_pack, pack_weight, packed_linear
from kernels_triton_free.packed.rows import MAX_ROWS, is_readable
from kernels_triton_free.packed.tiles import can_tile
from kernels_triton_free.strips.visibility import Bounds
from minivllm import LLM, SamplingParams
from minivllm.attention import FlexAttention, SdpaAttention
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.package_keys import hash_of
from minivllm.compilation.packaged import region_packages
from minivllm.compilation.packaged.package_builds import can_fork
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler, find_package
from minivllm.compilation.regions import Region, Size, TensorSpec, specs_of
from minivllm.compilation.row_counts import bound
from minivllm.engine import background_builds
from minivllm.processing.outputs import Logprob

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(cannot_compile_reason(CPU) is not None, reason="no C++ compiler")


class Pair(NamedTuple):
    scale: Tensor
    shift: Tensor


def transform(factor: float, x: Tensor, pair: Pair, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Takes a nested argument, writes into another one, returns two tensors."""
    y = torch.tanh(x * pair.scale + pair.shift) * factor
    cache[: x.shape[0]].copy_(y)
    return y, y.sum(-1)


def arguments(rows: int, blocks: int = 70, seed: int = 0) -> tuple[Tensor, Pair, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = Pair(torch.randn(16, generator=generator), torch.randn(16, generator=generator))
    return torch.randn(rows, 16, generator=generator), pair, torch.zeros(blocks, 16)


def declared(factor: float = 2.0, single: int | None = None, dtype: torch.dtype = torch.float32) -> Region:
    """``transform`` with its inputs; single: 1 if it is also called with one row."""

    def spec(*shape: int | Size) -> TensorSpec:
        return TensorSpec(shape, dtype, CPU)

    inputs = {
        "x": spec(Size("rows", 5, single), 16),
        "pair": Pair(spec(16), spec(16)),  # type: ignore[arg-type]
        "cache": spec(Size("blocks", 70), 16),
    }
    return Region("transform", partial(transform, factor), inputs, factor)


def make(compiler: PackagedRegionCompiler, factor: float = 2.0) -> Callable:
    return compiler(declared(factor))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package of ``transform`` by 2, which was never called."""
    if cannot_compile_reason(CPU) is not None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("packages") / "regions"
    compiler = PackagedRegionCompiler(directory)
    make(compiler)
    assert not compiler.is_complete
    compiler.build()
    assert compiler.is_complete
    assert len(list(directory.iterdir())) == 1, "nothing half-written is left behind"
    return directory


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects what would be built, without building it."""
    started: list[str] = []
    monkeypatch.setattr(
        region_packages.PackageBuilds, "start", lambda self, name, build: started.append(name)
    )
    return started


def test_a_person_is_told_once_that_and_how_much_is_compiled(
    tmp_path: Path, no_build: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning reaches standard error in a program that has not set up logging."""
    compiler = PackagedRegionCompiler(tmp_path)
    for factor in (2.0, 3.0, 2.0):
        make(compiler, factor)
    with caplog.at_level(logging.WARNING):
        compiler.build()
    assert len(no_build) == 2, "equal regions are one"
    told = caplog.messages[0]
    assert "Compiling the model" in told and "2 regions" in told and str(tmp_path) in told
    assert sum("Compiling the model" in message for message in caplog.messages) == 1


@pytest.fixture
def builds_are_copies(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To build a package takes ten seconds: the one that is there is copied."""

    def put(program: object, directory: Path, packaged: Any, shared: object) -> None:
        directory.mkdir(exist_ok=True)
        shutil.copy(next(built.glob(f"{packaged.key}-*")), directory)

    monkeypatch.setattr(region_packages, "build_package", put)


@pytest.mark.skipif(not can_fork(), reason="builds are child processes on Linux only")
@pytest.mark.usefixtures("builds_are_copies")
def test_in_the_background_a_child_builds_what_is_missing(tmp_path: Path) -> None:
    compiler = PackagedRegionCompiler(tmp_path / "regions")
    make(compiler)
    assert compiler.build_in_background() and not compiler.is_complete
    deadline = time.monotonic() + 120
    while compiler.is_building:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    region = make(compiler)
    assert compiler.is_complete
    with torch.inference_mode():
        x, pair, cache = arguments(7)
        torch.testing.assert_close(region(x, pair, cache), transform(2.0, x, pair, torch.zeros_like(cache)))


def test_a_package_computes_what_the_function_computes_for_every_number_of_rows(
    built: Path, no_build: list[str]
) -> None:
    region = make(PackagedRegionCompiler(built))
    for seed, rows in enumerate((5, 2, 3, 64)):
        with torch.inference_mode():
            x, pair, cache = arguments(rows, blocks=65 + rows, seed=seed)
            y, total = region(x, pair, cache)
            expected_cache = torch.zeros_like(cache)
            expected, expected_total = transform(2.0, x, pair, expected_cache)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(total, expected_total)
        torch.testing.assert_close(cache, expected_cache)
    assert not no_build


@pytest.mark.parametrize("given", [1, 2])
def test_a_region_takes_its_last_arguments_in_advance(built: Path, no_build: list[str], given: int) -> None:
    region = make(PackagedRegionCompiler(built))
    for seed, rows in enumerate((5, 2, 9)):
        x, pair, cache = arguments(rows, seed=seed)
        expected = transform(2.0, x, pair, torch.zeros_like(cache))
        for whole in (region, partial(transform, 2.0)):
            cache.zero_()
            last = (pair, cache)[-given:]
            with torch.inference_mode():
                torch.testing.assert_close(bound(whole, *last)(x, *(pair,)[: 2 - given]), expected)
            torch.testing.assert_close(cache[:rows], expected[0])
    assert not no_build


@pytest.mark.slow
@needs_compiler
def test_a_single_row_gets_a_package_of_its_own_that_computes_the_same(tmp_path: Path) -> None:
    directory = tmp_path / "regions"
    compiler = PackagedRegionCompiler(directory)
    region = compiler(declared(single=1))
    compiler.build()
    assert sorted(path.name.split("-")[0] for path in directory.iterdir()) == [
        "transform",
        "transform_of_one_row",
    ]
    with torch.inference_mode():
        for rows in (1, 2, 9):
            x, pair, cache = arguments(rows, seed=rows)
            y, total = region(x, pair, cache)
            torch.testing.assert_close((y, total), transform(2.0, x, pair, torch.zeros_like(cache)))
            torch.testing.assert_close(cache[:rows], y)


@needs_compiler
@pytest.mark.parametrize(
    "has_plain", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "beside a plain one"]
)
def test_a_few_rows_get_a_package_of_their_own_where_all_that_is_counted_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_plain: bool
) -> None:
    def which_code(x: Tensor, picked: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        fixed = x.shape[0] if isinstance(x.shape[0], int) else 0
        return x[picked] + words, torch.full((1,), fixed)

    def declare(reads_words: bool) -> Region:
        inputs = {
            "x": TensorSpec((Size("tokens", 5, single=1, few=4), 16), torch.float32, CPU),
            "picked": TensorSpec((Size("picked", 3, single=1, few=4),), torch.int64, CPU),
            "words": TensorSpec((16,), torch.float32, CPU),
        }
        return Region("which code", which_code, inputs, reads_words, has_loops=reads_words)

    shared = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    compiler = PackagedRegionCompiler(tmp_path / "regions")
    calls = []
    if has_plain:
        calls.append((compiler(declare(reads_words=False)), {1: 1, 4: 0}))
    assert compiler.rows.few == 0 and not declare(reads_words=False).has_code_for("few")
    calls.append((compiler(declare(reads_words=True)), {1: 1, 4: 4}))
    assert compiler.rows.few == 4
    compiler.build()
    # Some of these have equal code: one build emptied a file that another was packing,
    # which did not load then.
    assert not list(shared.rglob("*wrapper*")) and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(shared)
    words = torch.arange(16.0)
    with torch.inference_mode():
        for tokens, picked in [(1, 1), (4, 4), (4, 3), (5, 4), (2, 2)]:
            x, rows = torch.randn(tokens, 16), torch.randint(tokens, (picked,))
            for call, fixed_counts in calls:
                fixed = fixed_counts.get(tokens, 0) if tokens == picked else 0
                for y, code in (
                    call(x, rows, words),
                    bound(call, words)(x, rows),
                    bound(call, rows, words)(x),
                ):
                    assert torch.equal(y, x[rows] + words) and code.item() == fixed


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not is_readable(64, 64) or can_tile(64, 64), reason="no code for few rows on this CPU")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_steps_of_a_few_rows_are_padded_and_give_what_uncompiled_code_gives(
    tiny_model: Callable[..., Path], count: int
) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, vocab_size=256, dtype="bfloat16")
    prompts = [{"prompt_token_ids": list(range(3 + index, 9 + 2 * index))} for index in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)

    def entries(dtype: str) -> list[list[dict[int, Logprob]]]:
        """Uncompiled in float32."""
        is_exact = dtype == "float32"
        settings: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 8, "max_model_len": 64}
        with LLM(str(model), enforce_eager=is_exact, compile_in_background=False, **settings) as llm:
            runner = llm.llm_engine.client.core.executor.worker.runner  # type: ignore[attr-defined]
            assert runner.paged_model.rows.few == (0 if is_exact else MAX_ROWS)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].logprobs or [] for output in outputs]

    for own, expected in zip(entries("bfloat16"), entries("float32"), strict=True):
        for mine, theirs in zip(own, expected, strict=True):
            token = next(iter(mine))
            if token not in theirs:  # two were as likely, and what follows is another text
                break
            assert abs(mine[token].logprob - theirs[token].logprob) < 0.15


@pytest.mark.slow
@needs_compiler
def test_products_over_packed_weights_run_inside_a_package_without_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_pack(torch.bfloat16):
        pytest.skip("this CPU does not pack bfloat16")
    weight, bias = torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16()
    packed = pack_weight(weight)

    def product(x: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
        return packed_linear(torch.relu(x), packed, bias, 48) + packed_linear(x, packed, None, 48)

    compiler = PackagedRegionCompiler(tmp_path / "regions")
    x_spec = TensorSpec((Size("rows", 5), 32), torch.bfloat16, CPU)
    region = compiler(
        Region("product", product, {"x": x_spec, "packed": specs_of(packed), "bias": specs_of(bias)})
    )
    compiler.build()
    with torch.inference_mode():
        calls: list[str] = []
        with CountPythonOperators(calls):
            product(torch.randn(2, 32).bfloat16(), packed, bias)
            assert calls, "eager code goes through the operator"
            calls.clear()
            for rows in (2, 7, 33):
                x = torch.randn(rows, 32).bfloat16()
                expected = F.linear(x.relu().float(), weight.float(), bias.float()) + F.linear(
                    x.float(), weight.float()
                )
                torch.testing.assert_close(region(x, packed, bias).float(), expected, atol=0.2, rtol=0.02)
        assert "kernels_triton_free::packed_linear" not in calls


class CountPythonOperators(TorchDispatchMode):
    """Collects the names of operators that reach the dispatcher from here."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self._calls.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@needs_compiler
def test_attention_asks_for_no_room_like_the_cache_and_multiplies_several_queries_at_once(
    tmp_path: Path,
) -> None:
    code = generated_code_of_attention(tmp_path)
    rooms = [line for line in code.splitlines() if "_reorder_ptr_allocator.allocate(" in line]
    assert len(rooms) == 2 and all("need_pack ?" in line for line in rooms)
    assert "transpose_b_kernel<4, 16" in code, "keys are transposed once for several queries"
    assert "transpose_mxn<float, side, side>(" in code, "and for many queries ahead of them"


def generated_code_of_attention(tmp_path: Path) -> str:
    """C++ that Inductor writes for FlexAttention over a paged cache."""
    from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

    from minivllm.compilation.compiler import prepare_inductor

    prepare_inductor()
    cache = torch.randn(8, 16, 2, 8)
    counts, pages = torch.ones(3, 1, 1, dtype=torch.int32), torch.zeros(3, 1, 1, 8, dtype=torch.int32)
    lists = TileLists(counts, pages, counts.clone(), pages.clone())
    attention = torch.compile(partial(paged_flex_attention, scale=1.0), fullgraph=True)
    positions = Bounds(torch.full((3, 1), 5, dtype=torch.int32)), torch.arange(128, dtype=torch.int32)
    with torch.inference_mode(), fresh_inductor_cache(dir=str(tmp_path)):
        _, codes = run_and_get_code(
            attention, torch.randn(3, 2, 4, 8), cache, cache.clone(), lists, *positions
        )
    return "\n".join(codes)


def test_a_start_that_finds_its_packages_imports_neither_dynamo_nor_inductor_and_leaves_no_file(
    built: Path, tmp_path: Path
) -> None:
    program = f"""
import os
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch
from pathlib import Path
from tests.worker.test_region_packages import arguments, make
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
torch.set_num_threads({torch.get_num_threads()})
with torch.inference_mode():
    compiler = PackagedRegionCompiler(Path({str(built)!r}))
    y, _ = make(compiler)(*arguments(7))
assert y.any()
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules], flush=True)
os._exit(0)  # as far as destroying the compiler no process comes
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.stdout.strip() == "[]", result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_a_damaged_package_is_deleted_and_built_again(
    built: Path, tmp_path: Path, damage: str, no_build: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (package,) = built.iterdir()
    data = bytearray(package.read_bytes())
    if damage == "one bit":
        data[len(data) // 2] ^= 1
    copy = tmp_path / package.name
    copy.write_bytes({"truncated": data[: len(data) // 2], "one bit": data, "empty": b""}[damage])
    compiler = PackagedRegionCompiler(tmp_path)
    with caplog.at_level(logging.WARNING):
        make(compiler)
    compiler.build()
    assert no_build == ["transform"]
    assert "damaged" in caplog.text and not copy.exists()


def test_a_sound_file_that_is_no_package_is_built_again(
    built: Path, tmp_path: Path, no_build: list[str]
) -> None:
    (package,) = built.iterdir()
    key = package.stem.rpartition("-")[0]
    impostor = tmp_path / f"{key}-{hash_of(b'text')}.pt2"
    impostor.write_bytes(b"text")
    assert find_package(tmp_path, key) == impostor
    compiler = PackagedRegionCompiler(tmp_path)
    make(compiler)
    compiler.build()
    assert no_build == ["transform"] and not impostor.exists()


def test_a_package_is_not_used_for_other_constants_or_other_declarations(
    built: Path, no_build: list[str]
) -> None:
    compiler = PackagedRegionCompiler(built)
    for region in (declared(), declared(3.0), declared(dtype=torch.float64)):
        compiler(region)
    compiler.build()
    assert no_build == ["transform"] * 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda x, pair, cache: (x.double(), pair, cache),
            r"float32 cpu \[\*,16\] contiguous in x, .*float64",
        ),
        (
            lambda x, pair, cache: (torch.cat([x, x], 1)[:, ::2], pair, cache),
            r"in x, but was given .* strides",
        ),
        (
            lambda x, pair, cache: (x, Pair(pair.scale[:8].clone(), pair.shift), cache),
            r"\[16\] .* in pair.*\[8\]",
        ),
        (lambda x, pair, cache: (x, pair), "takes 4 tensors, but was given 3"),
    ],
)
def test_what_was_not_declared_is_refused_at_the_first_call(
    built: Path, change: Callable[..., tuple], sentence: str
) -> None:
    first, *last = change(*arguments(5))
    for call in (lambda region: region(first, *last), lambda region: bound(region, *last)(first)):
        with pytest.raises(TypeError, match=sentence), torch.inference_mode():
            call(make(PackagedRegionCompiler(built)))


@pytest.mark.usefixtures("builds_are_copies")
def test_a_region_that_is_called_before_anything_was_built_is_built_then(tmp_path: Path) -> None:
    """It never returns anything but what the function does."""
    region = make(PackagedRegionCompiler(tmp_path / "regions"))
    with torch.inference_mode():
        x, pair, cache = arguments(7)
        torch.testing.assert_close(region(x, pair, cache), transform(2.0, x, pair, torch.zeros_like(cache)))
    assert [path.name.split("-")[0] for path in (tmp_path / "regions").iterdir()] == ["transform"]


@needs_compiler
def test_code_that_would_only_serve_some_sizes_is_not_packaged(
    tmp_path: Path, no_build: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x * 3

    region = PackagedRegionCompiler(tmp_path)(
        Region("branches", branches, {"x": TensorSpec((Size("rows", 5), 4), torch.float32, CPU)})
    )
    with (
        caplog.at_level(logging.WARNING),
        torch.inference_mode(),
        pytest.raises(Exception, match="Constraint"),
    ):
        region(torch.ones(5, 4))  # torch.compile, which takes over, refuses it as well
    assert (
        not no_build and "restricted dimension 0" in caplog.text and "torch.compile takes over" in caplog.text
    )


@needs_compiler
def test_a_failed_build_leaves_the_region_to_torch_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(region_packages, "build_package", fail)
    compiler = PackagedRegionCompiler(tmp_path)
    region = make(compiler)
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        compiler.build()
        assert compiler.is_complete
        x, pair, cache = arguments(6)
        y, _ = region(x, pair, cache)
        expected, _ = transform(2.0, x, pair, cache.clone())
    torch.testing.assert_close(y, expected)
    assert "torch.compile takes over" in caplog.text


def test_a_folder_that_takes_no_trial_of_instructions_does_not_end_a_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", full)
    region_packages._try_instructions()


@needs_compiler
@pytest.mark.slow
def test_processes_that_build_the_same_package_at_once_leave_sound_ones(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch
from pathlib import Path
from tests.worker.test_region_packages import arguments, make
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
compiler = PackagedRegionCompiler(Path({str(tmp_path)!r}))
region = make(compiler)
with torch.inference_mode():
    compiler.build()
    print(region(*arguments(7))[0].abs().sum().item())
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert len({out for out, _ in results}) == 1 and float(results[0][0]) > 0, results
    assert all(process.returncode == 0 for process in processes)
    (path,) = tmp_path.iterdir()  # later processes waited for the first, and have built nothing
    assert path.suffix == ".pt2" and path.stem.rpartition("-")[2] == hash_of(path.read_bytes())


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)  # builds at the lowest priority
def test_an_engine_that_compiles_in_the_background_changes_over_without_changing_a_token(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_model("llama"))
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which making the model may have set
    monkeypatch.setattr(background_builds, "POLL_SECONDS", 0.0)
    prompts = [{"prompt_token_ids": [5 + index, 6, 7, 8]} for index in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 24, "max_model_len": 128}
    with LLM(model, enforce_eager=True, **settings) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(model, compile_in_background=True, **settings) as llm:
        engine = llm.llm_engine
        worker = engine.client.core.executor.worker
        kinds = [type(worker.runner.paged_model.backends[0])]
        requests = [engine.add_request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
        tokens: dict[str, list[int]] = {}
        steps = 0
        while engine.has_unfinished_requests():
            steps += 1
            if steps == 20:
                while worker._compiler.is_building:
                    time.sleep(0.1)
            for output in engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            kinds.append(type(worker.runner.paged_model.backends[0]))
        assert [tokens[request] for request in requests] == expected
        assert kinds[0] is SdpaAttention and kinds[-1] is FlexAttention
        assert worker.num_recompilations == 0
        of_a_few_rows = 3 if worker.runner.paged_model.rows.few else 0
    assert len(list((tmp_path / "regions").glob("*.pt2"))) == 13 + of_a_few_rows
