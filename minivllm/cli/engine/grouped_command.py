"""A command with many flags: help in groups, short or complete, and flags read from a file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from minivllm.cli.terminal.typed import read_typed_file
from minivllm.errors import ConfigError, RequestError

RARE = frozenset(
    {
        *(
            "tokenizer",
            "revision",
            "model_impl",
            "load_format",
            "performance_mode",
            "num_gpu_blocks_override",
        ),
        *(
            "long_prefill_token_threshold",
            "kv_cache_memory_bytes",
            "block_size",
            "attention_backend",
            "family",
        ),
        *("cudagraph_mode", "scheduling_policy", "hf_overrides", "profile", "multiprocess", "node_rank"),
        *("enable_expert_parallel", "distributed_executor_backend", "nnodes", "master_addr", "master_port"),
        *("node_key_file", "data_parallel_policy", "disable_custom_all_reduce", "heartbeat_timeout"),
        *("async_scheduling", "max_loras", "max_lora_rank", "max_cpu_loras", "logits_processors", "seed"),
        *("min_p", "min_tokens", "stop_regex", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("bad_words", "repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens"),
        *("max_queued_requests", "max_queued_prompt_tokens", "request_timeout", "max_body_bytes", "log_json"),
        *(
            "drain_timeout",
            "stats_interval",
            "lora_directory",
            "otlp_endpoint",
            "strict",
            "min_prefill_tokens",
        ),
        *("prefill_timeout", "model_option", "enable_prefix_caching", "kv_transfer_config", "cors_origins"),
        *(
            "reuse_partial_blocks",
            "limit_mm_per_prompt",
            "max_num_batched_encoder_embeds",
            "encoder_cache_bytes",
        ),
    }
)
"""Parameters that the short help of a command with engine flags leaves out."""

MAX_CONFIG_BYTES = 2**20


class GroupedCommand(typer.core.TyperCommand):
    """A command with engine flags. ``--help`` has a line for each common flag, ``--help-all`` everything."""

    groups: dict[str, str]
    """Parameter name -> heading above it in the help; ``Options`` for the rest."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.groups = getattr(self.callback, "groups_of_flags", {})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shows_all = bool(ctx.meta.get("help_all")) or not any(
            param.name == "help_all" for param in self.params
        )
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        num_left_out = 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if not shows_all and param.name in RARE:
                num_left_out += 1
                continue
            is_argument = param.param_type_name == "argument"
            heading = "Arguments" if is_argument else self.groups.get(str(param.name), "Options")
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(
                        records if shows_all else _one_line_each(records, formatter.width), col_max=34
                    )
        if num_left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{num_left_out} more flags: {ctx.command_path} --help-all")


def _one_line_each(records: list[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """Each flag without its negation, and of its help the first sentence,
    as far as that fits into the line."""
    short = [(names.split(" / ")[0], text.split(". ")[0].rstrip(".")) for names, text in records]
    room = width - max(len(names) for names, _ in short) - 5
    return [
        (names, text if len(text) <= room else f"{text[: room - 1].rsplit(' ', 1)[0].rstrip(' ,:;')} …")
        for names, text in short
    ]


def show_everything(ctx: typer.Context, wanted: bool) -> None:
    """Print the complete help and end the command."""
    if wanted:
        ctx.meta["help_all"] = True
        print(ctx.get_help())
        raise typer.Exit


def read_flags(ctx: typer.Context, path: Path | None) -> None:
    """Take the entries of a file as the values of flags that the command line leaves out.
    Raises ConfigError."""
    if path is None:
        return
    import yaml

    try:
        values = yaml.safe_load(read_typed_file(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except RequestError as error:
        raise ConfigError(f"--config: {error}") from None
    except UnicodeError:
        raise ConfigError(f"--config {path} is not UTF-8 text: give a YAML or JSON file of flags.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is no YAML or JSON: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(
            f"--config {path} holds lists within lists without end: give flags and values."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold flags and their values, such as `max-model-len: 4096`.")
    known = {str(param.name): param for param in ctx.command.params}
    flags: dict[str, Any] = {}
    for name, value in values.items():
        key = str(name).removeprefix("--").replace("-", "_")
        if key not in known or key in ("config", "help_all"):
            near = difflib.get_close_matches(key, known, n=1)
            advice = f" Did you mean {near[0].replace('_', '-')}?" if near else ""
            raise ConfigError(f"--config {path} has {str(name)!r}, which is no flag of this command.{advice}")
        flags[key] = _as_typed(value)
    ctx.default_map = {**(ctx.default_map or {}), **flags}


def _as_typed(value: Any) -> Any:
    """A value of the file as a command line would have it."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_typed(one) for one in value]
    return value if isinstance(value, bool) else str(value)


HelpAllOption = Annotated[
    bool,
    typer.Option("--help-all", help="Show every flag and exit.", is_eager=True, callback=show_everything),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML or JSON file of flags and values; flags on the command line come first.",
        metavar="FILE",
        is_eager=True,
        callback=read_flags,
    ),
]
