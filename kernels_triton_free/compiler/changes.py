"""Changes to PyTorch's compiler, which it may outgrow."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def try_to_change(patch: Callable[[], None]) -> None:
    """PyTorch promises to keep none of these interfaces:
    where one has gone, code is as slow as it would be anyway."""
    try:
        patch()
    except (ImportError, AttributeError) as error:
        logger.warning("PyTorch %s cannot be changed by %s: %s.", torch.__version__, patch.__name__, error)
