"""Parts of kernel bodies: frozen dataclasses with ``@cute.jit`` methods, chosen by ``ops/*.build``.

``smem`` is plain arithmetic (no DSL), read by ``why_not`` as well as by the kernels; ``load`` moves global to
shared memory; ``mma`` feeds the tensor cores from shared memory; ``schedule`` maps CTAs to tiles; ``warp_groups`` is
what bodies by warpgroup MMA begin with; ``tile_share`` adds up a tile that several CTAs have parts of; ``epilogue`` is
what becomes of accumulators, which ``tile_output``, ``results`` and ``boxes`` then store; ``launch`` launches a body.
"""
