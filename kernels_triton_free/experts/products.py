"""Mixtures of experts: each token is computed by a few of many small MLPs (Shazeer et al. 2017).

    ids, weights = route(logits, routing)          which experts a token goes to, and how much each one counts
    out = sum over k of weights[k] * expert(ids[k])(x)

An expert is ``down(activate(gate_up(x)))``. The tensors of all experts of a layer are stacked along a first
dimension. Three ways of computing the sum: ``loop`` goes through the experts that are hit (the reference, and
the way of a CPU, where only the experts of few rows gain from being computed together), ``grouped`` sorts the
tokens by expert and multiplies all groups at once, ``gathered`` reads the matrices of every token (for a
single token it reads no more than that). Sums are taken in the order of the choices, never by scattered
additions, so the same tokens always give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, int], Tensor]
"""(rows [n, in], expert) -> [n, out]."""

Activate = Callable[[Tensor], Tensor]
"""gate_up [n, 2 * inner] -> [n, inner]."""

Loop = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]
"""(x [tokens, hidden], ids, weights, tensors of all experts) -> [tokens, hidden]."""


class SortedRows(NamedTuple):
    """Choices [tokens * top_k] sorted by expert.

    order: int64 [tokens * top_k], the choice (token * top_k + k) at each sorted place. ends: int32 [experts],
    the place behind the last choice of each expert.
    """

    order: Tensor
    ends: Tensor


def sort_by_expert(ids: Tensor, num_experts: int) -> SortedRows:
    """Sort choices [tokens, top_k] by expert; those of one expert stay in order. The host waits for nothing.

    A counting sort: a choice goes behind all choices of smaller experts and the earlier ones of its own.
    """
    flat = ids.flatten()
    is_of = flat.unsqueeze(-1) == torch.arange(num_experts, device=ids.device)
    ends = is_of.sum(0).cumsum(0)
    rank = is_of.cumsum(0).gather(-1, flat.unsqueeze(-1)).squeeze(-1) - 1
    place = F.pad(ends, (1, 0))[flat] + rank
    # Not by scatter_, for which Inductor has no code of its own where values are int64.
    order = torch.empty_like(flat).index_put_((place,), torch.arange(flat.shape[0], device=ids.device))
    return SortedRows(order, ends.to(torch.int32))


class FewRows(NamedTuple):
    """A faster way for experts that few rows go to, all of them in one call: apply(rows [most or 1, n,
    hidden], experts int64 [n]) -> of the rows' shape, n at least 2. Of several tokens' rows, all ``most`` are
    there."""

    most: int
    apply: Callable[[Tensor, Tensor], Tensor]


def loop(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Product,
    activate: Activate,
    down: Product,
    absent: int | None = None,
    few: FewRows | None = None,
) -> Tensor:
    """x [tokens, hidden] -> [tokens, hidden], one hit expert after the other:
    each one's weights are read once.

    ids, weights [tokens, top_k]. absent: the id, larger than all others, of choices that are computed
    elsewhere and add nothing here. On a device other than a CPU the host waits for the ids.
    """
    if x.shape[0] == 1:  # as many rows as choices: one activation and one sum for all
        if absent is not None:
            ids, weights = (values[:, ids[0] != absent] for values in (ids, weights))
        if not ids.numel():
            return torch.zeros_like(x)
        if few is not None:
            rows = _of_few(few, x.expand(1, ids.shape[1], -1).contiguous(), ids[0])[0]
        else:
            chosen = ids[0].tolist()
            inner = activate(torch.cat([gate_up(x, expert) for expert in chosen]))
            rows = torch.cat([down(row, expert) for row, expert in zip(inner.split(1), chosen, strict=True)])
        return (rows.float() * weights[0, :, None]).sum(0, keepdim=True).to(x.dtype)
    plan = None if few is None else _plan_few(ids, few.most, absent)
    if few is not None and plan is not None:
        return _only_few(x, weights, few, plan)
    choices = ids.flatten()
    order, count = choices.argsort(stable=True), choices.bincount()
    if absent is not None:
        count = count[:absent]
    counts = count.tolist()
    own = sum(counts)
    rows = x.index_select(0, order[:own] // ids.shape[1])
    out = torch.empty_like(rows) if own == len(order) else x.new_zeros(len(order), x.shape[1])
    most = 0 if few is None else few.most
    for expert, (given, place) in enumerate(zip(rows.split(counts), out[:own].split(counts), strict=True)):
        if len(given) > most:
            place.copy_(down(activate(gate_up(given, expert)), expert))
    if few is not None:
        _add_few(out, rows, count, few)
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return F.embedding_bag(where.view(ids.shape), out, mode="sum", per_sample_weights=weights.to(x.dtype))


MOST_PLANNED = 128
"""Choices that are planned one by one on the host. What surrounds the call for few rows took 0.46 ms a layer
instead of 1.05 ms for 64 choices of two CPU cores; for 192 choices nothing was won."""
MOST_TURNS = 4
"""In which an expert's rows are computed. On two CPU cores 2, 3 and 4 were within 5 % of each other."""


