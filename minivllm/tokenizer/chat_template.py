"""A chat template rendered as transformers does it, without importing transformers,
which takes most of a second.

A template comes with a model's files, so it is not trusted: it runs in Jinja's sandbox and sees plain JSON
values only. https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message may carry its reasoning. Templates read the first one, some the second."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation. variables: what else the template may use, such as bos_token.

    Raises jinja2.TemplateError if the template is broken or refuses the messages,
    ValueError if there are none.
    """
    if not messages:
        raise ValueError("the conversation has no messages")
    compiled = _compile(template)
    given = {"documents": None, **variables, "messages": list(map(_message, messages)), "tools": tools}
    return compiled.render(**_plain(given), add_generation_prompt=add_generation_prompt)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates take a key without a value for something to print, and no key for nothing."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING_FIELDS if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy of JSON types: methods of anything else could be called by a template."""
    return json.loads(json.dumps(value, default=lambda other: f"<{type(other).__name__}>"))


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training: here it is what stands inside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names that lead to Python's internals."""

    def __init__(*args: Any, **entries: Any) -> None:
        for name in dict(*args[1:], **entries):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **entries)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: names begin with a letter")


class _Dict:
    """``dict(...)`` as a template may call it, without the attributes of the type."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
