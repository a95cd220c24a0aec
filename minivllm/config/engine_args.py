"""What the user may set: engine arguments under vLLM's names, and the settings of speculative decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

from minivllm.errors import ConfigError
from minivllm.plugins import ATTENTION, DRAFTERS, POLICIES, import_path

Device = Literal["cpu", "cuda"]
CudaGraphMode = Literal["none", "piecewise", "full_decode", "full_and_piecewise"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = ("int8", "int4", "fp8")
PERFORMANCE_MODES = ("throughput", "interactivity")
CUDA_GRAPH_MODES = get_args(CudaGraphMode)
# Method of speculative decoding -> the keys of speculative_config that it has for itself.
_SPECULATIVE_KEYS: dict[Any, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("suffix_max_cached_tokens",),
    "early_exit": ("num_layers",),
    "draft_model": ("model",),
    "eagle": ("model",),
    "eagle3": ("model",),
}
_WANTED_MODELS = {
    "draft_model": "a model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
}
SPECULATIVE_METHODS: tuple[str, ...] = tuple(_SPECULATIVE_KEYS)
MAX_SPECULATIVE_TOKENS = 31


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(allowed)}.")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}, but must be a whole number of at least {low}.")
    if value < low:
        raise ConfigError(f"{name} is {value}, but must be at least {low}.")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead, under vLLM's names. Raises ConfigError naming the key and what it may be.

    method: "ngram" copies what followed the same tokens before, "suffix" also looks at earlier outputs;
        "early_exit" asks the model's own first layers, "draft_model" a second model, "eagle" and "eagle3" a head that
        was trained to guess from this model's hidden states; or a name given to minivllm.register_drafter, or
        "package.module:factory" of a drafter of your own.
    num_speculative_tokens: most tokens guessed at once; how many are worth it is found out per request.
    prompt_lookup_min, prompt_lookup_max: ngram: tokens that must match, and beyond which longer matches do not count.
    suffix_max_cached_tokens: suffix: how many tokens of earlier outputs are remembered.
    num_layers: early_exit: how many layers guess, fewer than the model has; None takes a third of them.
    model: draft_model: a smaller model with the same vocabulary, named as EngineArgs.model is; eagle, eagle3: the
        directory or the Hugging Face id of a published head. model_path: where it lies, filled in when the engine
        starts.
    verification_cost: cost of verifying one more token, as a share of a step with a single one; None measures it
        when the engine starts (uncompiled engines assume 0.05).
    """

    method: str
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_max_cached_tokens: int = 65536
    num_layers: int | None = None
    model: str | None = None
    model_path: str | None = None
    verification_cost: float | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SpeculativeConfig:
        """Build from what the user wrote; a key that the method does not know is refused."""
        if not isinstance(values, dict):
            raise ConfigError(f"speculative_config is {values!r}, but must be a dictionary with at least a 'method'.")
        method = values.get("method")
        DRAFTERS.check(method)
        known = ("method", "num_speculative_tokens", "verification_cost", *_SPECULATIVE_KEYS.get(method, ()))
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"speculative_config has a key {key!r}, but with method {method!r} it may have: {', '.join(known)}."
                )
        config = cls(**{key: value for key, value in values.items() if value is not None})
        for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "suffix_max_cached_tokens"):
            _at_least(f"speculative_config[{key!r}]", getattr(config, key), 1)
        _at_least("speculative_config['num_layers']", config.num_layers, 1)
        if method in _WANTED_MODELS and (not isinstance(config.model, str) or not config.model):
            raise ConfigError(
                f"speculative_config['model'] is {config.model!r}, but method {method!r} needs the name or the path of "
                f"{_WANTED_MODELS[method]}."
            )
        if config.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"speculative_config['num_speculative_tokens'] is {config.num_speculative_tokens}, but must be at most "
                f"{MAX_SPECULATIVE_TOKENS}."
            )
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config['prompt_lookup_min'] is {config.prompt_lookup_min}, but must be at most "
                f"prompt_lookup_max, which is {config.prompt_lookup_max}."
            )
        cost = config.verification_cost
        if cost is not None and (isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost <= 1):
            raise ConfigError(f"speculative_config['verification_cost'] is {cost!r}, but must be from 0 to 1.")
        return config

    @property
    def num_lookahead_tokens(self) -> int:
        """Places in the KV cache that the drafter wants behind the scheduled tokens."""
        return self.num_speculative_tokens if self.method == "early_exit" or self.model is not None else 0

    @property
    def eagle_version(self) -> Literal["eagle", "eagle3"] | None:
        """Which kind of EAGLE head guesses, if one does."""
        return cast(Literal["eagle", "eagle3"], self.method) if self.method in ("eagle", "eagle3") else None


