"""The sampling flags, and what holds where a flag is not given: the model's generation_config.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine

FALLBACK: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95}
"""Used when the model says nothing about sampling: lively, with the unlikely tail cut off."""

_FROM_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

logger = logging.getLogger("minivllm.cli")


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling flags; None is "not given"."""

    temperature: Annotated[float | None, _option("0 always takes the likeliest token; higher is livelier.")] = None
    top_p: Annotated[float | None, _option("Keep the likeliest tokens that add up to this probability.")] = None
    top_k: Annotated[int | None, _option("Keep so many of the likeliest tokens; 0 keeps all.")] = None
    min_p: Annotated[float | None, _option("Drop tokens below this share of the likeliest one's probability.")] = None
    max_tokens: Annotated[int | None, _option("Most tokens of an answer.")] = None
    min_tokens: Annotated[int | None, _option("No end before so many tokens.")] = None
    stop: Annotated[list[str] | None, _option("Text that ends the answer (may be repeated).")] = None
    stop_regex: Annotated[list[str] | None, _option("Regular expression that ends it (may be repeated).")] = None
    stop_token_ids: Annotated[list[int] | None, _option("Token id that ends the answer (may be repeated).")] = None
    include_stop_str_in_output: Annotated[
        bool, _option("Keep the stop text in the answer.", "--include-stop-str-in-output")
    ] = False
    ignore_eos: Annotated[bool, _option("Go on after the model's end-of-sequence tokens.", "--ignore-eos")] = False
    bad_words: Annotated[list[str] | None, _option("Text that must not appear (may be repeated).")] = None
    repetition_penalty: Annotated[float | None, _option("Above 1 discourages tokens seen before.")] = None
    presence_penalty: Annotated[float | None, _option("Subtracted once for tokens of the answer so far.")] = None
    frequency_penalty: Annotated[float | None, _option("Subtracted per occurrence in the answer so far.")] = None
    skip_special_tokens: Annotated[
        bool, _option("Leave special tokens out of the text.", "--skip-special-tokens/--no-skip-special-tokens")
    ] = True

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """``defaults`` overridden by the flags that were given. Raises RequestError naming the field and its range."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        # Older typer versions hand over an empty list for a repeatable option that was not given.
        given = {name: value for name, value in given.items() if value != []}
        return SamplingParams(**{**defaults, **given})


def model_defaults(engine: LLMEngine) -> dict[str, Any]:
    """What the model's generation_config.json says about sampling, or ``FALLBACK`` if it leaves everything neutral.

    Its limit on the length is not taken: it stands for transformers' ``generate``. Raises ModelError if it is broken.
    """
    neutral, given = SamplingParams(), engine.get_default_sampling_params()
    values = {name: getattr(given, name) for name in _FROM_THE_MODEL if getattr(given, name) != getattr(neutral, name)}
    if not values:
        return dict(FALLBACK)
    logger.info("Sampling defaults of the model: %s.", ", ".join(f"{name} {value}" for name, value in values.items()))
    return values
