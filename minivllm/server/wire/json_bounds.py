"""How much a JSON text may hold, told before anything parses it.

Parsing, checking and reporting cost many times what sending costs: 4 MB of ``[-1,-1,…`` are over a million objects. The
scan looks at bytes only, 64 KiB at a time, and lets go of the interpreter lock in between.
"""

from dataclasses import dataclass

import numpy as np

from minivllm.server.wire.errors import ApiError

CHUNK_BYTES = 65536


@dataclass(frozen=True)
class JsonBounds:
    """max_values: values in all lists and objects. max_keys: keys in all objects. max_depth: of nested ones."""

    max_values: int = 2**18
    max_keys: int = 2**15
    max_depth: int = 100

    def check(self, text: bytes, what: str = "The body") -> None:
        """Raises ApiError 400 for a text that holds more; whether it is JSON at all is for the parser to say."""
        num_values = num_keys = depth = 0
        is_inside, is_escaped = False, False
        data = np.frombuffer(text, np.uint8)
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            quotes = chunk == ord('"')
            escaped, is_escaped = _escaped(chunk, is_escaped)
            if escaped is not None:
                quotes &= ~escaped
            inside = np.logical_xor.accumulate(quotes) ^ is_inside
            is_inside = bool(inside[-1])
            structure = chunk[~inside]
            change = np.zeros(len(structure), np.int32)
            change[(structure == ord("[")) | (structure == ord("{"))] = 1
            num_values += int(change.sum()) + int(np.count_nonzero(structure == ord(",")))
            change[(structure == ord("]")) | (structure == ord("}"))] = -1
            num_keys += int(np.count_nonzero(structure == ord(":")))
            depths = change.cumsum() + depth
            self._compare(what, "values", num_values, self.max_values)
            self._compare(what, "keys", num_keys, self.max_keys)
            if len(depths):
                self._compare(what, "levels of lists and objects", int(depths.max()), self.max_depth)
                depth = int(depths[-1])

    def _compare(self, what: str, name: str, number: int, limit: int) -> None:
        if number > limit:
            message = f"{what} has more than {limit} {name}, the most this server reads at once: send less."
            raise ApiError(400, message, code="body_too_complex")


def _escaped(chunk: np.ndarray, is_first_escaped: bool) -> tuple[np.ndarray | None, bool]:
    """(which bytes a backslash stands before, whether the next chunk's first byte is one of them).

    A backslash that is escaped itself escapes nothing: of a run of backslashes, every second one counts.
    """
    backslashes = chunk == ord("\\")
    if not backslashes.any():
        if not is_first_escaped:
            return None, False
        escaped = np.zeros(len(chunk), bool)
        escaped[0] = True
        return escaped, False
    positions = np.arange(len(chunk), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(backslashes, -1, positions))
    run = positions - last_other  # backslashes that end here, 0 for any other byte
    run[last_other < 0] += is_first_escaped  # as if one more stood before the chunk
    escaped = np.empty(len(chunk), bool)
    escaped[0] = is_first_escaped
    escaped[1:] = run[:-1] % 2 == 1
    return escaped, bool(run[-1] % 2)
