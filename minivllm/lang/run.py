"""Programs: functions on a state, run once, in batches, and from synchronous code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from minivllm.errors import RequestError
from minivllm.lang.engines import Engine, Settings, SteppedEngine, engine_of
from minivllm.lang.state import Run, State, all_or_none
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.frontend.llm import LLM

P = ParamSpec("P")
T = TypeVar("T")
Function = Callable[Concatenate[State, P], Coroutine[Any, Any, T]]

_SETTINGS = {one.name for one in fields(Settings)} - {"sampling"}


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """One call of a program in a batch: ``outcome["name"]`` is what was generated under that name."""

    value: T | None
    """What the program returned; None if it failed."""
    error: Exception | None
    """Why it failed; None if it did not."""
    state: State
    """Its text, results and details, up to a failure too."""

    def __getitem__(self, name: str) -> Any:
        return self.state[name]

    @property
    def text(self) -> str:
        return self.state.text


class Program(Generic[P, T]):
    """A function ``async def name(s: State, …)``, made by ``program``.

    ``await name(llm, …)`` runs it on a new state of an ``AsyncLLM`` and raises what it raises. ``await
    name(s, …)`` in another program runs it on that program's state, as part of it.
    """

    def __init__(self, function: Function[P, T], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        update_wrapper(self, function)

    def using(self, **settings: Any) -> Program[P, T]:
        """The same program with other settings: sampling parameters, chat_template, chat_template_kwargs,
        lora, cache_salt, priority. Raises RequestError for other names."""
        return Program(self.function, _settings(self.settings, settings))

    async def __call__(self, on: State | AsyncLLM | Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(on, State):
            return await self.function(on, *args, **kwargs)
        outcome = await self._run(engine_of(on), args, kwargs)
        if outcome.error is not None:
            raise outcome.error
        value: Any = outcome.value
        return value

    async def _run(self, engine: Engine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome[T]:
        run = Run(engine, self.settings)
        state = State(run)
        try:
            return Outcome(await self.function(state, *args, **kwargs), None, state)
        except Exception as error:
            return Outcome(None, error, state)
        finally:
            run.end()


@overload
def program(function: Function[P, T], /) -> Program[P, T]: ...
@overload
def program(**settings: Any) -> Callable[[Function[P, T]], Program[P, T]]: ...
def program(
    function: Function[P, T] | None = None, /, **settings: Any
) -> Program[P, T] | Callable[[Function[P, T]], Program[P, T]]:
    """Makes a program of a function: ``@program``, or ``@program(temperature=0.0)`` with settings;
    see ``using``."""
    if function is not None:
        return Program(_checked(function), Settings())
    base = _settings(Settings(), settings)
    return lambda given: Program(_checked(given), base)


def _checked(function: Any) -> Function[P, T]:
    """Raises RequestError."""
    if not inspect.iscoroutinefunction(function):
        raise RequestError(f"{function!r} is marked as a program, but must be an async def.")
    return cast("Function[P, T]", function)


def _settings(base: Settings, given: Mapping[str, Any]) -> Settings:
    sampling = {name: value for name, value in given.items() if name not in _SETTINGS}
    SamplingParams(**sampling)  # raises for what is none of its parameters
    others = {name: value for name, value in given.items() if name in _SETTINGS}
    return replace(base, sampling={**base.sampling, **sampling}, **others)


async def join(branches: Sequence[State], action: Callable[[State], Awaitable[T]]) -> list[T]:
    """Run ``action`` on all branches at once; its results in their order.
    If one fails, the others are aborted, and its error is raised."""

    async def act(branch: State) -> T:
        return await action(branch)

    return await all_or_none(list(map(act, branches)))


async def run_batch(
    llm: AsyncLLM | Engine, program: Program[..., T], inputs: Sequence[Any], *, max_parallel: int = 64
) -> list[Outcome[T]]:
    """Run a program on many inputs, at most ``max_parallel`` at once.
    The outcomes come in the order of the inputs.

    inputs: the arguments of each call: a dictionary by name, a tuple in order, anything else alone. A program
    that fails does so alone, and its branches are aborted; if this call is cancelled, all are. Raises
    RequestError.
    """
    if not isinstance(program, Program):
        raise RequestError(f"The program is {program!r}, but must be a function that @program marks.")
    if type(max_parallel) is not int or max_parallel < 1:
        raise RequestError(f"max_parallel is {max_parallel!r}, but must be a whole number of at least 1.")
    if isinstance(inputs, (str, Mapping)) or not isinstance(inputs, Iterable):
        raise RequestError(
            f"inputs is of type {type(inputs).__name__}, but must be a list with one entry per call."
        )
    engine, given = engine_of(llm), list(inputs)
    outcomes: dict[int, Outcome[T]] = {}
    waiting = iter(enumerate(given))

    async def work() -> None:
        for index, one in waiting:
            kwargs = one if isinstance(one, Mapping) else {}
            args = one if isinstance(one, tuple) else () if isinstance(one, Mapping) else (one,)
            outcomes[index] = await program._run(engine, args, kwargs)

    await all_or_none([work() for _ in range(min(max_parallel, len(given)))])
    return [outcomes[index] for index in range(len(given))]


def run_offline(
    llm: LLM, program: Program[..., T], inputs: Sequence[Any], *, max_parallel: int = 64
) -> list[Outcome[T]]:
    """``run_batch`` for an ``LLM``, from code without an event loop. Ctrl-C aborts all requests."""
    from minivllm.frontend.llm import LLM

    if not isinstance(llm, LLM):
        raise RequestError(
            f"run_offline takes an LLM, but was given a {type(llm).__name__}: await run_batch for it."
        )
    if asyncio._get_running_loop() is not None:
        raise RequestError(
            "run_offline was called in an event loop, which it would block: await run_batch with an AsyncLLM."
        )
    return asyncio.run(run_batch(SteppedEngine(llm), program, inputs, max_parallel=max_parallel))
