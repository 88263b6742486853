"""Seeds of random cases that each compile kernels of their own: a quarter every time, the rest where slow tests run."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """Parameters ``0`` to ``count - 1``; from a quarter of them on they are slow."""
    return [pytest.param(seed, marks=() if seed < -(-count // 4) else pytest.mark.slow) for seed in range(count)]
