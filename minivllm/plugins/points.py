"""All extension points: what can be plugged in, by name.

Annexes, folders that few starts need, are named here alone: no import leads into them from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from minivllm.plugins.plugin import Plugins

POLICIES = Plugins(
    "scheduling_policy",
    {
        "fcfs": "minivllm.scheduler.policy:FirstComeFirstServed",
        "priority": "minivllm.scheduler.policy:ByPriority",
        "response-ratio": "minivllm.scheduler.response_ratio:ByResponseRatio",
    },
)
"""A policy is a subclass of SchedulingPolicy: the class itself, which is called without arguments;
no function."""
ATTENTION = Plugins(
    "attention_backend",
    {
        "flex": "minivllm.attention.flex:rule_attention",
        "flex-shared": "minivllm.attention.shared_tiles:shared_attention",
        "sdpa": "minivllm.attention.uncompiled.sdpa:SdpaAttention",
    },
)
"""AttentionContext -> AttentionBackend: a function, or the class of a backend."""
DRAFTERS = Plugins(
    "speculative_config['method']",
    {
        "ngram": "minivllm.spec_decode.speculation:ngram",
        "suffix": "minivllm.spec_decode.speculation:suffix",
        "early_exit": "minivllm.spec_decode.speculation:early_exit",
        "draft_model": "minivllm.spec_decode.speculation:draft_model",
        "eagle": "minivllm.spec_decode.eagle.drafter:eagle",
        "eagle3": "minivllm.spec_decode.eagle.drafter:eagle",
        "mtp": "minivllm.spec_decode.eagle.drafter:eagle",
    },
)
"""DraftContext -> Drafter: a function, or the class of a drafter."""
CONNECTORS = Plugins(
    "kv_transfer_config['kv_connector']",
    {
        "OffloadingConnector": "minivllm.kv_transfer.connectors.offloading:OffloadingConnector",
        "SharedStorageConnector": "minivllm.kv_transfer.connectors.shared_storage:SharedStorageConnector",
        "LookupBufferConnector": "minivllm.kv_transfer.lookup.lookup_connector:LookupBufferConnector",
        "LMCacheConnector": "minivllm.kv_transfer.foreign.lmcache_connector:LMCacheConnector",
        "NixlConnector": "minivllm.kv_transfer.foreign.nixl_connector:NixlConnector",
        "MultiConnector": "minivllm.kv_transfer.connectors.multi:MultiConnector",
    },
)
"""A connector is a subclass of KVConnector, the class itself, which names its two sides."""
ROUTING = Plugins(
    "data_parallel_policy",
    {
        "prefix": "minivllm.data_parallel.policy:PrefixAffinity",
        "round_robin": "minivllm.data_parallel.policy:RoundRobin",
    },
)
"""A policy is a subclass of RoutingPolicy: the class itself, which is called without arguments."""


class ModelImplementation(NamedTuple):
    """Import paths of what describes, makes and loads models."""

    describe: str
    """(model path, load format, overrides of config.json) -> ModelFacts."""
    loader: str
    """A class without arguments: a ``worker.loading.loader.ModelLoader``."""
    eye: str = ""
    """A function: the encoder of images of families that are not in ``multimodal.eyes``, if it has them."""


MODEL_IMPLEMENTATIONS: Mapping[str, ModelImplementation] = MappingProxyType(
    {
        "minivllm": ModelImplementation(
            "minivllm.checkpoints.choose:describe_decoder", "minivllm.worker.loading.loader:DecoderLoader"
        ),
        "transformers": ModelImplementation(
            "minivllm.transformers_models.describe.config:describe_transformers_model",
            "minivllm.transformers_models.loader:TransformersLoader",
            "minivllm.transformers_models.eye:load_eye_parts",
        ),
    }
)
"""``ModelFacts.implementation`` -> what computes such models."""
EXECUTORS: Mapping[str, str] = MappingProxyType(
    {
        "uni": "minivllm.executor.uniproc:UniProcExecutor.start",
        "mp": "minivllm.executor.multiproc:MultiprocExecutor.start",
        "nodes": "minivllm.executor.nodes.entry:start_executor",
        "ray": "minivllm.engine_process.ray.executor:RayExecutor.start",
    }
)
"""``distributed_executor_backend``,
or "nodes" for "mp" on several hosts -> the import path of a function from ExecutorContext to Executor."""
CODE_GENERATORS: tuple[str, ...] = ("kernels_triton_free.cpu_code.install:install",)
"""Import paths of functions without arguments that change what Inductor generates,
called before it compiles."""
NODE_AGENT = "minivllm.executor.nodes.entry:run_node"
"""The import path of a function from EngineConfig to an exit status:
what runs on the hosts that have no engine."""
CLIENTS: Mapping[str, str] = MappingProxyType(
    {"external_launcher": "minivllm.engine_process.torchrun.client:TorchrunClient"}
)
"""``distributed_executor_backend`` -> the import path of a function from EngineArgs to EngineClient, where
another program has started the workers, and each of them makes a client."""
COMMANDS: Mapping[str, str] = MappingProxyType(
    {"bench": "minivllm.bench.command:bench", "simulate": "minivllm.bench.simulation.command:simulate"}
)
"""Commands of ``minivllm`` -> the import path of a typer application or a function, imported on request."""
register_connector, register_routing = CONNECTORS.register, ROUTING.register
register_policy, register_attention, register_drafter = (
    POLICIES.register,
    ATTENTION.register,
    DRAFTERS.register,
)
