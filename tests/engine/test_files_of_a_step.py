"""How many files of the package a person enters who follows one step in a debugger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minivllm
from minivllm import LLM, SamplingParams

HOME = Path(minivllm.__file__).parent
MOST_FILES, MOST_OF_THE_WORKER = 40, 25
"""May only fall."""
WORKER_FOLDERS = {
    "attention",
    "batch",
    "device",
    "linear",
    "models",
    "program",
    "sampling",
    "specs",
    "worker",
}


def test_a_plain_decode_enters_few_files(tiny_model: Callable[..., Path]) -> None:
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "attention_backend": "sdpa",
        "num_gpu_blocks_override": 16,
    }
    entered: set[Path] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and HOME in path.parents:
            entered.add(path.relative_to(HOME))

    with LLM(str(tiny_model("llama")), max_model_len=64, **settings) as llm:
        engine = llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        engine.add_request("r", {"prompt_token_ids": [5, 6, 7]}, params)
        for _ in range(2):  # the prompt, and a first decode, which makes what is kept
            engine.step()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            engine.step()
        finally:
            sys.setprofile(before)
    of_worker = {path for path in entered if path.parts[0] in WORKER_FOLDERS}
    assert len(entered) <= MOST_FILES, sorted(map(str, entered))
    assert len(of_worker) <= MOST_OF_THE_WORKER, sorted(map(str, of_worker))
