"""Where keys and values may come from besides this engine's own cache: host memory, disk, another engine."""

from __future__ import annotations

from typing import Protocol

from minivllm.messages import BlockIds
from minivllm.request import Request


class KVConnector(Protocol):
    """The scheduler's side of a store of keys and values (vLLM V1's connector seam).

    What it promises must be in the blocks before the step that was scheduled computes anything.
    """

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens the store has beyond the ``num_computed_tokens`` found in the prefix cache; changes nothing.

        Together at most ``num_tokens - 1``: one token must run to give logits.
        """
        ...

    def load(self, request: Request, block_ids: BlockIds, start: int, num_tokens: int) -> None:
        """The request is admitted: fill its blocks for positions ``start`` to ``start + num_tokens - 1``."""
        ...


class NoConnector(KVConnector):
    """Holds nothing."""

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return 0

    def load(self, request: Request, block_ids: BlockIds, start: int, num_tokens: int) -> None:
        raise RuntimeError("Nothing was promised, so nothing can be loaded.")
