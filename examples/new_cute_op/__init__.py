"""A new op with a kernel in the CuTe DSL: ``python -m docs.add_op examples/new_cute_op`` joins it to the tree."""

from cutekernels.ops.scale_rows.op import SCALE_ROWS

OPS = (SCALE_ROWS,)
