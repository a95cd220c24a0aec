"""Text out of token ids, one token at a time: never half a character, nothing of a stop string, linear time.

What a stream emits, plus what it flushes at the end, equals decoding all its ids at once.
Two stream types reach that:

* ``ByteLevelStream`` for byte-level BPE (Llama 3, Qwen, SmolLM, Mistral's newer ones):
  tokens are bytes, so an
  incremental UTF-8 decoder is all it takes.
* ``WindowStream`` for everything else (SentencePiece with byte fallback, Metaspace, WordPiece):
  decodes the new tokens
  after the last finished one and emits the difference, after vLLM's prefix and read offsets.

``tokenizers.decoders.DecodeStream`` is not used: it has no flush, waits forever on bytes that are not UTF-8,
and raises on some sequences, so it cannot promise the same text as decoding at once.
"""

import codecs
import json
import re
from collections import deque
from typing import Any, Protocol

from tokenizers import Tokenizer as TokenizersBackend

from minivllm.stop_conditions.stop_strings import StopMatch, StopMatcher

_BYTE_FALLBACK_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenStream(Protocol):
    """Turns ids into text; ``push`` returns the text that became certain, ``flush`` ends the stream.

    ``forget_half_character`` drops bytes at the end that only begin a character:
    the stream was cut from outside.
    """

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def forget_half_character(self) -> None: ...


