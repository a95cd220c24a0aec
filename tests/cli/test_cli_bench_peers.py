"""Peers that may not be installed, by stand-ins of their interfaces: each request gets the tokens it should,
in batches as the peer computes them best, in a Python of its own."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.rounds.side_processes import (
    Side,
    SideSpec,
    check_installed,
    hf_directory,
    openvino_directory,
)
from minivllm.bench.sides import peers
from minivllm.bench.sides.drive import Task, drive
from minivllm.errors import ConfigError, ModelError

FAKE_VLLM = """
import os, subprocess, sys
from types import SimpleNamespace as Made

__version__ = "0.0-fake"
SamplingParams = dict
# Engines have processes of their own: this one does nothing, but it must be paused and ended with its parent.
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


class LLM:
    def __init__(self, **arguments):
        self.llm_engine, self.arguments = self, arguments
        self.model_config = Made(get_vocab_size=lambda: 1000, dtype=f"torch.{arguments['dtype']} of {child.pid}")
        self.requests = {}

    def add_request(self, request_id, prompt, params):
        assert params["temperature"] == 0.0 and params["ignore_eos"]
        self.requests[request_id] = [prompt["prompt_token_ids"][-1], params["max_tokens"]]

    def step(self):
        outputs = []
        for request_id, state in list(self.requests.items()):
            state[0], state[1] = state[0] + 1, state[1] - 1
            if not state[1]:
                del self.requests[request_id]
            outputs.append(Made(request_id=request_id, outputs=[Made(token_ids=[state[0]])], finished=not state[1]))
        return outputs

    def reset_prefix_cache(self):
        assert not self.requests

    def generate(self, prompts, params, use_tqdm):
        if "prompt_logprobs" in params:  # of one prompt, in place of a list
            [prompt] = prompts
            entries = [{token: Made(logprob=-token / 8)} for token in prompt["prompt_token_ids"]]
            return [Made(prompt_logprobs=[None, *entries[1:]])]
        for number, (prompt, own) in enumerate(zip(prompts, params)):
            self.add_request(str(number), prompt, own)
        while self.requests:
            self.step()
"""


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """A Python that has the fake vLLM, an empty transformers, and else its standard library only."""
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    kinds = "class RequestOutputKind:\n    DELTA, FINAL_ONLY = 'delta', 'final'\n"
    (tmp_path / "packages" / "transformers.py").touch()
    (tmp_path / "packages" / "vllm" / "sampling_params.py").write_text(kinds)
    python = tmp_path / "python"
    path = f"$PYTHONPATH{os.pathsep}{tmp_path}/packages"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def state_of(pid: int) -> str:
    """R, S, T (stopped), … as Linux names it; X for a process that is gone or waits to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
    return "X" if state == "Z" else state


def wait_for(pids: list[int], states: str) -> None:
    deadline = time.monotonic() + 20
    while not all(state_of(pid) in states for pid in pids):
        assert time.monotonic() < deadline, [state_of(pid) for pid in pids]
        time.sleep(0.02)


