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
    depth: dict[Any, int] = {}
    for node in _inputs_first(output.grad_fn):
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


def _inputs_first(root: Any) -> list[Any]:
    """Return every node after the nodes whose results it uses; without recursion, because chains are long."""
    order: list[Any] = []
    is_done: dict[Any, bool] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node not in is_done:
            is_done[node] = False
            stack += [child for child in _children(node) if child not in is_done]
        else:
            stack.pop()
            if not is_done[node]:
                is_done[node] = True
                order.append(node)
    return order
