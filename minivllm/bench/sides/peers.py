"""Other engines as sides of a comparison: llama.cpp, OpenVINO GenAI, vLLM, transformers.

Each engine lives in a Python that may have nothing else, so its packages are imported where it is loaded.
Each also has ``own_way``: its own documented way of running a batch, to calibrate against.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.bench.sides.drive import Progress, Task
from minivllm.errors import ModelError

BATCH_TOKENS = 2048
"""Of llama.cpp's batch."""
PAGE_SIZE = 64
"""Tokens per block of transformers' continuous batching."""
SECONDS_TO_WAIT = 0.01
"""How long a step of it waits for a result before it looks whether a further request is due."""


class Peer:
    """Base of the sides below. facts: see StepEngine."""

    facts: dict[str, Any]

    def reset(self) -> None:
        """Nothing to do where prompts are fresh and memory of finished requests is given back."""

    def counters(self) -> dict[str, float]:
        return {}


@dataclass
class Slot:
    """A running request in one of llama.cpp's sequence slots.

    known: prompt and generated ids. computed: how many of them are in the cache.
    sampler: a chain of samplers; None for the likeliest token.
    """

    index: int
    slot: int
    known: list[int]
    max_tokens: int
    sampler: Any = None
    computed: int = 0
    generated: int = 0


class LlamaCppEngine(Peer):
    """llama.cpp through its Python bindings' C interface: greedy continuous batching over llama_decode.

    Its server's way of batching, in a few lines: every step decodes one token of each running request
    together with the next tokens of prompts, up to the batch size. Its own way is the loop of
    llama-batched-bench.
    """

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
        # Without a unified cache every sequence has a separate part:
        # attention of one does not walk over the others.
        per_sequence = -(-(longest + 8) // 256) * 256
        params.n_ctx, params.n_seq_max, params.kv_unified = per_sequence * running, running, False
        params.n_batch = max(BATCH_TOKENS, running)
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot make a context of {running} sequences of {per_sequence} tokens."
            )
        self._batch_tokens = params.n_batch
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._free_slots = list(range(running))
        self._running: list[Slot] = []
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
            sampler = self._sampler(index, task) if task.sampling else None
            self._running.append(Slot(index, slot, list(task.prompt), task.max_tokens, sampler))
        rows = self._fill_batch()
        self._decode()
        import numpy as np

        sampled = []
        for sequence, row in rows:
            if sequence.sampler is not None:  # it also counts the token among those that are penalised
                token = self._api.llama_sampler_sample(sequence.sampler, self._context, row)
                sampled.append((sequence, int(token)))
                continue
            logits = self._api.llama_get_logits_ith(self._context, row)
            sampled.append((sequence, int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())))
        now = time.perf_counter()
        for sequence, token in sampled:
            sequence.known.append(token)
            sequence.generated += 1
            finished = sequence.generated == sequence.max_tokens
            if finished:
                if sequence.sampler is not None:
                    self._api.llama_sampler_free(sequence.sampler)
                self._running.remove(sequence)
                heapq.heappush(self._free_slots, sequence.slot)
                self._api.llama_memory_seq_rm(
                    self._api.llama_get_memory(self._context), sequence.slot, -1, -1
                )
            yield Progress(sequence.index, [token], [now], finished)

    def _sampler(self, index: int, task: Task) -> Any:
        """The chain of llama.cpp's tools: penalties, top-k, top-p, min-p, temperature, a draw."""
        api, given = self._api, task.sampling
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        repetition = given.get("repetition_penalty", 1.0)
        if repetition != 1.0:
            penalties = api.llama_sampler_init_penalties(-1, repetition, 0.0, 0.0)
            for token in task.prompt:
                api.llama_sampler_accept(penalties, token)
            api.llama_sampler_chain_add(chain, penalties)
        if given.get("top_k", 0) > 0:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_k(int(given["top_k"])))
        for name, make in (("top_p", api.llama_sampler_init_top_p), ("min_p", api.llama_sampler_init_min_p)):
            if name in given:
                api.llama_sampler_chain_add(chain, make(given[name], 1))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(given.get("temperature", 1.0)))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(index))
        return chain

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        import numpy as np

        found: list[float] = []
        for first in range(0, len(token_ids), self._batch_tokens):
            part = token_ids[first : first + self._batch_tokens]
            self._batch.n_tokens = 0
            for position, token in enumerate(part, first):
                self._put(token, position, 0, True)
            self._decode()
            for row, following in enumerate(token_ids[first + 1 : first + 1 + len(part)]):
                pointer = self._api.llama_get_logits_ith(self._context, row)
                logits = np.ctypeslib.as_array(pointer, shape=(self._vocab_size,)).astype(np.float64)
                found.append(float(logits[following] - np.logaddexp.reduce(logits)))
        self.reset()
        return found

    def _fill_batch(self) -> list[tuple[Slot, int]]:
        """Put this step's tokens into the batch. Returns who gets logits, and in which row.

        Decodes get their place before prompts, but the batch holds them by sequence id: llama.cpp computes
        together only what has consecutive ids, and cuts the batch wherever the order breaks off.
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
                self._put(
                    sequence.known[position], position, sequence.slot, position == len(sequence.known) - 1
                )
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

    def own_way(self, tasks: Sequence[Task]) -> None:
        """All prompts in as few batches as hold them, then one token of every sequence at a time;
        nothing is sampled.

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


