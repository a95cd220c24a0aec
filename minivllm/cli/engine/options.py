"""The flags that commands share: option groups, one flag for every engine argument, and those of sampling."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from minivllm.cli.engine.grouped_command import ConfigOption, HelpAllOption
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError
from minivllm.sampling_params import MAX_INTEGER, SamplingParams

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name (smollm2), a Hugging Face id, a local directory or a .gguf file.",
        show_default="smollm2",
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.", metavar="MODEL")]
TextArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="TEXT",
        help="A prompt, as with -p. MODEL may be left out before it, but one word alone is a MODEL.",
        show_default=False,
    ),
]

_WRITTEN: dict[str, tuple[Any, str]] = {
    "hf_overrides": (str | None, "JSON"),
    "speculative_config": (str | None, "JSON"),
    "kv_transfer_config": (str | None, "JSON"),
    "limit_mm_per_prompt": (str | None, "JSON"),
    "logits_processors": (list[str] | None, "MODULE:CLASS"),
    "profile": (str | None, "DIR"),
}
"""Engine argument -> the type that its flag has on a command line, and how its value is called there."""
_NAMED = {
    "compile_in_background": (
        "--compile-in-background/--no-compile-in-background",
        " /--wait-for-compilation",
    )
}
"""Engine argument -> what its flag is called, where that does not follow from its name."""
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
"""Endings of whole numbers, as vLLM reads them: 8k are 8,000, 8K are 8,192."""
_JSON_EXAMPLES = {
    "hf_overrides": '{"num_hidden_layers": 2}',
    "speculative_config": '{"method": "ngram"}',
    "kv_transfer_config": '{"kv_connector": "OffloadingConnector"}',
    "limit_mm_per_prompt": '{"image": 2}',
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Flatten the option groups of ``command``, so that what several commands share is written once.

    Every parameter that is annotated with a dataclass gives way to that dataclass's fields, which carry
    ``Annotated[type, typer.Option(...)]``; for ``EngineArgs`` to a flag for each of its fields. ``command``
    gets the dataclasses back. Where there is a MODEL, ``--model`` names it too, as in other engines; both at
    once is a ConfigError. A TEXT may follow the MODEL, or stand alone. A command with engine flags has
    ``--help-all`` and ``--config`` too, see GroupedCommand.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }
    flat = [
        one.replace(kind=one.KEYWORD_ONLY) for name, one in signature.parameters.items() if name not in groups
    ]
    flat += [option for group in groups.values() for option in _options_of(group)]
    models = [one for one in flat if one.annotation == ModelArgument]
    # The default is left to ``flat_command``, which must know whether the argument was given.
    flat = [one.replace(default=None) if one in models else one for one in flat]
    if models:
        flat.append(models[0].replace(name="model_option", default=None, annotation=ModelOption))
    # A TEXT comes after the MODEL, which is among the engine's arguments.
    flat.sort(key=lambda one: one.annotation == TextArgument)
    takes_file = EngineArgs in groups.values()
    if takes_file:
        keyword = inspect.Parameter.KEYWORD_ONLY
        flat.append(inspect.Parameter("config", keyword, default=None, annotation=ConfigOption))
        flat.append(inspect.Parameter("help_all", keyword, default=False, annotation=HelpAllOption))

    def flat_command(**values: Any) -> None:
        if takes_file:
            del values["config"], values["help_all"]  # their callbacks have done all there is to do
        if models:
            model, named = values["model"], values.pop("model_option")
            if "text" in values and values["text"] is None and model is not None and _is_text(model):
                values["text"], model = model, None
            if model is not None and named is not None:
                raise ConfigError(
                    f"The model is named twice, as {model} and as --model {named}: give one of them."
                )
            given = named if model is None else model
            values["model"] = models[0].default if given is None else given
        grouped = {}
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in fields(group)}
            grouped[name] = group(**_read(own) if group is EngineArgs else own)
        command(**values, **grouped)

    flat_command.__name__, flat_command.__doc__ = command.__name__, command.__doc__
    flat_command.__module__ = command.__module__
    flat_command.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    flat_command.__annotations__ = {one.name: one.annotation for one in flat}
    flat_command.groups_of_flags = {  # type: ignore[attr-defined]
        field.name: _HEADINGS.get(group, "Options") for group in groups.values() for field in fields(group)
    }
    return flat_command


def _is_text(word: str) -> bool:
    """True if the argument for the model is a prompt:
    words with spaces in between, and no file of that name."""
    return " " in word.strip() and not Path(word).expanduser().exists()


def _options_of(group: Any) -> list[inspect.Parameter]:
    """The parameters that a group's fields stand for, in order."""
    hints = get_type_hints(group, include_extras=True)
    if group is EngineArgs:
        for name, hint in hints.items():
            kind, metavar = _WRITTEN.get(name, (hint.__origin__, None))
            option = typer.Option(*_NAMED.get(name, ()), help=hint.__metadata__[0], metavar=metavar)
            hints[name] = Annotated[kind, option]
        hints["model"] = ModelArgument
    hints = {name: _with_parser(hint) for name, hint in hints.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(one.name, keyword, default=one.default, annotation=hints[one.name])
        for one in fields(group)
    ]


