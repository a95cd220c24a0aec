"""Where the engine's start comes in: on the first node, and on the others."""

from __future__ import annotations

from minivllm.config import EngineConfig
from minivllm.executor.multiproc import MultiprocExecutor
from minivllm.executor.nodes.agent import NodeAgent
from minivllm.executor.nodes.head import HeadNode
from minivllm.executor.nodes.messages import settings_of
from minivllm.executor.protocol import ExecutorContext


def start_executor(context: ExecutorContext) -> MultiprocExecutor:
    """The executor of the first node, once all nodes are there. See EXECUTORS."""
    head = HeadNode(context.config, settings_of(context.config))
    return MultiprocExecutor(context.config, context.facts, nodes=head)


def run_node(config: EngineConfig) -> int:
    """Run the workers of another node until the first one ends; the exit status. See NODE_AGENT."""
    return NodeAgent(config, settings_of(config)).run()
