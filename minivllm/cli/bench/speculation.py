"""``minivllm bench speculation``: what guessing tokens is worth where answers repeat their prompt, and where not."""

from __future__ import annotations

from typing import Annotated

import typer

from minivllm.cli.bench.report import OutputOptions, make_report, publish
from minivllm.cli.bench.rounds import measure_in_turn
from minivllm.cli.bench.sides import SideSpec
from minivllm.cli.bench.text_cases import PROMPTS, TextCase
from minivllm.cli.engine_options import ModelArgument, with_model_option
from minivllm.cli.option_groups import with_option_groups
from minivllm.errors import ConfigError

METHODS = ("ngram", "suffix")
"""Those that need nothing but their name."""


@with_option_groups
@with_model_option
def speculation(
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    method: Annotated[str, typer.Option(help="How tokens are guessed: ngram or suffix.")] = "ngram",
    kind: Annotated[
        list[str] | None, typer.Option(help="Prompts: " + ", ".join(PROMPTS) + ". Repeatable. [default: all]")
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens that each request generates; those after its end do not count.")
    ] = 128,
    dtype: Annotated[str, typer.Option(help="Weights and activations.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each kind, after one for warm-up.")] = 5,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Run uncompiled: starts at once, for tokens per step alone.")
    ] = False,
) -> None:
    """Measure decoding at batch 1 with and without speculation, and how many tokens a step brings.

    Tokens per step do not depend on the machine: they bound what speculation can be worth.

    Example: minivllm bench speculation --kind edit --kind story
    """
    from minivllm.frontend.tokenizer import load_tokenizer

    if method not in METHODS:
        raise ConfigError(f"--method is {method!r}, but must be one of: {', '.join(METHODS)}.")
    unknown = [name for name in kind or () if name not in PROMPTS]
    if unknown:
        raise ConfigError(f"--kind is {unknown[0]!r}, but must be one of: {', '.join(PROMPTS)}.")
    tokenizer = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        if not tokenizer.has_chat_template:
            return tokenizer.encode(text)
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])

    end_ids = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    cases = [TextCase(name, encode, new_tokens, end_ids) for name in kind or PROMPTS]
    common = {"enforce_eager": enforce_eager}
    specs = [
        SideSpec(f"minivllm, {method}", "minivllm", {**common, "speculative_config": {"method": method}}),
        SideSpec("minivllm", "minivllm", common),
    ]
    outcome = measure_in_turn(specs, cases, model=model, dtype=dtype, repeats=repeats)
    configuration = {
        "model": model,
        "method": method,
        "dtype": dtype,
        "repeats": repeats,
        "cases": [case.name for case in cases],
        "sides": outcome.facts,
    }
    publish(make_report("speculation", configuration, outcome.measurements, outcome.comparisons), output)
