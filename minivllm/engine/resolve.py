"""From what the user asked for to what the engine runs with, once.
Everything chosen by the engine is logged."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from minivllm.attention import find_attention
from minivllm.checkpoints.choose import choose_implementation, read_model_facts
from minivllm.config import (
    DTYPE_NAMES,
    CacheConfig,
    Device,
    EngineArgs,
    EngineConfig,
    KVTransferConfig,
    LoRAConfig,
    NodesConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from minivllm.device.gpus import check_gpus
from minivllm.engine.draft_model import resolve_draft_model
from minivllm.errors import ConfigError
from minivllm.families.makers.registry import load_family
from minivllm.graphs.mode import resolve_graph_mode
from minivllm.hub.fetch import resolve_model
from minivllm.kv_transfer.connector import load_connector
from minivllm.kv_transfer.fingerprint import fingerprint
from minivllm.models.decoder.stages import check_deeper_levels
from minivllm.models.shards import agrees_on_scales, check_layout
from minivllm.multimodal.facts import find_eye, find_images
from minivllm.sampling.logits_processors import load_logits_processors
from minivllm.scheduler.policy import make_policy
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.facts import ModelFacts

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 64
CACHE_DTYPE_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""kv_cache_dtype -> PyTorch's name for it, where that is another one."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts e4m3."""


@dataclass(frozen=True)
class DeviceDefaults:
    """Defaults that differ between devices."""

    max_num_seqs: int
    max_num_batched_tokens: int
    interactive_max_num_batched_tokens: int
    memory_utilization: float


DEFAULTS: dict[str, DeviceDefaults] = {
    "cpu": DeviceDefaults(
        64, max_num_batched_tokens=2048, interactive_max_num_batched_tokens=128, memory_utilization=0.5
    ),
    "cuda": DeviceDefaults(
        256, max_num_batched_tokens=8192, interactive_max_num_batched_tokens=2048, memory_utilization=0.9
    ),
}


