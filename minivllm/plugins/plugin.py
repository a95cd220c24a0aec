"""Names that a setting takes, and the implementations that they stand for.

A setting names one of ours, one that was registered under a name,
or any importable one as "package.module:Class".
A registered implementation counts in its process;
an engine in another process is given the import path instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from minivllm.errors import ConfigError


def import_object(what: str, path: str) -> Any:
    """The object that "package.module:Name" stands for. what: how the error names it. Raises ConfigError."""
    module, separator, qualified = path.partition(":")
    if not separator or not module or not qualified:
        raise ConfigError(
            f"{what} is {path!r}, but must name a class or an object as 'package.module:Class'."
        )
    try:
        found: Any = import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} is {path!r}, which cannot be imported: {error}.") from None
    return found


def import_path(found: Any) -> str | None:
    """ "package.module:Name" of a class or function that another process can import, else None."""
    module, qualified = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if module in (None, "__main__") or "<locals>" in qualified:
        return None
    return f"{module}:{qualified}"


class Plugins:
    """The implementations of one extension point. setting: the name of the engine argument. ours: name -> the
    implementation, or its import path, so that names can be checked without importing what they stand for.
    known: a view of those and what was registered."""

    def __init__(self, setting: str, ours: Mapping[str, Any]) -> None:
        self._setting = setting
        self._ours = ours
        self._known = dict(ours)
        self.known: Mapping[str, Any] = MappingProxyType(self._known)

    def is_ours(self, name: str) -> bool:
        """Whether ``name`` is built in."""
        return name in self._ours

    def register(self, name: str, implementation: Any) -> None:
        """Let the setting take ``name`` for ``implementation``; what that must be
        differs by extension point, see ``points.py``.

        name: letters, digits, underscores and hyphens, not beginning with a digit. The same name again
        replaces what was registered. Raises ConfigError for another name, or one that is built in.
        """
        if not name.replace("-", "_").isidentifier():
            raise ConfigError(
                f"{self._setting} cannot be called {name!r}: use letters, digits, hyphens and underscores."
            )
        if name in self._ours:
            raise ConfigError(f"{self._setting} {name!r} is built in: choose another name.")
        self._known[name] = implementation

    def check(self, name: object) -> None:
        """Raise ConfigError unless ``name`` is known or has the form of an import path; imports nothing."""
        if not isinstance(name, str) or (name not in self._known and ":" not in name):
            known = ", ".join(self._known)
            raise ConfigError(
                f"{self._setting} is {name!r}, but must be one of {known}, or a 'package.module:Class'."
            )

    def load(self, name: str) -> Any:
        """The implementation. Raises ConfigError if it is unknown or cannot be imported."""
        self.check(name)
        found = self._known.get(name, name)
        return import_object(self._setting, found) if isinstance(found, str) else found

    def portable(self, name: str) -> str:
        """A name that another process understands as well. Raises ConfigError if there is none."""
        found = self._known.get(name, name)
        if isinstance(found, str):
            return name
        path = import_path(found)
        if path is None:
            raise ConfigError(
                f"{self._setting} {name!r} is defined where another process cannot import it: put it into a "
                "module."
            )
        return path
