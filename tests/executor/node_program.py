"""Nodes with mocks in place of workers, in processes of their own.

``python -m tests.executor.node_program CONFIG FAULT``:
CONFIG, an ``EngineConfig`` as JSON, of a node but the first.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from minivllm.config import EngineConfig
from minivllm.executor.multiproc import MultiprocExecutor
from minivllm.executor.nodes.agent import NodeAgent
from minivllm.executor.nodes.head import HeadNode
from tests.executor.test_multiproc import command

SETTINGS = {"the model's files": '"abc"', "dtype": '"float32"'}


def read(text: str) -> EngineConfig:
    return msgspec.json.decode(text, type=EngineConfig)


def start(config: EngineConfig, fault: str = "none", head: HeadNode | None = None) -> MultiprocExecutor:
    """The first node, when all others are there.
    head: its side of the connections, if they were waited for already."""
    facts = cast(Any, SimpleNamespace(vocab_size=100))
    return MultiprocExecutor(config, facts, command(fault), head or HeadNode(config, SETTINGS))


if __name__ == "__main__":
    sys.exit(NodeAgent(read(sys.argv[1]), SETTINGS, command(sys.argv[2])).run())