class TokenDecoder:
    """The facts about a tokenizer that decoding needs; made once, shared by all requests.
    Caches one entry per id."""

    def __init__(self, backend: TokenizersBackend) -> None:
        self._backend = backend
        self._special = {
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        }
        decoders = _decoder_types(backend)
        self.is_byte_level = "ByteLevel" in decoders and decoders <= {"ByteLevel", "Fuse"}
        self.has_byte_fallback = "ByteFallback" in decoders
        self._byte_of_char = _byte_level_alphabet() if self.is_byte_level else {}
        self._token_bytes: dict[int, bytes] = {}
        self._token_bytes_without_special: dict[int, bytes] = {}
        self._token_texts: dict[int, str] = {}

    def stream(self, skip_special_tokens: bool) -> TokenStream:
        """A new stream of one sequence."""
        if self.is_byte_level:
            return ByteLevelStream(self, skip_special_tokens)
        return WindowStream(self, skip_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The vocabulary entry, None if decoding leaves it out:
        unknown to the tokenizer, or special and skipped."""
        token = self._backend.id_to_token(token_id)
        return None if skip_special_tokens and token in self._special else token

    def token_bytes(self, skip_special_tokens: bool) -> dict[int, bytes]:
        """Bytes of the ids seen so far, of a byte-level tokenizer; ``load_token_bytes`` adds one."""
        return self._token_bytes_without_special if skip_special_tokens else self._token_bytes

    def load_token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        token = self.token(token_id, skip_special_tokens) or ""
        try:
            data = bytes([self._byte_of_char[char] for char in token])
        except KeyError:  # an added token in plain text, not in the byte alphabet
            data = token.encode()
        self.token_bytes(skip_special_tokens)[token_id] = data
        return data

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 of one token inside a sequence, special tokens shown;
        a part of a character has a part of its bytes."""
        if self.is_byte_level:
            known = self._token_bytes.get(token_id)
            return self.load_token_bytes(token_id, False) if known is None else known
        token = self.token(token_id, False) or ""
        if self.has_byte_fallback and _BYTE_FALLBACK_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads inside a sequence (a leading space stays);
        special tokens are shown."""
        text = self._token_texts.get(token_id)
        if text is None:
            # Some decoders drop the space of the first token, so the text is taken from the second place.
            text = self.decode([token_id, token_id])[len(self.decode([token_id])) :]
            if self.is_byte_level:
                text = self.load_token_bytes(token_id, False).decode(errors="replace")
            self._token_texts[token_id] = text
        return text


class ByteLevelStream:
    """Incremental UTF-8 over the bytes of the tokens;
    bytes that are not UTF-8 become U+FFFD as the decoder has it."""

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._token_bytes = decoder.token_bytes(skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._decoder.load_token_bytes(token_id, self._skip_special_tokens)
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def forget_half_character(self) -> None:
        self._utf8.reset()


class WindowStream:
    """Decodes pending tokens after the last finished one (the context) and emits what the context alone
    lacks.

    A run of byte-fallback tokens stays pending until another token ends it, because one invalid byte turns
    the whole run into U+FFFD. Tokens that decoding leaves out never enter the window, so the context always
    has text of its own.
    """

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._decoder.token(token_id, self._skip_special_tokens)
        if token is None:
            return ""
        self._pending.append(token_id)
        if self._decoder.has_byte_fallback and _BYTE_FALLBACK_TOKEN.fullmatch(token):
            return ""
        return self.flush()

    def flush(self) -> str:
        if not self._pending:
            return ""
        text = self._decoder.decode(self._context + self._pending)
        text = text[len(self._decoder.decode(self._context)) :]
        self._context = self._pending[-1:]
        self._pending = []
        return text

    def forget_half_character(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(b"".join(map(self._decoder.bytes_of, self._pending)))  # pending are tokens of a byte each
        begun, _ = utf8.getstate()
        del self._pending[len(self._pending) - len(begun) :]


class Detokenizer:
    """Text of one sequence with its stop strings and expressions.

    Text that may begin a match is held back until decided. Matches that end in the first ``min_tokens``
    tokens do not count, as in vLLM. After ``stop_match`` is set the sequence is over: the text ends before
    the match (after it with ``include_stop_string``) and no more tokens may be pushed.
    """

    def __init__(
        self,
        stream: TokenStream,
        stops: StopMatcher | None = None,
        *,
        min_tokens: int = 0,
        include_stop_string: bool = False,
    ) -> None:
        self._stream = stream
        self._stops = stops
        self._state = None if stops is None else stops.start
        self._num_tokens_to_ignore = min_tokens
        self._include_stop_string = include_stop_string
        self._held: deque[str] = deque()
        self._num_held = 0
        self._released: list[str] = []
        self.stop_match: StopMatch | None = None

    def push(self, token_id: int) -> bool:
        """Add one token; True if its text completed a match."""
        text = self._stream.push(token_id)
        if self._num_tokens_to_ignore > 0:
            self._num_tokens_to_ignore -= 1
            self._release(text, look_for_stops=False)
        elif text:
            self._release(text)
        return self.stop_match is not None

    def flush(self, *, is_cut: bool = False) -> bool:
        """End the sequence and release what was held back; True if a match turned up in the last of it.

        is_cut: it ends from outside, between any two tokens, so a character that is begun is left out.
        """
        if self.stop_match is None:
            if is_cut:
                self._stream.forget_half_character()
            text = self._stream.flush()
            self._release(text, look_for_stops=self._num_tokens_to_ignore == 0)
            if self.stop_match is None:
                self._release_held(0)
        return self.stop_match is not None

    def take(self) -> str:
        """The text released since the last call, and forget it."""
        text = self._released[0] if len(self._released) == 1 else "".join(self._released)
        self._released.clear()
        return text

    def text(self) -> str:
        """All text released and not taken."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def _release(self, text: str, look_for_stops: bool = True) -> None:
        if self._stops is None:
            self._released.append(text)
            return
        if look_for_stops:
            self._state, num_read, self.stop_match = self._stops.scan(self._state, text)
            text = text[:num_read]
        else:
            self._state = self._stops.skip(self._state, text)
        self._held.append(text)
        self._num_held += len(text)
        if self._include_stop_string:
            self._release_held(0)
        elif self.stop_match is not None:
            self._release_held(self.stop_match.length)
            self._held.clear()
        else:
            self._release_held(self._stops.num_held(self._state))

    def _release_held(self, num_held: int) -> None:
        """Release all but the last so many characters.
        Piece by piece, since an expression may hold back much."""
        while self._num_held > num_held:
            piece = self._held.popleft()
            num_released = min(len(piece), self._num_held - num_held)
            self._released.append(piece[:num_released])
            self._num_held -= num_released
            if num_released < len(piece):
                self._held.appendleft(piece[num_released:])


def _decoder_types(backend: TokenizersBackend) -> set[str]:
    """Names of the steps of a tokenizer's decoder."""
    if backend.decoder is None:
        return set()
    # The decoder's own JSON; that of the whole tokenizer would carry the vocabulary along.
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    return {step["type"] for step in steps}


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE:
    printable Latin-1 stands for itself, the rest goes from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
