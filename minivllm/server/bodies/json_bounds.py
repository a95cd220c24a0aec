"""How much a JSON text may hold, told before anything parses it.

Parsing, checking and reporting cost many times what sending costs: 4 MB of ``[-1,-1,…`` are over a million
objects. The scan looks at bytes only, 64 KiB at a time, and lets go of the interpreter lock in between.
"""

import codecs
from dataclasses import dataclass

import numpy as np

from minivllm.server.bodies.errors import ApiError

CHUNK_BYTES = 65536


def check_utf8(text: bytes) -> None:
    """Raises ApiError 400 for a body in another encoding than UTF-8, or with a byte order mark.

    A parser of JSON would recognize UTF-16 and UTF-32, but the scan below reads single bytes. JSON in those
    encodings has zero bytes, which JSON in UTF-8 cannot have.
    """
    decoder, is_utf8 = codecs.getincrementaldecoder("utf-8")(), b"\0" not in text
    try:
        for start in range(0, len(text) if is_utf8 else 0, CHUNK_BYTES):
            decoder.decode(text[start : start + CHUNK_BYTES], final=start + CHUNK_BYTES >= len(text))
    except UnicodeDecodeError:
        is_utf8 = False
    if not is_utf8 or text.startswith(codecs.BOM_UTF8):
        message = (
            "The body is not JSON in UTF-8: send UTF-8, without a byte order mark and without zero bytes."
        )
        raise ApiError(400, message, code="not_utf8")


@dataclass(frozen=True)
class JsonBounds:
    """max_values: values in all lists and objects. max_keys: keys in all objects.
    max_depth: of nested ones."""

    max_values: int = 2**18
    max_keys: int = 2**15
    max_depth: int = 100

    def check(self, text: bytes, what: str = "The body") -> None:
        """Raises ApiError 400 for a text that holds more;
        whether it is JSON at all is for the parser to say."""
        num_values = num_keys = depth = 0
        is_inside, rest = False, b""
        for start in range(0, len(text), CHUNK_BYTES):
            # Without escaped quotes. A backslash that is escaped itself escapes nothing,
            # so pairs of them go first.
            chunk = rest + text[start : start + CHUNK_BYTES]
            chunk = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            rest = b"\\" if chunk.endswith(b"\\") else b""
            data = np.frombuffer(chunk, np.uint8)[: len(chunk) - len(rest)]
            if not len(data):
                continue
            inside = np.logical_xor.accumulate(data == ord('"')) ^ is_inside
            is_inside = bool(inside[-1])
            structure = data[~inside]
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
