"""What may stand in speculative_config, and the sentences for what may not."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.config import EngineArgs, SpeculativeConfig
from minivllm.errors import ConfigError


def test_a_method_is_enough() -> None:
    assert SpeculativeConfig.from_dict({"method": "ngram"}) == SpeculativeConfig(method="ngram")
    assert (
        SpeculativeConfig.from_dict(
            {"method": "suffix", "num_speculative_tokens": None}
        ).num_speculative_tokens
        == 7
    )


def test_keys_keep_the_names_of_vllm() -> None:
    values = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    config = SpeculativeConfig.from_dict(values)
    assert (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == (3, 1, 4)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("ngram", "speculative_config is 'ngram', but must be a dictionary with at least a 'method'."),
        ({}, "speculative_config['method'] is None, but must be one of ngram, "),
        (
            {"method": "crystal_ball"},
            "speculative_config['method'] is 'crystal_ball', but must be one of ngram, ",
        ),
        (
            {"method": "ngram", "num_tokens": 3},
            "has a key 'num_tokens', but with method 'ngram' it may have: method, ",
        ),
        (
            {"method": "suffix", "prompt_lookup_min": 1},
            "has a key 'prompt_lookup_min', but with method 'suffix'",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "['num_speculative_tokens'] is 0, but must be at least 1.",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2.5},
            "is 2.5, but must be a whole number of at least 1.",
        ),
        ({"method": "ngram", "num_speculative_tokens": 99}, "is 99, but must be at most 31."),
        (
            {"method": "ngram", "prompt_lookup_min": 9},
            "is 9, but must be at most prompt_lookup_max, which is 5.",
        ),
        ({"method": "early_exit", "num_layers": 0}, "['num_layers'] is 0, but must be at least 1."),
        (
            {"method": "ngram", "num_layers": 2},
            "has a key 'num_layers', but with method 'ngram' it may have: method, ",
        ),
        (
            {"method": "ngram", "verification_cost": -1},
            "['verification_cost'] is -1, but must be from 0 to 1.",
        ),
        (
            {"method": "ngram", "verification_cost": "low"},
            "['verification_cost'] is 'low', but must be from 0 to 1.",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs(speculative_config=values)
    assert sentence in str(error.value)
