"""What the user may set about keys and values that travel, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from minivllm.errors import ConfigError
from minivllm.plugins.points import CONNECTORS

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVLoadFailurePolicy = Literal["recompute", "fail"]


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Where keys and values go besides the KV cache, and come from.

    kv_connector: "OffloadingConnector" (host memory),
    "SharedStorageConnector" (a directory), "LookupBufferConnector"
        (another engine), "LMCacheConnector" (LMCache's server), "MultiConnector" (several), a name given to
        minivllm.register_connector, or "package.module:Class".
    kv_role: "kv_producer" only saves, "kv_consumer" only loads, "kv_both" does both.
    kv_load_failure_policy: what becomes of a request whose keys and values do not arrive: "recompute" them,
    or "fail". kv_connector_extra_config: the connector's own settings.
    fingerprint: digest of all that decides what a block of known tokens holds,
    the model's files among it; settings:
        of all but the files. Filled in when the engine starts, for connectors whose blocks outlive it.
    """

    kv_connector: str
    kv_role: KVRole = "kv_both"
    kv_load_failure_policy: KVLoadFailurePolicy = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    settings: str = ""

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def saves(self) -> bool:
        return self.kv_role != "kv_consumer"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> KVTransferConfig:
        """Build from what the user wrote. Raises ConfigError naming the key and what it may be."""
        known = [one.name for one in fields(cls) if one.name not in ("fingerprint", "settings")]
        if not isinstance(values, dict):
            raise ConfigError(
                f"kv_transfer_config is {values!r}, but must be a dictionary with a 'kv_connector'."
            )
        for key in values:
            if key not in known:
                raise ConfigError(f"kv_transfer_config has a key {key!r}, but may have: {', '.join(known)}.")
        CONNECTORS.check(values.get("kv_connector"))
        for key, kind in (("kv_role", KVRole), ("kv_load_failure_policy", KVLoadFailurePolicy)):
            allowed = cast(tuple[str, ...], get_args(kind))
            if values.get(key, allowed[0]) not in allowed:
                raise ConfigError(
                    f"kv_transfer_config[{key!r}] is {values[key]!r}, but must be one of "
                    f"{', '.join(allowed)}."
                )
        extra = values.get("kv_connector_extra_config", {})
        if not isinstance(extra, dict):
            raise ConfigError(
                f"kv_transfer_config['kv_connector_extra_config'] is {extra!r}, but must be a dictionary."
            )
        return cls(**values)


def portable_transfer(values: dict[str, Any]) -> dict[str, Any]:
    """The same with connectors named so that another process understands them. Raises ConfigError."""
    values = {**values, "kv_connector": CONNECTORS.portable(values["kv_connector"])}
    extra = values.get("kv_connector_extra_config", {})
    if values["kv_connector"] == "MultiConnector" and isinstance(extra.get("connectors"), list):
        own = extra["connectors"]  # what is wrong with them is said when they are made
        named = [isinstance(one, dict) and isinstance(one.get("kv_connector"), str) for one in own]
        own = [portable_transfer(one) if is_named else one for one, is_named in zip(own, named)]
        values["kv_connector_extra_config"] = {**extra, "connectors": own}
    return values
