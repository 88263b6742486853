"""Public functions that concern every op: today, :func:`explain`."""

from __future__ import annotations

from cutekernels import dispatch, gpu
from cutekernels.ops import registry


def explain(op: str, problem: str, *, gpu_name: str = "auto", config: str | None = None) -> dispatch.Explanation:
    """Why a call runs the config it runs: ``print(cutekernels.explain("gemm", "m=16 n=4096 k=4096"))``.

    Args:
        op: the op's name, e.g. ``"gemm"``.
        problem: the problem in text form; fields left out hold their defaults.
        gpu_name: a GPU of the table (``"a100"``), or ``"auto"`` for the machine's own.
        config: explain this config instead of the chosen one.

    Returns:
        The choice, its origin, every source that was asked, the roofline floor; ``str()`` of it is a table.

    Raises:
        UnsupportedProblem: no such op, or not a problem of it.
        UnknownGpu: no such GPU.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    declared = registry.get(op)
    return dispatch.explain(declared, declared.Problem.parse(problem), gpu.lookup(gpu_name), config)
