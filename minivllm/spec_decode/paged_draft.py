"""Drafters with a model, over the blocks of the target: what they share, from a task to its guesses.

They guess token by token, all requests side by side. Where the target's token is drawn with the noise of its
position, the draft is drawn with the very same noise: the two agree as often as their distributions overlap,
up to a factor of two of the best any coupling could do, and verification needs to know nothing of the draft's
probabilities (Gumbel coupling; Daliri et al. 2024).

Block b of a request is block b of both caches, so blocks are counted once and the scheduler knows of one
model only. But a drafter computes a token when it first guesses the next one, not when the scheduler says so:
prompts come in chunks, blocks from the prefix cache, requests back from preemption, and guesses are rejected.
So beside each place of its cache it keeps a fingerprint of the text, up to there, that the keys and values in
this place stand for. A place that does not match counts as missing, and blocks that were shared for the
target are shared for the drafter too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.attention import AttentionBackend
from minivllm.batch.paged_model import PagedModel
from minivllm.batch.persistent_batch import WorkerRequest
from minivllm.batch.step_inputs import Row, StepInputs
from minivllm.compilation.compiler import RegionCompiler
from minivllm.config import CudaGraphMode
from minivllm.device.buffers import to_device
from minivllm.graphs.graph_capture import GraphBackend
from minivllm.graphs.step_graphs import StepGraphs, StepHidden
from minivllm.models.model import HiddenTap, Model
from minivllm.sampling.sampler import Sampler
from minivllm.spec_decode.drafter import DraftContext, Drafter, DraftTask, Guesses, GuessingModel

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that all its powers modulo 2 ** 64 are; the fractional part of the golden ratio mixes bits well."""


class PrefixFingerprints:
    """64 bits for every prefix of a text, quickly:
    sums of (token + 1) ** 2 times powers of a constant, modulo 2 ** 64.

    Two texts with equal fingerprints are equal but for a chance in very many;
    where they are not, guesses are bad.
    """

    def __init__(self, max_length: int) -> None:
        self._powers = np.cumprod(np.full(max_length, _MULTIPLIER, dtype=np.uint64), dtype=np.uint64)

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        """token_ids [n] int -> uint64 [n], never 0: entry i is that of the first i + 1 tokens."""
        values = token_ids.astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(values * values * self._powers[: len(values)], dtype=np.uint64)
        return sums | np.uint64(1)


class PagedDraft(Drafter):
    """Asks a model for one token after the other. It is its own GuessingModel.

    model: what guesses. A guess costs what its weights are of those that the target reads.
    """

    tap: HiddenTap | None = None
    model: Model
    caches: list[Any]

    def __init__(self, context: DraftContext, paged: PagedModel, *, token_offset: int = 0) -> None:
        """paged: builds the steps. token_offset:
        a token is computed so many places before its own (1 for EAGLE)."""
        self._batch = context.batch
        self._limits = context.limits
        self._tables = context.batch.groups[0]
        self._paged = paged
        self._token_offset = token_offset
        # Masks are those of the step that was verified; what a grammar allows next is not known yet.
        self._sampler = Sampler(context.sampling_state)

    @property
    def models(self) -> Sequence[GuessingModel]:
        return (self,)

    @property
    def backends(self) -> Sequence[AttentionBackend]:
        return self._paged.backends

    @abstractmethod
    def use_regions(self, compiler: RegionCompiler) -> None:
        """The target has changed to the regions of this compiler."""

    @abstractmethod
    def allocate_caches(self) -> None:
        """Have caches again after they were cleared."""

    @abstractmethod
    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """See GuessingModel."""

    def capture_graphs(self, mode: CudaGraphMode, backend: GraphBackend) -> None:
        """Nothing: what launches few kernels gains little."""

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        # The last guess is computed by verification, so of k guesses k - 1 need a place,
        # after the n known tokens.
        lengths = [
            min(task.max_tokens, self.num_places(task.slot) - len(task.token_ids) + 1) for task in tasks
        ]
        proposals: dict[str, list[int]] = {
            task.request_id: [] for task, length in zip(tasks, lengths) if length > 0
        }
        for step in range(max(lengths, default=0)):
            active = [task for task, length in zip(tasks, lengths) if length > step]
            slots = np.array([task.slot for task in active], dtype=np.int64)
            positions = np.array([len(task.token_ids) - 1 + step for task in active], dtype=np.int64)
            for task, token_id in zip(active, self.next_tokens(slots, positions)):
                proposals[task.request_id].append(token_id)
        return proposals

    def num_places(self, slot: int) -> int:
        """How many positions of the request in this slot have a place in the KV cache."""
        return int(self._tables.num_held[slot]) * self._tables.block_size + self._token_offset

    def next_tokens(self, slots: np.ndarray, positions: np.ndarray) -> list[int]:
        """Compute the tokens that stand at ``positions`` of ``slots`` (int [R] each; everything before them
        is known), guess the next ones, and write these into the batch."""
        owners = {request.slot: request for request in self._batch.requests.values() if request.slot >= 0}
        rows = [Row(owners[s], p - self._token_offset, 1) for s, p in zip(slots.tolist(), positions.tolist())]
        self._catch_up(rows)
        logits = self._logits(rows)[: len(rows)]
        token_ids: list[int] = self._sampler(logits, slots, positions + 1).token_ids.tolist()
        for slot, position, token_id in zip(slots.tolist(), positions.tolist(), token_ids):
            self._batch.token_ids.write(slot, position + 1, [token_id])
        return token_ids

    @abstractmethod
    def _catch_up(self, rows: list[Row]) -> None:
        """Have everything computed that stands before these rows."""

    @abstractmethod
    def _logits(self, rows: list[Row]) -> Tensor:
        """Compute these rows, one token each: logits [at least len(rows), vocab] of what follows them."""


