"""``minivllm pull``: fetch a model so that it is there when it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from minivllm.cli.engine.engine_start import engine_log
from minivllm.cli.engine.options import ModelArgument, with_options


@with_options
def pull(
    model: ModelArgument = "smollm2",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None,
) -> None:
    """Fetch a model and print where it lies.

    It is checked, and what is there already is not fetched again.

    Example: minivllm pull smollm2
    """
    from minivllm.hub.fetch import resolve_model

    with engine_log(verbose=True):
        path = resolve_model(model, revision)
    print(path)
