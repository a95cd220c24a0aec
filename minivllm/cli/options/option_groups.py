"""Option groups: a dataclass whose fields are command line options, shared by several commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of ``command`` that is annotated with a dataclass by that dataclass's fields, at the end.

    The fields carry ``Annotated[type, typer.Option(...)]``; typer then sees one flat signature, and ``command`` gets
    the dataclasses back. So an option that several commands share is written once.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    flat = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in groups
    ]
    for group in groups.values():
        flat.extend(_options_of(group))

    def flat_command(**values: Any) -> None:
        grouped = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **grouped)

    flat_command.__name__ = command.__name__
    flat_command.__doc__ = command.__doc__
    flat_command.__module__ = command.__module__
    flat_command.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    flat_command.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return flat_command


def _options_of(group: Any) -> list[inspect.Parameter]:
    """The parameters that a group's fields stand for, in order."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    if field.default is MISSING:
        raise TypeError(f"Option {field.name} of a group needs a default.")
    return field.default
