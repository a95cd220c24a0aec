"""Where minivllm keeps what outlives a process:
fetched models, compiled code, tokenizers, digests, chat history."""

import os
from pathlib import Path

from minivllm.errors import ConfigError


def home_directory() -> Path:
    """``$MINIVLLM_HOME``, else ``~/.cache/minivllm``; absolute.

    A ``~`` is expanded even where no shell has done it, and a relative path begins at the current directory.
    Raises ConfigError where the home directory of a user is not known.
    """
    given = os.environ.get("MINIVLLM_HOME") or "~/.cache/minivllm"
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"The directory {given!r} is below a home directory that is not known: set MINIVLLM_HOME to an "
            "absolute path."
        ) from None
