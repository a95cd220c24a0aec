"""``minivllm pull`` and ``minivllm list``: fetch a model before it is needed, and see what is there."""

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

    The files are checked. Files that are there already are not fetched again.

    Example: minivllm pull smollm2
    """
    from minivllm.hub.fetch import resolve_model

    with engine_log(verbose=True):
        path = resolve_model(model, revision)
    print(path)


def list_models() -> None:
    """List the models on this machine: name, size, and where they lie.

    Names that can be fetched without a model hub come first.
    Models of other directories are named by their path.

    Example: minivllm list
    """
    from minivllm.hub.fetch import stored_models

    models = stored_models()
    width = max(len(model.name) for model in models)
    for model in models:
        size = "not fetched yet" if model.num_bytes is None else f"{model.num_bytes / 1e6:,.0f} MB"
        print(f"{model.name:{width}}  {size:>15}  {model.path or ''}".rstrip())
