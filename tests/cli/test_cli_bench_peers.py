"""Peers that may not be installed, by stand-ins of their interfaces: each request gets the tokens it should."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minivllm.cli.bench.drive import Task, drive


def fake_vllm() -> tuple[ModuleType, ModuleType]:
    """vLLM's LLMEngine, whose every step adds one to the last token of each request."""

    class Engine:
        model_config = SimpleNamespace(get_vocab_size=lambda: 1000)

        @classmethod
        def from_engine_args(cls, args: dict[str, Any]) -> Engine:
            engine = cls()
            engine.args, engine.requests, engine.resets = args, {}, 0
            return engine

        def add_request(self, request_id: str, prompt: dict[str, list[int]], params: dict[str, Any]) -> None:
            assert params["temperature"] == 0.0 and params["ignore_eos"] and params["output_kind"] == "delta"
            self.requests[request_id] = [prompt["prompt_token_ids"][-1], params["max_tokens"]]

        def step(self) -> list[Any]:
            outputs = []
            for request_id, state in list(self.requests.items()):
                state[0], state[1] = state[0] + 1, state[1] - 1
                finished = state[1] == 0
                if finished:
                    del self.requests[request_id]
                completion = SimpleNamespace(token_ids=[state[0]])
                outputs.append(SimpleNamespace(request_id=request_id, outputs=[completion], finished=finished))
            return outputs

        def reset_prefix_cache(self) -> None:
            self.resets += 1

    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.EngineArgs, module.LLMEngine, module.SamplingParams = dict, Engine, dict  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    return module, params


def test_vllm_is_driven_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module, params = fake_vllm()
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.delitem(sys.modules, "minivllm.cli.bench.side_vllm", raising=False)
    from minivllm.cli.bench.side_vllm import load

    engine = load({"model": "m", "dtype": "auto"})
    assert engine.facts["vocab_size"] == 1000
    engine.reset()
    records, _ = drive(engine, [Task([5], 3), Task([8, 9], 1)])
    assert [record.token_ids for record in records] == [[6, 7, 8], [10]]
    monkeypatch.delitem(sys.modules, "minivllm.cli.bench.side_vllm")


class FakeLlamaCpp(ModuleType):
    """llama.cpp's C interface over a model whose next token is the sum of all tokens so far, modulo the vocabulary."""

    VOCAB, N_BATCH = 50, 8

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.__version__ = "0"
        self.caches: dict[int, list[int]] = {}
        self.rows: dict[int, Any] = {}
        self.batch_sizes: list[int] = []
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
    from minivllm.cli.bench import side_llama_cpp

    fake = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(side_llama_cpp, "BATCH_TOKENS", fake.N_BATCH)
    engine = side_llama_cpp.load({"path": "m.gguf", "longest": 30, "running": running, "threads": 1, "gpu_layers": 0})
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
