"""The engine's flags: one for every field of ``EngineArgs``, under vLLM's names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from minivllm.config import EngineArgs
from minivllm.errors import ConfigError

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name (smollm2), a Hugging Face id, a local directory or a .gguf file.",
        show_default="smollm2",
    ),
]


def with_model_option(command: Callable[..., None]) -> Callable[..., None]:
    """Let ``--model NAME`` name the model as the argument MODEL does, for people who know it so from other engines.

    ``command`` gets the one that was given, or its own default. Both at once is a ConfigError.
    """
    signature = inspect.signature(command, eval_str=True)
    argument = signature.parameters["model"]
    option = inspect.Parameter(
        "model_option",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, typer.Option("--model", help="The same as MODEL.", metavar="MODEL")],
    )

    def with_either(*, model_option: str | None, model: str | None, **values: Any) -> None:
        if model is not None and model_option is not None:
            raise ConfigError(f"The model is named twice, as {model} and as --model {model_option}: give one of them.")
        command(model=model or model_option or argument.default, **values)

    # The default is left to ``with_either``, which must know whether the argument was given.
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None if name == "model" else parameter.default)
        for name, parameter in signature.parameters.items()
    ]
    with_either.__name__, with_either.__doc__, with_either.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    with_either.__signature__ = signature.replace(parameters=[*others, option])  # type: ignore[attr-defined]
    with_either.__annotations__ = {one.name: one.annotation for one in [*others, option]}
    return with_either


def _flags() -> Iterator[tuple[str, Any, Any]]:
    """Name, annotated type and default of every engine argument but the model, which is the command's argument."""
    hints: dict[str, Any] = get_type_hints(EngineArgs)
    for one in fields(EngineArgs):
        kind, flag = hints[one.name], one.name.replace("_", "-")
        if one.name == "model":
            continue
        names = (f"--{flag}/--no-{flag}",) if kind in (bool, bool | None) else ()
        kind = {dict[str, Any] | None: str | None, list[Any] | None: list[str] | None}.get(kind, kind)
        option = typer.Option(*names, help=one.metadata["help"], metavar=one.metadata["metavar"])
        yield one.name, Annotated[kind, option], field(default=one.default)


_EngineFlags: Any = make_dataclass("_EngineFlags", _flags(), frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(_EngineFlags):
    """The flags behind ``EngineArgs``: objects come as JSON, everything else under the same name and type."""

    def engine_args(self, model: str) -> EngineArgs:
        """The engine arguments of these flags. Raises ConfigError naming the argument and what it may be."""
        values = asdict(self)
        values["hf_overrides"] = _json_object("hf_overrides", self.hf_overrides, '{"num_hidden_layers": 2}')
        values["speculative_config"] = _json_object(
            "speculative_config", self.speculative_config, '{"method": "ngram"}'
        )
        values["logits_processors"] = self.logits_processors or None
        return EngineArgs(model=model, **values)


def _json_object(name: str, text: str | None, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not valid JSON ({error}); an example is '{example}'.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {text}, but must be a JSON object such as '{example}'.")
    return value
