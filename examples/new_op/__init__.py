"""A new op, whole: ``softcap(x, cap) = cap * tanh(x / cap)``. Copy it to add your own.

``python -m docs.add_op examples/new_op`` joins it to the tree: this folder goes to ``cutekernels/ops/softcap/``, its
``kernel.py`` to ``cutekernels/kernels/triton/softcap.py``, and its names where they must stand. Then it is dispatched,
tuned, benched, seen by torch.compile, and refuses bad operands.
"""

from __future__ import annotations

from cutekernels.ops.softcap.op import SOFTCAP

OPS = (SOFTCAP,)
