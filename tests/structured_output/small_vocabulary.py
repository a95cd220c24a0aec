"""The compiler over the small tokenizer's vocabulary, and what every token writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from minivllm.config import EngineConfig
from minivllm.sampling_params import StructuredOutputs
from minivllm.simulation.executor import simulated_config
from minivllm.structured_output.compiler import GrammarCompiler
from minivllm.structured_output.grammar import ALL_TOKENS, Grammar
from minivllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

VOCAB_SIZE = 416  # the tokenizer has 384, as in published models the logits are wider
EOS = [1]
WORDS = VOCAB_SIZE // 32


def engine_config(directory: Path, tokenizer: str | None = None) -> EngineConfig:
    return simulated_config(model="small", model_path=str(directory), load_format="auto", tokenizer=tokenizer)


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each token writes, by the byte alphabet of byte-level BPE;
    special tokens write nothing and are left out."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
    texts = {token: tokenizer.convert_ids_to_tokens([token])[0] for token in range(tokenizer.vocab_size)}
    return {
        token: bytes(alphabet[character] for character in text)
        for token, text in texts.items()
        if text is not None and token not in tokenizer.special_ids
    }


class SmallVocabulary:
    def __init__(self, directory: Path) -> None:
        self.tokenizer = load_tokenizer(directory)
        self.compiler = GrammarCompiler(engine_config(directory), VOCAB_SIZE)
        self.bytes = token_bytes(self.tokenizer)

    def grammar(self, **structured: Any) -> Grammar:
        return self.compiler.compile(StructuredOutputs(**structured), EOS)


def allowed(grammar: Grammar, drafts: list[int] | None = None) -> list[set[int]]:
    """The set of tokens that each row of the mask allows."""
    rows = np.full((1 + len(drafts or []), WORDS), ALL_TOKENS, dtype=np.int32)
    grammar.fill(rows, drafts or [])
    return [
        set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in rows
    ]
