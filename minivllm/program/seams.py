"""The seams of a program: attention, exchanges between ranks and engines, stages, and the choice of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from minivllm.program.program import Code, Name, Seam, Tree, World


class Attend(Seam):
    """Attention of a layer over everything that the caches hold, or the update of its states."""

    kind = "attend"

    def __init__(
        self,
        layer: int,
        output: Tree,
        weights: Callable[[], Any],
        *,
        cache: int | None = None,
        reads_stream: bool = True,
    ) -> None:
        """output: spec of o. weights: sinks, or those of an update. cache: number of the layer's cache, if
        it is another one than the layer's. reads_stream: a drafter may ask for the residual stream here."""
        self._layer = layer
        self._cache = layer if cache is None else cache
        self._weights = weights
        self.reads = ("q", "stream" if reads_stream else "q")
        self.gives = {"o": output}

    def weights(self) -> tuple[Any, ...]:
        return (self._weights(),)

    def cross(self, world: World, *values: Any) -> Tensor | None:
        q, stream, weights = values
        if world.note_input is not None:
            world.note_input(self._layer, stream)
        return world.attend(self._cache, q, weights)


class _Exchange(Seam):
    """Something that a single rank need not do."""

    def is_real(self, ranks: int) -> bool:
        return ranks > 1


class Sum(_Exchange):
    """Each rank has a summand of a register; afterwards all have the sum."""

    kind = "sum"

    def __init__(self, register: Name, spec: Tree) -> None:
        self.reads = (register,)
        self.gives = {register: spec}

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.communicator is not None
        return world.communicator.all_reduce(values[0])


class Agree(_Exchange):
    """Ranks agree on a small tensor [tokens, n]: on the sum of what they have, or the largest.

    source: the register it is computed from by ``code``, uncompiled; None if the register is there already.
    """

    def __init__(
        self,
        register: Name,
        spec: Tree,
        *,
        largest: bool,
        source: Name | None = None,
        code: Code | None = None,
    ) -> None:
        self.kind = "largest" if largest else "squares"
        self._takes_largest = largest
        self.code = code
        self.reads = (source or register,)
        self.gives = {register: spec}

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.communicator is not None
        x = values[0] if self.code is None else self.code(values[0])
        exchange = world.communicator.all_reduce_max if self._takes_largest else world.communicator.all_reduce
        return exchange(x)


class Gather(_Exchange):
    """Each rank has some columns of a register;
    afterwards all have all of them, side by side in order of rank."""

    kind = "gather"

    def __init__(self, register: Name, spec: Tree, widths: Sequence[int]) -> None:
        """widths: columns of each rank."""
        self._widths = widths
        self.reads = (register,)
        self.gives = {register: spec}

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.communicator is not None
        return world.communicator.gather_columns(values[0], self._widths)


class Receive(Seam):
    """The residual stream comes from the stage before."""

    kind = "receive"

    def __init__(self, stream: Tree) -> None:
        self._spec = stream
        self.reads = ("token_ids",)
        self.gives = {"stream": stream}

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.stage is not None
        return world.stage.receive((len(values[0]), self._spec.shape[-1]), self._spec.dtype)


class Send(Seam):
    """The residual stream goes to the next stage."""

    kind = "send"
    reads = ("stream",)

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.stage is not None
        world.stage.send(values[0])
        return None


class Share(Seam):
    """The tokens of this engine become those of all engines, for the experts here."""

    kind = "share"

    def __init__(self, source: Name, register: Name, stream: Tree) -> None:
        """source: this engine's [tokens, hidden]. register: gets those of all."""
        self.reads = (source,)
        self.gives = {register: stream}

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.group is not None
        return world.group.gather(values[0])


class Combine(Seam):
    """What the experts here made of the tokens of all engines becomes the sum of what all made of this
    engine's.

    shared: register of what this worker adds for the tokens of its engine; None: nothing.
    """

    kind = "combine"

    def __init__(self, stream: Tree, shared: Name | None) -> None:
        self.reads = ("x",) if shared is None else ("x", shared)
        self.gives = {"x": stream}

    def cross(self, world: World, *values: Any) -> Tensor | None:
        assert world.group is not None
        x, *shared = values
        for part in shared:
            x[world.group.own] += part
        return world.group.combine(x)


class Pick(Seam):
    """A step ends here. Whatever follows is computed for some of its tokens, as often as it is asked for."""

    kind = "pick"

    def cross(self, world: World, *values: Any) -> Tensor | None:
        raise AssertionError("fuse cuts a program here")
