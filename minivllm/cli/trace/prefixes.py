"""The prefix cache of a traced engine as a tree in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.cli.terminal.terminal_text import counted

if TYPE_CHECKING:
    from rich.tree import Tree

    from minivllm.messages import PrefixNode, PrefixTree

MOST_NODES = 200


def print_tree(tree: PrefixTree) -> None:
    """A line for each run of cached tokens without a branch."""
    from rich.console import Console

    Console().print(drawn_tree(tree))


def drawn_tree(tree: PrefixTree) -> Tree:
    """Requests of a trace have made-up tokens, so the tree has counts only."""
    from rich.tree import Tree

    drawn = Tree("prefix cache" if tree.nodes else "The prefix cache is empty.")
    open_trees = [drawn]
    for node in tree.nodes:
        del open_trees[node.depth + 1 :]
        open_trees.append(open_trees[-1].add(_described(node), style="bold" if node.users else ""))
    if tree.num_blocks_left_out:
        drawn.add(f"{counted(tree.num_blocks_left_out, 'block')} more")
    return drawn


def _described(node: PrefixNode) -> str:
    """Ages of a trace are in steps."""
    use = counted(node.users, "request") if node.users else f"unused for {counted(round(node.age), 'step')}"
    beginning = "" if node.is_plain or node.depth else ", shared with no other request"
    return f"{counted(node.num_tokens, 'token')}, {counted(node.num_blocks, 'block')}, {use}{beginning}"
