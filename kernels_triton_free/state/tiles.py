"""How the tokens of many requests are laid out for a scan over each of them: single tokens, and tiles of 64.

A request with one token needs one step of the recurrence. A longer one is cut into tiles. What happens within tiles is
computed for all of them at once, as matrix products; then states go from tile to tile, all requests side by side. The
tiles are numbered so that the first ones of all requests come first, then all second ones, and so on, the longest
request at the head: what one turn of the scan needs is a slice.
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

    rows: int64 [requests], which of the step's rows they are, the longest first. tokens: int64 [tiles, 64], which of
    the step's tokens lie in a tile. is_token: bool [tiles, 64], false behind a request's last token (``tokens`` repeats
    that one there). levels: how many requests have a first tile, how many have a second one, … .
    """

    rows: Tensor
    tokens: Tensor
    is_token: Tensor
    levels: tuple[int, ...]


class ScanRows(NamedTuple):
    """All requests of a step.

    single_rows, single_tokens: int64 [singles], the rows that have one token, and which one. tiles: the longer ones, if
    there are any. places: int64 [tokens], where each token's output lies among those of the single tokens and, behind
    them, those of the tiles; None where single tokens are all there is, in the order of the step.
    """

    single_rows: Tensor
    single_tokens: Tensor
    tiles: ScanTiles | None
    places: Tensor | None


def plan_scan(starts: Sequence[int], lengths: Sequence[int], num_tokens: int) -> ScanRows:
    """Lay out rows of ``lengths`` tokens that begin at ``starts``; the result lies on the CPU.

    num_tokens: of the step, padding included, whose outputs are of no use. Rows without tokens are left out.
    """
    singles = [row for row, length in enumerate(lengths) if length == 1]
    longer = sorted((row for row, length in enumerate(lengths) if length > 1), key=lambda row: -lengths[row])
    single_tokens = torch.tensor([starts[row] for row in singles], dtype=torch.int64)
    single_rows = torch.tensor(singles, dtype=torch.int64)
    if not longer and singles and torch.equal(single_tokens, torch.arange(num_tokens)):
        return ScanRows(single_rows, single_tokens, None, None)

    places = torch.zeros(num_tokens, dtype=torch.int64)
    places[single_tokens] = torch.arange(len(singles))
    tiles = _tiles(longer, starts, lengths) if longer else None
    if tiles is not None:
        places[tiles.tokens[tiles.is_token]] = len(singles) + tiles.is_token.flatten().nonzero().flatten()
    return ScanRows(single_rows, single_tokens, tiles, places)


def _tiles(longer: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> ScanTiles:
    depth = -(-lengths[longer[0]] // TILE)
    levels = tuple(sum(lengths[row] > level * TILE for row in longer) for level in range(depth))
    first = [starts[row] + level * TILE for level, count in enumerate(levels) for row in longer[:count]]
    end = [starts[row] + lengths[row] for count in levels for row in longer[:count]]
    tokens = torch.tensor(first)[:, None] + torch.arange(TILE)
    behind = torch.tensor(end)[:, None]
    return ScanTiles(torch.tensor(longer), torch.minimum(tokens, behind - 1), tokens < behind, levels)


Scanned = tuple[Tensor, Tensor]
"""(outputs, states after them)."""


def scan_rows(
    inputs: Sequence[Tensor],
    states: Tensor,
    slots: Tensor,
    rows: ScanRows,
    step: Callable[[Sequence[Tensor], Tensor], Scanned],
    scan: Callable[[Sequence[Tensor], Tensor, ScanTiles], Scanned],
) -> Tensor:
    """Run single tokens through ``step`` and tiles through ``scan``; returns their outputs [tokens, …].

    inputs: [tokens, …] each; ``step`` is given [singles, …] and ``scan`` [tiles, 64, …]. states: [slots, …], changed in
    place. slots: int64 [rows], where the state of each of the step's rows lies.
    """
    outputs = []
    if len(rows.single_rows):
        own = slots[rows.single_rows]
        single_inputs = inputs if rows.places is None else [x[rows.single_tokens] for x in inputs]
        out, after = step(single_inputs, states[own])
        states.index_copy_(0, own, after)
        outputs.append(out)
    if rows.tiles is not None:
        own = slots[rows.tiles.rows]
        out, after = scan([x[rows.tiles.tokens] for x in inputs], states[own], rows.tiles)
        states.index_copy_(0, own, after)
        outputs.append(out.flatten(0, 1))
    return outputs[0] if rows.places is None else torch.cat(outputs)[rows.places]


def through_levels(states: Tensor, levels: Sequence[int], turn: Callable[[slice, Tensor], Scanned]) -> Scanned:
    """Take states [requests, …] through the tiles of each; (outputs [tiles, …], states behind the last tiles).

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
    """Log decays of a tile's tokens [..., 64] -> decays: from before the tile to each token [..., 64], from each token
    to the tile's end [..., 64], and from token j to token i [..., i, j], 0 for j > i."""
    summed = log_decay.cumsum(-1)
    is_later = torch.ones(TILE, TILE, dtype=torch.bool, device=summed.device).triu(1)
    between = (summed[..., :, None] - summed[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    return summed.exp(), (summed[..., -1:] - summed).exp(), between
