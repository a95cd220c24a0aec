"""``attention_backend``: which one an engine gets, by which names, and what is said about a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams, register_attention
from minivllm.attention import AttentionContext, FlexAttention, SdpaAttention, find_attention, in_step_order
from minivllm.batch.step_inputs import Row
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ConfigError
from minivllm.specs.attention import Reach
from tests.attention.backends import new_context, specs_of
from tests.attention.random_batches import BatchShape, new_batch

made: list[str] = []


class Remembered(SdpaAttention):
    """The reference, which leaves a trace."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        made.append(str(context.device))


def answer(model: Path, **arguments: Any) -> list[int]:
    with LLM(str(model), enforce_eager=True, dtype="float32", num_gpu_blocks_override=24, **arguments) as llm:
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.0, max_tokens=5))
    return list(output[0].outputs[0].token_ids)


def test_flex_is_compiled_or_else_its_reference() -> None:
    shape = BatchShape()
    batch, specs = new_batch(shape), specs_of([Reach()])
    context = {
        compiles: new_context(batch.groups[0], shape, specs, compiles=compiles) for compiles in (True, False)
    }
    flex = find_attention(EngineArgs().attention_backend)
    assert isinstance(flex(context[True]), FlexAttention) and isinstance(flex(context[False]), SdpaAttention)
    assert isinstance(find_attention("sdpa")(context[True]), SdpaAttention)


def test_a_registered_name_and_an_import_path_name_the_same_backend(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    register_attention("remembered", Remembered)
    path = f"{Remembered.__module__}:Remembered"
    expected = answer(model)
    assert not made
    assert answer(model, attention_backend="remembered") == expected and made == ["cpu"]
    assert answer(model, attention_backend=path) == expected and made == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match="'flex' is built in"):
        register_attention("flex", Remembered)


def test_an_engine_in_a_process_of_its_own_imports_its_backend(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    path = "tutorials.attention_variants:chunked"
    assert answer(model, attention_backend=path, multiprocess=True) == answer(model, attention_backend=path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("flesh", r"attention_backend is 'flesh', but must be one of flex, flex-shared, sdpa"),
        (
            "no_such_module:Backend",
            r"attention_backend is 'no_such_module:Backend', which cannot be imported: No mod",
        ),
        (
            "minivllm.attention:Nothing",
            r"which cannot be imported: module 'minivllm\.attention' has no attribute",
        ),
        ("minivllm.attention:__doc__", r"which must be a function or a class"),
        (":", r"must name a class or an object as 'package\.module:Class'"),
    ],
)
def test_a_wrong_name_is_a_sentence_before_the_model_is_loaded(
    name: str, sentence: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(EngineArgs(model=str(tiny_model("llama")), attention_backend=name))


def test_rows_come_as_single_tokens_then_few_then_several_and_otherwise_as_they_were() -> None:
    request: Any = None
    rows = [Row(request, start, count) for start, count in enumerate([5, 1, 4, 2, 1, 9])]
    ordered, single, few = in_step_order(rows, few_tokens=4)
    assert [(row.start, row.count) for row in ordered] == [(1, 1), (4, 1), (2, 4), (3, 2), (0, 5), (5, 9)]
    assert (single, few) == (2, 2)
    ordered, single, few = in_step_order(rows, few_tokens=0)
    assert [row.start for row in ordered] == [1, 4, 0, 2, 3, 5] and (single, few) == (2, 0)
