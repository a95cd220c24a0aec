"""``minivllm env MODEL --program``: the program of a model, fused for a layout, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from minivllm.program.fuse import Plan


def program_tables(model: str, ranks: int, stages: int, *, images: bool) -> list[RenderableType]:
    """The program of rank 0 of each pipeline stage. No weights are read. images: that of a step with images.
    Raises ModelError if the model is computed by its class of transformers, ConfigError if the layout is not
    possible, or an engine would not see images."""
    from minivllm.config import EngineArgs
    from minivllm.engine.resolve import resolve
    from minivllm.hub.fetch import resolve_model
    from minivllm.simulation.program_plan import planned_programs

    path = str(resolve_model(model, weights=False))
    config, facts = resolve(EngineArgs(model=path, tensor_parallel_size=ranks, pipeline_parallel_size=stages))
    plans = planned_programs(config, facts, images=images)
    titles = [f"Stage {number} of {stages}" if stages > 1 else None for number in range(1, stages + 1)]
    return [_table(plan, title) for plan, title in zip(plans, titles, strict=True)]


def _table(plan: Plan, title: str | None) -> RenderableType:
    from rich.table import Table

    from minivllm.program.printed import sections

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("region", "piece or seam", "reads", "gives", "its class", "fields"):
        table.add_column(column, overflow="fold")
    for section in sections(plan):
        for number, line in enumerate(section.lines):
            name = f"{line.region} × {section.layers}" if number == 0 and section.layers > 1 else line.region
            style = "bold magenta" if line.is_seam else None
            what = f"— {line.what} —" if line.is_seam else line.what
            table.add_row(name, what, line.reads, line.gives, line.where, line.fields, style=style)
        table.add_section()
    return table