class _Plan(NamedTuple):
    """A turn is up to ``most`` rows of one expert. experts: of each turn. tokens: of the turns' rows, all
    first rows first. places: of the choices among these rows; one behind them for choices that are computed
    elsewhere."""

    experts: list[int]
    tokens: list[list[int]]
    places: list[list[int]]


def _plan_few(ids: Tensor, most: int, absent: int | None) -> _Plan | None:
    """None if there are too many choices, or an expert has too many rows."""
    if ids.numel() > MOST_PLANNED:
        return None
    choices: list[list[int]] = ids.tolist()
    rows: dict[int, list[int]] = {}
    for token, chosen in enumerate(choices):
        for expert in chosen:
            rows.setdefault(expert, []).append(token)
    rows.pop(-1 if absent is None else absent, None)
    if not rows or max(map(len, rows.values())) > MOST_TURNS * most:
        return None
    experts: list[int] = []
    tokens: list[list[int]] = []
    first: dict[int, int] = {}
    for expert in sorted(rows):
        first[expert] = len(experts)
        for start in range(0, len(rows[expert]), most):
            own = rows[expert][start : start + most]
            experts.append(expert)
            tokens.append(own + own[:1] * (most - len(own)))  # what is too much repeats the first row
    if len(experts) == 1:
        experts, tokens = experts * 2, tokens * 2
    num_turns, taken = len(experts), dict.fromkeys(rows, 0)
    places: list[list[int]] = []
    for chosen in choices:
        own = []
        for expert in chosen:
            if expert in first:
                turn, row = divmod(taken[expert], most)
                taken[expert] += 1
                own.append(row * num_turns + first[expert] + turn)
            else:
                own.append(most * num_turns)
        places.append(own)
    return _Plan(experts, [list(row) for row in zip(*tokens)], places)


def _only_few(x: Tensor, weights: Tensor, few: FewRows, plan: _Plan) -> Tensor:
    """All experts in one call."""
    tokens, places = torch.tensor(plan.tokens), torch.tensor(plan.places)
    rows = x.index_select(0, tokens.flatten()).view(*tokens.shape, -1)
    values = few.apply(rows, torch.tensor(plan.experts)).flatten(0, 1)
    if any(tokens.numel() in own for own in plan.places):
        values = F.pad(values, (0, 0, 0, 1))
    return F.embedding_bag(places, values, mode="sum", per_sample_weights=weights.to(x.dtype))


def _add_few(out: Tensor, rows: Tensor, count: Tensor, few: FewRows) -> None:
    """Compute the experts with few rows, which are sorted by expert, into the same places of ``out``."""
    hit = torch.nonzero((count > 0) & (count <= few.most)).flatten()
    if not hit.numel():
        return
    turn = torch.arange(few.most).unsqueeze(1)
    is_row = turn < count[hit]
    places = (count.cumsum(0) - count)[hit] + turn.where(is_row, 0)  # what is too much repeats the first row
    values = _of_few(few, rows[places], hit)
    out[places[is_row]] = values[is_row]


def _of_few(few: FewRows, rows: Tensor, experts: Tensor) -> Tensor:
    if experts.shape[0] > 1:
        return few.apply(rows, experts)
    return few.apply(rows.repeat(1, 2, 1), experts.repeat(2))[:, :1]


def grouped_product(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Sorted rows x [n, in] times their experts' weights [experts, out, in] -> [n, out],
    all groups in one launch.

    bfloat16, in and out multiples of 8. bias [n, out]: that of each row. ends: see ``SortedRows``.
    """
    out = F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return out if bias is None else out + bias


def gathered_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Row by row: x [n, in] times weight [n, out, in] (picked by the caller) plus bias [n, out] -> [n, out].

    Written as a sum, so that compiled code reads the picked matrices where they are stored.
    """
    out = (weight.float() * x.float().unsqueeze(1)).sum(-1).to(x.dtype)
    return out if bias is None else out + bias


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [tokens * top_k, hidden] in the order of the choices, weights [tokens,
    top_k] -> [tokens, hidden]."""
    tokens, top_k = weights.shape
    return (rows.view(tokens, top_k, -1).float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


_library = torch.library.Library("kernels_triton_free", "FRAGMENT")
_library.define("expert_loop(Tensor x, Tensor ids, Tensor weights, Tensor[] tensors, str how) -> Tensor")
_loops: dict[str, Loop] = {}


def define_loop(how: str, function: Loop) -> None:
    """Give a loop over experts a name, under which ``run_loop`` finds it. The same name always means the same
    loop, in every process, since compiled code that is kept on disk calls it by that."""
    _loops[how] = function


def run_loop(x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor], how: str) -> Tensor:
    """The loop of this name. Compiled code sees one operator, whatever the loop does inside:
    which experts are hit is known only when it runs."""
    result: Tensor = torch.ops.kernels_triton_free.expert_loop.default(x, ids, weights, list(tensors), how)
    return result


def _expert_loop(x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor], how: str) -> Tensor:
    return _loops[how](x, ids, weights, tensors)


def _expert_loop_shape(
    x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor], how: str
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("expert_loop", _expert_loop, "CompositeExplicitAutograd")
torch.library.register_fake("kernels_triton_free::expert_loop", _expert_loop_shape, lib=_library)
