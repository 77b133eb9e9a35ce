"""Paths in the graph that autograd records: how many operations follow each other, and how far an input is away.

Both are counted in operations of the recorded graph, views included, so constants differ between models. Growth with
the length of the input is what counts (Vaswani et al. 2017, table 1).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor


def longest_chain(output: Tensor) -> int:
    """Return the number of operations on the longest path that ends in `output`: they cannot run at the same time."""
    order = _topological(output.grad_fn)
    depth: dict[Any, int] = {}
    for node in reversed(order):
        depth[node] = 1 + max((depth[child] for child in _children(node)), default=0)
    return depth[output.grad_fn]


def shortest_path(output: Tensor, leaf: Tensor) -> int:
    """Return the number of operations on the shortest path from a leaf to `output`.

    Raises ValueError if the output does not depend on the leaf.
    """
    distance = {output.grad_fn: 0}
    queue = deque([output.grad_fn])
    while queue:
        node = queue.popleft()
        if getattr(node, "variable", None) is leaf:
            return distance[node]
        for child in _children(node):
            if child not in distance:
                distance[child] = distance[node] + 1
                queue.append(child)
    raise ValueError("output does not depend on the leaf")


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _topological(root: Any) -> list[Any]:
    """Return every node after all nodes that use its result; without recursion, because chains are long."""
    order: list[Any] = []
    state: dict[Any, bool] = {}  # True: all nodes below it are in the list
    stack = [root]
    while stack:
        node = stack[-1]
        if node not in state:
            state[node] = False
            stack += [child for child in _children(node) if child not in state]
        else:
            stack.pop()
            if not state[node]:
                state[node] = True
                order.append(node)
    return order[::-1]
