"""Errors whose text is a sentence for the person who can fix the problem.

The command line prints the text alone, without a traceback, and exits with ``exit_code``.
"""


class MinivllmError(Exception):
    """Base of every error that is the caller's to fix:
    its text says what was given, what is allowed, what to do."""

    exit_code = 1


class ConfigError(MinivllmError, ValueError):
    """An engine argument, or a combination of them, cannot work."""

    exit_code = 2


class RequestError(MinivllmError, ValueError):
    """One request is not acceptable; other requests are not affected."""

    exit_code = 2


class ContextLengthError(RequestError):
    """Prompt and answer together do not fit into max_model_len."""


class ModelError(MinivllmError):
    """A model cannot be found, fetched, read or supported."""


class EngineDeadError(MinivllmError):
    """The engine stopped; the text carries the original cause."""


class EngineLostError(EngineDeadError):
    """One of several engines has died with this request.
    Others serve on, or it starts again: send it again."""
