"""vLLM as a side of a comparison, through its step-by-step LLMEngine; its own way is ``LLM.generate``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.bench.sides.drive import Progress, Task


class VllmEngine:
    """The engine of a ``vllm.LLM``, on token ids."""

    def __init__(self, llm: Any, facts: dict[str, Any]) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self.facts = facts

    def reset(self) -> None:
        self._engine.reset_prefix_cache()

    def add(self, index: int, task: Task) -> None:
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(str(index), {"prompt_token_ids": task.prompt}, _params(task, RequestOutputKind.DELTA))

    def step(self) -> Iterable[Progress]:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens = [token for completion in output.outputs for token in completion.token_ids]
            yield Progress(int(output.request_id), tokens, [now] * len(tokens), output.finished)

    def counters(self) -> dict[str, float]:
        return {}

    def own_way(self, tasks: Sequence[Task]) -> None:
        from vllm.sampling_params import RequestOutputKind

        prompts = [{"prompt_token_ids": task.prompt} for task in tasks]
        params = [_params(task, RequestOutputKind.FINAL_ONLY) for task in tasks]
        self._llm.generate(prompts, params, use_tqdm=False)


def _params(task: Task, kind: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True, detokenize=False, output_kind=kind
    )


def load(arguments: dict[str, Any]) -> VllmEngine:
    """arguments: those of vllm.LLM.

    On a CPU all cores compute: without this, vLLM keeps one of them for its scheduler. What is set already stays.
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
