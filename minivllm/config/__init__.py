"""Engine configuration: what the user may set (``EngineArgs``) and what the engine runs with
(``EngineConfig``).

Both are frozen. ``EngineArgs`` keeps vLLM's names; ``EngineConfig`` is resolved from it exactly once
(``minivllm.engine.resolve``), and every value the engine picks by itself is logged with its reason.

May import: plugins.
Door: `EngineArgs` in engine_args.py, `EngineConfig` in engine_config.py.
"""

from minivllm.config.engine_args import (
    CUDA_GRAPH_MODES,
    DEVICES,
    DTYPE_NAMES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    MAX_SPECULATIVE_TOKENS,
    MODEL_IMPLS,
    PERFORMANCE_MODES,
    QUANTIZATIONS,
    SPECULATIVE_METHODS,
    CudaGraphMode,
    Device,
    EagleVersion,
    EngineArgs,
    ExecutorKind,
    SpeculativeConfig,
)
from minivllm.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ImagesConfig,
    LoRAConfig,
    NodesConfig,
    SchedulerConfig,
)
from minivllm.config.kv_transfer_config import KVLoadFailurePolicy, KVTransferConfig

__all__ = [
    "CUDA_GRAPH_MODES",
    "DEVICES",
    "DTYPES",
    "DTYPE_NAMES",
    "KV_CACHE_DTYPES",
    "LOAD_FORMATS",
    "MAX_SPECULATIVE_TOKENS",
    "MODEL_IMPLS",
    "PERFORMANCE_MODES",
    "QUANTIZATIONS",
    "SPECULATIVE_METHODS",
    "CacheConfig",
    "CudaGraphMode",
    "Device",
    "EagleVersion",
    "EngineArgs",
    "EngineConfig",
    "ExecutorKind",
    "ImagesConfig",
    "KVLoadFailurePolicy",
    "KVTransferConfig",
    "LoRAConfig",
    "NodesConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
]
