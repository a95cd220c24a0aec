"""What can be plugged in, by seam: the names that settings take, and whose classes they stand for.

A setting names one of ours, one that was registered under a name, or any importable one as "package.module:Class".
What was registered counts in its own process: an engine in another process is given the import path instead.

Annexes, folders that few starts need, are found here alone: no import leads into them from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from minivllm.errors import ConfigError


def import_object(what: str, path: str) -> Any:
    """The object that "package.module:Name" stands for. what: how the error names it. Raises ConfigError."""
    module, separator, qualified = path.partition(":")
    if not separator or not module or not qualified:
        raise ConfigError(f"{what} is {path!r}, but must name a class or an object as 'package.module:Class'.")
    try:
        found: Any = import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} is {path!r}, which cannot be imported: {error}.") from None
    return found


def import_path(found: Any) -> str | None:
    """ "package.module:Name" of a class or function that another process can import, else None."""
    module, qualified = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if module in (None, "__main__") or "<locals>" in qualified:
        return None
    return f"{module}:{qualified}"


class Plugins:
    """The implementations of one seam. setting: the name of the engine argument. ours: name -> the implementation, or
    its import path, so that names can be checked without importing what they stand for. known: a view of those and what
    was registered."""

    def __init__(self, setting: str, ours: Mapping[str, Any]) -> None:
        self._setting = setting
        self._ours = ours
        self._known = dict(ours)
        self.known: Mapping[str, Any] = MappingProxyType(self._known)

    def is_ours(self, name: str) -> bool:
        """Whether ``name`` is built in."""
        return name in self._ours

    def register(self, name: str, implementation: Any) -> None:
        """Let the setting take ``name`` for ``implementation``; what that must be differs by seam, see below.

        name: letters, digits, underscores and hyphens, not beginning with a digit. The same name again replaces what
        was registered. Raises ConfigError for another name, or one that is built in.
        """
        if not name.replace("-", "_").isidentifier():
            raise ConfigError(
                f"{self._setting} cannot be called {name!r}: use letters, digits, hyphens and underscores."
            )
        if name in self._ours:
            raise ConfigError(f"{self._setting} {name!r} is built in: choose another name.")
        self._known[name] = implementation

    def check(self, name: object) -> None:
        """Raise ConfigError unless ``name`` is known or has the form of an import path; imports nothing."""
        if not isinstance(name, str) or (name not in self._known and ":" not in name):
            known = ", ".join(self._known)
            raise ConfigError(f"{self._setting} is {name!r}, but must be one of {known}, or a 'package.module:Class'.")

    def load(self, name: str) -> Any:
        """The implementation. Raises ConfigError if it is unknown or cannot be imported."""
        self.check(name)
        found = self._known.get(name, name)
        return import_object(self._setting, found) if isinstance(found, str) else found

    def portable(self, name: str) -> str:
        """A name that another process understands as well. Raises ConfigError if there is none."""
        found = self._known.get(name, name)
        if isinstance(found, str):
            return name
        path = import_path(found)
        if path is None:
            raise ConfigError(
                f"{self._setting} {name!r} is defined where another process cannot import it: put it into a module."
            )
        return path


POLICIES = Plugins(
    "scheduling_policy",
    {
        "fcfs": "minivllm.scheduler.policy:FirstComeFirstServed",
        "priority": "minivllm.scheduler.policy:ByPriority",
        "response-ratio": "minivllm.scheduler.response_ratio:ByResponseRatio",
    },
)
"""A policy is a subclass of SchedulingPolicy: the class itself, which is called without arguments; no function."""
ATTENTION = Plugins(
    "attention_backend",
    {"flex": "minivllm.attention.flex:rule_attention", "sdpa": "minivllm.attention.sdpa:SdpaAttention"},
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
    """A class without arguments: a ``worker.model_loader.ModelLoader``."""


MODEL_IMPLEMENTATIONS: Mapping[str, ModelImplementation] = MappingProxyType(
    {
        "minivllm": ModelImplementation(
            "minivllm.checkpoints.choose:describe_decoder", "minivllm.worker.model_loader:DecoderLoader"
        ),
        "transformers": ModelImplementation(
            "minivllm.transformers_models.describe.config:describe_transformers_model",
            "minivllm.transformers_models.loader:TransformersLoader",
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
"""``distributed_executor_backend``, or "nodes" for "mp" on several hosts -> the import path of a function from
ExecutorContext to Executor."""
CODE_GENERATORS: tuple[str, ...] = ("kernels_triton_free.cpu_code.install:install",)
"""Import paths of functions without arguments that change what Inductor generates, called before it compiles."""
NODE_AGENT = "minivllm.executor.nodes.entry:run_node"
"""The import path of a function from EngineConfig to an exit status: what runs on the hosts that have no engine."""
CLIENTS: Mapping[str, str] = MappingProxyType(
    {"external_launcher": "minivllm.engine_process.torchrun.client:TorchrunClient"}
)
"""``distributed_executor_backend`` -> the import path of a function from EngineArgs to EngineClient, where another
program has started the workers, and each of them makes a client."""
COMMANDS: Mapping[str, str] = MappingProxyType(
    {"bench": "minivllm.bench.command:bench", "simulate": "minivllm.bench.simulation.command:simulate"}
)
"""Commands of ``minivllm`` -> the import path of a typer application or a function, imported on request."""
register_connector, register_routing = CONNECTORS.register, ROUTING.register
register_policy, register_attention, register_drafter = POLICIES.register, ATTENTION.register, DRAFTERS.register