def load_llama_cpp(arguments: dict[str, Any]) -> LlamaCppEngine:
    """arguments: path of the GGUF file, longest, running, threads, gpu_layers. Raises ModelError."""
    return LlamaCppEngine(arguments.pop("path"), **arguments)


class OpenvinoEngine(Peer):
    """OpenVINO GenAI's ContinuousBatchingPipeline, step by step;
    its own way is the pipeline's ``generate``."""

    def __init__(self, pipeline: Any, facts: dict[str, Any]) -> None:
        self._pipeline = pipeline
        self.facts = facts
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}

    def add(self, index: int, task: Task) -> None:
        self._handles[index] = self._pipeline.add_request(index, _ids(task), _config(task))
        self._left[index] = task.max_tokens

    def step(self) -> Iterable[Progress]:
        self._pipeline.step()
        now = time.perf_counter()
        for index, handle in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            self._left[index] -= len(tokens)
            if finished := self._left[index] <= 0:
                del self._handles[index], self._left[index]
            if tokens:
                yield Progress(index, tokens, [now] * len(tokens), finished)

    def own_way(self, tasks: Sequence[Task]) -> None:
        self._pipeline.generate([_ids(task) for task in tasks], [_config(task) for task in tasks])

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        task = Task(token_ids, 1)
        config = _config(task)
        config.echo, config.logprobs = True, 1  # also of the prompt
        handle = self._pipeline.add_request(0, _ids(task), config)
        found: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    found += output.generated_log_probs
        return found[1 : len(token_ids)]


def _ids(task: Task) -> Any:
    import numpy as np
    from openvino import Tensor

    return Tensor(np.array([task.prompt], dtype=np.int64))


def _config(task: Task) -> Any:
    from openvino_genai import GenerationConfig

    config = GenerationConfig()
    config.do_sample, config.ignore_eos, config.max_new_tokens = bool(task.sampling), True, task.max_tokens
    for name, value in task.sampling.items():
        setattr(config, name, value)
    return config


