"""How long a step takes, fitted to what ``minivllm bench model`` measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Report
from minivllm.errors import ConfigError, RequestError


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``base``, and so many for each prompt token and for each request that decodes. How
    long the contexts are that they attend to is left out.

    alone: of an engine whose neighbours are idle, where engines share a machine;
    None if they do not slow one another.
    """

    base: float
    prompt_token: float
    decode: float
    alone: StepTime | None = None

    def seconds(self, num_prompt_tokens: int, num_decodes: int, busy: float = 1.0) -> float:
        """busy: share of the other engines that have work as the step begins."""
        together = self.base + num_prompt_tokens * self.prompt_token + num_decodes * self.decode
        if self.alone is None:
            return together
        return busy * together + (1 - busy) * self.alone.seconds(num_prompt_tokens, num_decodes)


def parse_step_time(text: str) -> StepTime:
    """ "BASE,PROMPT_TOKEN,DECODE" in milliseconds. Raises ConfigError."""
    try:
        numbers = [float(part) / 1e3 for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(0 <= number < 1e6 for number in numbers) or not any(numbers):
        raise ConfigError(
            f"--step-ms is {text!r}, but must be the milliseconds of a step, of each prompt token and of "
            "each request "
            "that decodes, such as 20,1.7,2.3."
        )
    base, prompt_token, decode = numbers
    return StepTime(base, prompt_token, decode)


def fit_step_time(report: Report) -> StepTime:
    """The step time of the first engine in a report of ``bench model``.
    Raises RequestError if it tells too little.

    Decoding at two batch sizes or more gives the base and the cost of a request, by least squares of the step
    times relative to what was measured. A prefill gives the cost of a prompt token.
    """
    speeds = [one for one in report.measurements if one.metric == "speed" and one.samples]
    speeds = [one for one in speeds if one.side == speeds[0].side]
    decodes: list[tuple[int, float]] = []
    prefills: list[tuple[int, float]] = []
    for one in speeds:
        if found := re.match(r"decode \d+, batch (\d+),", one.case):
            decodes.append((int(found[1]), int(found[1]) / median(one.samples)))
        elif found := re.match(r"prefill (\d+)$", one.case):
            prefills.append((int(found[1]), int(found[1]) / median(one.samples)))
    if len({batch for batch, _ in decodes}) < 2 or not prefills:
        raise RequestError(
            "The report does not tell how long a step takes: write one with minivllm bench model --case "
            "decode:1 "
            "--case decode:16 --case prefill:512 --json FILE."
        )
    facts = report.configuration.get("sides", {}).get(speeds[0].side, {})
    longest, seconds = max(prefills)
    return fit_points(decodes, longest, seconds, facts.get("max_num_batched_tokens", longest))


def fit_points(
    decodes: Sequence[tuple[int, float]], prompt_tokens: int, seconds: float, budget: int
) -> StepTime:
    """decodes: (batch, seconds of a step), of two batches or more. seconds: until the first token of a prompt
    that is computed in steps of ``budget`` tokens."""
    base, decode = _line(decodes)
    num_steps = -(-prompt_tokens // budget)
    return StepTime(base, max(0.0, (seconds - num_steps * base) / prompt_tokens), decode)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, that fit best relative to the values."""
    weights = [1 / value**2 for _, value in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points)) / spread
    slope = min(max(0.0, slope), mean_y / mean_x)
    return mean_y - slope * mean_x, slope
