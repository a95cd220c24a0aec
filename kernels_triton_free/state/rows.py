"""How the tokens of a step are packed, and where the state of each request lies."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateRows(NamedTuple):
    """The rows of a step, one for each request, whose tokens lie one after the other. All int32.

    read [rows]: the slot of the state before the row's first token. write [rows]: the slot that takes the
    state after its last one; often the same. No row writes what another one reads. starts, counts [rows]: the
    row's first token in the step, and how many it has. token_rows, offsets [tokens]: the row of each token,
    and its place in it.

    Slot 0 holds zeros for ever: a request without a past reads it. Padding tokens are rows of their own
    behind all others, which read slot 0 and write the last slot, of which nothing is read. Rows of drafts
    write that slot too. A row may have no tokens: it writes what it reads.
    """

    read: Tensor
    write: Tensor
    starts: Tensor
    counts: Tensor
    token_rows: Tensor
    offsets: Tensor
