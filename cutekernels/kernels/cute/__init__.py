"""Kernel bodies in the CuTe Python DSL, a file for each schedule and op; their parts are in ``parts/``.

Device code uses CuTe's letters. ``mA gA sA rA`` is operand A as the whole tensor in global memory, as the
CTA's tile of it, in shared memory, in registers; ``cA`` is a tensor of coordinates with A's shape. ``tXsA``
is ``sA`` as partitioned among the threads of ``X``: ``tA`` the threads that copy A, ``tC`` those of the MMA.
Behind each partition a comment gives its shape, e.g. ``# (CPY, CPY_M, CPY_K, STAGE)``: per thread, one copy's
elements, its repeats along M and K, the pipeline stage.

Glossary. One word for one thing, in code, configs, documents and the database; from PTX, CUTLASS and the papers.

Schedules, the values of a config's ``body``:

- ``multistage``: every warp copies by cp.async and multiplies by warp MMA; ``skinny``: the same for few tokens.
- ``warpgroup``: a producer warp loads by TMA, consumer warp groups multiply by wgmma; ``skinny_warpgroup``: the same
  for few tokens, without a persistent grid; ``few``: warpgroup attention of few tiles.

Tiles:

- ``tile_m``, ``warps_m``, ``cluster_m``: along rows of out, in every body; ``tile_n``, ``warps_n``, ``cluster_n``:
  along its columns; ``tile_k``: of the depth, a *k-tile*; a *k-block* is an MMA's part of it; ``tile_q``, ``tile_kv``:
  queries and keys.
- ``swap_ab``: the body computes ``out^T = B^T A^T``, so that columns of out take the MMA's rows, and translates.
- ``split_k``, ``split``: CTAs that share one tile's depth or keys. ``raster``: tile rows of a band that is walked
  column by column.
- persistent grid: as many CTAs as run at once, each with several tiles; ``dynamic``: it draws them from a counter;
  ``exclusive``: a CTA that has its SM to itself; paired tiles: the i-th and the i-th last of a head in one CTA.

Pipelines:

- stage: one of the buffers that loads fill ahead; ``full`` and ``empty`` are its mbarriers, *phase* their parity.
- producer, consumer: who fills and who reads stages; setmaxnreg moves registers from one to the other.
- ping-pong: two consumer groups, each with a tile of its own, multiply in turns.
- multicast: one TMA load into the shared memory of all CTAs of a cluster.

Between kernels:

- PDL, programmatic dependent launch: ``pdl_wait`` (griddepcontrol.wait) until the kernel before is done and visible,
  ``pdl_launch`` (griddepcontrol.launch_dependents) lets the next one be set up.
- ``prefetch_l2``: brings what the kernel before does not write into the L2 cache, ahead of ``pdl_wait``.

Arithmetic:

- accumulators: fp32 (or fp16) sums of an MMA, in registers; *epilogue*: what is done to them before they leave.
- ``gamma``: a norm's weight; ``rstd``: one over the root of a row's mean square; gate and up: halves of a gated weight.
- ``lse``: a row's log-sum-exp; ``delta``: a row's sum of ``dO * O``; *lazy*: rescales only where scores grow by far.
"""