def _setting(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: int | None = None,
    metavar: str | None = None,
) -> Any:
    """A field with what it is for, and what it may be besides None: one of ``choices``, or a number from ``at_least``.

    metavar: how the command line names its value.
    """
    help_text += f" One of: {', '.join(choices)}." if choices else ""
    metadata = {"help": help_text, "choices": choices, "at_least": at_least, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Engine arguments under vLLM's names; ``None`` (or ``"auto"``) lets the engine choose and log why.

    What a field is for stands in its metadata, from which its checks and its command line flag are made. Raises
    ConfigError that names the argument and what it may be.
    """

    model: str = _setting("smollm2", "A short name (smollm2), a Hugging Face id, a local directory or a .gguf file.")
    tokenizer: str | None = _setting(None, "Where the tokenizer comes from, if not from the model.")
    revision: str | None = _setting(None, "Branch, tag or commit of a Hugging Face id.")
    dtype: str = _setting("auto", "Weights and activations.", choices=DTYPES)
    seed: int = _setting(0, "Seeds dummy weights and requests that bring no seed of their own.", at_least=0)
    load_format: str = _setting("auto", "Format of the weights; dummy is random weights.", choices=LOAD_FORMATS)
    device: str = _setting("auto", "Where the model runs.", choices=DEVICES)
    max_model_len: int | None = _setting(None, "Prompt plus answer of one request, in tokens.", at_least=1)
    max_num_seqs: int | None = _setting(None, "Requests that may run at the same time.", at_least=1)
    max_num_batched_tokens: int | None = _setting(
        None, "Token budget of one step, if performance-mode does not suit.", at_least=1
    )
    performance_mode: str | None = _setting(
        None,
        "What the token budget is chosen for: whole prompts in few steps, or short steps, so that prompts which arrive "
        "hardly delay the answers that are being written. AsyncLLM and serve take the latter by default.",
        choices=PERFORMANCE_MODES,
    )
    long_prefill_token_threshold: int = _setting(
        0, "Most tokens one request gets in a step; 0 is no such limit.", at_least=0
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "Share of the device's memory that engine and KV cache may use where the cache is not sized explicitly (on a "
        "CPU: of what is free after loading).",
    )
    kv_cache_memory_bytes: int | None = _setting(None, "Size of the KV cache in bytes.", at_least=1)
    num_gpu_blocks_override: int | None = _setting(None, "Size of the KV cache in blocks.", at_least=2)
    block_size: int | None = _setting(None, "Tokens per block of the KV cache: 8, 16, 32, 64, 128 or 256.")
    kv_cache_dtype: str = _setting(
        "auto",
        "Elements of the KV cache; auto is float32 on a CPU, where it is faster, else that of the weights. Fewer bits "
        "hold more tokens in the same memory: bfloat16 on a CPU, on a GPU also fp8_e4m3 (finer, up to 448) and "
        "fp8_e5m2 (coarser, up to 57344), rounded without a scale, larger values to the largest.",
        choices=KV_CACHE_DTYPES,
    )
    quantization: str | None = _setting(
        None,
        "Fewer bits for the weights of linear layers (fp8: a recent GPU). A GGUF file keeps its own blocks where they "
        "have those bits already. Without it AWQ, GPTQ and fp8 checkpoints are multiplied as they are, and a GGUF file "
        "dequantised.",
        choices=QUANTIZATIONS,
    )
    enable_prefix_caching: bool = _setting(True, "Reuse the KV cache of equal prompt beginnings.")
    attention_backend: str = _setting(
        "flex",
        "flex (compiled FlexAttention; its reference where nothing is compiled), sdpa (the reference), a name given to "
        "minivllm.register_attention, or your own, as package.module:factory.",
    )
    enforce_eager: bool = _setting(False, "Run the same code uncompiled: starts sooner, answers more slowly.")
    compile_in_background: bool | None = _setting(
        None,
        "On a CPU, answer uncompiled until the model is compiled. The tokens are the same but for rounding: float32 "
        "gives the same ones. By default only chat does.",
    )
    cudagraph_mode: str | None = _setting(
        None,
        "Steps that replay CUDA graphs: piecewise is all up to a few hundred tokens, with attention between the "
        "graphs; full_decode is those of decodes alone, in one graph. On a GPU the default is full_and_piecewise.",
        choices=CUDA_GRAPH_MODES,
    )
    scheduling_policy: str = _setting(
        "fcfs",
        "Who comes first: fcfs, priority, a name given to minivllm.register_policy, or package.module:Class of a "
        "minivllm.SchedulingPolicy.",
    )
    hf_overrides: dict[str, Any] | None = _setting(  # noqa: RUF009
        None, "Values that replace entries of the model's config.json.", metavar="JSON"
    )
    profile: str | None = _setting(
        None, "Write a Perfetto trace of the first steps, with named ranges, into this directory.", metavar="DIR"
    )
    multiprocess: bool = _setting(
        False, "Run the engine core in a process of its own, as AsyncLLM and the server always do."
    )
    heartbeat_timeout: float = _setting(
        300.0, "Seconds after which an engine process that does not finish its step is taken for hung and killed."
    )
    speculative_config: dict[str, Any] | None = _setting(  # noqa: RUF009
        None,
        f"Guess tokens ahead and verify them: an object with a method ({', '.join(SPECULATIVE_METHODS)}) and its "
        "settings, see SpeculativeConfig. The tokens of a request are the same with and without it.",
        metavar="JSON",
    )
    async_scheduling: bool | None = _setting(
        None,
        "Schedule the next step while the last one runs, before its tokens are known. The tokens of a request are the "
        "same with and without it. By default on a GPU without speculative-config, whose drafts begin with the last "
        "token; on a CPU model and scheduler share the cores.",
    )
    enable_lora: bool = _setting(False, "Serve LoRA adapters.")
    max_loras: int = _setting(1, "LoRA adapters that may be in use at the same time.", at_least=1)
    max_lora_rank: int = _setting(
        16, "Largest rank of a LoRA adapter; it decides what memory adapters take, not their speed.", at_least=1
    )
    max_cpu_loras: int | None = _setting(
        None, "LoRA adapters kept in host memory (default: max-loras); more only while requests use more.", at_least=1
    )
    logits_processors: list[Any] | None = _setting(  # noqa: RUF009
        None,
        "Custom logits processors, in order: subclasses of minivllm.LogitsProcessor, or package.module:Class, which is "
        "what an engine in a process of its own needs.",
        metavar="MODULE:CLASS",
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.metadata["choices"] and (value is not None or one.default is not None):
                _choice(one.name, value, one.metadata["choices"])
            if one.metadata["at_least"] is not None:
                _at_least(one.name, value, one.metadata["at_least"])
        POLICIES.check(self.scheduling_policy)
        ATTENTION.check(self.attention_backend)
        if self.enforce_eager and self.cudagraph_mode not in (None, "none"):
            raise ConfigError(
                f"cudagraph_mode is {self.cudagraph_mode!r}, but enforce_eager asks for no graphs: set one of them."
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, but must be at least max_loras, which is {self.max_loras}: "
                "every adapter on the device is in host memory too."
            )
        if self.block_size is not None and self.block_size not in (8, 16, 32, 64, 128, 256):
            raise ConfigError(f"block_size is {self.block_size!r}, but must be 8, 16, 32, 64, 128 or 256.")
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization is {share!r}, but must be above 0 and at most 1.")
        timeout = self.heartbeat_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0.0 < timeout < math.inf:
            raise ConfigError(f"heartbeat_timeout is {timeout!r}, but must be a number of seconds above 0.")
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both size the KV cache: set only one of them."
            )
        if self.logits_processors is not None and not isinstance(self.logits_processors, (list, tuple)):
            raise ConfigError(f"logits_processors is {self.logits_processors!r}, but must be a list.")
        if self.speculative_config is not None:
            SpeculativeConfig.from_dict(self.speculative_config)
            if self.compile_in_background:
                raise ConfigError("compile_in_background does not go with speculative_config: set only one of them.")
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(f"async_scheduling is {self.async_scheduling!r}, but must be True, False or None.")
        if self.async_scheduling and self.speculative_config is not None:
            raise ConfigError(
                "async_scheduling schedules a step before the last token is known, but speculative_config guesses what "
                "follows it: set only one of them."
            )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Build from keyword arguments; an unknown name raises ConfigError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"{name!r} is not an engine argument; known are: {', '.join(known)}.")
        return cls(**kwargs)

    def for_another_process(self) -> EngineArgs:
        """The same with everything that is plugged in named by its import path. Raises ConfigError if it has none."""
        processors = []
        for processor in self.logits_processors or ():
            path = processor if isinstance(processor, str) else import_path(processor)
            if path is None:
                raise ConfigError(
                    f"The logits processor {processor!r} is defined where another process cannot import it: "
                    "put it into a module."
                )
            processors.append(path)
        speculative = self.speculative_config
        if speculative is not None:
            speculative = {**speculative, "method": DRAFTERS.portable(speculative["method"])}
        return replace(
            self,
            scheduling_policy=POLICIES.portable(self.scheduling_policy),
            attention_backend=ATTENTION.portable(self.attention_backend),
            speculative_config=speculative,
            logits_processors=processors or None,
        )