def resolve(args: EngineArgs) -> tuple[EngineConfig, ModelFacts]:
    """Find the model, read its configuration, and fill in every value the user left open.

    Raises ConfigError for values that cannot work together, ModelError if the model cannot be had or read.
    """
    device = resolve_device(args.device)
    path = resolve_model(args.model, args.revision, weights=args.load_format != "dummy")
    overrides = args.hf_overrides or {}
    if args.family is not None:
        overrides = {**overrides, "architectures": [load_family(args.family).architecture]}
    implementation, why = choose_implementation(path, args.load_format, overrides, args.model_impl)
    facts = read_model_facts(path, args.load_format, overrides, implementation)
    dtype, dtype_reason = resolve_dtype(args.dtype, facts.dtype, device)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    cache_dtype, cache_reason = resolve_cache_dtype(args.kv_cache_dtype, dtype, device, capability)
    defaults = DEFAULTS[device]
    max_num_seqs = args.max_num_seqs or defaults.max_num_seqs
    max_model_len = args.max_model_len or facts.max_position_embeddings
    if max_model_len < 2:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but must hold a prompt and an answer: at least 2 tokens."
        )
    if max_model_len > facts.max_position_embeddings and not facts.can_be_longer:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {args.model} was made for at most "
            f"{facts.max_position_embeddings} tokens."
        )
    speculative = resolve_speculation(args.speculative_config, facts)
    if speculative is not None and speculative.has_model:
        speculative = resolve_draft_model(speculative, path, facts, max_model_len, args.load_format)
    transfer = (
        None if args.kv_transfer_config is None else KVTransferConfig.from_dict(args.kv_transfer_config)
    )
    needs_fingerprint = transfer is not None and load_connector(transfer).needs_fingerprint(transfer)
    if transfer is not None:
        check_transfer(transfer, args.num_workers, facts)
    check_workers(args, facts, device)
    check_stages(args, facts, speculative)
    find_attention(args.attention_backend)
    load_logits_processors(
        args.logits_processors or ()
    )  # what is wrong with them is said before the model is loaded
    token_budget = resolve_token_budget(args, defaults, max_num_seqs)
    eye = find_eye(args, path)
    images, no_images = find_images(
        args,
        str(path if eye is None else eye),
        implementation=implementation,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=dtype,
        budget=token_budget,
        max_num_seqs=max_num_seqs,
    )
    if images is not None:
        if images.deeper_levels and isinstance(facts, DecoderConfig):
            check_deeper_levels(facts, args.pipeline_parallel_size, images.deeper_levels)
        token_budget = max(token_budget, images.least_batched_tokens)
    config = EngineConfig(
        model=args.model,
        model_path=str(path),
        load_format=args.load_format,
        dtype=dtype,
        device=device,
        seed=args.seed,
        enforce_eager=args.enforce_eager,
        compile_in_background=resolve_background(args, device),
        cudagraph_mode=resolve_graph_mode(
            args.cudagraph_mode,
            device,
            args.enforce_eager,
            facts,
            attention=args.attention_backend,
            has_staged_images=images is not None and args.pipeline_parallel_size > 1,
        ),
        cache=CacheConfig(
            block_size=args.block_size or DEFAULT_BLOCK_SIZE,
            num_blocks=args.num_gpu_blocks_override,
            memory_bytes=args.kv_cache_memory_bytes,
            memory_utilization=args.gpu_memory_utilization or defaults.memory_utilization,
            dtype=cache_dtype,
            enable_prefix_caching=args.enable_prefix_caching,
            reuse_partial_blocks=args.reuse_partial_blocks,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            max_model_len=max_model_len,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            policy=args.scheduling_policy,
            has_priorities=make_policy(args.scheduling_policy).uses_priority,
            num_lookahead_tokens=0 if speculative is None else speculative.num_lookahead_tokens,
            num_stages=args.pipeline_parallel_size,
        ),
        tokenizer=args.tokenizer,
        quantization=args.quantization,
        speculative=speculative,
        profile=args.profile,
        async_scheduling=resolve_async_scheduling(args, device, facts),
        lora=LoRAConfig(
            max_loras=args.max_loras,
            max_lora_rank=args.max_lora_rank,
            max_cpu_loras=args.max_cpu_loras or args.max_loras,
        )
        if args.enable_lora
        else None,
        attention_backend=args.attention_backend,
        logits_processors=tuple(args.logits_processors or ()),
        family=args.family,
        model_impl=implementation,
        hf_overrides=overrides,
        executor="mp" if args.executor == "ray" else args.executor,  # Ray only says where
        kv_transfer=transfer,
        tensor_parallel_size=args.tensor_parallel_size,
        expert_parallel=args.enable_expert_parallel,
        pipeline_parallel_size=args.pipeline_parallel_size,
        custom_all_reduce=not args.disable_custom_all_reduce,
        heartbeat_timeout=args.heartbeat_timeout,
        data_parallel_size=args.data_parallel_size,
        nodes=None
        if args.nnodes == 1 or args.executor == "ray"
        else NodesConfig(
            nnodes=args.nnodes,
            node_rank=args.node_rank,
            master_addr=args.master_addr,
            master_port=args.master_port,
            key_file=args.node_key_file or "",
        ),
        images=images,
        no_images=no_images,
        eye_path=None if eye is None else str(eye),
    )
    if transfer is not None and needs_fingerprint:
        settings = settings_digest(config, facts)
        digest = fingerprint(settings, config.model_path, config.eye_path)
        config = replace(config, kv_transfer=replace(transfer, settings=settings, fingerprint=digest))
    logger.info("Model %s: %s, weights in %s (%s).", args.model, facts.architecture, dtype, dtype_reason)
    logger.info("Its layers are those of %s (%s).", implementation, why)
    logger.info(
        "Device %s; max_model_len %d, max_num_seqs %d, max_num_batched_tokens %d, KV cache in %s (%s).",
        device,
        max_model_len,
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        cache_dtype,
        cache_reason,
    )
    if images is not None:
        logger.info(
            "Images: up to %d in a prompt, of up to %s embeddings (%.1f MiB); a step encodes up to %s, and "
            "%.1f MiB are kept.",
            images.most_in_prompt,
            f"{images.most_embeds:,}",
            images.most_embeds * images.bytes_per_embed / 2**20,
            f"{images.max_num_batched_embeds:,}",
            images.encoder_cache_bytes / 2**20,
        )
    if config.expert_parallel:
        together = "s, which take every step together" if config.shares_experts else ""
        num_workers, num_engines = args.num_sharing_experts, config.data_parallel_size
        logger.info(
            "Whole experts are dealt out to %d workers, of %d engine%s.", num_workers, num_engines, together
        )
    return config, facts


def check_transfer(transfer: KVTransferConfig, num_ranks: int, facts: ModelFacts) -> None:
    """Raises ConfigError where a connector cannot move what this model keeps, or not for so many workers."""
    connector = load_connector(transfer)
    connector.check_ranks(transfer, num_ranks)
    if facts.keeps_states:
        connector.check_states(transfer)


