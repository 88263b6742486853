"""Attention: the declaration. ``out = softmax(scale * q k^T + mask) v``; public function in ``api.py``.

Operands are as the caller has them: q and out ``(B, SQ, HQ, D)``, k and v ``(B, SKV, HKV, D)``, or varlen without the
batch, ``(TOTAL, H, D)``, with the sequences' ends in ``cu_seqlens``. Head dims are contiguous and rows 16-byte aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutekernels.columns import where
from cutekernels.op import Work
from cutekernels.ops.attention.coefficients import EAGER, EXPONENTS, MULTISTAGE
from cutekernels.ops.attention.config import GROUP_ROWS, AttentionConfig, FewForward, WarpgroupForward
from cutekernels.ops.attention.operands import AttentionOp, VarlenOp, numbers, rows, workspace
from cutekernels.ops.attention.problem import (
    NO_SCALES,
    SLACK,
    AttentionProblem,
    Q,
    TilesSchedule,
    depth,
    launch_blind,
    sample_sinks,
    score_factors,
    sides_of,
    since_revision_1,
)
from cutekernels.ops.shared.cute_op import CuteOp
from cutekernels.ops.shared.operands import Array, Vector
from cutekernels.rules import Broken, of_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutekernels.backends import Artifact
    from cutekernels.gpu import GpuSpec

# Registers beside accumulators and Q: fragments, row statistics, addresses (docs/notes/attention.md#prefill-registers).
OTHER_REGISTERS = {"bf16": 56, "fp16": 64}
CONVERTING = 40  # for vectors in e4m3 on their way to shared memory


class MultistageForward(TilesSchedule[Any, AttentionConfig]):
    """cp.async and warp MMA."""

    name = "multistage"
    config = AttentionConfig

    @of_config
    def converting(self, c: AttentionConfig, gpu: GpuSpec, x: AttentionProblem) -> Broken:
        if x.cached_in != "same":
            yield c.stages == 1, "stages=1 would convert keys in FP8 while scores are held, which spills: take 2"

    def registers(self, p: AttentionProblem, c: AttentionConfig) -> int:
        """An estimate of the compiler's need: accumulators of both products, queries, and the rest."""
        accumulators = c.rows * (p.width + c.tile_kv) // 32
        queries = where(c.q_in_registers, c.rows * p.width // 64, 0)
        return accumulators + queries + OTHER_REGISTERS[p.dtype] + (CONVERTING if p.cached_in != "same" else 0)

    def smem_bytes(self, p: AttentionProblem, c: AttentionConfig) -> int:
        return c.smem(p).total_bytes

    def times_us(self, p: AttentionProblem, c: Any, gpu: GpuSpec, x: object) -> Any:
        """See :meth:`TilesSchedule.tiles_us`."""
        return self.tiles_us(
            p, c, gpu, products=2, read_rows=where(c.q_in_registers, 0, c.rows),
            exponents=EXPONENTS * where(c.lazy, 1.0, EAGER),
            fixed=MULTISTAGE.tile * where(c.stages > 1, 1.0, MULTISTAGE.one_stage),
            crowd_power=MULTISTAGE.few_warps,
            uneven=p.limited_right,
        )  # fmt: skip


class PrefillOp(AttentionOp[Q, AttentionConfig]):
    """Rules, model and kernels of tiles of queries that walk keys."""

    Config = AttentionConfig
    schedules = (MultistageForward(), WarpgroupForward(), FewForward())

    # -- kernel

    def further(self, p: Q, c: AttentionConfig) -> list[Any]:
        return [*workspace(sums=False, tickets=c.dynamic_scheduler)[1 : 1 + c.by_groups], *numbers(3, 2)]

    def build(self, p: Q, c: AttentionConfig, gpu: GpuSpec) -> Artifact:
        from cutekernels.backends import cute as backend

        *operands, k_scale, v_scale = self.fakes(p, c)  # scales are the last arguments, of one body
        scales = () if c.by_groups else (k_scale, v_scale)
        return backend.compile(self.body(p, c, gpu), *operands, *self.further(p, c), *scales, gpu=gpu)

    def bind(self, p: Q, c: AttentionConfig, kernel: Callable[..., Any]) -> Callable[..., Any]:
        from cutekernels.ops.shared.per_stream import StreamWorkspace

        begin = 1 + p.lse
        if p.seq_kv == 0:
            return launch_blind(p.lse, begin + self.inputs.index("sinks"))
        limits, multistage, kernels_order = p.limits, not c.by_groups, self.kernels_order
        counter = StreamWorkspace(0, 1) if c.dynamic_scheduler else None  # one ticket, no partial sums

        def launch(*args: Any) -> None:
            if args[0].numel() == 0:
                return
            lse = args[1].view(-1) if p.lse else None
            operands, scales = kernels_order(*args[begin:-2])
            factors = score_factors(args[-2], args[-1])
            if multistage:
                kernel(args[0], lse, *operands, *factors, *limits, *scales)
            else:
                kernel(args[0], lse, *operands, None if counter is None else counter.get()[1], *factors, *limits)

        return launch

    def kernels_order(self, *inputs: Tensor | None) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
        """A call's inputs as kernels take them behind the results, those of ``order``, and the scales of a cache."""
        raise NotImplementedError

    def body(self, p: Q, c: AttentionConfig, gpu: GpuSpec) -> Any:
        """The kernel of ``c.body`` with its parts."""
        from cutekernels.backends import cute as backend
        from cutekernels.kernels.cute.attention.multistage_forward import MultistageAttention
        from cutekernels.kernels.cute.attention.warpgroup_forward import WarpgroupAttention
        from cutekernels.kernels.cute.parts.cache import CacheTiles
        from cutekernels.kernels.cute.parts.float8 import Float8, Float8Load
        from cutekernels.kernels.cute.parts.heads import HeadRows
        from cutekernels.kernels.cute.parts.mask import BandMask
        from cutekernels.kernels.cute.parts.products import warp_products
        from cutekernels.kernels.cute.parts.sequences import HeadOrder, Sequences
        from cutekernels.kernels.cute.parts.softmax import OnlineSoftmax

        shared: dict[str, Any] = {
            "mask": BandMask(c.tile_q, c.tile_kv, p.limited_left, p.limited_right, p.mask),
            "softmax": OnlineSoftmax(SLACK if c.lazy else 0.0, p.softcap),
            "order": HeadOrder("rows" if c.order == "paired" else c.order, gpu.l2_bytes // 2),
            "sequences": Sequences(p.varlen, p.page),
        }
        if c.by_groups:
            return WarpgroupAttention(
                groups=c.tile_q // GROUP_ROWS,
                tile_kv=c.tile_kv,
                head_dim=p.head_dim,
                padded=p.width,
                stages=c.stages,
                turns=c.turns,
                resident=0 if c.grid == "tiles" else gpu.sm_count,
                dynamic_scheduler=c.dynamic_scheduler,
                separate_output_smem=c.grid == "ahead",
                ctas_per_sm=c.ctas_per_sm,
                split=c.split,
                paired_tiles=c.order == "paired",
                dependent=c.dependent and gpu.has_pdl,
                **shared,
            )
        tile = (c.tile_kv, p.head_dim, p.width, c.stages, c.threads)
        float8 = None
        if p.cached_in != "same":
            float8 = Float8Load(Float8(gpu.has_fp8), backend.type_of(p.dtype), p.cached_in == "fp8_tokens")
        return MultistageAttention(
            rows_q=HeadRows(c.tile_q, p.head_dim, p.width, 1, c.threads),
            rows_kv=HeadRows(*tile) if p.page is None else CacheTiles(*tile, p.page, p.limited_left, float8),
            products=warp_products(c.warps, c.q_in_registers),
            ctas_per_sm=c.ctas_per_sm,
            **shared,
        )


class Attention(
    VarlenOp[AttentionProblem, AttentionConfig], PrefillOp[AttentionProblem], CuteOp[AttentionProblem, AttentionConfig]
):
    """Problems of self-attention and cross-attention, with every option."""

    name = "attention"
    revision = 2
    earlier = {1: since_revision_1}
    Problem = AttentionProblem
    suite = (
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16",
        "batch=4 seq_q=4096 seq_kv=4096 heads_q=16 heads_kv=16 causal=1",
        "batch=4 seq_q=2048 seq_kv=2048 heads_q=32 heads_kv=32 head_dim=64 causal=1",
        "batch=1 seq_q=1024 seq_kv=1024 heads_q=28 heads_kv=4 causal=1 lse=1",
        "batch=2 seq_q=300 seq_kv=777 heads_q=48 heads_kv=8 causal=1 window_left=200 window=left dtype=fp16",
        "batch=2 seq_q=257 seq_kv=257 heads_q=4 heads_kv=1 head_dim=80 window_left=30 window_right=9 window=both",
        "batch=2 seq_q=130 seq_kv=200 heads_q=6 heads_kv=3 head_dim=96 mask=1 dtype=fp16 lse=1",
        "batch=3 seq_q=200 seq_kv=200 heads_q=8 heads_kv=2 head_dim=256 causal=1 softcap=1",
        "batch=5 seq_q=150 seq_kv=150 heads_q=8 heads_kv=2 causal=1 varlen=1 lse=1",
        "batch=2 seq_q=300 seq_kv=500 heads_q=8 heads_kv=1 head_dim=64 causal=1 window_left=127 window=left sinks=same",
    )

    out = rows("batch?", "seq_q", "heads_q", result=True)
    lse = Array("batch?", "heads_q", "seq_q", dtype="wide", strides=(), flat=True, result=True, given="lse")
    q = rows("batch?", "seq_q", "heads_q")
    k = rows("batch?", "seq_kv", "heads_kv")
    v = rows("batch?", "seq_kv", "heads_kv")
    mask = Array("batch|1", "heads_q|1", "seq_q", "seq_kv", dtype="bool", given="mask", bits=64, strided=True)
    cu_seqlens_q = Vector("ends", "i32", strides=(), given="varlen")
    cu_seqlens_kv = Vector("ends", "i32", strides=(), given="varlen")
    sinks = Vector("heads_q", "sinks", optional=True, align=2, canonical=True)
    order = (
        *("out", "lse", "q", "k", "v", "mask", "cu_seqlens_q", "cu_seqlens_kv"),
        *("page_table", "sinks", "k_scale", "v_scale"),
    )
    options = ("causal", "window", "window_left", "window_right", "softcap", "lse")

    def kernels_order(self, *inputs: Tensor | None) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
        q, k, v, mask, cu_q, cu_kv, sinks = inputs
        if mask is not None:
            import torch

            mask = mask.view(torch.uint8)
        return (q, k, v, mask, cu_q, cu_kv, None, sinks), NO_SCALES

    # -- mathematics

    def draw(self, p: AttentionProblem, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        import torch

        if name == "mask":
            noise = torch.rand((p.batch, 1, p.seq_q, p.seq_kv), generator=generator, device=generator.device)
            return (noise < 0.7).expand(-1, p.heads_q, -1, -1)
        if name.startswith("cu_seqlens"):
            return _ends(p.batch, p.seq_q if name == "cu_seqlens_q" else p.seq_kv, generator)
        if name == "sinks":
            return sample_sinks(p.sinks, p.dtype, p.heads_q, p.pairs / max(1, p.seq_q), generator)
        return None

    def evaluate(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        from cutekernels.ops.attention import reference

        q, k, v, mask, *rest = args
        if mask is not None:
            mask = mask.expand(q.shape[0], q.shape[2], -1, -1)
        return reference.attention(q, k, v, mask, *rest, **sides_of(**options))[: 1 + options["lse"]]

    def work(self, p: AttentionProblem) -> Work:
        flops = 4.0 * p.batch * p.heads_q * p.pairs * p.head_dim
        return Work(flops=flops, bytes=float(p.bytes_moved), depth=depth(p))

    def vendor(self, p: AttentionProblem) -> Callable[..., object] | None:
        """torch's SDPA, which chooses the backend, where it has what ``p`` asks."""
        from torch.nn.functional import scaled_dot_product_attention

        shifted = p.causal and p.seq_q != p.seq_kv  # torch aligns the first query with the first key
        limited = p.window != "none" or shifted or (p.causal and p.mask)
        if p.varlen or p.softcap or p.lse or p.sinks != "none" or limited:
            return None

        def call(out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            gqa = p.heads_q != p.heads_kv
            scale = rest[3]  # behind the two ends of varlen sequences and the sinks
            return scaled_dot_product_attention(q, k, v, mask, is_causal=p.causal, scale=scale, enable_gqa=gqa)

        return call


ATTENTION = Attention()


def _ends(sequences: int, mean: int, generator: torch.Generator) -> Tensor:
    """Ends of ``sequences`` random lengths whose mean is ``mean``, from 0: ``(sequences + 1,)``."""
    import torch

    device = generator.device
    total = sequences * mean
    cuts = torch.randint(0, total + 1, (max(0, sequences - 1),), generator=generator, device=device)
    edges = [torch.zeros(1, device=device), cuts.sort().values, torch.full((1,), total, device=device)]
    return torch.cat(edges if sequences else edges[:1]).to(torch.int32)
