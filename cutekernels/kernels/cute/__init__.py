"""Kernel bodies in the CuTe Python DSL, one file per op and schedule; their parts are in ``parts/``.

Device code uses CuTe's letters. ``mA gA sA rA`` is operand A as the whole tensor in global memory, as the
CTA's tile of it, in shared memory, in registers; ``cA`` is a tensor of coordinates with A's shape. ``tXsA``
is ``sA`` as partitioned among the threads of ``X``: ``tA`` the threads that copy A, ``tC`` those of the MMA.
Behind each partition a comment gives its shape, e.g. ``# (CPY, CPY_M, CPY_K, STAGE)``: per thread, one copy's
elements, its repeats along M and K, the pipeline stage.
"""
