"""How a transformers model reaches the engine's attention, and what each of its layers asks of it.

transformers lets a model's attention be replaced by name (``AttentionInterface``). Under ``PAGED`` the
queries, keys and values of every layer come here: keys and values go into the cache, and the engine attends.
Under ``PROBE`` the model runs once, on tensors without contents, to tell what its layers are: heads,
dimensions, scale, window, soft cap, sinks. What a layer says of its mask (``AttentionMaskInterface``) counts,
not what its configuration seems to mean.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kernels_triton_free.paged_cache import write_kv
from minivllm.errors import ModelError
from minivllm.models.shards import OwnHeads
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache
from minivllm.transformers_models.layers.experts import OURS, compute_experts
from minivllm.transformers_models.trace.operators import LayerAttention, StepHolder

PAGED, PROBE = "minivllm", "minivllm_probe"
PROBE_TOKENS = 7
ONE_AT_A_TIME = threading.Lock()
"""Held while a model is built or probed:
what that changes, such as PyTorch's default dtype, is the whole process's."""

MaskRule = Callable[[Any, Any, Any, Any], Any]
"""transformers' masks: (batch, head, query position, key position) -> visible."""

_KNOWN_TENSORS = ("s_aux", "position_ids", "cache_position", "position_embeddings")
"""Tensors that attention functions are given and that need nothing here but what is done with them."""


class PagedLayer:
    """Hangs on an attention module, and knows which layer that is.
    ``step`` is shared by all layers of a model."""

    def __init__(
        self, index: int, layer: LayerAttention, attention_dtype: torch.dtype, holder: StepHolder
    ) -> None:
        self.index = index
        self.layer = layer
        self.dtype = attention_dtype
        self.holder = holder

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """q [1, heads, tokens, D], k, v [1, kv_heads, tokens, D] -> [1, tokens, heads, D of v]."""
        step, layer = self.holder.step, self.layer
        assert step is not None, "the model runs outside of a step"
        q, k, v, sinks = layer.own_part(q, k, v, sinks)
        if step.attend is None:
            return torch.ops.minivllm.attend(q, k, v, sinks, self.index)
        cache: LayerCache = step.caches[self.index]
        write_kv(cache.k, cache.v, *layer.keys_and_values(k, v), cache.slots)
        own_sinks = None if sinks is None else sinks.float()
        return layer.output(step.attend(self.index, layer.queries(q, self.dtype), own_sinks), q.dtype)


class OwnPositions:
    """Stands in the place of transformers' cache for layers that count positions themselves, from the length
    of what is cached: for each token of the step, the difference between its position and its place in the
    step."""

    def __init__(self, positions: Tensor) -> None:
        places = torch.arange(positions.shape[0], dtype=positions.dtype, device=positions.device)
        self._before = positions - places

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """int [tokens]."""
        return self._before

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values as they are: attention stores them."""
        return k, v


def counts_positions(module: nn.Module) -> bool:
    """Whether a layer's attention asks the cache how long it is, besides being told positions."""
    return "get_seq_length" in inspect.getsource(type(module).forward)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    return layer.attend(query, key, value, options.get("s_aux")), None


