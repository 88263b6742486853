"""What a dependent launch of ``gemm`` does before its turn, to the schedules that know of it: it asks for weights.

Under programmatic dependent launch a CTA is placed while the kernel ahead still runs, waits until that is done, and
would find memory idle in between. ``ahead`` k-tiles of W are on their way to the L2 cache by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec
    from cutekernels.ops.gemm.op import GemmConfig

# What a CTA asks for, in bytes: all of it is gained up to ENOUGH, and lost again beyond TOO_MUCH. H200, us, by bytes,
# 2026-11-22. 3584 x 3584, 16 tokens, specialized, tiles of 8 KiB: none 8.58, 16 KiB 8.24, 32 KiB 8.06, 64 KiB 7.96;
# 64 tokens 8.91, 8.62, 8.54, 9.02, 128 KiB 9.64. 18944 x 3584, tiles of 36 KiB, 16 tokens: none 34.43, 72 KiB 34.01,
# 144 KiB 34.22, 288 KiB 34.8; in another run, by 36 and 72 KiB, 16 tokens 33.00 and 33.03, 64 tokens 33.92 and 34.29,
# behind a norm 33.92 and 34.03, 35.26 and 35.39. Behind a norm no more than alone: 64 tokens x 3584, by none to
# 128 KiB, 10.20, 9.92, 9.81, 9.92, 10.19.
ENOUGH, TOO_MUCH = 32 * 1024, 48 * 1024
MOST = 128 * 1024
_GAIN_US = 0.4


def asked_bytes(c: GemmConfig) -> int:
    """By a CTA."""
    return c.ahead * c.tile_m * c.tile_k * 2


def broken(c: GemmConfig, gpu: GpuSpec) -> Iterator[str]:
    """The rules that ``c`` breaks."""
    if c.pdl and not gpu.has_pdl:
        yield f"{gpu.name} has no programmatic dependent launch"
    if c.ahead and not c.pdl:
        yield f"ahead={c.ahead} is for pdl=1: without, no time passes before a kernel's turn"
    if asked_bytes(c) > MOST:
        yield f"ahead={c.ahead} asks for {asked_bytes(c)} bytes at once: at most {MOST}"


def saved_us(c: GemmConfig) -> float:
    """Of a launch whose CTAs are all placed at once; later ones have nothing to wait for."""
    asked = asked_bytes(c)
    return _GAIN_US * (min(asked, ENOUGH) / ENOUGH - max(0, asked - TOO_MUCH) / TOO_MUCH)
