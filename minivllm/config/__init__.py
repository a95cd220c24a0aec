"""Engine configuration: what the user may set (``EngineArgs``) and what the engine runs with (``EngineConfig``).

Both are frozen. ``EngineArgs`` keeps vLLM's names; ``EngineConfig`` is resolved from it exactly once
(``minivllm.engine.resolve``), and every value the engine picks by itself is logged with its reason.

May import: the vocabulary only.
Door: `EngineArgs` in engine_args.py, `EngineConfig` in engine_config.py.
"""

from minivllm.config.engine_args import PERFORMANCE_MODES, CudaGraphMode, Device, EngineArgs, SpeculativeConfig
from minivllm.config.engine_config import CacheConfig, EngineConfig, LoRAConfig, SchedulerConfig

__all__ = [
    "PERFORMANCE_MODES",
    "CacheConfig",
    "CudaGraphMode",
    "Device",
    "EngineArgs",
    "EngineConfig",
    "LoRAConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
]
