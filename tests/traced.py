"""The graphs that ``torch.compile`` makes of a function, kept and run as they are."""

from __future__ import annotations

from typing import Any


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
