"""llama.cpp as a side of a comparison, through its Python bindings' C interface: the same GGUF file, the same ids.

Its server's way of batching, in a few lines: every step decodes one token of each running request together with the
next tokens of prompts, up to the batch size. Its own way, to calibrate against, is the loop of llama-batched-bench.
Needs the standard library and llama_cpp (which brings numpy) only, so that it also runs in a Python where nothing else
is installed.
"""

from __future__ import annotations

import ctypes
import heapq
import time
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from minivllm.bench.sides.drive import Progress, Task
from minivllm.errors import ModelError

BATCH_TOKENS = 2048


@dataclass
class Sequence:
    """A running request in one of llama.cpp's sequence slots.

    known: prompt and generated ids. computed: how many of them are in the cache.
    """

    index: int
    slot: int
    known: list[int]
    max_tokens: int
    computed: int = 0
    generated: int = 0


class LlamaCppEngine:
    """Greedy continuous batching over llama_decode."""

    def __init__(self, path: str, *, longest: int, running: int, threads: int, gpu_layers: int) -> None:
        """longest: tokens of the longest request. running: requests at a time. Raises ModelError."""
        import llama_cpp

        self._api: Any = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = gpu_layers
        model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        if not model:
            raise ModelError(f"llama.cpp cannot load {path}.")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        # Without a unified cache every sequence has a part of its own: attention of one does not walk over the others.
        per_sequence = -(-(longest + 8) // 256) * 256
        params.n_ctx, params.n_seq_max, params.kv_unified = per_sequence * running, running, False
        params.n_batch = max(BATCH_TOKENS, running)
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise ModelError(f"llama.cpp cannot make a context of {running} sequences of {per_sequence} tokens.")
        self._batch_tokens = params.n_batch
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._free_slots = list(range(running))
        self._running: list[Sequence] = []
        self._waiting: list[tuple[int, Task]] = []
        self.facts = {"vocab_size": self._vocab_size, "threads": threads, "version": llama_cpp.__version__}
        self.facts["own_way"] = "the loop of llama-batched-bench"

    def reset(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def add(self, index: int, task: Task) -> None:
        self._waiting.append((index, task))

    def step(self) -> Iterable[Progress]:
        while self._waiting and self._free_slots:
            index, task = self._waiting.pop(0)
            slot = heapq.heappop(self._free_slots)
            self._running.append(Sequence(index, slot, list(task.prompt), task.max_tokens))
        rows = self._fill_batch()
        self._decode()
        import numpy as np

        sampled = []
        for sequence, row in rows:
            logits = self._api.llama_get_logits_ith(self._context, row)
            sampled.append((sequence, int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())))
        now = time.perf_counter()
        for sequence, token in sampled:
            sequence.known.append(token)
            sequence.generated += 1
            finished = sequence.generated == sequence.max_tokens
            if finished:
                self._running.remove(sequence)
                heapq.heappush(self._free_slots, sequence.slot)
                self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), sequence.slot, -1, -1)
            yield Progress(sequence.index, [token], [now], finished)

    def _fill_batch(self) -> list[tuple[Sequence, int]]:
        """Put this step's tokens into the batch. Returns who gets logits, and in which row.

        Decodes get their place before prompts, but the batch holds them by sequence id: llama.cpp computes together
        only what has consecutive ids, and cuts the batch wherever the order breaks off.
        """
        left, counts = self._batch_tokens, {}
        for sequence in sorted(self._running, key=lambda one: len(one.known) - one.computed):
            counts[sequence.slot] = min(len(sequence.known) - sequence.computed, left)
            left -= counts[sequence.slot]
        rows = []
        self._batch.n_tokens = 0
        for sequence in sorted(self._running, key=lambda one: one.slot):
            end = sequence.computed + counts[sequence.slot]
            for position in range(sequence.computed, end):
                self._put(sequence.known[position], position, sequence.slot, position == len(sequence.known) - 1)
            if sequence.computed < end == len(sequence.known):
                rows.append((sequence, self._batch.n_tokens - 1))
            sequence.computed = end
        return rows

    def _put(self, token: int, position: int, slot: int, wants_logits: bool) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, wants_logits
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
        batch.n_tokens = row + 1

    def _decode(self) -> None:
        status = self._api.llama_decode(self._context, self._batch)
        if status != 0:
            raise ModelError(f"llama_decode failed with status {status}.")
        self._api.llama_synchronize(self._context)

    def own_way(self, tasks: Several[Task]) -> None:
        """All prompts in as few batches as hold them, then one token of every sequence at a time; nothing is sampled.

        For requests of equal output lengths, not more than can run together.
        """
        self._batch.n_tokens = 0
        for slot, task in enumerate(tasks):
            for position, token in enumerate(task.prompt):
                if self._batch.n_tokens == self._batch_tokens:
                    self._decode()
                    self._batch.n_tokens = 0
                self._put(token, position, slot, position == len(task.prompt) - 1)
        self._decode()
        for step in range(tasks[0].max_tokens - 1):
            self._batch.n_tokens = 0
            for slot, task in enumerate(tasks):
                self._put(task.prompt[0], len(task.prompt) + step, slot, True)
            self._decode()
        self.reset()

    def counters(self) -> dict[str, float]:
        return {}


def load(arguments: dict[str, Any]) -> LlamaCppEngine:
    """arguments: path of the GGUF file, longest, running, threads, gpu_layers. Raises ModelError."""
    return LlamaCppEngine(arguments.pop("path"), **arguments)