def test_a_peer_runs_in_a_python_of_its_own_and_sleeps_while_it_is_not_asked(other_python: str) -> None:
    spec = SideSpec("vllm", "vllm", {"dtype": "float32"}, other_python)
    check_installed(spec)
    tasks = [Task([5], 3), Task([8, 9], 1)]
    with Side(spec) as side:
        assert (side.facts["vocab_size"], side.facts["version"]) == (1000, "0.0-fake")
        assert side.facts["environment"]["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0", "all cores compute"
        pids = [side._process.pid, int(side.facts["dtype"].split()[-1])]
        for _ in range(2):
            wait_for(pids, "T")
            assert [record.token_ids for record in side.run(tasks).records] == [[6, 7, 8], [10]]
        assert side.run(tasks, own_way=True).records == []
        assert side.log_probabilities([5, 8, 9]) == [-1.0, -1.125]
        wait_for(pids, "T")
    wait_for(pids, "X")


def test_a_sleeping_peer_ends_when_nobody_is_left_to_wake_it(other_python: str) -> None:
    command = (
        "import os\nfrom minivllm.bench.rounds.side_processes import Side, SideSpec\n"
        f"side = Side(SideSpec('vllm', 'vllm', {{'dtype': 'float32'}}, {other_python!r}))\n"
        "print(side._process.pid, side.facts['dtype'].split()[-1], flush=True)\n"
        "input()\nos.kill(os.getpid(), 9)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as asker:
        assert asker.stdin is not None and asker.stdout is not None
        pids = [int(pid) for pid in asker.stdout.readline().split()]
        wait_for(pids, "T")
        print(file=asker.stdin, flush=True)
        asker.wait(timeout=60)
    wait_for(pids, "X")


def test_another_python_is_not_given_this_one_s_packages(other_python: str) -> None:
    with pytest.raises(ModelError, match="No module named 'torch'"):
        Side(SideSpec("transformers", "transformers", {}, other_python))


def cuts_of(ids: list[int]) -> tuple[int, int]:
    """How often llama.cpp computes for a batch with tokens of these sequences,
    and how often it must at least.

    Each time it takes the first sequence that is left, and then those whose id is one more than the last
    one's in the order of the batch, and as many tokens of each as the shortest of them has.
    """
    left = Counter(ids)
    cuts = 0
    while +left:
        together: list[int] = []
        for one in dict.fromkeys(one for one in ids if left[one]):
            if not together or one == together[-1] + 1:
                together.append(one)
        fewest = min(left[one] for one in together)
        left.subtract(dict.fromkeys(together, fewest))
        cuts += 1
    at_least = len({one for one in ids if one - 1 not in ids}) if len(set(ids)) == len(ids) else 0
    return cuts, at_least


class FakeLlamaCpp(ModuleType):
    """llama.cpp's C interface over a model whose next token is the sum of all tokens so far,
    modulo the vocabulary."""

    VOCAB, N_BATCH = 50, 8

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.__version__ = "0"
        self.caches: dict[int, list[int]] = {}
        self.rows: dict[int, Any] = {}
        self.batch_sizes: list[int] = []
        self.cuts: list[tuple[int, int]] = []
        self.llama_synchronize = lambda context: None
        self.llama_log_callback: Callable[[Any], Any] = lambda function: function
        self.llama_log_set = lambda callback, data: None
        self.llama_backend_init = lambda: None
        self.llama_model_default_params = SimpleNamespace
        self.llama_context_default_params = SimpleNamespace
        self.llama_model_load_from_file = lambda path, params: "model"
        self.llama_model_get_vocab = lambda model: "vocab"
        self.llama_vocab_n_tokens = lambda vocab: self.VOCAB
        self.llama_init_from_model = lambda model, params: "context"
        self.llama_get_memory = lambda context: "memory"
        self.llama_memory_clear = lambda memory, data: self.caches.clear()
        self.llama_memory_seq_rm = lambda memory, slot, first, last: self.caches.pop(slot)
        self.llama_get_logits_ith = lambda context, row: self.rows[row]

    def llama_batch_init(self, tokens: int, embd: int, sequences: int) -> Any:
        columns = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(tokens)], **columns)

    def llama_decode(self, context: str, batch: Any) -> int:
        assert 0 < batch.n_tokens <= len(batch.token)
        self.batch_sizes.append(batch.n_tokens)
        self.cuts.append(cuts_of([batch.seq_id[row][0] for row in range(batch.n_tokens)]))
        self.rows = {}
        for row in range(batch.n_tokens):
            cache = self.caches.setdefault(batch.seq_id[row][0], [])
            assert batch.pos[row] == len(cache), "tokens of a sequence come in order, without a gap"
            cache.append(batch.token[row])
            if batch.logits[row]:
                logits = (ctypes.c_float * self.VOCAB)()
                logits[sum(cache) % self.VOCAB] = 1.0
                self.rows[row] = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return 0


@pytest.mark.parametrize("running", [1, 2, 5])
def test_llama_cpp_is_batched_continuously(monkeypatch: pytest.MonkeyPatch, running: int) -> None:
    fake = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(peers, "BATCH_TOKENS", fake.N_BATCH)
    engine = peers.load_llama_cpp(
        {"path": "m.gguf", "longest": 30, "running": running, "threads": 1, "gpu_layers": 0}
    )
    tasks = [Task([3, 4], 4), Task(list(range(20)), 3), Task([7], 1), Task([1, 1, 1], 5), Task([2], 2)]
    engine.reset()
    records, _ = drive(engine, tasks)
    for task, record in zip(tasks, records):
        known = list(task.prompt)
        for _ in range(task.max_tokens):
            known.append(sum(known) % fake.VOCAB)
        assert record.token_ids == known[len(task.prompt) :]
    assert max(fake.batch_sizes) <= fake.N_BATCH, "a prompt longer than the batch comes in parts"
    assert fake.caches == {}, "finished sequences give their cells back"


@given(lengths=st.lists(st.integers(1, 9), min_size=4, max_size=16))
def test_llama_cpp_gets_decodes_in_the_order_in_which_it_computes_them_together(lengths: list[int]) -> None:
    """Whatever order slots became free in:
    a batch is cut only where the ids of running sequences have a gap."""
    fake = FakeLlamaCpp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "llama_cpp", fake)
        arguments = {"path": "m.gguf", "longest": 30, "running": 4, "threads": 1, "gpu_layers": 0}
        engine = peers.load_llama_cpp(arguments)
        for _ in range(2):
            engine.reset()
            drive(engine, [Task([3], length) for length in lengths])
    assert all(cuts == at_least for cuts, at_least in fake.cuts)


def test_llama_cpp_s_own_way_is_one_batch_of_prompts_and_one_per_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    engine = peers.load_llama_cpp(
        {"path": "m.gguf", "longest": 30, "running": 3, "threads": 1, "gpu_layers": 0}
    )
    engine.own_way([Task([3, 4], 5)] * 3)
    assert fake.batch_sizes == [6, 3, 3, 3, 3] and {cuts for cuts, _ in fake.cuts} == {1}
    assert fake.caches == {}


