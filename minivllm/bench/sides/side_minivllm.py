"""Our engine as a side of a comparison."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.bench.sides.drive import Progress, Task
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, ModelError
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.messages import LoRARequest, SchedulerStats
from minivllm.sampling_params import OutputKind, SamplingParams, StructuredOutputs

SECONDS_BETWEEN_STATS = 0.02
"""How often the cache usage is looked at: often enough for its peak, seldom enough to cost nothing."""


RANKS = (8, 16, 32, 64)


def ranks_of(count: int, max_rank: int) -> list[int]:
    """Ranks of ``count`` adapters: 8, 16, 32, 64 in turn, none above max_rank,
    or max_rank if it is below 8."""
    allowed = [rank for rank in RANKS if rank <= max_rank] or [max_rank]
    return [allowed[index % len(allowed)] for index in range(count)]


def write_random_adapters(
    directory: Path, shapes: Mapping[str, Sequence[int]], ranks: Sequence[int]
) -> list[LoRARequest]:
    """Write one adapter of each rank in PEFT's format that changes all layers a little; seeded. How fast
    adapters are served does not depend on what they learnt.

    shapes: [out, in] of every linear layer by its name in the model, such as
    ``model.layers.0.self_attn.q_proj``.
    """
    import torch
    from safetensors.torch import save_file

    requests = []
    for index, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(index)
        matrices = {}
        for name, (outputs, inputs) in shapes.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = torch.randn(*shape, generator=generator) * 0.01
                matrices[f"base_model.model.{name}.lora_{part}.weight"] = matrix.bfloat16()
        path = directory / f"random-{index}"
        path.mkdir()
        save_file(matrices, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        requests.append(LoRARequest(path.name, lora_path=str(path)))
    return requests


class MinivllmEngine:
    """LLMEngine, step by step. adapters: the requests use them in turn; empty: none.
    structure: of all answers."""

    def __init__(
        self,
        engine: LLMEngine,
        adapters: Sequence[LoRARequest] = (),
        structure: StructuredOutputs | None = None,
    ) -> None:
        self.engine = engine
        self._adapters = adapters
        self._structure = structure
        config = engine.client.config
        self.facts: dict[str, Any] = {
            "dtype": config.dtype,
            "kv_cache_dtype": config.cache.dtype,
            "device": config.device,
            "vocab_size": engine.client.model_vocab_size,
            "block_size": config.cache.block_size,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        }
        self._kv_peak = 0.0
        self._next_look = 0.0
        self._before: SchedulerStats = engine.stats()

    def reset(self) -> None:
        self.engine.reset_prefix_cache()
        self._before = self.engine.stats()
        self._kv_peak = 0.0
        self._next_look = 0.0

    def add(self, index: int, task: Task) -> None:
        sampling: dict[str, Any] = {"temperature": 0.0, "seed": index, **task.sampling}
        params = SamplingParams(
            **sampling,
            max_tokens=task.max_tokens,
            ignore_eos=self._structure is None,
            output_kind=OutputKind.DELTA,
            structured_outputs=self._structure,
        )
        lora = self._adapters[index % len(self._adapters)] if self._adapters else None
        self.engine.add_request(str(index), {"prompt_token_ids": task.prompt}, params, lora=lora)

    def step(self) -> Iterable[Progress]:
        outputs = self.engine.step()
        now = time.perf_counter()
        if now >= self._next_look:
            self._kv_peak = max(self._kv_peak, self.engine.stats().kv_cache_usage)
            self._next_look = now + SECONDS_BETWEEN_STATS
        for output in outputs:
            token_ids = [token for completion in output.outputs for token in completion.token_ids]
            error = None if output.error is None else f"EngineError: {output.error}"
            yield Progress(int(output.request_id), token_ids, [now] * len(token_ids), output.finished, error)

    def log_probabilities(self, token_ids: list[int]) -> list[float]:
        """See Side. Raises ModelError for a text that the engine refuses."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=OutputKind.FINAL_ONLY
        )
        self.engine.add_request("text", {"prompt_token_ids": token_ids}, params)
        while not (outputs := self.engine.step()):
            pass
        if outputs[0].error is not None:
            raise ModelError(outputs[0].error)
        entries = outputs[0].prompt_logprobs or []
        return [
            entry[token].logprob for token, entry in zip(token_ids[1:], entries[1:], strict=True) if entry
        ]

    def counters(self) -> dict[str, float]:
        after, before = self.engine.stats(), self._before
        queried = after.prefix_cache_queried_tokens - before.prefix_cache_queried_tokens
        hits = after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
        memory = self.engine.client.call("collective_rpc", "memory_bytes", [])
        return {
            "kv_peak": self._kv_peak,
            "cache_hit_rate": hits / queried if queried else 0.0,
            "preemptions": after.num_preemptions - before.num_preemptions,
            "weight_bytes": sum(worker["weights"] for worker in memory),
            "kv_touched_bytes": sum(worker["kv_cache_touched"] for worker in memory),
        }


def load(arguments: dict[str, Any]) -> MinivllmEngine:
    """The engine with its arguments, and two more: ``lora`` is how many random adapters the requests use in
    turn, ``regex`` what all answers match: they end where it lets them. It waits until the model is compiled.

    Raises ConfigError or ModelError.
    """
    arguments = {"compile_in_background": False} | arguments
    count = arguments.pop("lora", 0)
    if type(count) is not int or count < 0:
        raise ConfigError(f"lora is {count!r}, but must be a number of adapters, 0 for none.")
    pattern = arguments.pop("regex", None)
    structure = None if pattern is None else StructuredOutputs(regex=str(pattern))
    if not count:
        return MinivllmEngine(LLMEngine.from_args(EngineArgs.from_kwargs(**arguments)), structure=structure)
    room = {"max_loras": count, "max_lora_rank": max(RANKS), "enable_lora": True}
    args = EngineArgs.from_kwargs(**(room | arguments))
    engine = LLMEngine.from_args(args)
    [shapes, *_] = engine.client.call("collective_rpc", "adapter_shapes", [])
    with tempfile.TemporaryDirectory() as directory:
        adapters = write_random_adapters(Path(directory), shapes, ranks_of(count, args.max_lora_rank))
        for adapter in adapters:
            engine.add_lora(adapter)
    return MinivllmEngine(engine, adapters, structure)