class CachedDraft(PagedDraft):
    """Guesses with a model that has keys and values of its own in as many blocks as the target."""

    def __init__(self, context: DraftContext, model: Model, *, token_offset: int = 0) -> None:
        super().__init__(context, context.paged(model, token_offset=token_offset), token_offset=token_offset)
        self.model = model
        self.caches = self._paged.caches
        self._fingerprints = PrefixFingerprints(self._limits.max_model_len + 1)
        self._computed = np.zeros(self._tables.num_blocks * self._tables.block_size, dtype=np.uint64)
        self.use_regions(context.compiler)
        self.cost_per_token = model.weights_per_token / context.target.model.weights_per_token

    def use_regions(self, compiler: RegionCompiler) -> None:
        self._paged.use_regions(compiler)

    def allocate_caches(self) -> None:
        self._paged.allocate_caches()
        self._computed.fill(0)

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._paged.copy_blocks(0, sources, targets)
        of_blocks = self._computed.reshape(-1, self._tables.block_size)
        of_blocks[targets] = of_blocks[sources]

    def guess_ahead(self, guesses: Sequence[Guesses]) -> None:
        """The first pass computes a row for each request that ends with its newest token. The row begins
        before all that the last steps have changed, and as far behind as no more tokens are accepted than
        the host assumes: then it computes some places once more. The others compute one guess each.

        The host does not know the texts in these places, so they count as missing for everything else.
        """
        places = [self.num_places(g.request.slot) - g.request.num_tokens + 1 for g in guesses]
        counts = {g.request.slot: min(g.count, room) for g, room in zip(guesses, places)}
        rows = [
            self._newest(g, self._num_changed(g.num_verified)) for g, room in zip(guesses, places) if room > 0
        ]
        self._catch_up([Row(row.request, row.start, 1) for row in rows if not row.request.is_guessed_for])
        for row in rows:
            row.request.is_guessed_for = True
            self._forget(row, counts[row.request.slot])
        while rows:
            ends = np.cumsum([row.count for row in rows])
            fitting = max(1, int((ends <= self._limits.max_num_batched_tokens).sum()))
            self._guess_after(rows[:fitting], counts)
            rows = rows[fitting:]

    def _guess_after(self, rows: list[Row], counts: Mapping[int, int]) -> None:
        """Guess what follows these rows, which end with newest tokens. counts: guesses by batch slot."""
        step = 0
        while rows:
            inputs, logits = self._last_logits(rows)
            wanted = np.array([counts[row.request.slot] > step for row in inputs.rows])
            self._guess(inputs.row_arrays.slots[wanted], logits, wanted, step)
            step += 1
            rows = [
                Row(row.request, row.start + row.count, 1)
                for row in inputs.rows
                if counts[row.request.slot] > step
            ]

    def _newest(self, guesses: Guesses, num_changed: int) -> Row:
        """The row that ends with the newest token of a request."""
        request = guesses.request
        end = request.num_tokens - self._token_offset
        count = num_changed if request.is_guessed_for else 1
        return Row(request, end - count, count)

    def _forget(self, row: Row, num_guesses: int) -> None:
        """Places of a row, wherever it is, and of the guesses after it, are no more what they were."""
        request, end = row.request, row.start + row.count + num_guesses
        start = max(0, row.start - request.num_unsure_tokens)
        end = min(end, self.num_places(request.slot) - self._token_offset)
        self._computed[self._places(request.slot, np.arange(start, end))] = 0

    def _guess(self, slots: np.ndarray, logits: Tensor, wanted: np.ndarray, step: int) -> None:
        """Guess number ``step`` of the requests in these slots int64 [R], put behind their tokens. logits
        [rows, vocab], wanted bool [rows]: those of the slots."""
        true_lengths = self._batch.true_lengths
        assert true_lengths is not None
        if not len(slots):
            return
        index = to_device(slots, logits.device)
        if len(slots) < len(wanted):
            logits = logits[to_device(np.flatnonzero(wanted), logits.device)]
        positions = true_lengths.lengths[index] + step
        token_ids = self._sampler(logits, slots, positions, with_logprobs=False).token_ids
        self._batch.token_ids.put_at(index, positions, token_ids)

    @abstractmethod
    def _num_changed(self, num_verified: int) -> int:
        """Places of a request, up to that of its newest token, in which the last step and the guesses before
        it may have left what does not belong there, or nothing. num_verified: see Guesses."""

    @abstractmethod
    def _last_logits(self, rows: list[Row]) -> tuple[StepInputs, Tensor]:
        """Compute these rows, in the order of the inputs' rows: logits [rows, vocab] of what follows each."""

    def _catch_up(self, rows: list[Row]) -> None:
        """In passes within the limits of a step."""
        missing = [gap for row in rows for gap in self._missing(row)]
        while missing:
            room, now = self._limits.max_num_batched_tokens, list[Row]()
            while missing and room > 0 and len(now) < self._limits.max_num_seqs:
                row = missing.pop()
                count = min(row.count, room)
                now.append(Row(row.request, row.start, count))
                room -= count
                if count < row.count:
                    missing.append(Row(row.request, row.start + count, row.count - count))
            self._compute(now)

    @abstractmethod
    def _missing(self, row: Row) -> list[Row]:
        """Spans of the row's request, before the row, that ``_compute`` has to be called with."""

    @abstractmethod
    def _compute(self, rows: list[Row]) -> Any:
        """Put keys and values of these rows into the caches."""

    def _places(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where positions int [n] of slots (int [n], or one) lie in the caches."""
        return self._tables.cache_slots(slots, positions)

    def _texts(self, request: WorkerRequest, count: int) -> np.ndarray:
        """Fingerprints of what the first ``count`` places are computed from:
        the text up to the token of each."""
        offset = self._token_offset
        return self._fingerprints(self._batch.token_ids.host[request.slot, : count + offset])[offset:]


class DraftDecoder(CachedDraft):
    """Guesses with a second, smaller model (Leviathan et al. 2023). Its attention reads everything before a
    token, so it computes from the first place on that is missing.

    Its vocabulary is the target's, but may be padded to another width: logits of ids that only one of them
    has are cut or minus infinity, and an id of a prompt that its embedding lacks is read as the last one it
    has.
    """

    def __init__(self, context: DraftContext, model: Model) -> None:
        super().__init__(context, model)
        self._width = context.target.model.vocab_size
        self.graphs: StepGraphs | None = None

    def capture_graphs(self, mode: CudaGraphMode, backend: GraphBackend) -> None:
        """Its passes take the graphs that steps of the target would, with the memory of these."""
        self.graphs = None
        if mode == "none":
            return
        limits = self._limits
        graphs = StepGraphs(
            mode,
            self._paged,
            backend,
            max_num_seqs=limits.max_step_rows,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        graphs.capture()
        self.graphs = graphs

    def _missing(self, row: Row) -> list[Row]:
        places = self._places(row.request.slot, np.arange(row.start))
        is_computed = self._computed[places] == self._texts(row.request, row.start)
        start = row.start if is_computed.all() else int(np.argmin(is_computed))
        return [Row(row.request, start, row.start - start)] if start < row.start else []

    def _forward(self, rows: list[Row]) -> tuple[StepInputs, StepHidden]:
        graph = None if self.graphs is None else self.graphs.choose([row.count for row in rows])
        if graph is None or self.graphs is None:
            inputs = self._paged.build(rows)
        else:
            inputs = self.graphs.build(rows, graph)
        if self.model.vocab_size < self._width:
            inputs.token_ids.clamp_(max=self.model.vocab_size - 1)
        if graph is None or self.graphs is None:
            return inputs, StepHidden(self._paged.forward(inputs))
        return inputs, self.graphs.forward(inputs, graph)

    def _compute(self, rows: list[Row]) -> tuple[StepInputs, StepHidden]:
        inputs, hidden = self._forward(rows)
        for row in rows:
            end = row.start + row.count
            places = self._places(row.request.slot, np.arange(row.start, end))
            self._computed[places] = self._texts(row.request, end)[row.start :]
        return inputs, hidden

    def _logits(self, rows: list[Row]) -> Tensor:
        inputs, hidden = self._compute(rows)
        if hidden.logits is not None:
            return self._of_target_width(hidden.logits)
        index = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=self.model.device)
        return self._of_target_width(self.model.logits(hidden.hidden, index, inputs.tokens))

    def _num_changed(self, num_verified: int) -> int:
        """That of the newest token, and of the last draft, which was never an input. The accepted ones before
        it were."""
        return 2

    def _last_logits(self, rows: list[Row]) -> tuple[StepInputs, Tensor]:
        inputs, hidden = self._forward(rows)
        index, count = self._paged.last_tokens(inputs)
        if hidden.logits is None:
            logits = self.model.logits(hidden.hidden, index, inputs.tokens)[:count]
        else:
            logits = hidden.logits[index[:count]]
        return inputs, self._of_target_width(logits)

    def _of_target_width(self, logits: Tensor) -> Tensor:
        return torch.nn.functional.pad(logits, (0, self._width - logits.shape[1]), value=-torch.inf)
