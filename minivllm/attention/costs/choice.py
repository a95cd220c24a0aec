"""Which way rows of few tokens attend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.attention.costs.calibration import measured_costs
from minivllm.attention.costs.model import ASSUMED, Cost, Costs, Way, Work
from minivllm.attention.interface.backend import AttentionContext, StepRows
from minivllm.specs.attention import Reach


class Choice:
    """Between pairs and tiles. costs: as they are assumed, until they are measured."""

    def __init__(self, pairs: Way, tiles: Way, context: AttentionContext) -> None:
        self.costs: Costs = ASSUMED
        self._pairs = pairs
        self._tiles = tiles
        self._context = context

    def calibrate(self) -> None:
        """Measure, if rows of few tokens can come."""
        if self._context.few_tokens > 1:
            self.costs = measured_costs(self._pairs, self._tiles, self._context) or ASSUMED

    def pairs_cost_less(self, rows: StepRows) -> bool:
        """Whether the rows of few tokens should take less time as pairs, in a layer of each reach."""
        few = rows.cut(rows.num_single, rows.num_single + rows.num_few)
        pairs = self.costs.pairs
        if rows.num_single:  # then pairs are computed in any case
            pairs = pairs._replace(fixed=0.0)
        by_pairs = _seconds(pairs, self._pairs.expected_work(few))
        return by_pairs < _seconds(self.costs.tiles, self._tiles.expected_work(few))

    def expected_seconds(self, parts: Sequence[tuple[object, Any]]) -> Mapping[Reach, float]:
        """What a layer of each reach should take in a step with these parts: the way of each, and what it
        has prepared. Empty if no costs were measured."""
        total: dict[Reach, float] = {}
        if self.costs is not ASSUMED:
            for kind, prepared in parts:
                is_pairs = kind is self._pairs
                way, cost = (self._pairs, self.costs.pairs) if is_pairs else (self._tiles, self.costs.tiles)
                for reach, work in way.work(prepared).items():
                    total[reach] = total.get(reach, 0.0) + cost.seconds(work)
        return total


def _seconds(cost: Cost, work: Mapping[Reach, Work]) -> float:
    return sum(map(cost.seconds, work.values()))