def _with_parser(hint: Any) -> Any:
    """The annotation of a flag whose value is a number or a path,
    with a parser that repeats what was given wrongly."""
    option = hint.__metadata__[0]
    for kinds, parser, metavar in _PARSERS:
        if hint.__origin__ in kinds and option.parser is None and option.min is None:
            option = copy.copy(option)
            option.parser, option.metavar = parser, option.metavar or metavar
    return Annotated[hint.__origin__, option]


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number: write it like 0.7.") from None


def _path(text: str | Path) -> Path:
    if text == "":
        raise typer.BadParameter("an empty text names no file: name one, or leave the flag out.")
    return Path(text)


def whole_number(text: str | int) -> int:
    """A number that may end in a unit: 4096, 8k, 1.5M. Raises typer.BadParameter, which names the flag."""
    if isinstance(text, int):  # a flag's default
        return text
    digits, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    try:
        number = Decimal(digits) * unit
        if abs(number) <= MAX_INTEGER and number == int(number):
            return int(number)
    except (ArithmeticError, ValueError):
        pass
    raise typer.BadParameter(f"{text!r} is no whole number: write it like 4096, 8k (8,000) or 8K (8,192).")


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments from what their flags gave. Raises ConfigError."""
    read = {name: _json_object(name, values[name], example) for name, example in _JSON_EXAMPLES.items()}
    return values | read | {"logits_processors": values["logits_processors"] or None}


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


def engine_flags(args: EngineArgs) -> list[str]:
    """The flags that give these arguments to another command; the model is not among them."""
    flags = []
    for name, value in (asdict(args) | {"model": None}).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}={one}" for one in value]
        elif value is not None:
            flags.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


_PARSERS: tuple[tuple[tuple[Any, ...], Callable[[str], Any], str], ...] = (
    ((int, int | None, list[int] | None), whole_number, "<int>"),
    ((float, float | None), _number, "<float>"),
    ((Path | None,), _path, "<path>"),
)
"""Types of flags, their parser, and how the value is called in a help."""

_FROM_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

logger = logging.getLogger("minivllm.cli")


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling flags; None is "not given"."""

    temperature: Annotated[
        float | None, _option("0 always takes the likeliest token; higher is livelier.")
    ] = None
    top_p: Annotated[float | None, _option("Keep the likeliest tokens that add up to this probability.")] = (
        None
    )
    top_k: Annotated[int | None, _option("Keep so many of the likeliest tokens; 0 keeps all.")] = None
    min_p: Annotated[
        float | None, _option("Drop tokens below this share of the likeliest one's probability.")
    ] = None
    max_tokens: Annotated[int | None, _option("Most tokens of an answer.")] = None
    min_tokens: Annotated[int | None, _option("No end before so many tokens.")] = None
    stop: Annotated[list[str] | None, _option("Text that ends the answer (may be repeated).")] = None
    stop_regex: Annotated[list[str] | None, _option("Regular expression that ends it (may be repeated).")] = (
        None
    )
    stop_token_ids: Annotated[
        list[int] | None, _option("Token id that ends the answer (may be repeated).")
    ] = None
    include_stop_str_in_output: Annotated[
        bool, _option("Keep the stop text in the answer.", "--include-stop-str-in-output")
    ] = False
    ignore_eos: Annotated[
        bool, _option("Go on after the model's end-of-sequence tokens.", "--ignore-eos")
    ] = False
    bad_words: Annotated[list[str] | None, _option("Text that must not appear (may be repeated).")] = None
    repetition_penalty: Annotated[float | None, _option("Above 1 discourages tokens seen before.")] = None
    presence_penalty: Annotated[float | None, _option("Subtracted once for tokens of the answer so far.")] = (
        None
    )
    frequency_penalty: Annotated[float | None, _option("Subtracted per occurrence in the answer so far.")] = (
        None
    )
    skip_special_tokens: Annotated[bool, _option("Leave special tokens out of the text.")] = True

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """``defaults`` overridden by the flags that were given.
        Raises RequestError naming the field and its range."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        # Older typer versions hand over an empty list for a repeatable option that was not given.
        given = {name: value for name, value in given.items() if value != []}
        return SamplingParams(**{**defaults, **given})


def model_defaults(engine: LLMEngine) -> dict[str, Any]:
    """How the engine samples where a request says nothing, as far as that is not neutral.

    The model's limit on the length is not taken: it stands for transformers' ``generate``. Raises ModelError
    if its generation_config.json is broken.
    """
    neutral, given = SamplingParams(), engine.get_default_sampling_params()
    values = {
        name: getattr(given, name)
        for name in _FROM_THE_MODEL
        if getattr(given, name) != getattr(neutral, name)
    }
    logger.info(
        "Sampling by default: %s.",
        ", ".join(f"{name} {value}" for name, value in values.items()) or "neutral",
    )
    return values


_HEADINGS: dict[Any, str] = {EngineArgs: "Engine", SamplingOptions: "Sampling"}
"""Group of flags -> its heading in a help."""
