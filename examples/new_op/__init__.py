"""A new op, whole: ``softcap(x, cap) = cap * tanh(x / cap)``. Copy it to add your own.

This folder goes to ``cutekernels/ops/softcap/``, ``kernel.py`` of it to ``cutekernels/kernels/triton/softcap.py``, and
``"softcap": ("softcap",)`` joins ``FAMILIES`` in ``cutekernels/ops/registry.py``. Then it is dispatched, tuned,
benched, seen by torch.compile, and refuses bad operands.
"""

from __future__ import annotations

from cutekernels.ops.softcap.op import SOFTCAP

OPS = (SOFTCAP,)
