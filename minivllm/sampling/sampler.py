"""From the logits of a step to its tokens.

grammar masks -> allowed ids, bad words, min_tokens, logit bias -> custom processors -> penalties ->
temperature -> custom processors that are argmax-invariant -> min-p -> top-k -> top-p -> Gumbel-max with
stateless noise. Greedy rows take the argmax of what the stages before temperature left.
Log-probabilities are those of the raw logits.

Which stages a row goes through is decided on the host, row by row: a row's token never depends on its
neighbours, and rows that need nothing cost an argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.sampling.bisection import sortable
from kernels_triton_free.sampling.draw import (
    draw,
    draw_among_likeliest,
    draw_from_candidates,
    draw_from_vocabulary,
    draw_truncated,
    has_runs,
    likeliest,
    scale_by_temperature,
    token_logprobs,
    top_candidates,
)
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.messages import PositionLogprobs
from minivllm.sampling.sampling_state import LogitsStage, SamplingState
from minivllm.sampling.token_masks import TokenMaskStage

# How many of the likeliest tokens are sorted, in turn, before the whole vocabulary is.
_NUM_CANDIDATES = (256, 4096)
# Rows of prompt logits that are widened to float32 at once, which bounds the memory a long prompt takes.
_PROMPT_ROWS_AT_ONCE = 64
# What a draw takes beside the logits, and what it takes more where rows are truncated.
_OWN = {"temperature": torch.float32, "min_p": torch.float32, "seeds": torch.int64, "positions": torch.int64}
_TRUNCATING = {"top_k": torch.int64, "top_p": torch.float32}


@dataclass(frozen=True)
class SampledTokens:
    """token_ids [R] int64 on the logits' device.
    logprobs: one entry per row, None where the request asked for none."""

    token_ids: Tensor
    logprobs: list[PositionLogprobs | None]


class Sampler:
    """Samples one token per row of logits."""

    def __init__(self, state: SamplingState, masks: Sequence[TokenMaskStage] = ()) -> None:
        """masks: come before all other stages."""
        self._state = state
        self._masks = tuple(masks)
        self._likeliest: Callable[[Tensor], Tensor] = likeliest
        # Without and with truncation, where they are compiled.
        self._draws: Sequence[Callable[..., Any]] = ()  # of all rows at once, on a GPU
        self._draws_of_kinds: Sequence[Callable[..., Any]] = ()  # of float32 rows of one kind, on a CPU
        self._drawn_dtype = torch.float32

    @property
    def _loaded_masks(self) -> list[TokenMaskStage]:
        """Those of the current step."""
        return [mask for mask in self._masks if not mask.is_empty]

    def use_regions(self, compiler: RegionCompiler, logits: torch.dtype) -> None:
        """Compiled code from now on, where logits are of this dtype: on a GPU to draw where nothing edits or
        masks any row, which asks the device for nothing; on a CPU to draw, and to find the likeliest tokens.

        These take six operators and a draw some thirty, and after a model's weights have gone through the
        CPU's cache each takes as long as if it were called for the first time: the six 0.2 ms of a step of 13
        for one row, 0.6 for 32 (SmolLM2-135M, two cores).
        """
        vocab_size, device = self._state.vocab_size, self._state.temperature.device.device
        rows = Size("rows", 5, single=1)
        spec = TensorSpec((rows, vocab_size), logits, device)
        self._drawn_dtype = logits
        if device.type != "cpu":
            self._draws = _compiled_draws(compiler, spec) if compiler.enabled else ()
            return
        if compiler.enabled and compiler.rows.fewest == 1:
            # Of edited rows too, which are float32 whatever the model's dtype.
            spec_of_rows = TensorSpec((rows, vocab_size), torch.float32, device)
            self._draws_of_kinds = _compiled_draws_on_cpu(compiler, spec_of_rows)
        else:
            self._draws_of_kinds = ()
        if not has_runs(vocab_size):
            return
        compiled = compiler(Region("likeliest tokens", likeliest, {"logits": spec}))

        def find(given: Tensor) -> Tensor:
            is_declared = (
                given.dtype == logits and given.is_contiguous() and given.shape[0] >= compiler.rows.fewest
            )
            found: Tensor = compiled(given) if is_declared else likeliest(given)
            return found

        self._likeliest = find

    def __call__(
        self,
        logits: Tensor,
        slots: np.ndarray,
        positions: Tensor | np.ndarray,
        *,
        with_logprobs: bool = True,
    ) -> SampledTokens:
        """logits [R, V] any float dtype, left as they are; slots [R] int: the slot of each row, several rows
        may share one; positions [R] int: tokens before the sampled one in its sequence. with_logprobs: as
        requests ask for them; reading them waits for the device.

        Raises ValueError if V is not the vocabulary size of the state.
        """
        if logits.shape[-1] != self._state.vocab_size:
            raise ValueError(
                f"The logits have {logits.shape[-1]} columns, but the sampling state was made for "
                f"{self._state.vocab_size}: make both with the width of the model's output layer."
            )
        slots = np.asarray(slots, dtype=np.int64)
        is_masked = any(mask.touches(slots).any() for mask in self._loaded_masks)
        if self._state.is_plain[slots].all() and not is_masked:
            return SampledTokens(self._likeliest(logits), [None] * len(slots))
        is_random = self._state.temperature.host[slots] > 0.0
        is_declared = logits.dtype == self._drawn_dtype and logits.is_contiguous()
        is_drawn = bool(self._draws) and is_declared and bool(is_random.any())
        if is_drawn and not self._changes_rows(slots, is_random):
            token_ids = self._draw_together(logits, slots, positions, is_random)
            return SampledTokens(token_ids, self._logprobs(logits, token_ids, slots, with_logprobs))
        needs_work = is_random | self.depends_on_output(slots)
        # Masks compare nothing and compute nothing:
        # where there is no more to do, logits need not become wider.
        dtype = torch.float32 if needs_work.any() else logits.dtype
        for mask in self._loaded_masks:
            needs_work |= mask.touches(slots)

        if needs_work.all():
            token_ids = self._process(logits.to(dtype, copy=True), slots, positions, is_random)
        else:
            token_ids = self._likeliest(logits)
            if needs_work.any():
                rows = to_device(np.flatnonzero(needs_work), logits.device)
                token_ids[rows] = self._process(
                    logits[rows].to(dtype),
                    slots[needs_work],
                    _select(positions, needs_work),
                    is_random[needs_work],
                )
        return SampledTokens(token_ids, self._logprobs(logits, token_ids, slots, with_logprobs))

    def _changes_rows(self, slots: np.ndarray, is_random: np.ndarray) -> bool:
        """slots [R] int, is_random [R] bool: whether a mask, or a stage, would change any row."""
        stages: list[LogitsStage | TokenMaskStage] = [*self._loaded_masks, *self._state.edits]
        return any(stage.touches(slots).any() for stage in stages) or any(
            (stage.touches(slots) & is_random).any() for stage in self._state.draw_edits
        )

    def _draw_together(
        self, logits: Tensor, slots: np.ndarray, positions: Tensor | np.ndarray, is_random: np.ndarray
    ) -> Tensor:
        """All rows by one of the draws, which waits for nothing. Returns token ids [R] int64."""
        is_truncated = bool((self._is_truncated(slots) & is_random).any())
        index, *columns = self._of_rows(slots, positions, logits.device)
        if is_truncated:
            columns += [self._state.top_k.device[index], self._state.top_p.device[index]]
        token_ids: Tensor = self._draws[is_truncated](logits, *columns)
        return token_ids

    def _is_truncated(self, slots: np.ndarray) -> np.ndarray:
        top_k = self._state.top_k.host[slots]
        is_truncated: np.ndarray = (top_k > 0) & (top_k < self._state.vocab_size)
        return is_truncated | (self._state.top_p.host[slots] < 1.0)

    def _of_rows(
        self, slots: np.ndarray, positions: Tensor | np.ndarray, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Slots of the rows on the device, then temperature, min-p, seeds and positions,
        as ``draw`` takes them."""
        state = self._state
        if isinstance(positions, Tensor):
            index, lengths = to_device(slots, device), positions.to(device=device, dtype=torch.int64)
        else:
            index, lengths = to_device(np.stack([slots, positions]).astype(np.int64, copy=False), device)
        return (
            index,
            state.temperature.device[index],
            state.min_p.device[index],
            state.seed.device[index],
            lengths,
        )

    def depends_on_output(self, slots: np.ndarray) -> np.ndarray:
        """slots [R] int -> bool [R]: rows whose next token may depend on the tokens before it in other ways
        than through their logits. Masks do not count: they are there for every position in advance."""
        depends = np.zeros(len(slots), dtype=np.bool_)
        if not self._state.is_edited[slots].any():
            return depends
        for stage in self._state.draw_edits:
            depends |= stage.touches(slots)
        depends &= self._state.temperature.host[slots] > 0.0
        for stage in self._state.edits:
            depends |= stage.touches(slots)
        return depends

    def _process(
        self, logits: Tensor, slots: np.ndarray, positions: Tensor | np.ndarray, is_random: np.ndarray
    ) -> Tensor:
        """Run all stages on logits [R, V], which are overwritten. Returns token ids [R] int64.

        They are float32, unless masks are all there is to do.
        """
        is_masked = np.zeros(len(slots), dtype=np.bool_)
        for mask in self._loaded_masks:
            is_masked |= mask.touches(slots)
            if mask.touches(slots).any():
                mask.apply(logits, slots, positions)
        edits = [stage for stage in self._state.edits if stage.touches(slots).any()]
        masked = logits.clone() if edits and is_masked.any() else None
        for stage in edits:
            stage.apply(logits, slots)
        if masked is not None:
            # Where the constraints leave nothing of what the mask allows, the mask has the last word.
            logits = torch.where(logits.amax(-1, keepdim=True) == -torch.inf, masked, logits)
        if is_random.all():
            return self._draw_rows(logits, slots, positions)
        token_ids = self._likeliest(logits)
        if is_random.any():
            rows = to_device(np.flatnonzero(is_random), logits.device)
            token_ids[rows] = self._draw_rows(logits[rows], slots[is_random], _select(positions, is_random))
        return token_ids

    def _draw_rows(self, logits: Tensor, slots: np.ndarray, positions: Tensor | np.ndarray) -> Tensor:
        """Draw from logits [R, V] float32 of rows with a temperature. Returns token ids [R] int64."""
        state, device = self._state, logits.device
        if self._draws_of_kinds and not any(stage.touches(slots).any() for stage in state.draw_edits):
            return self._draw_compiled(logits, slots, positions)
        _, temperature, min_p, seeds, positions = self._of_rows(slots, positions, device)
        scaled = scale_by_temperature(logits, temperature)
        for stage in state.draw_edits:
            if stage.touches(slots).any():
                stage.apply(scaled, slots)
        is_truncated = self._is_truncated(slots)
        if not is_truncated.any():
            return draw_from_vocabulary(scaled, torch.log(min_p), seeds, positions)
        if is_truncated.all():
            return self._draw_truncated(scaled, slots, seeds, positions)
        free = to_device(np.flatnonzero(~is_truncated), device)
        cut = to_device(np.flatnonzero(is_truncated), device)
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=device)
        token_ids[free] = draw_from_vocabulary(
            scaled[free], torch.log(min_p[free]), seeds[free], positions[free]
        )
        token_ids[cut] = self._draw_truncated(scaled[cut], slots[is_truncated], seeds[cut], positions[cut])
        return token_ids

    def _draw_compiled(self, logits: Tensor, slots: np.ndarray, positions: Tensor | np.ndarray) -> Tensor:
        """``_draw_rows`` by compiled code; truncated rows that need more candidates go on uncompiled."""
        state, draw_free, draw_cut = self._state, *self._draws_of_kinds
        is_truncated = self._is_truncated(slots)
        token_ids = torch.empty(len(slots), dtype=torch.int64)
        for of_kind in (~is_truncated, is_truncated):
            rows = np.flatnonzero(of_kind)
            if len(rows) == 0:
                continue
            own = logits if len(rows) == len(slots) else logits[rows]
            index, *columns = self._of_rows(slots[rows], _select(positions, of_kind), logits.device)
            if not is_truncated[rows[0]]:
                token_ids[rows] = draw_free(own, *columns)
                continue
            found, exact = draw_cut(own, *columns, state.top_k.device[index], state.top_p.device[index])
            if not exact.all():
                temperature, _, seeds, lengths = (column[~exact] for column in columns)
                scaled = scale_by_temperature(own[~exact], temperature)
                found[~exact] = self._draw_truncated(
                    scaled, slots[rows[~exact.numpy()]], seeds, lengths, _NUM_CANDIDATES[1:]
                )
            token_ids[rows] = found
        return token_ids

    def _draw_truncated(
        self,
        scaled: Tensor,
        slots: np.ndarray,
        seeds: Tensor,
        positions: Tensor,
        counts: Sequence[int] = _NUM_CANDIDATES,
    ) -> Tensor:
        """Draw where top-k or top-p applies: mostly among a few candidates;
        more are sorted only for rows in need.

        scaled [R, V] of the rows' slots [R]; seeds, positions [R] int64; counts: of candidates, in turn.
        Returns token ids [R] int64.
        """
        state = self._state
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=scaled.device)
        rows = np.arange(len(slots))
        for num_candidates in (*counts, state.vocab_size):
            row_index, slot_index = to_device(rows, scaled.device), to_device(slots[rows], scaled.device)
            wide = scaled if len(rows) == len(slots) else scaled[row_index]
            has_top_p = bool((state.top_p.host[slots[rows]] < 1.0).any())
            token_ids[row_index], exact = draw_from_candidates(
                wide,
                *top_candidates(wide, num_candidates),
                state.top_k.device[slot_index],
                state.top_p.device[slot_index] if has_top_p else None,
                state.min_p.device[slot_index],
                seeds[row_index],
                positions[row_index],
            )
            rows = rows[~exact.cpu().numpy()]
            if len(rows) == 0:
                break
        return token_ids

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, slots: np.ndarray, are_wanted: bool
    ) -> list[PositionLogprobs | None]:
        counts = self._state.num_logprobs[slots]
        entries: list[PositionLogprobs | None] = [None] * len(slots)
        rows = np.flatnonzero((counts >= 0) & are_wanted)
        if len(rows) > 0:
            index = to_device(rows, logits.device)
            wanted = counts[rows].tolist()
            for row, entry in zip(rows.tolist(), _position_logprobs(logits[index], token_ids[index], wanted)):
                named = self._state.logprob_token_ids.get(int(slots[row]))
                entries[row] = entry if named is None else _named_logprobs(logits[row], entry, named)
        return entries


