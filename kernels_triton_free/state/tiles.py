"""How the tokens of many requests are laid out for a scan over each of them: single tokens, and tiles of 64.

A request with one token needs one step of the recurrence. A longer one is cut into tiles. What happens within
tiles is computed for all of them at once, as matrix products; then states go from tile to tile, all requests
side by side. The tiles are numbered so that the first ones of all requests come first, then all second ones,
and so on, the longest request at the head: what one turn of the scan needs is a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
"""Tokens of a tile."""


class ScanTiles(NamedTuple):
    """The requests of a step that have several tokens.

    rows: int64 [requests], which of the step's rows they are, the longest first. tokens: int64 [tiles, 64],
    which of the step's tokens lie in a tile. is_token: bool [tiles, 64], false behind a request's last token
    (``tokens`` repeats that one there). levels: how many requests have a first tile, how many have a second
    one, … .
    """

    rows: Tensor
    tokens: Tensor
    is_token: Tensor
    levels: tuple[int, ...]


class ScanPlan(NamedTuple):
    """All requests of a step, whose tokens lie one after the other.

    single_rows, single_tokens: int64 [singles], the rows that have one token, and which one. tiles: the
    longer ones, if there are any. empty_rows: those without tokens, whose states stay what they are. places:
    int64 [tokens], where each token's output lies among those of the single tokens and, behind them, those of
    the tiles.
    """

    single_rows: Tensor
    single_tokens: Tensor
    tiles: ScanTiles | None
    empty_rows: Tensor
    places: Tensor

    def to(self, device: torch.device) -> ScanPlan:
        """The same on a device."""
        tiles = self.tiles
        if tiles is not None:
            own, tokens, is_token, levels = tiles
            tiles = ScanTiles(own.to(device), tokens.to(device), is_token.to(device), levels)
        rows, tokens, _, empty, places = self
        return ScanPlan(rows.to(device), tokens.to(device), tiles, empty.to(device), places.to(device))


def plan_scan(counts: Tensor) -> ScanPlan | None:
    """Lay out rows of so many tokens, int64 [rows], on the CPU; None if each has one."""
    if bool((counts == 1).all()):
        return None
    starts = counts.cumsum(0) - counts
    singles, longer = (counts == 1).nonzero().flatten(), (counts > 1).nonzero().flatten()
    longer = longer[counts[longer].argsort(descending=True, stable=True)]
    places = torch.empty(int(counts.sum()), dtype=torch.int64)
    places[starts[singles]] = torch.arange(len(singles))
    tiles = None
    if len(longer):
        tokens, is_token, levels = _tiles(starts[longer], counts[longer])
        places[tokens[is_token]] = len(singles) + is_token.flatten().nonzero().flatten()
        tiles = ScanTiles(longer, tokens, is_token, levels)
    return ScanPlan(singles, starts[singles], tiles, (counts == 0).nonzero().flatten(), places)


def _tiles(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """What ScanTiles holds, of rows with these first tokens and numbers of tokens, the longest first."""
    levels = tuple(int((counts > first).sum()) for first in range(0, int(counts[0]), TILE))
    row_of = torch.cat([torch.arange(count) for count in levels])
    level_of = torch.arange(len(levels)).repeat_interleave(torch.tensor(levels))
    offsets = level_of[:, None] * TILE + torch.arange(TILE)
    ends = counts[row_of, None]
    return starts[row_of, None] + torch.minimum(offsets, ends - 1), offsets < ends, levels


Scanned = tuple[Tensor, Tensor]
"""(outputs, states after them)."""


def scan_rows(
    inputs: Sequence[Tensor],
    states: Tensor,
    read: Tensor,
    write: Tensor,
    plan: ScanPlan | None,
    step: Callable[[Sequence[Tensor], Tensor], Scanned],
    scan: Callable[[Sequence[Tensor], Tensor, ScanTiles], Scanned],
) -> Tensor:
    """Run single tokens through ``step`` and tiles through ``scan``; returns their outputs [tokens, …].

    inputs: [tokens, …] each; ``step`` is given [singles, …] and ``scan`` [tiles, 64, …]. states: [slots, …],
    changed in place. read, write: [rows], the slots of the state in front of each row and behind it; no row
    reads what another one writes. plan: from ``plan_scan``.
    """
    if plan is None:
        out, states[write] = step(inputs, states[read])
        return out
    rows = plan.single_rows
    out, states[write[rows]] = step([x[plan.single_tokens] for x in inputs], states[read[rows]])
    if plan.tiles is not None:
        rows = plan.tiles.rows
        in_tiles, states[write[rows]] = scan(
            [x[plan.tiles.tokens] for x in inputs], states[read[rows]], plan.tiles
        )
        out = torch.cat([out, in_tiles.flatten(0, 1)])
    states[write[plan.empty_rows]] = states[read[plan.empty_rows]]
    return out[plan.places]


def through_levels(
    states: Tensor, levels: Sequence[int], turn: Callable[[slice, Tensor], Scanned]
) -> Scanned:
    """Take states [requests, …] through the tiles of each;
    (outputs [tiles, …], states behind the last tiles).

    turn: (the tiles of a level, states in front of them) -> (outputs, states behind them).
    """
    outputs, finished, first = [], [], 0
    for count in levels:
        finished.append(states[count:])
        out, states = turn(slice(first, first + count), states[:count])
        outputs.append(out)
        first += count
    return torch.cat(outputs), torch.cat([states, *reversed(finished)])


def decay_between(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log decays of a tile's tokens [..., 64] -> decays: from before the tile to each token [..., 64], from
    each token to the tile's end [..., 64], and from token j to token i [..., i, j], 0 for j > i."""
    summed = log_decay.cumsum(-1)
    is_later = torch.ones(TILE, TILE, dtype=torch.bool, device=summed.device).triu(1)
    between = (summed[..., :, None] - summed[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    return summed.exp(), (summed[..., -1:] - summed).exp(), between