def load_openvino(arguments: dict[str, Any]) -> OpenvinoEngine:
    """arguments: path of the exported model, vocab_size, tokens of all running requests, running,
    and properties of the device."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.enable_prefix_caching = arguments["running"], False
    # Blocks of a CPU hold 32 tokens; every request may leave one of them half empty.
    scheduler.num_kv_blocks = arguments["tokens"] // 32 + 2 * arguments["running"] + 1
    scheduler.max_num_batched_tokens = 2048
    properties = arguments["properties"]
    pipeline = openvino_genai.ContinuousBatchingPipeline(arguments["path"], scheduler, "CPU", properties)
    facts = {
        "vocab_size": arguments["vocab_size"],
        "weights": arguments["weights"],
        "properties": properties,
        "version": openvino_genai.__version__,
        "own_way": "ContinuousBatchingPipeline.generate",
    }
    return OpenvinoEngine(pipeline, facts)


class VllmEngine(Peer):
    """The engine of a ``vllm.LLM``, step by step; its own way is ``LLM.generate``."""

    def __init__(self, llm: Any, facts: dict[str, Any]) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self.facts = facts

    def reset(self) -> None:
        self._engine.reset_prefix_cache()

    def add(self, index: int, task: Task) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(
            str(index), {"prompt_token_ids": task.prompt}, _params(task, RequestOutputKind.DELTA)
        )

    def step(self) -> Iterable[Progress]:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens = [token for completion in output.outputs for token in completion.token_ids]
            yield Progress(int(output.request_id), tokens, [now] * len(tokens), output.finished)

    def own_way(self, tasks: Sequence[Task]) -> None:
        from vllm.sampling_params import RequestOutputKind

        prompts = [{"prompt_token_ids": task.prompt} for task in tasks]
        params = [_params(task, RequestOutputKind.FINAL_ONLY) for task in tasks]
        self._llm.generate(prompts, params, use_tqdm=False)

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        from vllm.sampling_params import RequestOutputKind

        # 0: no other tokens than those of the text.
        params = _params(Task(token_ids, 1), RequestOutputKind.FINAL_ONLY, prompt_logprobs=0)
        [output] = self._llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
        return [
            entry[token].logprob
            for token, entry in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]


def _params(task: Task, kind: Any, **others: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, **task.sampling},
        max_tokens=task.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=kind,
        **others,
    )


def load_vllm(arguments: dict[str, Any]) -> VllmEngine:
    """arguments: those of vllm.LLM.

    On a CPU all cores compute: without this, vLLM keeps one for its scheduler.
    Values that are already set stay.
    """
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for name, value in (("OMP_THREADS_BIND", cores), ("NUM_OF_RESERVED_CPU", "0"), ("KVCACHE_SPACE", "2")):
        os.environ.setdefault(f"VLLM_CPU_{name}", value)
    # The scheduler runs in this process, so that nothing but the model's threads competes for the cores.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm

    llm = vllm.LLM(disable_log_stats=True, skip_tokenizer_init=True, **arguments)
    config = llm.llm_engine.model_config
    facts = {
        "vocab_size": config.get_vocab_size(),
        "dtype": str(config.dtype).removeprefix("torch."),
        "version": vllm.__version__,
        "own_way": "LLM.generate",
        "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
    }
    return VllmEngine(llm, facts)


class GenerateEngine(Peer):
    """transformers' ``generate``: batches of at most ``running`` requests, padded on the left,
    each run to its end.

    A request that comes meanwhile waits. Its own way is ``generate`` without a clock for the tokens.
    """

    def __init__(self, model: Any, facts: dict[str, Any], running: int) -> None:
        self._model = model
        self.facts = facts
        self._running = running
        self._waiting: dict[int, Task] = {}

    def reset(self) -> None:
        self._waiting = {}

    def add(self, index: int, task: Task) -> None:
        self._waiting[index] = task

    def step(self) -> Iterable[Progress]:
        from transformers import StoppingCriteriaList

        waiting = list(self._waiting.items())
        batch, self._waiting = dict(waiting[: self._running]), dict(waiting[self._running :])
        times: list[float] = []

        def note_time(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            """Asked after each step whether to stop; never says so."""
            times.append(time.perf_counter())
            return input_ids.new_zeros(len(input_ids), dtype=bool)

        rows = self._generate(list(batch.values()), stopping_criteria=StoppingCriteriaList([note_time]))
        for row, (index, task) in zip(rows, batch.items()):
            yield Progress(index, row[: task.max_tokens], times[: task.max_tokens], finished=True)

    def own_way(self, tasks: Sequence[Task]) -> None:
        for first in range(0, len(tasks), self._running):
            self._generate(tasks[first : first + self._running])

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        import torch

        ids = torch.tensor([token_ids], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(ids).logits[0, :-1].double()
        found: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def _generate(self, batch: Sequence[Task], **others: Any) -> list[list[int]]:
        import torch

        longest = max(len(task.prompt) for task in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, task in enumerate(batch):
            ids[place, longest - len(task.prompt) :] = torch.tensor(task.prompt)
            mask[place, longest - len(task.prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max(task.max_tokens for task in batch),
                pad_token_id=0,
                **{"do_sample": bool(batch[0].sampling), **batch[0].sampling},
                **others,
            )
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows


class ContinuousBatchingEngine(Peer):
    """transformers' ContinuousBatchingManager, in a thread of its own;
    times are those that it records itself."""

    def __init__(self, model: Any, facts: dict[str, Any], num_blocks: int, max_batch_tokens: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.facts = facts | {"own_way": "the loop of generate_batch"}
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens
            ),
        )
        self._manager.start()

    def add(self, index: int, task: Task) -> None:
        if task.sampling:
            raise ModelError("transformers' continuous batching is measured greedily: its settings are one.")
        added = self._manager.add_request(
            list(task.prompt),
            request_id=str(index),
            max_new_tokens=task.max_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )
        if added is None:
            raise ModelError("transformers' continuous batching no longer takes requests.")

    def step(self) -> Iterable[Progress]:
        output = self._manager.get_result(timeout=SECONDS_TO_WAIT)
        if output is None:
            if not self._manager.is_running():
                raise ModelError("transformers' continuous batching stopped; its reason is above.")
            return
        tokens = list(output.generated_tokens)
        error = None if output.error is None else f"TransformersError: {output.error}"
        yield Progress(
            int(output.request_id), tokens, list(output.timestamps or ()), output.is_finished(), error
        )

    def own_way(self, tasks: Sequence[Task]) -> None:
        """For requests of equal output lengths."""
        self._manager.add_requests(
            inputs=[list(task.prompt) for task in tasks], max_new_tokens=tasks[0].max_tokens
        )
        unfinished = len(tasks)
        while unfinished:
            output = self._manager.get_result(timeout=1)
            if output is None and not self._manager.is_running():
                raise ModelError("transformers' continuous batching stopped; its reason is above.")
            unfinished -= output is not None and output.is_finished()


def load_model(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same weights as our engine's, in transformers. arguments: model and dtype.
    Raises ConfigError, ModelError."""
    import torch
    import transformers

    from minivllm.config import EngineArgs
    from minivllm.engine.resolve import resolve

    config, decoder = resolve(EngineArgs(model=arguments["model"], dtype=arguments["dtype"]))
    directory, _, file = config.model_path.rpartition("/")
    source = {"gguf_file": file} if file.endswith(".gguf") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory if source else config.model_path, dtype=getattr(torch, config.dtype), **source
    )
    model = model.eval()
    torch.nn.Module.to(model, config.device)
    model.generation_config.eos_token_id = None
    facts = {"dtype": config.dtype, "device": config.device, "vocab_size": decoder.vocab_size}
    return model, facts | {"version": transformers.__version__, "own_way": "model.generate"}


def load_transformers(arguments: dict[str, Any]) -> GenerateEngine:
    """arguments: model, dtype, and running, requests at a time. Raises ConfigError or ModelError."""
    return GenerateEngine(*load_model(arguments), arguments["running"])


def load_continuous(arguments: dict[str, Any]) -> ContinuousBatchingEngine:
    """arguments: model, dtype, and longest, running: tokens of the longest request, requests at a time."""
    longest, running = arguments["longest"], arguments["running"]
    model, facts = load_model(arguments)
    return ContinuousBatchingEngine(
        model, facts, num_blocks=running * -(-longest // PAGE_SIZE) + 8, max_batch_tokens=max(2048, running)
    )