def _columns(rows: TensorSpec, dtypes: dict[str, torch.dtype]) -> dict[str, TensorSpec]:
    """One number of each kind for each row of a tensor [R, V]."""
    return {name: TensorSpec(rows.shape[:1], dtype, rows.device) for name, dtype in dtypes.items()}


def _compiled_draws(compiler: RegionCompiler, logits: TensorSpec) -> tuple[Callable[..., Tensor], ...]:
    """``draw`` and ``draw_truncated``, compiled at once: no step of the warm-up has a temperature."""
    vocab_size, device, dtype = logits.sizes[1], logits.device, logits.dtype
    free: Callable[..., Tensor] = compiler(Region("draw", draw, {"logits": logits, **_columns(logits, _OWN)}))
    rows = Size(
        "rows", 64
    )  # any number, one row too, which comes as two: other code would take as long to compile
    values = TensorSpec((rows, vocab_size), dtype, device)
    keys = TensorSpec((rows, vocab_size), torch.int16 if dtype.itemsize == 2 else torch.int32, device)
    sort = compiler(Region("keys of logits", sortable, {"values": values}))
    cut_keys = partial(draw_truncated, dtype=dtype)
    cut = compiler(
        Region("truncated draw", cut_keys, {"keys": keys, **_columns(keys, _OWN | _TRUNCATING)}, (dtype,))
    )

    def draw_cut(*given: Tensor) -> Tensor:
        count = len(given[0])
        if count == 1:  # compiled code for any number of rows takes two at least
            given = tuple(tensor.expand(2, *tensor.shape[1:]).contiguous() for tensor in given)
        token_ids: Tensor = cut(sort(given[0]), *given[1:])
        return token_ids[:count]

    for function, declared in ((free, _OWN), (draw_cut, _OWN | _TRUNCATING)):
        for count in (compiler.rows.fewest, 2):
            ones = [torch.ones(count, dtype=kind, device=device) for kind in declared.values()]
            function(torch.zeros(count, vocab_size, dtype=dtype, device=device), *ones)
    return free, draw_cut