def check_workers(args: EngineArgs, facts: ModelFacts, device: Device) -> None:
    """Raises ConfigError where several engines or workers cannot share or divide this model, or not here."""
    size = args.tensor_parallel_size
    if device == "cuda" and (args.num_workers > 1 or args.shares_experts):
        is_one_host = args.nnodes == 1 and args.executor == "mp" and not args.shares_experts
        check_gpus(args.num_workers, is_one_host, args.sizes_cache)
    if size == 1 and not args.shares_experts:
        return
    formats = () if facts.quantization is None else facts.quantization.formats
    rounds_inputs = any(
        form is not None and form.layout == "int8" and form.rounds_inputs for _, form in formats
    )
    if size > 1 and rounds_inputs and not (isinstance(facts, DecoderConfig) and agrees_on_scales(facts)):
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this checkpoint rounds the inputs of its layers to int8, "
            "with one "
            "scale for all of a token's, on which workers agree only in minivllm's own layers of attention "
            "without "
            f"gates and a dense MLP: use 1, or the unquantised model with quantization='int8'."
        )
    if isinstance(facts, DecoderConfig):
        num_sharing = args.num_sharing_experts if args.enable_expert_parallel else None
        check_layout(facts, size, args.quantization, num_sharing)
    elif args.enable_expert_parallel:
        raise ConfigError(
            "enable_expert_parallel deals out whole experts, but workers divide every expert of a model that "
            "transformers computes: leave it out."
        )


def check_stages(args: EngineArgs, facts: ModelFacts, speculative: SpeculativeConfig | None = None) -> None:
    """Raises ConfigError where the layers of this model cannot be dealt out to so many stages, or where those
    of the last stage, which drafts, are not all that it needs for that."""
    size = args.pipeline_parallel_size
    if size == 1:
        return
    if facts.num_layers < size:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but {args.model} has {facts.num_layers} layers, and every "
            "stage needs "
            f"one: use {facts.num_layers} or less."
        )
    if isinstance(facts, DecoderConfig) and facts.reads_across_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but layers of {args.model} read keys, values or embeddings "
            "that the first stage has: use tensor_parallel_size."
        )
    needed = {
        "early_exit": "the first layers and the head",
        "eagle3": "hidden states of layers all over the model",
    }
    if speculative is not None and speculative.method in needed:
        raise ConfigError(
            f"pipeline_parallel_size is {size}, but {speculative.method} guesses from "
            f"{needed[speculative.method]}, "
            "which no stage has: choose another method, such as ngram or draft_model."
        )


def resolve_token_budget(args: EngineArgs, defaults: DeviceDefaults, max_num_seqs: int) -> int:
    """Tokens per step. Half of a small budget is left for prompts when all other requests decode."""
    if args.max_num_batched_tokens is not None:
        return args.max_num_batched_tokens
    if args.performance_mode == "interactivity":
        return max(defaults.interactive_max_num_batched_tokens, 2 * max_num_seqs)
    return defaults.max_num_batched_tokens


def resolve_background(args: EngineArgs, device: str) -> bool:
    """What compile_in_background means on this device: only a CPU's compiled code is kept on disk, where the
    engine can find what another process compiled. Left open, it is on where nothing speaks against it."""
    if device != "cpu" or args.enforce_eager:
        return False
    if args.compile_in_background is not None:
        return args.compile_in_background
    return (
        args.speculative_config is None and not args.shares_experts and args.executor != "external_launcher"
    )


def resolve_async_scheduling(args: EngineArgs, device: Device, facts: ModelFacts | None = None) -> bool:
    """As asked for; left open, on a GPU, unless there are drafts: a step that is scheduled before they are
    verified counts on all of them. Raises ConfigError for drafts of a model that keeps states.

    On a CPU it costs what it hides:
    the model takes all cores, so a scheduler beside it only takes some of them away.
    """
    has_drafts = args.speculative_config is not None
    if args.async_scheduling and has_drafts and facts is not None and facts.keeps_states:
        raise ConfigError(
            f"async_scheduling with speculative_config schedules a step before the last drafts are verified, "
            f"but layers of {facts.architecture} keep a state, which must take in the accepted ones first: "
            "leave out one of them."
        )
    if args.async_scheduling is not None:
        return args.async_scheduling
    chosen = device == "cuda" and not has_drafts
    if device == "cuda":
        logger.info("Async scheduling is %s.", "on" if chosen else "off, since there are drafts")
    return chosen