class Probe:
    """One run on tensors without contents,
    in which every layer's attention is recorded instead of computed."""

    _current: Probe | None = None

    def __init__(
        self,
        model: nn.Module,
        windows: set[int],
        chunks: set[int],
        whole: Sequence[tuple[int, OwnHeads]] = (),
    ) -> None:
        """windows, chunks: sizes that the configuration names,
        among which that of a layer's mask is looked for.

        whole: (query heads of the whole layer, this worker's) in a model of which this worker has a part.
        """
        self.layers: list[LayerAttention] = []
        self._whole = whole
        self._names = {module: name for name, module in model.named_modules()}
        self._windows = windows
        self._chunks = chunks

    @contextmanager
    def recording(self) -> Iterator[None]:
        from transformers import masking_utils

        with ONE_AT_A_TIME:
            find_packed = masking_utils.find_packed_sequence_indices
            Probe._current = self
            # It looks at the values of positions, which a tensor without contents does not have.
            masking_utils.find_packed_sequence_indices = lambda position_ids: None
            try:
                yield
            finally:
                masking_utils.find_packed_sequence_indices = find_packed
                Probe._current = None

    def record(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        name = self._names.get(module, type(module).__name__)
        strange = [
            key for key, value in options.items() if isinstance(value, Tensor) and key not in _KNOWN_TENSORS
        ]
        if strange:
            _refuse(name, f"its attention adds {strange[0]}, which the engine's does not know")
        own = self._own_heads(name, q)
        if own is not None:
            q, k, v = q[:, own.heads], k[:, own.kv_heads], v[:, own.kv_heads]
        if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            _refuse(
                name,
                f"{q.shape[1]} query heads do not share {k.shape[1]} and {v.shape[1]} heads of k and v "
                "evenly",
            )
        if q.shape[2] != PROBE_TOKENS or k.shape[2] != PROBE_TOKENS:
            _refuse(name, f"it attends from {q.shape[2]} to {k.shape[2]} tokens in a step of {PROBE_TOKENS}")
        if mask is None and not getattr(module, "is_causal", True):
            _refuse(name, "it attends to tokens behind the query")
        scaling = options.get("scaling")
        scale = q.shape[3] ** -0.5 if scaling is None else float(scaling)
        self.layers.append(
            LayerAttention(
                module=name,
                kv_heads=k.shape[1],
                head_dim=q.shape[3],
                value_dim=v.shape[3],
                spec=self._spec(name, mask, q.shape[1] // k.shape[1], scale, options),
                own=own,
            )
        )
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

    def _own_heads(self, name: str, q: Tensor) -> OwnHeads | None:
        """Those to pick, where a module of a divided model computes all heads."""
        if not self._whole:
            return None
        num_heads, own = self._whole[len(self.layers)]
        given, expected = q.shape[1], own.heads.stop - own.heads.start
        if given not in (num_heads, expected):
            _refuse(name, f"it computes {given} of {num_heads} heads where this worker has {expected}")
        return own if given > expected else None

    def _spec(self, name: str, mask: Any, group: int, scale: float, options: dict[str, Any]) -> AttentionSpec:
        soft_cap = options.get("softcap")
        kind: str = "window"
        size: int | None = options.get("sliding_window")  # all there is where the model builds no mask
        if mask is not None:
            if not isinstance(mask, RecordedMask):
                _refuse(name, "it builds its attention mask by itself")
            kind, size = mask.fit(self._windows, self._chunks) or _refuse(
                name, "its attention mask is neither causal, nor a sliding window, nor in chunks"
            )
        return AttentionSpec(
            window=size if kind == "window" else None,
            scale=scale,
            query_group=group,
            chunk=size if kind == "chunk" else None,
            soft_cap=None if soft_cap is None else float(soft_cap),
            has_sinks=options.get("s_aux") is not None,
        )


def _refuse(name: str, why: str) -> NoReturn:
    raise ModelError(f"The layer {name} cannot run on the engine's attention: {why}.")


def _probe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    probe = Probe._current
    assert probe is not None, "the model is not being probed"
    return probe.record(module, query, key, value, attention_mask, options), None


class RecordedMask:
    """Stands for a mask in a probing run: the rule it would have been made by."""

    def __init__(self, rule: MaskRule) -> None:
        self._rule = rule

    def __getitem__(self, part: Any) -> RecordedMask:
        """Some of its rows, by the same rule."""
        return self

    def fit(self, windows: set[int], chunks: set[int]) -> tuple[str, int | None] | None:
        """("window", size or None for full attention) or ("chunk", size):
        the rule that holds at all borders."""
        kinds: list[tuple[str, int | None]] = [
            ("window", None),
            *(("window", size) for size in sorted(windows)),
        ]
        kinds += [("chunk", size) for size in sorted(chunks)]
        sizes = {size for _, size in kinds if size is not None} | {PROBE_TOKENS}
        queries = sorted(
            {max(0, times * size + step) for size in sizes for times in (1, 2) for step in (-1, 0, 1)}
        )
        keys = sorted(
            {0}
            | {max(0, border + step) for q in queries for border in _borders(q, sizes) for step in (-1, 0, 1)}
        )
        q, k = torch.tensor(queries)[:, None], torch.tensor(keys)[None, :]
        with _NoPadding():
            seen = torch.as_tensor(self._rule(torch.tensor(0), torch.tensor(0), q, k)).expand(
                len(queries), len(keys)
            )
        for kind, size in kinds:
            visible = k <= q
            if kind == "chunk" and size is not None:
                visible = visible & (k // size == q // size)
            elif size is not None:
                visible = visible & (k > q - size)
            if torch.equal(visible, seen):
                return kind, size
        return None


class _NoPadding(TorchFunctionMode):
    """Tensors without contents that a mask looks at count the padding of a batch,
    of which a probe has none: zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [
            torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) and x.is_meta else x for x in args
        ]
        return func(*known, **(kwargs or {}))


def _borders(query: int, sizes: set[int]) -> set[int]:
    """Keys at which what a query sees could begin or end."""
    return {query, *(query - size for size in sizes), *(query // size * size for size in sizes)}


def _probe_mask(**arguments: Any) -> RecordedMask:
    return RecordedMask(arguments["mask_function"])


def _probe_experts(module: nn.Module, hidden_states: Tensor, *routing: Any) -> Tensor:
    """Which experts are hit is a matter of contents, and of no interest to a probe."""
    return torch.empty_like(hidden_states)


def register_with_transformers() -> None:
    """Make the attention functions known to transformers, under their names. Does no harm twice."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(PAGED, _paged_attention)
    AttentionInterface.register(PROBE, _probe_attention)
    # PAGED has no function for masks, and so no mask is built.
    AttentionMaskInterface.register(PROBE, _probe_mask)
    ExpertsInterface.register(PROBE, _probe_experts)
    ExpertsInterface.register(OURS, compute_experts)