def _compiled_draws_on_cpu(compiler: RegionCompiler, logits: TensorSpec) -> tuple[Callable[..., Any], ...]:
    """``draw``, and for truncated rows ``draw_among_likeliest``."""
    count = _NUM_CANDIDATES[0]
    among = partial(draw_among_likeliest, num_candidates=count)
    free = Region("draw", draw, {"logits": logits, **_columns(logits, _OWN)})
    cut = Region(
        "draw among the likeliest", among, {"logits": logits, **_columns(logits, _OWN | _TRUNCATING)}, count
    )
    return compiler(free), compiler(cut)


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int) -> list[PositionLogprobs]:
    """Log-probabilities of the prompt's own tokens.

    logits [P, V] any float dtype: row i predicts next_token_ids[i] ([P] int, below V).
    k: alternatives per position.
    """
    entries: list[PositionLogprobs] = []
    for rows, tokens in zip(
        logits.split(_PROMPT_ROWS_AT_ONCE), next_token_ids.long().split(_PROMPT_ROWS_AT_ONCE)
    ):
        entries += _position_logprobs(rows, tokens, [k] * len(rows))
    return entries


def _position_logprobs(logits: Tensor, token_ids: Tensor, wanted: list[int]) -> list[PositionLogprobs]:
    """logits [R, V], token_ids [R] int64, wanted [R]: alternatives per row."""
    if not wanted:
        return []
    logprobs, ranks, top_ids, top_logprobs = token_logprobs(logits, token_ids, max(wanted))
    columns = (x.tolist() for x in (token_ids, logprobs, ranks, top_ids, top_logprobs))
    return [
        PositionLogprobs([token, *ids[:k]], [logprob, *likeliest[:k]], rank)
        for token, logprob, rank, ids, likeliest, k in zip(*columns, wanted)
    ]


def _named_logprobs(logits: Tensor, entry: PositionLogprobs, token_ids: list[int]) -> PositionLogprobs:
    """The entry of a position with the alternatives that the request names. logits [V] any float dtype."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    named = logprobs[to_device(np.array(token_ids, dtype=np.int64), logits.device)]
    ranks = len(logprobs) + 1 - torch.searchsorted(logprobs.sort().values, named, right=True)
    return PositionLogprobs(
        [entry.token_ids[0], *token_ids], [entry.logprobs[0], *named.tolist()], entry.rank, ranks.tolist()
    )


def _select(positions: Tensor | np.ndarray, rows: np.ndarray) -> Tensor | np.ndarray:
    """positions[rows] with rows bool [R] on the host, wherever the positions are."""
    if isinstance(positions, Tensor):
        return positions[to_device(np.flatnonzero(rows), positions.device)]
    return positions[rows]
