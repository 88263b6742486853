"""Rules of ``rope``'s CuTe body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutekernels.op import power_of_two
from cutekernels.ops.rope.rotary import RotaryConfig, RotaryProblem
from cutekernels.ops.shared import tile_rules
from cutekernels.ops.shared.two_bodies import CuteBody
from cutekernels.rules import of_both

if TYPE_CHECKING:
    from cutekernels.gpu import GpuSpec

_MOST_CHANNELS = 64  # of a thread, over all its heads
_ANY = 1 << 30  # batch entries: the grid has as many as there are


def _heads(name: str) -> dict[str, str | int]:
    return {"batch": _ANY, "seq": "seq", "head": name, "dim": "head_dim"}


class CuteRope(CuteBody[RotaryProblem, RotaryConfig]):
    """Tiles as Triton's; a thread has one vector of pairs of one token in each of its heads."""

    module = "rope"
    knobs = {
        "tokens": (1, 2, 4),
        "heads": (1, 2, 4, 8, 16, 32),
        "block": (8, 16, 32, 64, 128, 256),
        "warps": (1, 4),
    }
    shapes = {
        **{
            f"{before}{name}": _heads(heads)
            for before in ("out_", "")
            for name, heads in (("q", "heads_q"), ("k", "heads_kv"))
        },
        **{name: {"batch": _ANY, "row": "table_rows", "col": "half"} for name in ("cos", "sin")},
        "positions": {"batch": _ANY, "seq": "seq"},
    }

    def body(self, kernels: Any, p: Any, c: RotaryConfig, gpu: GpuSpec) -> Any:
        return kernels.Rope(
            tokens=c.tokens,
            heads=c.heads,
            block=c.block,
            threads=32 * c.warps,
            vec=p.vec,
            interleaved=p.interleaved,
            inverse=p.inverse,
            positions=p.positions,
            dependent=gpu.has_pdl,
        )

    @of_both
    def block_of_all_pairs(self, p: RotaryProblem, c: RotaryConfig, gpu: GpuSpec) -> str | None:
        if c.block == p.block:
            return None
        return f"body=cute takes {p.half} pairs by block={p.block}, the power of two from 8 to 256; it is {c.block}"

    @of_both
    def one_vector_of_cosines(self, p: RotaryProblem, c: RotaryConfig, gpu: GpuSpec) -> str | None:
        one_head = c.tokens * c.block // p.pairs_per_access
        if one_head <= 32 * c.warps <= one_head * c.heads:
            return None
        return (
            f"threads of body=cute have one vector of cosines and all a head: {one_head} of a head to "
            f"{one_head * c.heads} of the tile; warps={c.warps} are {32 * c.warps}"
        )

    @of_both
    def channels_of_a_thread(self, p: RotaryProblem, c: RotaryConfig, gpu: GpuSpec) -> str | None:
        each = 2 * c.tokens * c.heads * c.block // (32 * c.warps)
        if each <= _MOST_CHANNELS:
            return None
        return f"a thread of body=cute has {_MOST_CHANNELS} channels at most; warps={c.warps} makes {each}"

    @of_both
    def no_idle_heads(self, p: RotaryProblem, c: RotaryConfig, gpu: GpuSpec) -> str | None:
        there = f"{p.heads_q} and {p.heads_kv} heads"
        return tile_rules.idles("heads", c.heads, power_of_two(max(p.groups)), there)

    @of_both
    def no_idle_tokens(self, p: RotaryProblem, c: RotaryConfig, gpu: GpuSpec) -> str | None:
        return tile_rules.idles("tokens", c.tokens, power_of_two(p.seq), f"{p.seq} tokens")
