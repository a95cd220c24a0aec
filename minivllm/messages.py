"""What travels between frontend, engine core and workers.
Typed msgspec structs: every one encodes as msgpack.

Frontend -> core: ``EngineRequest``. Core -> frontend: ``EngineOutput``.
Core -> workers: ``SchedulerOutput``, then the ``TokenMasks`` of that step.
Workers -> core: ``ModelRunnerOutput``.
"""

from __future__ import annotations

from enum import StrEnum
from math import prod

import msgspec

from minivllm.sampling_params import PoolingParams, SamplingParams

BlockIds = tuple[list[int], ...]
"""Physical block ids of one request, one list per KV cache group."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EventType(StrEnum):
    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class EngineEvent(msgspec.Struct, frozen=True):
    """Something that happened to a request; ``timestamp`` is time.monotonic() of the core [seconds]."""

    type: EventType
    timestamp: float


class LoRARequest(msgspec.Struct, frozen=True):
    """A low-rank adapter to answer with, in vLLM's order of fields.

    lora_name: what it is called from here on, and told apart by. lora_int_id: a label of the caller's, as
    vLLM has it. lora_path: local directory in PEFT's format (adapter_config.json and
    adapter_model.safetensors).
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


class FeatureLines(msgspec.Struct, frozen=True):
    """How features of an image's tiles become lines, each with a newline at its end (LLaVA-NeXT).

    The first unit is the whole image, whose features stand before the lines. The tiles follow, row by row.
    """

    tiles: tuple[int, int]
    """Rows and columns of tiles."""
    margin: tuple[int, int]
    """Rows at the top and as many at the bottom, columns on the left and as many on the right: they are left
    out, since they show padding [features]."""
    size: tuple[int, int]
    """Rows and columns to which the others are resized [features]."""


class ImageItem(msgspec.Struct, frozen=True):
    """An image of a prompt. Its span is all tokens that it brings."""

    digest: bytes
    """Of its pixels, 32 bytes."""
    offset: int
    """Position of the span."""
    length: int
    """Tokens of the span."""
    runs: list[tuple[int, int]]
    """(first, count) of placeholders in a row, counted from offset."""
    unit_embeds: int
    """Embeddings of a unit, the least that is encoded."""
    unit_shape: tuple[int, int, int]
    """Pixels of a unit: channels, height, width."""
    num_units: int
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of the only run, where a model rotates them in space (Qwen-VL)."""
    sees_itself: bool = False
    """All placeholders of a run see each other (Gemma 3), so a step computes a run as a whole."""
    lines: FeatureLines | None = None
    """None where embeddings are read in the order in which they are encoded. Otherwise they are read when all
    units are encoded."""

    @property
    def num_embeds(self) -> int:
        """Encoded ones."""
        return self.unit_embeds * self.num_units

    @property
    def num_kept(self) -> int:
        """Embeddings that are kept when all units are encoded: one for each placeholder. As many as there
        were, except where they become lines."""
        return sum(count for _, count in self.runs)

    @property
    def unit_bytes(self) -> int:
        """Of the pixels of a unit."""
        return prod(self.unit_shape)

    @property
    def end(self) -> int:
        """The position in the prompt after the last placeholder."""
        return self.offset + sum(self.runs[-1])

    def whole_runs(self, end: int) -> int:
        """Where a step ends that could end before position ``end``: not inside a run that sees itself."""
        for first, count in self.runs if self.sees_itself else ():
            if self.offset + first < end < self.offset + first + count:
                return self.offset + first
        return end


class UnitsToEncode(msgspec.Struct, frozen=True):
    """Units of an image that takes the room of num_embeds embeddings, from number ``first`` on.
    pixels: uint8 [units, channels, height, width], which is ``shape``. lines: what all embeddings become with
    these units; None where they stay what they are, or where more units follow."""

    digest: bytes
    first: int
    num_embeds: int
    shape: tuple[int, ...]
    pixels: bytes
    lines: FeatureLines | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate (n > 1 is split by the frontend).

    eos_token_ids: every id that ends a sequence of this model. bad_words_token_ids: sequences of ids that may
    not be completed. cache_salt: separates prefix-cache entries of tenants. arrival_time: time.monotonic()
    [seconds]. thinking_token_ids: opening and closing tag of thoughts, with sampling_params.thinking_budget.
    lora: the adapter to use, None for the model as it is. pooling: give one vector and no tokens; max_tokens
    is then 0. images: in the order of their spans."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    seed: int
    arrival_time: float
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    thinking_token_ids: tuple[list[int], list[int]] | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    images: list[ImageItem] = []


class PositionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position.
    Entry 0 is the token that stands there; the likeliest ones follow, or those that the request named.

    token_ids, logprobs: [1 + k]. rank: rank of the token that stands there, 1 is the likeliest. other_ranks:
    [k] of named tokens; empty where the likeliest follow, whose ranks are 1 to k.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    other_ranks: list[int] = msgspec.field(default_factory=list)


class EngineOutput(msgspec.Struct, kw_only=True):
    """What one step did for one request.

    logprobs: one entry per new token. prompt_logprobs: one entry per prompt position of which the logprobs
    are known now (chunks arrive in order; position 0 has none and is not sent). num_cached_tokens: prompt
    tokens that came from the prefix cache. error: set with finish_reason ERROR. pooled: the vector [hidden]
    of a request with PoolingParams.
    """

    request_id: str
    new_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    events: list[EngineEvent] = msgspec.field(default_factory=list)
    error: str | None = None
    pooled: list[float] | None = None


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know of a request it sees for the first time."""

    request: EngineRequest
    block_ids: BlockIds
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """The difference for a request the workers already know.

    new_block_ids: appended to the block table, or replacing all of it if ``resumed`` (back after preemption).
    """

    request_id: str
    new_block_ids: BlockIds
    num_computed_tokens: int
    resumed: bool = False


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A block that goes on with another text. group: the KV group whose layers have it.
    source, target: block ids."""

    group: int
    source: int
    target: int


class BlockTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Whole blocks that travel. keys: their hashes; in a load that ends with a state, its name before them.
    block_ids: of each KV group, one for each key; the null block where the group's is not read. where: the
    sources of a load, the targets of a save, as the connector numbers them. transfer_id: names a load, and no
    other. part: which of several connectors moves them."""

    keys: list[bytes]
    block_ids: BlockIds
    where: list[int] = msgspec.field(default_factory=list)
    transfer_id: str = ""
    part: int = 0


class KVConnectorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector's scheduler side tells its worker side with a step. loads: begin before the step
    computes, and need not end with it. saves: blocks that are full once the step has computed. snapshots:
    states of the steps before, to be saved first of all, since the step and its loads may write into their
    slots."""

    loads: list[BlockTransfer] = msgspec.field(default_factory=list)
    saves: list[BlockTransfer] = msgspec.field(default_factory=list)
    snapshots: list[BlockTransfer] = msgspec.field(default_factory=list)


UNKNOWN = -1
"""In place of the id of a token that only the workers know."""


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step: how many tokens to compute for whom, and what changed since the last step.

    num_scheduled_tokens keeps the order in which requests were scheduled. draft_token_ids: tokens to verify;
    UNKNOWN for guesses that only the workers know. num_guesses: how many guesses the workers make after this
    step, which stay there; requests that are not named get none.
    finished_request_ids: each id is sent exactly once. block_copies: made before anything is computed or
    loaded, and after snapshots are saved; all sources are read before any target is written.
    kv_connector_metadata: None if nothing travels. forget: digests of images whose embeddings are dropped;
    encode: what is encoded after that, and before tokens are computed.
    """

    num_scheduled_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    new_requests: list[NewRequestData] = msgspec.field(default_factory=list)
    cached_requests: list[CachedRequestData] = msgspec.field(default_factory=list)
    draft_token_ids: dict[str, list[int]] = msgspec.field(default_factory=dict)
    num_guesses: dict[str, int] = msgspec.field(default_factory=dict)
    finished_request_ids: list[str] = msgspec.field(default_factory=list)
    preempted_request_ids: list[str] = msgspec.field(default_factory=list)
    block_copies: list[BlockCopy] = msgspec.field(default_factory=list)
    kv_connector_metadata: KVConnectorMetadata | None = None
    forget: list[bytes] = []
    encode: list[UnitsToEncode] = []

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def is_empty(self) -> bool:
        """True if there is nothing in it that workers would have to know."""
        known = self.num_scheduled_tokens or self.finished_request_ids or self.preempted_request_ids
        return not (known or self.kv_connector_metadata or self.encode)