def test_llama_cpp_tells_the_probability_of_every_token_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(peers, "BATCH_TOKENS", fake.N_BATCH)
    engine = peers.load_llama_cpp(
        {"path": "m.gguf", "longest": 30, "running": 1, "threads": 1, "gpu_layers": 0}
    )
    text = [3, 3, 6, 7, 19, 38, 1, 2, 29, 8, 16]
    is_expected = [text[place] == sum(text[:place]) % fake.VOCAB for place in range(1, len(text))]
    assert 0 < sum(is_expected) < len(is_expected)
    total = math.log(math.e + fake.VOCAB - 1)
    assert engine.log_probabilities(text) == pytest.approx([hit - total for hit in is_expected])
    assert max(fake.batch_sizes) == fake.N_BATCH and fake.caches == {}


def fake_openvino() -> dict[str, ModuleType]:
    """OpenVINO GenAI's pipeline, whose every step adds one to the last token of each request."""

    class Handle:
        def __init__(self, last: int, left: int, echoed: list[int]) -> None:
            self.last, self.left, self.unread, self.echoed = last, left, list[int](), echoed

        def can_read(self) -> bool:
            return bool(self.unread)

        def read(self) -> dict[int, Any]:
            told, self.echoed = [*self.echoed, self.unread.pop(0)], []
            return {
                0: SimpleNamespace(generated_ids=told, generated_log_probs=[-token / 8 for token in told])
            }

    class Pipeline:
        def __init__(self, path: str, scheduler: Any, device: str, properties: dict[str, Any]) -> None:
            assert scheduler.num_kv_blocks >= 3 and not scheduler.enable_prefix_caching
            self.handles: list[Handle] = []

        def add_request(self, index: int, ids: Any, config: Any) -> Handle:
            assert ids.shape == (1, ids.size) and config.ignore_eos and not config.do_sample
            echoes = getattr(config, "echo", False) and config.logprobs == 1
            self.handles.append(Handle(int(ids[0, -1]), config.max_new_tokens, ids[0].tolist() * echoes))
            return self.handles[-1]

        def has_non_finished_requests(self) -> bool:
            return any(handle.left or handle.unread for handle in self.handles)

        def step(self) -> None:
            for handle in self.handles:
                if handle.left:
                    handle.last, handle.left = handle.last + 1, handle.left - 1
                    handle.unread.append(handle.last)

        def generate(self, ids: list[Any], configs: list[Any]) -> None:
            for number, (prompt, config) in enumerate(zip(ids, configs, strict=True)):
                self.add_request(number, prompt, config)

    genai, core = ModuleType("openvino_genai"), ModuleType("openvino")
    genai.ContinuousBatchingPipeline, genai.__version__ = Pipeline, "0"  # type: ignore[attr-defined]
    genai.SchedulerConfig = genai.GenerationConfig = SimpleNamespace  # type: ignore[attr-defined]
    core.Tensor = lambda array: array  # type: ignore[attr-defined]
    return {"openvino_genai": genai, "openvino": core}


def test_openvino_is_driven_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm.bench.sides.peers import load_openvino as load

    for name, module in fake_openvino().items():
        monkeypatch.setitem(sys.modules, name, module)
    sizes = {"running": 2, "tokens": 64, "vocab_size": 1000}
    engine = load({"path": "m", "weights": "int4", "properties": {}, **sizes})
    tasks = [Task([5], 3), Task([8, 9], 1)]
    records, _ = drive(engine, tasks)
    assert [record.token_ids for record in records] == [[6, 7, 8], [10]]
    engine.own_way(tasks)
    engine = load({"path": "m", "weights": "int4", "properties": {}, **sizes})
    assert engine.log_probabilities([5, 8, 9]) == [-1.0, -1.125]


def test_a_checkpoint_directory_is_what_peers_read_already(tiny_model: Callable[..., Path]) -> None:
    assert hf_directory(str(tiny_model("llama"))) == tiny_model("llama")


def test_openvino_s_export_is_made_once_by_its_own_tool(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    tool = tmp_path / "optimum-cli"
    tool.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last/called"\n')
    tool.chmod(0o755)
    model, python = str(tiny_model("llama")), str(tmp_path / "python")
    made = openvino_directory(model, "int4", python)
    called = (made / "called").read_text()
    assert f"--model {model} " in called and "--weight-format int4 --group-size 32" in called
    tool.write_text("#!/bin/sh\necho there is no room >&2; exit 1\n")
    assert openvino_directory(model, "int4", python) == made
    with pytest.raises(ModelError, match=r"did not export .*: there is no room"):
        openvino_directory(model, "fp16", python)
    tool.unlink()
    with pytest.raises(ConfigError, match="cannot be run"):
        openvino_directory(model, "fp16", python)
    with pytest.raises(ConfigError, match=r"weights is 'int3', but openvino's must be one of: int4"):
        openvino_directory(model, "int3", python)
    assert [path.name for path in made.parent.iterdir()] == [made.name], "what failed leaves nothing behind"


@pytest.mark.slow
def test_a_gguf_file_becomes_a_directory_with_the_same_weights(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    made = hf_directory(str(smollm2_path))
    read = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        ids = torch.arange(20)[None]
        torch.testing.assert_close(read(ids).logits, theirs(ids).logits)
