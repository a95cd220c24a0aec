"""What the engine runs with, once everything is resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.config.engine_args import CudaGraphMode, Device, ExecutorKind, SpeculativeConfig
from minivllm.config.kv_transfer_config import KVTransferConfig


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache: block size [tokens], explicit size if any, element type, prefix reuse,
    of whole blocks or to the token."""

    block_size: int = 64
    num_blocks: int | None = None
    memory_bytes: int | None = None
    memory_utilization: float = 0.9
    dtype: str = "float32"
    enable_prefix_caching: bool = True
    reuse_partial_blocks: bool = True


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of one request.

    num_lookahead_tokens: room behind the scheduled tokens, into which a drafter with a KV cache writes its
    guesses. num_stages: of a pipeline, which steps should share the requests among.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    has_priorities: bool = False
    num_lookahead_tokens: int = 0
    num_stages: int = 1

    @property
    def longest_chunk(self) -> int:
        """Tokens of one request that a step writes at most."""
        threshold = self.long_prefill_token_threshold or self.max_num_batched_tokens
        return min(threshold, self.max_num_batched_tokens) + self.num_lookahead_tokens


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Room for adapters: slots on the device, the largest rank, and how many are kept in host memory."""

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int = 1


@dataclass(frozen=True, kw_only=True)
class NodesConfig:
    """Hosts that share the workers of one model evenly: how many, which of them this one is, where the first
    one listens, and a file with the secret that they have in common."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    key_file: str


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """How the engine sees images."""

    family: str
    """Whose spans and encoder: a model_type of config.json."""
    placeholder: int
    """The token of a prompt that stands for an image, before its span takes that place."""
    unit_embeds: int
    """Embeddings of the largest unit, which is what the encoder encodes at least."""
    unit_shape: tuple[int, int, int]
    """Pixels of the largest unit: channels, height, width."""
    least_unit_shape: tuple[int, int, int]
    """Pixels of the smallest one."""
    most_embeds: int
    """Embeddings of the largest image."""
    bytes_per_embed: int
    """Of all levels."""
    most_in_prompt: int
    """Images of a prompt."""
    least_batched_tokens: int
    """Of a step: a run that sees itself is computed as a whole, beside all decodes. 0: runs may be cut."""
    max_num_batched_embeds: int
    """Embeddings that a step encodes, at least one unit's."""
    encoder_cache_bytes: int
    """Of embeddings, at least the largest image's."""
    pixel_bytes: int = 256 * 2**20
    """Most pixels that the engine core holds."""
    deeper_levels: int = 0
    """Levels of features that are added after as many of the first layers, besides those in place of
    embeddings."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine runs with, after resolution. ``model_path`` is local: a directory or a ``.gguf``
    file. ``lora`` is None where no adapters are served. tokenizer: where the tokenizer comes from, if not
    from the model. attention_backend, logits_processors: see EngineArgs. async_scheduling: one step more is
    in flight. family, model_impl, hf_overrides: what workers in other processes read the model's
    configuration with. executor: whether the worker lives in the engine's process ("uni") or elsewhere (see
    EngineArgs). kv_transfer: None where no keys and values travel. tensor_parallel_size: workers that divide
    every layer. expert_parallel: the workers of all engines have all of some experts each.
    pipeline_parallel_size: stages that the layers are dealt out to, each with so many workers.
    custom_all_reduce: they add up in shared memory, not through gloo. heartbeat_timeout: how long a step may
    take [seconds]. data_parallel_size: engines that share the machine, each with the whole model, or all of
    it but experts. nodes: None on one host. images: None where it reads text only, and no_images says why.
    eye_path: a local directory with the image encoder of a model of text; None: it is the model's."""

    model: str
    model_path: str
    load_format: str
    dtype: str
    device: Device
    seed: int
    enforce_eager: bool
    compile_in_background: bool = False
    cudagraph_mode: CudaGraphMode = "none"
    cache: CacheConfig
    scheduler: SchedulerConfig
    tokenizer: str | None = None
    quantization: str | None = None
    speculative: SpeculativeConfig | None = None
    profile: str | None = None
    lora: LoRAConfig | None = None
    attention_backend: str = "flex"
    logits_processors: tuple[Any, ...] = ()
    async_scheduling: bool = False
    family: str | None = None
    model_impl: str = "auto"
    hf_overrides: dict[str, Any] | None = None
    executor: ExecutorKind = "uni"
    kv_transfer: KVTransferConfig | None = None
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    pipeline_parallel_size: int = 1
    custom_all_reduce: bool = True
    heartbeat_timeout: float = 300.0
    data_parallel_size: int = 1
    nodes: NodesConfig | None = None
    images: ImagesConfig | None = None
    no_images: str = ""
    eye_path: str | None = None

    @property
    def images_path(self) -> str:
        """Where the image encoder and what describes it lie."""
        return self.model_path if self.eye_path is None else self.eye_path

    @property
    def shares_experts(self) -> bool:
        """Whether the workers of several engines divide the experts."""
        return self.expert_parallel and self.data_parallel_size > 1

    @property
    def num_workers(self) -> int:
        """Of one model. Those of a stage follow one another in rank."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def worker_names(self) -> list[str]:
        """Of the workers in order of rank, as people read them."""
        size, has_stages = self.tensor_parallel_size, self.pipeline_parallel_size > 1
        stages = [f" (stage {rank // size})" if has_stages else "" for rank in range(self.num_workers)]
        return [f"worker of rank {rank}{stage}" for rank, stage in enumerate(stages)]

    @property
    def local_ranks(self) -> range:
        """Of the workers on this host."""
        if self.nodes is None:
            return range(self.num_workers)
        count = self.num_workers // self.nodes.nnodes
        return range(self.nodes.node_rank * count, (self.nodes.node_rank + 1) * count)

    @property
    def num_guesses(self) -> int:
        """Drafts of each request that the workers guess after every step and keep, with async_scheduling."""
        if self.speculative is None or not self.async_scheduling:
            return 0
        return self.speculative.num_speculative_tokens

    @property
    def max_in_flight(self) -> int:
        """Steps that are handed to the workers before the results of the oldest are taken in:
        one for each stage."""
        return self.pipeline_parallel_size + self.async_scheduling
