"""The engine's flags: one for every field of ``EngineArgs``, under vLLM's names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from minivllm.config import (
    CUDA_GRAPH_MODES,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    PERFORMANCE_MODES,
    QUANTIZATIONS,
    SPECULATIVE_METHODS,
    EngineArgs,
)
from minivllm.errors import ConfigError
from minivllm.plugins import POLICIES

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name (smollm2), a Hugging Face id, a local directory or a .gguf file.",
        show_default="smollm2",
    ),
]


def with_model_option(command: Callable[..., None]) -> Callable[..., None]:
    """Let ``--model NAME`` name the model as the argument MODEL does, for people who know it so from other engines.

    ``command`` gets the one that was given, or its own default. Both at once is a ConfigError.
    """
    signature = inspect.signature(command, eval_str=True)
    argument = signature.parameters["model"]
    option = inspect.Parameter(
        "model_option",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, typer.Option("--model", help="The same as MODEL.", metavar="MODEL")],
    )

    def with_either(*, model_option: str | None, model: str | None, **values: Any) -> None:
        if model is not None and model_option is not None:
            raise ConfigError(f"The model is named twice, as {model} and as --model {model_option}: give one of them.")
        command(model=model or model_option or argument.default, **values)

    # The default is left to ``with_either``, which must know whether the argument was given.
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None if name == "model" else parameter.default)
        for name, parameter in signature.parameters.items()
    ]
    with_either.__name__, with_either.__doc__, with_either.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    with_either.__signature__ = signature.replace(parameters=[*others, option])  # type: ignore[attr-defined]
    with_either.__annotations__ = {one.name: one.annotation for one in [*others, option]}
    return with_either


def _option(help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The flags behind ``EngineArgs``; the model itself is the command's argument."""

    tokenizer: Annotated[str | None, _option("Where the tokenizer comes from, if not from the model.")] = None
    revision: Annotated[str | None, _option("Branch, tag or commit of a Hugging Face id.")] = None
    dtype: Annotated[str, _option(f"Weights and activations: {', '.join(DTYPES)}.")] = "auto"
    seed: Annotated[int, _option("Seeds dummy weights and every request; same seed, same answers.")] = 0
    load_format: Annotated[str, _option(f"{', '.join(LOAD_FORMATS)}; dummy is random weights.")] = "auto"
    device: Annotated[str, _option(f"{', '.join(DEVICES)}.")] = "auto"
    max_model_len: Annotated[int | None, _option("Prompt plus answer of one request, in tokens.")] = None
    max_num_seqs: Annotated[int | None, _option("Requests that may run at the same time.")] = None
    max_num_batched_tokens: Annotated[
        int | None, _option("Token budget of one step, if performance-mode does not suit.")
    ] = None
    performance_mode: Annotated[
        str | None,
        _option(
            f"{' or '.join(PERFORMANCE_MODES)}: whole prompts in few steps, or short steps that keep answers flowing "
            "while prompts arrive. serve takes the latter."
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        int, _option("Most tokens one request gets in a step; 0 is no such limit.")
    ] = 0
    gpu_memory_utilization: Annotated[
        float | None,
        _option("Share of the memory that engine and KV cache may use (on a CPU: of what is free after loading)."),
    ] = None
    kv_cache_memory_bytes: Annotated[int | None, _option("Size of the KV cache in bytes.")] = None
    num_gpu_blocks_override: Annotated[int | None, _option("Size of the KV cache in blocks.")] = None
    block_size: Annotated[int | None, _option("Tokens per block of the KV cache: 8, 16, 32, 64, 128 or 256.")] = None
    kv_cache_dtype: Annotated[str, _option(f"Elements of the KV cache: {', '.join(KV_CACHE_DTYPES)} (fp8: a GPU).")] = (
        "auto"
    )
    quantization: Annotated[
        str | None,
        _option(
            f"Fewer bits for linear layers: {', '.join(QUANTIZATIONS)} (fp8: a recent GPU). "
            f"A GGUF file keeps its own blocks where they fit."
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        _option("Reuse the KV cache of equal prompt beginnings.", "--enable-prefix-caching/--no-enable-prefix-caching"),
    ] = True
    attention_backend: Annotated[
        str, _option("flex (compiled), sdpa (its reference), or your own, as package.module:factory.")
    ] = "flex"
    enforce_eager: Annotated[
        bool,
        _option(
            "Run uncompiled: starts sooner, answers more slowly.",
            "--enforce-eager/--no-enforce-eager",
        ),
    ] = False
    compile_in_background: Annotated[
        bool | None,
        _option(
            "Answer uncompiled until the model is compiled, on a CPU. chat does.",
            "--compile-in-background/--no-compile-in-background",
        ),
    ] = None
    cudagraph_mode: Annotated[
        str | None, _option(f"Steps that replay CUDA graphs: {', '.join(CUDA_GRAPH_MODES)}. On a GPU the last one.")
    ] = None
    scheduling_policy: Annotated[str, _option(f"{', '.join(POLICIES.names)} or package.module:Class.")] = "fcfs"
    hf_overrides: Annotated[
        str | None, _option("JSON object whose entries replace those of the model's config.json.", metavar="JSON")
    ] = None
    speculative_config: Annotated[
        str | None,
        _option(
            "Guess tokens ahead and verify them: JSON object with a method "
            f"({', '.join(SPECULATIVE_METHODS)}) and its settings.",
            metavar="JSON",
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        _option(
            "Schedule the next step while the last one runs (default: on a GPU).",
            "--async-scheduling/--no-async-scheduling",
        ),
    ] = None
    enable_lora: Annotated[bool, _option("Serve LoRA adapters.", "--enable-lora/--no-enable-lora")] = False
    max_loras: Annotated[int, _option("LoRA adapters that may be in use at the same time.")] = 1
    max_lora_rank: Annotated[int, _option("Largest rank of a LoRA adapter.")] = 16
    max_cpu_loras: Annotated[int | None, _option("LoRA adapters kept in host memory.")] = None
    logits_processors: Annotated[
        list[str] | None,
        _option("Custom logits processor, as package.module:Class (may be repeated).", metavar="MODULE:CLASS"),
    ] = None

    multiprocess: Annotated[
        bool, _option("Run the engine core in a process of its own.", "--multiprocess/--no-multiprocess")
    ] = False
    heartbeat_timeout: Annotated[
        float, _option("Seconds after which an engine process that does not finish its step is killed.")
    ] = 300.0

    profile: Annotated[
        str | None, _option("Write a Perfetto trace of the first steps into this directory.", metavar="DIR")
    ] = None

    def engine_args(self, model: str) -> EngineArgs:
        """The engine arguments of these flags. Raises ConfigError naming the argument and what it may be."""
        values = asdict(self)
        values["hf_overrides"] = _json_object("hf_overrides", self.hf_overrides, '{"num_hidden_layers": 2}')
        values["speculative_config"] = _json_object(
            "speculative_config", self.speculative_config, '{"method": "ngram"}'
        )
        values["logits_processors"] = self.logits_processors or None
        return EngineArgs(model=model, **values)


def _json_object(name: str, text: str | None, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not valid JSON ({error}); an example is '{example}'.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {text}, but must be a JSON object such as '{example}'.")
    return value
