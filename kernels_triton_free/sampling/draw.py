"""From logits to token ids: penalties, temperature, min-p, top-k, top-p, Gumbel-max draws, log-probabilities.

Every truncation keeps the tokens at or above a threshold of their row, so the three of them together are one
number per row, and tokens that tie with the last one kept are kept too: the outcome does not depend on how a
sort orders equals. The probability mass of top-p is summed in integers, whose sums are the same in any order.

Rows never influence each other. The functions take and return tensors only, without data-dependent control
flow, so each can be compiled as it stands.
"""

from math import gcd

import torch
from torch import Tensor

from kernels_triton_free.sampling.bisection import greatest_key, unsorted
from kernels_triton_free.sampling.noise import gumbel_noise, gumbel_noise_at

# exp(scaled) <= 1 in units of 2^-40: a vocabulary of 2^22 tokens sums to less than 2^63.
_MASS_UNIT = 2.0**40
MIN_RUN, MAX_RUN = 64, 512
"""Logits side by side whose greatest is found first. For 16 rows of 49,152 in bfloat16, max alone took 0.33
ms on two cores, runs of 64 took 0.28, of 256 0.18, of 512 0.15."""


def apply_penalties(
    logits: Tensor, output_counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Lower the logits of tokens that occurred:
    presence and frequency (OpenAI), repetition (Keskar et al. 2019).

    Returns float32 [N]; a logit of -inf stays -inf.

    logits [N] float32: of the tokens that a row's prompt or output has. output_counts [N] int32: occurrences
    among the generated tokens. presence, frequency, repetition [N] float32: of each token's row.

    First repetition: logits are divided by it when positive and multiplied when negative. Then frequency *
    count and presence (once) are subtracted; these two look at the output only.
    """
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - frequency * output_counts - presence * (output_counts > 0)


def scale_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - row maximum) / temperature:
    logits [R, V] float32, temperature [R] float32 > 0 -> float32 [R, V].

    The largest entry is exactly 0, whatever the temperature. NaN counts as -inf (never drawn); a row without
    any finite entry becomes -inf throughout.
    """
    logits = _finite(logits)
    return (logits - _largest(logits)) / temperature[:, None]


def _finite(logits: Tensor) -> Tensor:
    # nan_to_num asks for NaN, which compiled code for a CPU does one value after the other.
    return torch.where(logits > -torch.inf, logits.clamp(max=torch.finfo(torch.float32).max), -torch.inf)


def _largest(logits: Tensor) -> Tensor:
    """[R, V] -> [R, 1]; 0 for a dead row, which keeps its -inf so: -inf - -inf is NaN."""
    largest = logits.amax(-1, keepdim=True)
    return torch.where(largest == -torch.inf, 0.0, largest)


def top_candidates(scaled: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The C = min(num_candidates, V) largest of scaled [R, V], largest first:
    values and token ids (int64), [R, C]."""
    values, token_ids = torch.topk(scaled, min(num_candidates, scaled.shape[-1]), dim=-1)
    return values, token_ids


def _mass(scaled: Tensor, threshold: Tensor) -> Tensor:
    """Unnormalised probability of what reaches threshold [R], in units of 2^-40: [R, n] -> int64 [R, n]."""
    kept = scaled >= threshold[:, None]
    return torch.where(kept, torch.exp(scaled) * _MASS_UNIT, 0.0).to(torch.int64)


def truncation_threshold(
    scaled: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor | None, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The value from which on tokens are kept by min-p, then top-k, then top-p of the renormalised rest.

    scaled [R, V]: from scale_by_temperature.
    ordered [R, C]: its C largest values, largest first (C = V: all).
    top_k [R] int64 (below 1: all); top_p [R] float32 in (0, 1], None if all are 1; min_p [R] float32 in [0,
    1]. Returns (threshold [R] float32, exact [R] bool). Where exact is False, the C values do not reach far
    enough to tell, or do not contain everything that is kept, and C = V is needed; with C = V it is always
    True.
    The likeliest token is always kept.
    """
    vocab_size, num_ordered = scaled.shape[-1], ordered.shape[-1]
    keeps_all = (top_k < 1) | (top_k >= vocab_size)
    is_kth_known = ~keeps_all & (top_k <= num_ordered)
    kth = ordered.gather(-1, (top_k - 1).clamp(0, num_ordered - 1)[:, None])[:, 0]
    threshold = torch.maximum(torch.log(min_p), torch.where(is_kth_known, kth, -torch.inf))

    if top_p is not None:
        total = _mass(scaled, threshold).sum(-1)
        mass = _mass(ordered, threshold)
        before = mass.cumsum(-1) - mass
        kept = before.double() < (top_p.double() * total.double())[:, None]
        last_kept = torch.minimum(ordered.masked_fill(~kept, torch.inf).amin(-1), ordered[:, 0])
        threshold = torch.where(top_p < 1.0, torch.maximum(threshold, last_kept), threshold)

    if num_ordered == vocab_size:
        return threshold, torch.ones_like(threshold, dtype=torch.bool)
    smallest = ordered[:, -1]
    # Equal to the smallest is not enough: tokens beyond the C values may tie with it.
    exact = ((keeps_all | is_kth_known) & (threshold > smallest)) | (smallest == -torch.inf)
    return threshold, exact


def bisected_threshold(
    keys: Tensor, dtype: torch.dtype, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The threshold of ``truncation_threshold`` with C = V, float32 [R], without a sort: see ``bisection``.

    keys [R, V]: those of logits of this dtype; temperature [R] float32 > 0;
    the rest as there, but top_p is never None.
    """
    values = _of_keys(keys, dtype)
    largest = _largest(values)

    def scaled(values: Tensor) -> Tensor:
        return (values - largest) / temperature[:, None]

    def scaled_at(key: Tensor) -> Tensor:
        return scaled(_of_keys(key[:, None], dtype))[:, 0]

    kth = scaled_at(greatest_key(keys, lambda reached: reached.sum(-1) >= top_k))
    keeps_all = (top_k < 1) | (top_k >= keys.shape[-1])
    threshold = torch.maximum(torch.log(min_p), torch.where(keeps_all, -torch.inf, kth))
    mass = _mass(scaled(values), threshold)
    enough = top_p.double() * mass.sum(-1).double()
    last = scaled_at(
        greatest_key(keys, lambda reached: torch.where(reached, mass, 0).sum(-1).double() >= enough)
    )
    return torch.where(top_p < 1.0, torch.maximum(threshold, last), threshold)


def _of_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits of this dtype with these keys as ``scale_by_temperature`` reads them, float32."""
    values = unsorted(keys, dtype).float()
    return torch.where(values == torch.inf, torch.finfo(torch.float32).max, values)


def draw_from_candidates(
    scaled: Tensor,
    candidates: Tensor,
    candidate_ids: Tensor,
    top_k: Tensor,
    top_p: Tensor | None,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Truncate and draw, looking for winners among the candidates only.

    scaled [R, V]; candidates, candidate_ids [R, C]: from top_candidates; seeds, positions [R] int64; the rest
    as in truncation_threshold. Returns (token ids [R] int64, exact [R] bool). Where exact is True the token
    is the one that draw_from_vocabulary gives with the exact threshold; elsewhere it is to be drawn again
    from more candidates.
    """
    threshold, exact = truncation_threshold(scaled, candidates, top_k, top_p, min_p)
    scores = candidates + gumbel_noise_at(seeds, positions, candidate_ids)
    scores = scores.masked_fill(candidates < threshold[:, None], -torch.inf)
    # Among equal scores the smallest id wins, as in an argmax over the vocabulary.
    is_best = scores == scores.amax(-1, keepdim=True)
    token_ids = candidate_ids.masked_fill(~is_best, scaled.shape[-1]).amin(-1)
    return torch.where(candidates[:, 0] == -torch.inf, 0, token_ids), exact


def draw_among_likeliest(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    num_candidates: int,
) -> tuple[Tensor, Tensor]:
    """``draw_from_candidates`` of so many of the likeliest tokens, from logits [R, V].
    To be compiled, for a CPU.

    temperature [R] float32 > 0; the rest as there.
    """
    scaled = scale_by_temperature(logits.float(), temperature)
    candidates = top_candidates(scaled, num_candidates)
    return draw_from_candidates(scaled, *candidates, top_k, top_p, min_p, seeds, positions)


def has_runs(vocab_size: int) -> bool:
    """Whether ``likeliest`` divides so many logits."""
    return gcd(vocab_size, MAX_RUN) >= MIN_RUN


def likeliest(logits: Tensor) -> Tensor:
    """Id of the greatest of logits [R, V] in each row, the smallest id among equals; int64 [R].

    max keeps the index as it goes: on a CPU it is five times as fast as argmax over bfloat16. amax, which
    keeps none, is faster still: it finds the run that the greatest lies in, and max looks into that one only.
    """
    if logits.device.type != "cpu" or not has_runs(logits.shape[-1]):
        return logits.max(-1).indices
    run = gcd(logits.shape[-1], MAX_RUN)
    runs = logits.unflatten(-1, (-1, run))
    best = runs.amax(-1).max(-1).indices
    return best * run + runs[torch.arange(logits.shape[0]), best].max(-1).indices


def draw_from_vocabulary(
    scaled: Tensor,
    threshold: Tensor,
    seeds: Tensor,
    positions: Tensor,
    is_random: Tensor | None = None,
    *,
    quick: bool = False,
) -> Tensor:
    """Gumbel-max (Gumbel 1954): the argmax of scaled [R,
    V] + noise over entries >= threshold [R] is a draw from their softmax.

    seeds, positions [R] int64. is_random [R] bool: where it is false there is no noise, and the likeliest is
    taken. quick: see ``gumbel_noise``. Returns int64 [R], always below V; 0 for a row of -inf.
    """
    noise = gumbel_noise(seeds, positions, scaled.shape[-1], quick=quick)
    if is_random is not None:
        noise = torch.where(is_random[:, None], noise, 0.0)
    scores = (scaled + noise).masked_fill(scaled < threshold[:, None], -torch.inf)
    return likeliest(scores) if scores.device.type == "cpu" else scores.argmax(-1)


def draw(logits: Tensor, temperature: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """A token of each row that nothing but temperature and min-p restricts: int64 [R]. To be compiled.

    logits [R, V] any float dtype; temperature [R] float32, 0 for the likeliest token; min_p [R] float32;
    seeds, positions [R] int64. Two loops over the logits, for the maximum and for the draw, take the place of
    some thirty operators that each go through as many values: 0.21 ms for 256 rows of a vocabulary of 152,000
    on an H100, 1.3 in place of 9 ms for 16 rows of 49,152 on two cores of Zen 4
    (``tests/kernels/test_bench_sampling.py``).
    """
    return _draw_above(torch.log(min_p), logits.float(), temperature, seeds, positions)


def draw_truncated(
    keys: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """``draw`` where top-k [R] int64 and top-p [R] float32 may restrict rows too,
    as in ``bisected_threshold``.

    keys [R, V]: ``sortable`` of logits of this dtype, made beforehand:
    each loop over them would make them anew.
    """
    threshold = bisected_threshold(keys, dtype, _above_zero(temperature), top_k, top_p, min_p)
    return _draw_above(threshold, _of_keys(keys, dtype), temperature, seeds, positions)


def _draw_above(
    threshold: Tensor, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    scaled = scale_by_temperature(logits, _above_zero(temperature))
    quick = logits.device.type == "cpu"
    return draw_from_vocabulary(scaled, threshold, seeds, positions, temperature > 0.0, quick=quick)


def _above_zero(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0.0, temperature, 1.0)


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of given tokens and of the likeliest ones, in float32.

    logits [R, V] any float dtype; token_ids [R] int64 below V; 0 <= k, cut to V.
    Returns (logprobs [R] float32, ranks [R] int64, top ids [R, k] int64, top logprobs [R, k] float32). The
    rank is 1 for the likeliest: one more than the number of strictly likelier tokens. The top ids come
    likeliest first, equals by id.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    top_ids = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1).indices.sort(-1).values
    top, order = torch.sort(logprobs.gather(-1, top_ids), dim=-1, descending=True, stable=True)
    return chosen[:, 0], ranks, top_ids.gather(-1, order), top
