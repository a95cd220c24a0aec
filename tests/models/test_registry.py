"""The table of families: rows are added from outside by name or by import path,
and none of the table is replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams, register_family
from minivllm.errors import ConfigError, ModelError
from minivllm.families.makers.registry import FAMILIES, load_family

OWN = replace(FAMILIES["LlamaForCausalLM"], architecture="OwnForCausalLM", model_type="own")


def answer(model: Path, **options: Any) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(model), enforce_eager=True, num_gpu_blocks_override=9, max_model_len=64, **options) as llm:
        [output] = llm.generate({"prompt_token_ids": list(range(2, 20))}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture
def unknown_model(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """Llama's weights under an architecture that is in no table."""
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["SomeForCausalLM"]}))
    return model


def test_a_family_is_registered_or_named_by_its_import_path(
    unknown_model: Path, tiny_model: Callable[..., Path]
) -> None:
    path = f"{__name__}:OWN"
    with pytest.raises(ModelError, match=r"architectures is \['SomeForCausalLM'\], but .*family='package"):
        answer(unknown_model)
    expected = answer(tiny_model("llama"))
    assert answer(unknown_model, family=path) == answer(unknown_model, family="LlamaForCausalLM") == expected
    assert answer(unknown_model, family=path, multiprocess=True) == expected
    register_family(replace(OWN, architecture="SomeForCausalLM"))
    assert answer(unknown_model) == expected


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lifo", "family is 'lifo', but must be one of LlamaForCausalLM"),
        ("no_such_module:FAMILY", "cannot be imported: No module named 'no_such_module'"),
        (f"{__name__}:NOBODY", "cannot be imported"),
        ("minivllm.request:Request", "must be a minivllm.Family"),
    ],
)
def test_what_is_no_family_is_told_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_family(name)


def test_a_family_of_the_table_stays_what_it_is() -> None:
    known = FAMILIES["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match="'LlamaForCausalLM' is built in"):
        register_family(replace(known, has_windows=True))
    assert FAMILIES["LlamaForCausalLM"] is known
    with pytest.raises(ConfigError, match="letters, digits"):
        register_family(replace(known, architecture="not a name"))
