"""Traces of a function by torch: the ops that reach dispatch, and the graphs that ``torch.compile`` makes of it."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Graphs:
    """``torch.compile(backend=graphs.backend)`` keeps each graph in ``graphs.seen``."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def backend(self, module: Any, example: Any) -> Any:
        self.seen.append(module)
        return module

    def ops(self) -> list[str]:
        """The names of our ops in the first graph, in order."""
        targets = [str(node.target) for node in self.seen[0].graph.nodes]
        return [t.split(".")[1] for t in targets if t.startswith("cutekernels.")]


class Recording(TorchDispatchMode):
    """Notes the ops that reach dispatch, but for those inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