class TokenMasks(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens may come next, for the requests of one step that do not take any.

    first_rows: request id -> its first row; a request with d draft tokens has 1 + d rows, one per position.
    bits: int32 [rows, words] in C order: bit t % 32 of word t // 32 is set where token t may come.
    words: of one row.
    """

    first_rows: dict[str, int]
    bits: bytes
    words: int


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """Results of one step, by request id.

    sampled_token_ids: the new tokens of each request that reached its last known token in this step; requests
    whose prompt is only partly computed are absent. logprobs: one entry per sampled token, only where asked
    for. prompt_logprobs: positions finished in this step, only where asked for. pooled: vectors of requests
    with PoolingParams whose last token was computed, which sample none.
    draft_token_ids: guesses of what follows the sampled tokens.
    expected_attention_seconds, measured_attention_seconds: of all layers of this worker; 0 where nothing is
    expected, see ``minivllm.attention.costs``.
    """

    sampled_token_ids: dict[str, list[int]] = msgspec.field(default_factory=dict)
    logprobs: dict[str, list[PositionLogprobs]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[str, list[PositionLogprobs]] = msgspec.field(default_factory=dict)
    pooled: dict[str, list[float]] = msgspec.field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = msgspec.field(default_factory=dict)
    expected_attention_seconds: float = 0.0
    measured_attention_seconds: float = 0.0


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of one KV group. name: "full attention", "sliding window of 1024". num_blocks: without the
    null block. usage: share of them that is in use, 0 to 1."""

    name: str
    num_blocks: int
    usage: float


class KVTransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """What has travelled since the start. tier: the connector's name. hit_tokens: found there.
    num_failed_blocks: were missing or broken. block_bytes: of one block over all layers and workers.
    num_loads: that have ended; loads_within: (seconds, how many of them took at most so long); load_seconds:
    of all together."""

    tier: str
    block_bytes: int
    hit_tokens: int
    num_loaded_blocks: int
    num_saved_blocks: int
    num_failed_blocks: int
    num_loads: int = 0
    loads_within: list[tuple[float, int]] = []
    load_seconds: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The core's state after a step; counters run from the start of the engine.

    kv_cache_usage: share of the blocks that are in use, 0 to 1, in the pool that has the fewest left.
    kv_cache_pools: of each KV group. prefix_cache_copied_tokens: those hit tokens that copies of blocks gave.
    num_drafts: verifications of at least one drafted token. num_draft_tokens, num_accepted_tokens: drafted
    tokens that were verified, and those of them that were kept. num_accepted_tokens_per_position: how many
    verifications kept their first, second, … drafted token. kv_transfer: of each tier. worker_resident_bytes:
    memory of the process that each worker lives in, by rank. expected_attention_seconds,
    measured_attention_seconds: of all steps for which a worker could tell both, by the last stage's first
    worker.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    kv_cache_pools: list[PoolStats] = []
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_copied_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = msgspec.field(default_factory=list)
    kv_transfer: list[KVTransferStats] = []
    worker_resident_bytes: list[int] = []
    expected_attention_seconds: float = 0.0
    measured_attention_seconds: float = 0.0


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """Cached tokens that follow one another without a branch; nodes come after the one that they continue."""

    depth: int
    """Nodes before it on the way from the root."""
    num_tokens: int
    token_ids: list[int]
    """The first ones; empty if not is_plain."""
    is_plain: bool
    """Whether the beginning is known, and has neither a cache salt nor an adapter."""
    num_blocks: int
    """Blocks that end in this node, equal ones included."""
    num_bytes: int
    """Of these blocks over all layers of their KV group and all workers."""
    users: int
    """Requests that hold it now."""
    age: float
    """Seconds since the last request gave it up; 0 while one holds it."""


class PrefixTree(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache of an engine as a tree, for people to look at."""

    nodes: list[PrefixNode]
    """Depth first."""
    num_blocks_left_out: int
    """Different ones that no node shows."""


class RecentStep(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler decided in a step, for people to look at. step: its number, from 1.

    num_scheduled_tokens: per request. unfinished_prompts: those that sampled nothing, because known tokens
    remained to be computed. preempted: those that lost their place. loading: those that wait for keys and
    values from elsewhere.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    unfinished_prompts: set[str]
    preempted: list[str]
    loading: list[str] = []
