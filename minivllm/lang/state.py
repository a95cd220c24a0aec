"""``State``: the text of a program so far, as token ids that never change,
and what was generated under which name."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from minivllm.errors import RequestError
from minivllm.lang.choose import Selected, best_choice, check_choices, score
from minivllm.lang.engines import Engine, Settings
from minivllm.lang.growing_text import GrowingText
from minivllm.lang.roles import Block, Image
from minivllm.sampling_params import OutputKind, SamplingParams
from minivllm.tokenizer.detokenizer import TokenDecoder
from minivllm.tokenizer.pieces import tokens_of_text

if TYPE_CHECKING:
    from minivllm.multimodal.files.decoding import Picture
    from minivllm.processing.outputs import CompletionOutput, PositionLogprobMap, RequestOutput

T = TypeVar("T")

_PAYS_TO_WAIT = 32
"""Tokens that choices would compute each for itself,
from which on the first one is scored before the others."""
_NOT_FOR_GEN = ("n", "best_of", "output_kind", "prompt_logprobs", "prompt_logprobs_start")


@dataclass(frozen=True, slots=True)
class Generated:
    """How a ``gen`` came out."""

    text: str
    """Without the stop string that ended it."""
    token_ids: list[int]
    """As sampled, with the token that ended it."""
    finish_reason: str | None
    """ "stop" or "length"."""
    stop_reason: int | str | None
    """The stop string, stop expression or stop token id; None for an end-of-sequence token."""
    logprobs: list[PositionLogprobMap] | None
    """If they were asked for."""
    num_prompt_tokens: int
    """Tokens of the state before it, with those of its images."""
    num_cached_tokens: int
    """Of these, tokens that came from the prefix cache."""


@dataclass
class Run:
    """One call of a program: its engine, its settings, and its requests in flight, those of all branches."""

    engine: Engine
    settings: Settings
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    has_ended: bool = False

    @cached_property
    def decoder(self) -> TokenDecoder:
        return TokenDecoder(self.engine.frontend.tokenizer.backend)

    async def complete(
        self, token_ids: list[int], pictures: Sequence[Picture], params: SamplingParams
    ) -> RequestOutput:
        """The finished output. Raises RequestError if the engine gave up on it."""
        if self.has_ended:
            raise RequestError(
                "The program of this state has ended: what it generated can be read, not continued."
            )
        request = self.engine.complete(token_ids, params, self.settings, pictures)
        task = asyncio.create_task(request)
        self.in_flight.add(task)
        try:
            output = await task
        finally:
            task.cancel()
            self.in_flight.discard(task)
        if output.error is not None or output.outputs[0].finish_reason == "abort":
            raise RequestError(output.error or "The request was aborted.")
        return output

    def end(self) -> None:
        """Abort what branches left behind."""
        self.has_ended = True
        for task in self.in_flight:
            task.cancel()


class State:
    """A text that grows: ``s += …`` appends, ``gen`` and ``select`` generate, ``fork`` branches.

    Every appended text, and every group of role blocks, is tokenised by itself when the next request needs
    it; sampled tokens are appended as sampled. So the tokens of a state are a prefix of all its later ones,
    and the prefix cache holds them. A text between role blocks belongs to the assistant's turn, which it
    opens. Special tokens count as such in a plain text, and are text in a role block.

    One request at a time: a state that generates is forked for another one.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._text = GrowingText(run.engine, run.settings)
        self._num_computed = 0
        self._is_busy = False
        self._path: tuple[int, ...] = ()
        self._num_forks = 0
        self.results: dict[str, Any] = {}
        """What ``gen`` and ``select`` returned, by name."""
        self.details: dict[str, Generated | Selected] = {}
        """How it came out, by name."""

    def __iadd__(self, piece: str | Image | Block) -> State:
        """Append a text, an image or a role block.
        Raises RequestError for anything else, where a block or an image cannot come, and for images that the
        model cannot see."""
        self._text.append(piece)
        return self

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError."""
        if name not in self.results:
            raise KeyError(f"{name!r} was not generated: there are {sorted(self.results)}.")
        return self.results[name]

    def __contains__(self, name: str) -> bool:
        return name in self.results

    @property
    def text(self) -> str:
        """All so far, with the special tokens of the chat template;
        what was appended since the last request too."""
        return str(self._text)

    @property
    def token_ids(self) -> list[int]:
        """All that requests have seen or sampled, with one placeholder for each image;
        what was appended since is not tokenised yet."""
        return list(self._text.tokens)

    async def gen(
        self, name: str | None = None, *, json: Any = None, regex: str | None = None, **sampling: Any
    ) -> Any:
        """Generate until the turn ends, and append it. Returns the text, or the parsed value with ``json``.

        name: the result is kept under it. json: a type that msgspec knows (dict, a dataclass, …), a pydantic
        model, or a JSON schema. regex: what the whole text matches. sampling: parameters of
        ``SamplingParams`` but n and those of prompts; what is not given comes from the program's settings,
        then from the model. Without max_tokens the context is the limit. The text ends before a stop string,
        which is not appended either.
        Raises RequestError for what cannot be served, and for JSON that max_tokens cut off.
        """
        params = self._params(json, regex, sampling)
        with self._request():
            await self._text.settle(opens=True)
            before = len(self._text)
            output = await self._complete(params)
            [completion] = output.outputs
            kept, rest = self._kept(completion, params)
            # The last sampled token was never computed.
            self._num_computed = before + min(len(kept), len(completion.token_ids) - 1)
            self._text.append_tokens(kept + (self._text.encode_after(rest) if rest else []), completion.text)
        generated = Generated(
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.stop_reason,
            completion.logprobs,
            before,
            output.num_cached_tokens,
        )
        value = completion.text if json is None else _parsed(name, json, generated)
        self._keep(name, value, generated)
        return value

    async def select(self, name: str | None, choices: Sequence[str], *, scoring: str = "mean") -> str:
        """Append the likeliest of ``choices``, and return it. Of equals the first one is taken.

        scoring: "mean" or "sum" of the logprobs of a choice's tokens, or "greedy", the choice that greedy
        sampling among them leads to. One request if every choice is a single token, else one for each. Raises
        RequestError.
        """
        given = check_choices(choices, scoring)
        with self._request():
            await self._text.settle(opens=True)
            ids = [self._text.encode_after(choice) for choice in given]
            if all(len(one) == 1 for one in ids):
                logprobs = await self._score_tokens([one[0] for one in ids])
            else:
                logprobs = await self._score_texts(ids)
            best = best_choice(ids, logprobs, scoring)
            self._num_computed = len(self._text) + len(ids[best]) - 1
            self._text.append_tokens(ids[best], given[best])
        scores = {choice: score(one, scoring) for choice, one in zip(given, logprobs)}
        self._keep(name, given[best], Selected(scores, logprobs))
        return given[best]

    async def commit(self) -> None:
        """Compute what was appended, so that branches find it in the cache. It pays before a ``fork`` of more
        than 8, and where branches begin with few tokens in common."""
        with self._request():
            await self._text.settle(opens=False)
            if len(self._text) > self._num_computed + 1:
                await self._complete(_final(temperature=0.0, max_tokens=1, ignore_eos=True))
                self._num_computed = len(self._text)

    def fork(self, n: int) -> list[State]:
        """``n`` branches that begin with this text. No request: they share its tokens in the prefix cache.
        With a seed among the settings each branch draws differently, and the same in every run."""
        if type(n) is not int or n < 1:
            raise RequestError(f"fork was given {n!r}, but takes a whole number of at least 1.")
        first = self._num_forks
        self._num_forks += n
        return [self._branch((*self._path, first + index)) for index in range(n)]

    # -- requests ----------------------------------------------------------------------------------

    async def _complete(self, params: SamplingParams, more: Sequence[int] = ()) -> RequestOutput:
        return await self._run.complete([*self._text.tokens, *more], self._text.pictures, params)

    @contextmanager
    def _request(self) -> Iterator[None]:
        if self._is_busy:
            raise RequestError("This state is generating already: fork it, and generate in the branches.")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _params(self, json: Any, regex: str | None, sampling: dict[str, Any]) -> SamplingParams:
        settings = self._run.settings.sampling
        given = {"max_tokens": None, **settings, **sampling}
        if self._path and "seed" not in sampling and given.get("seed") is not None:
            digest = hashlib.blake2b(f"{given['seed']}/{self._path}".encode(), digest_size=8).digest()
            given["seed"] = int.from_bytes(digest, "little", signed=True)
        for name in _NOT_FOR_GEN:
            if name in given:
                raise RequestError(
                    f"gen takes no {name}: fork the state for several texts, select scores given ones."
                )
        if json is not None and regex is not None:
            raise RequestError("gen was given json and regex, but takes one of them.")
        if json is not None or regex is not None:
            given["structured_outputs"] = {"json": _schema(json)} if regex is None else {"regex": regex}
        defaults = self._run.engine.frontend.get_default_sampling_params()
        named = msgspec.structs.asdict(SamplingParams(**given))
        return msgspec.structs.replace(
            defaults, **{name: named[name] for name in given}, output_kind=OutputKind.FINAL_ONLY
        )

    def _kept(self, completion: CompletionOutput, params: SamplingParams) -> tuple[list[int], str]:
        """The sampled tokens that are appended, and text that is tokenised anew after them."""
        ids, reason = completion.token_ids, completion.stop_reason
        if completion.finish_reason != "stop":
            return ids, ""
        if isinstance(reason, str):
            stream = self._run.decoder.stream(params.skip_special_tokens)
            return tokens_of_text(ids, completion.text, stream)
        # The template writes the end of a turn itself.
        return (ids if reason is not None and params.include_stop_str_in_output else ids[:-1]), ""

    async def _score_tokens(self, token_ids: list[int]) -> list[list[float]]:
        """The logprob of each token that may come next: one request, which computes what was appended."""
        params = _final(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            allowed_token_ids=token_ids,
            logprob_token_ids=token_ids,
        )
        output = await self._complete(params)
        [entries] = output.outputs[0].logprobs or []
        return [[entries[token_id].logprob] for token_id in token_ids]

    async def _score_texts(self, choices: list[list[int]]) -> list[list[float]]:
        """The logprobs of each choice's tokens:
        a request for each, which computes one token more than it has."""
        start = len(self._text)
        params = _final(temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)

        async def logprobs(choice: list[int]) -> list[float]:
            output = await self._complete(params, choice)
            entries = (output.prompt_logprobs or [])[start:]
            return [entry[token].logprob for entry, token in zip(entries, choice, strict=True) if entry]

        num_new = start - self._num_computed
        first, *others = map(logprobs, choices)
        if num_new * len(others) < _PAYS_TO_WAIT:
            return await all_or_none([first, *others])
        return [
            await first,
            *await all_or_none(others),
        ]  # the others find in the cache what the first one computes

    def _keep(self, name: str | None, value: Any, details: Generated | Selected) -> None:
        if name is not None:
            self.results[name], self.details[name] = value, details

    def _branch(self, path: tuple[int, ...]) -> State:
        branch = State(self._run)
        self._text.branch(branch._text)
        branch._num_computed, branch._path = self._num_computed, path
        branch.results, branch.details = dict(self.results), dict(self.details)
        return branch


async def all_or_none(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. If one fails, the others are cancelled, which aborts their requests,
    and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _final(**values: Any) -> SamplingParams:
    return SamplingParams(**values, output_kind=OutputKind.FINAL_ONLY)


def _schema(kind: Any) -> Any:
    """The JSON schema of a type, whose objects have no other keys; a schema is left as it is."""
    if isinstance(kind, (dict, str)):
        return kind
    try:
        schema = kind.model_json_schema() if hasattr(kind, "model_json_schema") else msgspec.json.schema(kind)
    except TypeError as error:
        raise RequestError(f"json is {kind!r}, of which no JSON schema can be made: {error}.") from None
    for one in (schema, *schema.get("$defs", {}).values()):
        if "properties" in one:
            one.setdefault("additionalProperties", False)
    return schema


def _parsed(name: str | None, kind: Any, generated: Generated) -> Any:
    """The value that was generated as JSON. Raises RequestError if it was cut off."""
    if generated.finish_reason == "length":
        raise RequestError(
            f"The JSON of {name or 'gen'} has no end after {len(generated.token_ids)} tokens: give more "
            "max_tokens."
        )
    try:
        if hasattr(kind, "model_validate_json"):
            return kind.model_validate_json(generated.text)
        return msgspec.json.decode(generated.text, type=Any if isinstance(kind, (dict, str)) else kind)
    except ValueError as error:
        raise RequestError(f"The JSON of {name or 'gen'} is none of {kind!r}: {error}") from None