def resolve_speculation(values: dict[str, Any] | None, facts: ModelFacts) -> SpeculativeConfig | None:
    """What speculative_config means for this model. Raises ConfigError."""
    if values is None:
        return None
    config = SpeculativeConfig.from_dict(values)
    if config.method != "early_exit":
        return config
    if facts.keeps_states:
        raise ConfigError(
            f"speculative_config asks for the first layers as a drafter, but layers of {facts.architecture} "
            "keep a state: each guess would change it, and it could not be taken back. Choose another "
            "method, such as ngram or suffix."
        )
    num_layers = max(1, facts.num_layers // 3) if config.num_layers is None else config.num_layers
    if num_layers >= facts.num_layers:
        raise ConfigError(
            f"speculative_config asks for the first {num_layers} layers as a drafter, but the model has "
            f"{facts.num_layers}: num_layers must be fewer."
        )
    return replace(config, num_layers=num_layers)


def settings_digest(config: EngineConfig, facts: ModelFacts) -> str:
    """Digest of all that decides which keys and values known tokens have, but for the model's files, and
    adapters and salts, which are part of the blocks' hashes."""
    settings = {
        "facts": facts,
        "implementation": facts.implementation,
        "random weights": config.seed if config.load_format == "dummy" else None,
        "dtype": config.dtype,
        "cache dtype": config.cache.dtype,
        "block size": config.cache.block_size,
        "quantization": config.quantization,
        "attention": config.attention_backend,
        # Sums over ranks are rounded in other places.
        "tensor parallel size": config.tensor_parallel_size,
        "expert parallel": config.expert_parallel,
        # Stages have parts of their own; which layers, follows from their number.
        "pipeline parallel size": config.pipeline_parallel_size,
        # Scaled rotary tables depend on it.
        "max_model_len": config.scheduler.max_model_len,
    }
    return hashlib.sha256(
        "\n".join(f"{name}: {value!r}" for name, value in settings.items()).encode()
    ).hexdigest()


def resolve_device(device: str) -> Device:
    """ "auto" is a GPU if PyTorch sees one. Raises ConfigError for "cuda" without one."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            "device is 'cuda', but PyTorch sees no CUDA device here: use device='cpu' or 'auto'."
        )
    return "cuda" if device == "cuda" or (device == "auto" and available) else "cpu"


def resolve_dtype(dtype: str, saved: str, device: Device) -> tuple[str, str]:
    """The dtype of weights and activations, and why."""
    if dtype != "auto":
        return DTYPE_NAMES.get(dtype, dtype), "as asked for"
    if saved == "float32":
        return "float32", "as the checkpoint was saved"
    if device == "cuda":
        return saved, "as the checkpoint was saved"
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and cpu_computes_bfloat16():
        return "bfloat16", "this CPU has bfloat16 instructions"
    return "float32", "this CPU has no bfloat16 instructions"


def resolve_cache_dtype(
    asked: str, dtype: str, device: Device, capability: tuple[int, int]
) -> tuple[str, str]:
    """PyTorch's name for the dtype of the KV cache, and why. dtype: of the weights. capability: of a GPU.

    Attention on a GPU reads blocks of fewer bits than its queries, converting in registers; on a CPU it reads
    only its own dtype, and takes that of the blocks. Raises ConfigError for what would cost more than it
    saves.
    """
    if asked == "auto":
        return dtype, "that of the weights"
    name = CACHE_DTYPE_NAMES.get(asked, asked)
    bits = torch.finfo(getattr(torch, name)).bits
    if device == "cpu":
        if bits < 16:
            raise ConfigError(
                f"kv_cache_dtype is {asked!r}, but a CPU cannot attend to blocks of {bits} bits: every step "
                "would "
                "convert all it reads, which takes longer than attention. bfloat16 takes half the memory of "
                "float32."
            )
        return name, "as asked for"
    if name != dtype and bits >= torch.finfo(getattr(torch, dtype)).bits:
        raise ConfigError(
            f"kv_cache_dtype is {asked!r}, which saves nothing on a GPU against that of the weights, "
            f"{dtype!r}: "
            "use 'auto', or fp8_e4m3 or fp8_e5m2 for half the memory."
        )
    if name == "float8_e4m3fn" and capability < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype is {asked!r}, but this GPU (compute capability {capability[0]}.{capability[1]}) "
            "cannot "
            "convert it: use fp8_e5m2, or a GPU of 8.9 or more."
        )
    return name, "as asked for"


def cpu_computes_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or an Arm CPU with BF16)."""
    path = "/proc/cpuinfo"
    if not os.path.exists(path):
        return False
    with open(path) as file:
        flags = next((line.split() for line in file if line.startswith(("flags", "Features"))), [])
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
