"""What the user may set: engine arguments under vLLM's names, and the settings of speculative decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Engine arguments under vLLM's names; ``None`` (or ``"auto"``) lets the engine choose and log why.

    model: a short name (``smollm2``), a Hugging Face id, a local directory or a ``.gguf`` file.
    tokenizer: where the tokenizer comes from; None takes it from the model.
    revision: branch, tag or commit of a Hugging Face id.
    dtype: weights and activations.
    seed: seeds dummy weights and requests that bring no seed of their own.
    max_model_len: prompt plus output tokens of one request [tokens].
    max_num_seqs: requests that may run at the same time.
    max_num_batched_tokens: token budget of one step. None follows performance_mode.
    performance_mode: what the budget is chosen for. "throughput": whole prompts in few steps. "interactivity": short
        steps, so that prompts which arrive hardly delay the answers that are being written. None means interactivity
        for AsyncLLM and the server, throughput otherwise.
    long_prefill_token_threshold: cap on the tokens one request gets per step; 0 is no cap.
    gpu_memory_utilization: share of the device's memory that engine and cache may use when the cache is not sized
        explicitly; on a CPU it is the share of the memory that is free after loading.
    kv_cache_memory_bytes / num_gpu_blocks_override: explicit cache size [bytes / blocks]; set one at most.
    block_size: tokens per KV block.
    kv_cache_dtype: element type of the KV cache ("auto": float32 on a CPU, where it is faster, else ``dtype``). Fewer
        bits hold more tokens in the same memory: "bfloat16" on a CPU; on a GPU "fp8_e4m3" (finer, up to 448) and
        "fp8_e5m2" (coarser, up to 57344), rounded without a scale, larger values to the largest.
    quantization: store the weights of linear layers in fewer bits: "int8", "int4" or "fp8" (a recent GPU). Blocks of a
        GGUF file are kept where they have those bits already. None multiplies AWQ, GPTQ and fp8 checkpoints as they
        are, and a GGUF file dequantised to ``dtype``.
    attention_backend: "flex" (compiled FlexAttention; its reference where nothing is compiled), "sdpa" (the reference),
        a name given to minivllm.register_attention, or "package.module:factory", which is what an engine in a process
        of its own needs.
    family: what the model's files are read as: the architecture of a family in the table or given to
        minivllm.register_family, or "package.module:FAMILY" of a minivllm.Family, which is what an engine in a process
        of its own needs. None: as config.json names it.
    enforce_eager: run the same code uncompiled.
    compile_in_background: on a CPU, start to answer uncompiled, and change over when everything is compiled. The
        tokens are the same but for rounding: float32 gives the same ones. None means that only ``minivllm chat`` does.
    cudagraph_mode: which steps replay CUDA graphs: "none", "piecewise" (all steps up to a few hundred tokens, attention
        between the graphs), "full_decode" (steps of decodes alone, in one graph) or "full_and_piecewise"; None takes
        the last on a GPU.
    scheduling_policy: who comes first: "fcfs", "priority", a name given to minivllm.register_policy, or
        "package.module:Class" of a minivllm.SchedulingPolicy.
    hf_overrides: values that replace entries of the model's config.json.
    profile: directory that gets a trace of the first steps, with named ranges (see minivllm/profiling).
    multiprocess: run the engine core in a process of its own. In one process, which is the default, a debugger steps
        from a prompt into a kernel; AsyncLLM and the server always use two.
    heartbeat_timeout: seconds after which an engine process that does not finish its step is taken for hung and killed.
    speculative_config: guess several tokens per step and verify them; see SpeculativeConfig. The tokens of a request
        are the same with and without it.
    async_scheduling: schedule the next step while the last one runs, before its tokens are known. The tokens of a
        request are the same with and without it; one that stops may have been computed once more for nothing. None:
        on a GPU, which would else idle meanwhile; not on a CPU, where model and scheduler share the cores, and not with
        speculative_config, whose drafts begin with the last token.
    enable_lora: serve LoRA adapters. max_loras: adapters used by the requests that run at the same time.
    max_lora_rank: the largest rank there is room for; together they decide what memory adapters take, not their speed.
    max_cpu_loras: adapters kept in host memory (None: as many as max_loras); more only while requests use more.
    logits_processors: custom ones, in order: subclasses of minivllm.LogitsProcessor, or "package.module:Class", which
        is what an engine in a process of its own needs.
    """

    model: str = "smollm2"
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    performance_mode: str | None = None
    long_prefill_token_threshold: int = 0
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    enable_prefix_caching: bool = True
    attention_backend: str = "flex"
    family: str | None = None
    enforce_eager: bool = False
    compile_in_background: bool | None = None
    cudagraph_mode: str | None = None
    scheduling_policy: str = "fcfs"
    hf_overrides: dict[str, Any] | None = None
    profile: str | None = None
    multiprocess: bool = False
    heartbeat_timeout: float = 300.0
    speculative_config: dict[str, Any] | None = None
    async_scheduling: bool | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    logits_processors: list[Any] | None = None

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("device", self.device, DEVICES)
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _choice("quantization", self.quantization, QUANTIZATIONS)
        POLICIES.check(self.scheduling_policy)
        ATTENTION.check(self.attention_backend)
        if self.performance_mode is not None:
            _choice("performance_mode", self.performance_mode, PERFORMANCE_MODES)
        if self.cudagraph_mode is not None:
            _choice("cudagraph_mode", self.cudagraph_mode, CUDA_GRAPH_MODES)
            if self.enforce_eager and self.cudagraph_mode != "none":
                raise ConfigError(
                    f"cudagraph_mode is {self.cudagraph_mode!r}, but enforce_eager asks for no graphs: set one of them."
                )
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        _at_least("seed", self.seed, 0)
        _at_least("max_loras", self.max_loras, 1)
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        _at_least("max_cpu_loras", self.max_cpu_loras, 1)
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
