"""What the user may set: engine arguments under vLLM's names, and the settings of speculative decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal, cast, get_args

from minivllm.config.kv_transfer_config import KVTransferConfig, portable_transfer
from minivllm.errors import ConfigError
from minivllm.plugins.plugin import import_path
from minivllm.plugins.points import ATTENTION, CONNECTORS, DRAFTERS, POLICIES, ROUTING

Device = Literal["cpu", "cuda"]
CudaGraphMode = Literal["none", "piecewise", "full_decode", "full_and_piecewise"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
}
"""Short names of dtypes -> PyTorch's."""
KV_CACHE_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "cpu", "cuda")
MODEL_IMPLS = ("auto", "minivllm", "transformers")
QUANTIZATIONS = ("int8", "int4", "fp8")
PERFORMANCE_MODES = ("throughput", "interactivity")
ExecutorKind = Literal["uni", "mp", "ray", "external_launcher"]
CUDA_GRAPH_MODES = get_args(CudaGraphMode)
EagleVersion = Literal["eagle", "eagle3", "mtp"]
# Method of speculative decoding -> the keys of speculative_config that it has for itself.
_SPECULATIVE_KEYS: dict[Any, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": ("suffix_max_cached_tokens",),
    "early_exit": ("num_layers",),
    "draft_model": ("model",),
    "eagle": ("model",),
    "eagle3": ("model",),
    "mtp": (),
}
_WANTED_MODELS = {
    "draft_model": "a model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
}
_NODES_BY_HAND = ("node_rank", "master_addr", "master_port", "node_key_file")
SPECULATIVE_METHODS: tuple[str, ...] = tuple(_SPECULATIVE_KEYS)
MAX_SPECULATIVE_TOKENS = 31
DRAFTERS_APART = ("ngram", "suffix", "draft_model")
"""Methods that never run layers of the model which they guess for."""


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
        "early_exit" asks the model's own first layers, "draft_model" a second model, "eagle" and "eagle3" a
        head that was trained to guess from this model's hidden states, "mtp" the head of this kind that
        the model's checkpoint holds (multi-token prediction); or a name given to
        minivllm.register_drafter, or "package.module:factory" of a drafter of your own.
    num_speculative_tokens: most tokens guessed at once; how many are worth it is found out per request.
    prompt_lookup_min, prompt_lookup_max: ngram: tokens that must match, and beyond which longer matches do
    not count. suffix_max_cached_tokens: suffix: how many tokens of earlier outputs are remembered.
    num_layers: early_exit: how many layers guess, fewer than the model has; None takes a third of them.
    model: draft_model: a smaller model with the same vocabulary, named as EngineArgs.model is;
    eagle, eagle3: the
        directory or the Hugging Face id of a published head.
        model_path: where it lies, filled in when the engine starts.
    verification_cost: cost of verifying one more token, as a share of a step with a single one;
    None measures it
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
            raise ConfigError(
                f"speculative_config is {values!r}, but must be a dictionary with at least a 'method'."
            )
        method = values.get("method")
        DRAFTERS.check(method)
        known = ("method", "num_speculative_tokens", "verification_cost", *_SPECULATIVE_KEYS.get(method, ()))
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"speculative_config has a key {key!r}, but with method {method!r} it may have: "
                    f"{', '.join(known)}."
                )
        config = cls(**{key: value for key, value in values.items() if value is not None})
        for key in (
            "num_speculative_tokens",
            "prompt_lookup_min",
            "prompt_lookup_max",
            "suffix_max_cached_tokens",
        ):
            _at_least(f"speculative_config[{key!r}]", getattr(config, key), 1)
        _at_least("speculative_config['num_layers']", config.num_layers, 1)
        if method in _WANTED_MODELS and (not isinstance(config.model, str) or not config.model):
            raise ConfigError(
                f"speculative_config['model'] is {config.model!r}, but method {method!r} needs the name or "
                "the path of "
                f"{_WANTED_MODELS[method]}."
            )
        if config.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"speculative_config['num_speculative_tokens'] is {config.num_speculative_tokens}, but must "
                "be at most "
                f"{MAX_SPECULATIVE_TOKENS}."
            )
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config['prompt_lookup_min'] is {config.prompt_lookup_min}, but must be at most "
                f"prompt_lookup_max, which is {config.prompt_lookup_max}."
            )
        cost = config.verification_cost
        if cost is not None and (
            isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 <= cost <= 1
        ):
            raise ConfigError(
                f"speculative_config['verification_cost'] is {cost!r}, but must be from 0 to 1."
            )
        return config

    @property
    def num_lookahead_tokens(self) -> int:
        """Places in the KV cache that the drafter wants behind the scheduled tokens."""
        return self.num_speculative_tokens if self.method == "early_exit" or self.has_model else 0

    @property
    def has_model(self) -> bool:
        """Whether the drafter has a model of its own, which keeps keys and values in the target's blocks."""
        return self.model is not None or self.method == "mtp"

    @property
    def eagle_version(self) -> EagleVersion | None:
        """Which kind of head guesses, if one does."""
        return cast(EagleVersion, self.method) if self.method in get_args(EagleVersion) else None


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Engine arguments under vLLM's names; ``None`` (or ``"auto"``) lets the engine choose and log why.

    The text beside a field is the help of its command line flag too.
    """

    model: Annotated[str, "A short name (smollm2), a Hugging Face id, a local directory or a .gguf file."] = (
        "smollm2"
    )
    tokenizer: Annotated[str | None, "Where the tokenizer comes from, if not from the model."] = None
    revision: Annotated[str | None, "Branch, tag or commit of a Hugging Face id."] = None
    model_impl: Annotated[
        str,
        f"Whose layers compute the model: {', '.join(MODEL_IMPLS)}. auto takes minivllm's where it knows the "
        "family, "
        "else those of transformers, over the same cache, attention and products.",
    ] = "auto"
    dtype: Annotated[
        str, f"Weights and activations: {', '.join(DTYPES)}, or short: {', '.join(DTYPE_NAMES)}."
    ] = "auto"
    seed: Annotated[int, "Seeds dummy weights, and requests that bring no seed of their own."] = 0
    load_format: Annotated[str, f"{', '.join(LOAD_FORMATS)}; dummy is random weights."] = "auto"
    device: Annotated[str, f"{', '.join(DEVICES)}."] = "auto"
    max_model_len: Annotated[int | None, "Prompt plus answer of one request [tokens]."] = None
    max_num_seqs: Annotated[int | None, "Requests that may run at the same time."] = None
    max_num_batched_tokens: Annotated[
        int | None, "Token budget of one step, if performance_mode does not suit."
    ] = None
    performance_mode: Annotated[
        str | None,
        "throughput: whole prompts in few steps. interactivity: short steps, so that prompts which arrive "
        "hardly delay "
        "the answers that are being written; AsyncLLM and serve take that.",
    ] = None
    long_prefill_token_threshold: Annotated[
        int, "Most tokens one request gets in a step; 0 is no such limit."
    ] = 0
    limit_mm_per_prompt: Annotated[
        dict[str, int] | None,
        "Most images of a prompt, for models that see, as JSON; 0 loads no image encoder. Left out: 8.",
    ] = None
    eye: Annotated[
        str | None,
        "Directory with an image encoder and projector in LLaVA's format, for a model of text with as wide "
        "embeddings.",
    ] = None
    max_num_batched_encoder_embeds: Annotated[
        int | None, "Most embeddings of images that a step encodes. Left out: max_num_batched_tokens."
    ] = None
    encoder_cache_bytes: Annotated[int | None, "Size of the cache for embeddings of images [bytes]."] = None
    gpu_memory_utilization: Annotated[
        float | None,
        "Share of the memory that engine and KV cache may use (on a CPU: of what is free after loading), "
        "where the "
        "cache has no size of its own.",
    ] = None
    kv_cache_memory_bytes: Annotated[int | None, "Size of the KV cache [bytes]."] = None
    num_gpu_blocks_override: Annotated[int | None, "Size of the KV cache [blocks]."] = None
    block_size: Annotated[int | None, "Tokens per block of the KV cache: 8, 16, 32, 64, 128 or 256."] = None
    kv_cache_dtype: Annotated[
        str,
        f"Elements of the KV cache: {', '.join(KV_CACHE_DTYPES)}. auto is that of the weights. Fewer "
        "bits hold more tokens: bfloat16 on a CPU; on a GPU fp8_e4m3 (finer, up to 448) and fp8_e5m2 "
        "(coarser, up to "
        "57344), rounded without a scale, larger values to the largest.",
    ] = "auto"
    quantization: Annotated[
        str | None,
        f"Fewer bits for linear layers: {', '.join(QUANTIZATIONS)} (fp8: a recent GPU). A GGUF file keeps "
        "its own "
        "blocks where they fit. Without it AWQ, GPTQ and fp8 checkpoints are multiplied as they are, a GGUF "
        "file "
        "dequantised to dtype. A CPU with VNNI and no AMX multiplies 4 bits in bfloat16 as 8 where it "
        "computes several "
        "tokens at a time, and one with AVX2 and no more in bfloat16 and float32.",
    ] = None
    enable_prefix_caching: Annotated[bool, "Reuse the KV cache of equal prompt beginnings."] = True
    reuse_partial_blocks: Annotated[
        bool,
        "With enable_prefix_caching: reuse beginnings to the token, by copying the block in which two texts "
        "part. "
        "Without it whole blocks are reused. Models with states reuse whole blocks always.",
    ] = True
    attention_backend: Annotated[
        str,
        "flex (compiled FlexAttention; its reference where nothing is compiled), flex-shared (on a GPU, "
        "requests that share a prefix also read it once for all where that should pay; not yet measured on "
        "one), sdpa (the reference), a name given to register_attention, or your own, as "
        "package.module:factory.",
    ] = "flex"
    family: Annotated[
        str | None,
        "What the model's files are read as, in place of what config.json says: an architecture of the table "
        "of "
        "families or given to register_family, or your own, as package.module:FAMILY.",
    ] = None
    enforce_eager: Annotated[bool, "Run the same code uncompiled: starts sooner, answers more slowly."] = (
        False
    )
    compile_in_background: Annotated[
        bool | None,
        "On a CPU, answer uncompiled until everything is compiled; the tokens are the same but for rounding, "
        "and in "
        "float32 the very same. The default, except with speculative_config, with experts that several "
        "engines share, "
        "and under external_launcher. Those who measure should wait.",
    ] = None
    cudagraph_mode: Annotated[
        str | None,
        "Steps that replay CUDA graphs: none; piecewise (up to a few hundred tokens, attention between the "
        "graphs); "
        "full_decode (decodes, and the verification of drafts, in one graph); "
        "full_and_piecewise, which is the default on a GPU.",
    ] = None
    scheduling_policy: Annotated[
        str,
        f"Who comes first: {', '.join(POLICIES.known)}, a name given to register_policy, or your own, as "
        "package.module:Class. response-ratio: what waits longest for the tokens that are not cached, so "
        "that a prefix "
        "is used while it is cached.",
    ] = "fcfs"
    hf_overrides: Annotated[
        dict[str, Any] | None, "JSON object whose entries replace those of the model's config.json."
    ] = None
    profile: Annotated[str | None, "Write a Perfetto trace of the first steps into this directory."] = None
    multiprocess: Annotated[
        bool,
        "Run the engine core in a process of its own, as AsyncLLM and serve always do; what is plugged in "
        "then needs "
        "an import path. In one process a debugger steps from a prompt into a kernel.",
    ] = False
    tensor_parallel_size: Annotated[
        int, "Workers that divide every layer, each in a process of its own; on a CPU."
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        "Of mixtures of experts, give each of several workers all of some experts, in place of a part of "
        "every one. "
        "With data_parallel_size the workers of all engines divide the experts, and take every step "
        "together.",
    ] = False
    pipeline_parallel_size: Annotated[
        int,
        "Stages that the layers are dealt out to, which compute side by side, each with workers of its own; "
        "on a CPU.",
    ] = 1
    distributed_executor_backend: Annotated[
        str | None,
        "Where workers live: uni, in the engine's process, which is the default for one; mp, each in a "
        "process of its "
        "own, whose end is told with its reason; ray, the same on nodes of a Ray cluster, this one and "
        "others; "
        "external_launcher, in the processes of torchrun, which all run the same script. What is plugged in "
        "then needs "
        "an import path, but for uni.",
    ] = None
    nnodes: Annotated[
        int,
        "Hosts that share the workers evenly; the same command runs on each of them (with ray only on one, "
        "and 1 takes "
        "as few as have room).",
    ] = 1
    node_rank: Annotated[
        int, "Which of them this one is, from 0. The first one serves; the others run workers until it ends."
    ] = 0
    master_addr: Annotated[str, "Address of the first of several nodes, where the others find it."] = (
        "127.0.0.1"
    )
    master_port: Annotated[int, "Port there."] = 29501
    node_key_file: Annotated[
        str | None,
        "File with a secret of 32 bytes or more, the same on all nodes: what they send one another is "
        "encrypted with "
        "it, and nobody else can connect.",
    ] = None
    data_parallel_size: Annotated[
        int,
        "Engines that each hold the whole model (all but experts with enable_expert_parallel) and share the "
        "requests, "
        "each in a process of its own. They divide the cores (unless OMP_NUM_THREADS is set) and the memory "
        "of a KV "
        "cache without a size of its own; max_num_seqs and other limits are those of each. On a CPU.",
    ] = 1
    data_parallel_policy: Annotated[
        str,
        f"Which engine gets a request: {', '.join(ROUTING.known)}, a name given to register_routing, or your "
        "own, as "
        "package.module:Class. prefix: the one that will be done with the prompt first, by what it holds of "
        "it and by "
        "what else it has to do.",
    ] = "prefix"
    disable_custom_all_reduce: Annotated[
        bool, "Let workers add up through gloo instead of shared memory."
    ] = False
    heartbeat_timeout: Annotated[
        float,
        "Seconds after which an engine process that does not finish its step is taken for hung and killed; a "
        "worker in "
        "a process of its own after three quarters of that.",
    ] = 300.0
    speculative_config: Annotated[
        dict[str, Any] | None,
        "Guess tokens ahead and verify them, which leaves the answers as they are: JSON object with a "
        "method "
        f"({', '.join(SPECULATIVE_METHODS)}) and its settings; see SpeculativeConfig.",
    ] = None
    async_scheduling: Annotated[
        bool | None,
        "Schedule the next step while the last one runs, before its tokens are known; the answers are the "
        "same. The default is to do so on a GPU, which would else idle meanwhile, and not with "
        "speculative_config. With draft_model, eagle, eagle3 and mtp it can be asked for: each request then "
        "gets num_speculative_tokens guesses in every step, also where fewer would pay.",
    ] = None
    enable_lora: Annotated[bool, "Serve LoRA adapters."] = False
    max_loras: Annotated[int, "LoRA adapters of the requests that run at the same time."] = 1
    max_lora_rank: Annotated[
        int, "Largest rank of a LoRA adapter; max_loras of it are the memory they take."
    ] = 16
    max_cpu_loras: Annotated[
        int | None,
        "LoRA adapters kept in host memory, more only while requests use more. [default: max_loras]",
    ] = None
    kv_transfer_config: Annotated[
        dict[str, Any] | None,
        f"Keep keys and values elsewhere too, and take them from there: JSON object with a kv_connector "
        f"({', '.join(CONNECTORS.known)}) and its settings; see KVTransferConfig.",
    ] = None
    logits_processors: Annotated[
        list[Any] | None, "Custom logits processor, as package.module:Class (may be repeated), in order."
    ] = None

    def __post_init__(self) -> None:
        _choice("model_impl", self.model_impl, MODEL_IMPLS)
        _choice("dtype", DTYPE_NAMES.get(self.dtype, self.dtype), DTYPES)
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("device", self.device, DEVICES)
        _choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _choice("quantization", self.quantization, QUANTIZATIONS)
        POLICIES.check(self.scheduling_policy)
        ATTENTION.check(self.attention_backend)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("data_parallel_size", self.data_parallel_size, 1)
        ROUTING.check(self.data_parallel_policy)
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        self._check_workers()
        self._check_stages()
        self._check_nodes()
        self._check_backend()
        if self.performance_mode is not None:
            _choice("performance_mode", self.performance_mode, PERFORMANCE_MODES)
        if self.cudagraph_mode is not None:
            _choice("cudagraph_mode", self.cudagraph_mode, CUDA_GRAPH_MODES)
            if self.enforce_eager and self.cudagraph_mode != "none":
                raise ConfigError(
                    f"cudagraph_mode is {self.cudagraph_mode!r}, but enforce_eager asks for no graphs: set "
                    "one of them."
                )
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _at_least("max_num_batched_encoder_embeds", self.max_num_batched_encoder_embeds, 1)
        _at_least("encoder_cache_bytes", self.encoder_cache_bytes, 1)
        self._check_images()
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        _at_least("seed", self.seed, 0)
        _at_least("max_loras", self.max_loras, 1)
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        _at_least("max_cpu_loras", self.max_cpu_loras, 1)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}, but must be at least max_loras, which is "
                f"{self.max_loras}: "
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
                "kv_cache_memory_bytes and num_gpu_blocks_override both size the KV cache: set only one of "
                "them."
            )
        for name in ("tokenizer", "revision", "profile", "family", "eye", "master_addr", "node_key_file"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} is empty: give it a value, or leave it out.")
        if self.logits_processors is not None and not isinstance(self.logits_processors, (list, tuple)):
            raise ConfigError(f"logits_processors is {self.logits_processors!r}, but must be a list.")
        if self.speculative_config is not None:
            SpeculativeConfig.from_dict(self.speculative_config)
            if self.compile_in_background:
                raise ConfigError(
                    "compile_in_background does not go with speculative_config: set only one of them."
                )
        if self.kv_transfer_config is not None:
            KVTransferConfig.from_dict(self.kv_transfer_config)
            if not self.enable_prefix_caching:
                raise ConfigError(
                    "kv_transfer_config needs enable_prefix_caching: what travels is named by the hashes of "
                    "its blocks."
                )
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(
                f"async_scheduling is {self.async_scheduling!r}, but must be True, False or None."
            )
        self._check_shared_experts()
        if self.async_scheduling and self.speculative_config is not None:
            if not SpeculativeConfig.from_dict(self.speculative_config).has_model:
                raise ConfigError(
                    "async_scheduling schedules a step before the last token is known, but the speculative "
                    f"method {self.speculative_config.get('method')!r} guesses what follows it from tokens "
                    "that the host knows: leave out one of them, or choose draft_model, eagle, eagle3 or mtp."
                )
            if self.pipeline_parallel_size > 1:
                raise ConfigError(
                    "async_scheduling with speculative_config does not go with pipeline_parallel_size "
                    f"{self.pipeline_parallel_size}: only the last stage knows which drafts were accepted. "
                    "Leave out one of them."
                )

    @property
    def num_workers(self) -> int:
        """Of one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sizes_cache(self) -> bool:
        """Whether the size of the KV cache is given."""
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None

    @property
    def num_sharing_experts(self) -> int:
        """Workers that divide the experts of a layer, with enable_expert_parallel: those of all engines."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether several engines divide the experts."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def executor(self) -> ExecutorKind:
        """Where the workers live."""
        chosen = self.distributed_executor_backend or ("uni" if self.num_workers == 1 else "mp")
        return cast(ExecutorKind, chosen)

    def _check_images(self) -> None:
        limits = self.limit_mm_per_prompt
        if limits is None:
            return
        if not isinstance(limits, dict) or set(limits) - {"image"}:
            raise ConfigError(
                f'limit_mm_per_prompt is {limits!r}, but must be a dictionary such as {{"image": 8}}.'
            )
        _at_least("limit_mm_per_prompt['image']", limits.get("image"), 0)

    def _check_workers(self) -> None:
        """What goes with several workers. Raises ConfigError."""
        _choice("distributed_executor_backend", self.executor, get_args(ExecutorKind))
        if self.num_sharing_experts == 1 and self.enable_expert_parallel:
            raise ConfigError(
                "enable_expert_parallel divides experts among workers, but tensor_parallel_size and "
                "data_parallel_size "
                "are 1: raise one of them, or leave it out."
            )
        if self.tensor_parallel_size > 1 and self.executor == "uni":
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but "
                "distributed_executor_backend='uni' has a "
                "single worker: set only one of them."
            )

    def _check_shared_experts(self) -> None:
        """What goes with engines that share experts. Raises ConfigError."""
        if not self.shares_experts:
            return
        method = (self.speculative_config or {}).get("method")
        others = {
            "pipeline_parallel_size": self.pipeline_parallel_size > 1,
            "disable_custom_all_reduce": self.disable_custom_all_reduce,
            "kv_transfer_config": self.kv_transfer_config is not None,
            "compile_in_background": bool(self.compile_in_background),
            f"the speculative method {method!r}": method not in (None, *DRAFTERS_APART),
        }
        for name, is_given in others.items():
            if is_given:
                raise ConfigError(
                    "data_parallel_size with enable_expert_parallel divides experts among engines that take "
                    "every "
                    f"step together, which does not go with {name}: leave one of them out."
                )

    def _check_stages(self) -> None:
        """What goes with stages. Raises ConfigError."""
        if self.pipeline_parallel_size == 1:
            return
        if self.executor == "uni":
            raise ConfigError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size}, but "
                "distributed_executor_backend='uni' has "
                "a single worker: set only one of them."
            )

    def _check_backend(self) -> None:
        """What goes with processes that others start. Raises ConfigError."""
        others = {
            "data_parallel_size": self.data_parallel_size > 1,
            "kv_transfer_config": self.kv_transfer_config is not None,
        }
        if self.executor == "ray":
            others |= {name: getattr(self, name) != getattr(EngineArgs, name) for name in _NODES_BY_HAND}
        elif self.executor == "external_launcher":
            others |= {
                "pipeline_parallel_size": self.pipeline_parallel_size > 1,
                "multiprocess": self.multiprocess,
                "async_scheduling": bool(self.async_scheduling),
                "compile_in_background": bool(self.compile_in_background),
            }
        else:
            return
        for name, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"distributed_executor_backend is {self.executor!r}, which does not go with {name}: "
                    "leave that out."
                )
        if self.executor == "ray" and find_spec("ray") is None:
            raise ConfigError(
                "distributed_executor_backend is 'ray', which needs Ray: pip install 'minivllm[ray]'."
            )

    def _check_nodes(self) -> None:
        """What goes with several hosts. Raises ConfigError."""
        _at_least("nnodes", self.nnodes, 1)
        _at_least("node_rank", self.node_rank, 0)
        _at_least("master_port", self.master_port, 1)
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank is {self.node_rank}, but nnodes is {self.nnodes}: nodes are counted from 0, so "
                "it must be "
                f"at most {self.nnodes - 1}."
            )
        if self.master_port > 65535:
            raise ConfigError(f"master_port is {self.master_port}, but must be at most 65535.")
        if self.nnodes == 1:
            return
        if self.num_workers % self.nnodes:
            raise ConfigError(
                f"nnodes is {self.nnodes}, but tensor_parallel_size {self.tensor_parallel_size} and "
                f"pipeline_parallel_size {self.pipeline_parallel_size} make {self.num_workers} workers, "
                "which so many "
                "nodes cannot share evenly."
            )
        if self.executor == "ray":
            return
        if self.executor != "mp":
            raise ConfigError(
                f"nnodes is {self.nnodes}, but distributed_executor_backend={self.executor!r} is not made "
                "for that: "
                "use 'mp', or 'ray'."
            )
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"nnodes is {self.nnodes}, but data_parallel_size is {self.data_parallel_size}: set only one "
                "of them."
            )
        if self.kv_transfer_config is not None:
            raise ConfigError(
                f"nnodes is {self.nnodes}, but kv_transfer_config needs all workers on one host."
            )
        if self.node_key_file is None:
            raise ConfigError(
                f"nnodes is {self.nnodes}, but there is no node_key_file: nodes talk only to those who know "
                "the same "
                "secret. Make one with: (umask 077; openssl rand -hex 32 > node.key), and copy it to all of "
                "them."
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
        """The same with everything that is plugged in named by its import path.
        Raises ConfigError if it has none."""
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
        transfer = self.kv_transfer_config
        if transfer is not None:
            transfer = portable_transfer(transfer)
        return replace(
            self,
            data_parallel_policy="prefix",  # the frontend routes
            kv_transfer_config=transfer,
            scheduling_policy=POLICIES.portable(self.scheduling_policy),
            attention_backend=ATTENTION.portable(self.attention_backend),
            speculative_config=speculative,
            logits_processors=processors or None,
        )
