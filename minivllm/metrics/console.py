"""The console's status line: what happened since the last one."""

from __future__ import annotations

from minivllm.metrics.prometheus import ServerMetrics


class StatusLine:
    """Compares the counters with those of the last call."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def next(self, metrics: ServerMetrics, seconds: float) -> str | None:
        """The line for the last ``seconds``; None if nothing happened in them."""
        stats = metrics.engine_stats
        now = (
            metrics.registry.get_sample_value("minivllm_prompt_tokens_total") or 0.0,
            metrics.registry.get_sample_value("minivllm_generation_tokens_total") or 0.0,
            float(stats.prefix_cache_queried_tokens),
            float(stats.prefix_cache_hit_tokens),
            float(stats.num_preemptions),
        )
        prompt, generated, queried, hit, preempted = (new - old for new, old in zip(now, self._last))
        self._last = now
        if not (prompt or generated or stats.num_running or stats.num_waiting):
            return None
        parts = [
            f"running {stats.num_running}",
            f"waiting {stats.num_waiting}",
            f"KV {stats.kv_cache_usage:.0%}",
            f"prompt {prompt / seconds:,.0f} tok/s",
            f"generation {generated / seconds:,.0f} tok/s",
            f"prefix hits {hit / queried:.0%}" if queried else "prefix hits –",
        ]
        if preempted:
            parts.append(f"preempted {preempted:.0f}")
        return " · ".join(parts)
