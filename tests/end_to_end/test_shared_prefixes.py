"""Users that share a prefix get the same tokens and the same logprobs, bit for bit, whether its blocks are
read side by side or row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm import SamplingParams
from minivllm.attention.interface.backend import StepRows
from minivllm.attention.lists.shared_prefixes import Readers
from minivllm.attention.pairs import RowPairs
from minivllm.compilation.compiler import cannot_compile_reason
from tests.parity_reference import tiny_llm

PREFIX = [5 + 7 * place % 300 for place in range(40)]
PROMPTS = [[*PREFIX, *range(10 * user + 20, 10 * user + 20 + 3 * user)] for user in range(6)]
Answer = tuple[list[int], list[float]]


def answers(model: Path) -> tuple[list[Answer], int]:
    """Tokens and their logprobs of six users, the first of whom fills the prefix cache; and the number of
    preemptions, since the cache has no room for all of them."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    settings = {"block_size": 16, "max_model_len": 128, "num_gpu_blocks_override": 20}
    with tiny_llm(model, enforce_eager=False, **settings) as llm:
        outputs = []
        for part in (PROMPTS[:1], PROMPTS):
            outputs += llm.generate([{"prompt_token_ids": ids} for ids in part], params, use_tqdm=False)
        preemptions = llm.get_metrics().num_preemptions
    found = []
    for output in outputs:
        completion = output.outputs[0]
        logprobs = [next(iter(entry.values())).logprob for entry in completion.logprobs or ()]
        found.append((list(completion.token_ids), logprobs))
    return found, preemptions


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="there is no C++ compiler here"
)
def test_answers_do_not_depend_on_the_order_in_which_blocks_are_read(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, users = tiny_model("llama", head_dim=32), set[int]()
    shared_blocks = RowPairs.shared_blocks

    def record(self: RowPairs, rows: StepRows) -> Readers | None:
        found = shared_blocks(self, rows)
        users.add(0 if found is None else len(set(found.row.tolist())))
        return found

    monkeypatch.setattr(RowPairs, "shared_blocks", record)
    side_by_side, preemptions = answers(model)
    assert {2, 4} <= users and preemptions > 0, f"shared by {users} rows, {preemptions} preemptions"
    monkeypatch.setattr(RowPairs, "shared_blocks", lambda self, rows: None)
    assert answers(model)[0] == side_by_side
    assert all(len(tokens) == len(logprobs) == 40 for tokens, logprobs in side_by_side)
