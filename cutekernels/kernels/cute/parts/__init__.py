"""Parts of kernel bodies: frozen dataclasses with ``@cute.jit`` methods, chosen by ``ops/*.build``.

``smem`` is plain arithmetic (no DSL), read by ``why_not`` as well as by the kernels; ``load`` moves global to
shared memory; ``mma`` feeds the tensor cores from shared memory; ``schedule`` maps CTAs to tiles; ``epilogue``
and ``results`` turn accumulators into the result.
"""
