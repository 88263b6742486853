"""QuACK's W8A16 with a scale per channel, which it leaves to the caller's epilogue: theirs, as in its own W4A8."""

from __future__ import annotations

from functools import partial

from quack.cute_dsl_utils import get_device_capacity
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import RowVecLoad
from quack.gemm import _split_k_buffers
from quack.gemm_config import SplitKMode
from quack.operand_transform.host import pick_w4_cfg
from torch import Tensor

from bench.baselines import Launch

_TILE_K = 64


@gemm_epilogue(ops={"cs": RowVecLoad("cs")})
def _channel_scale(acc, cs):
    return {"D": acc * cs}


def channels(x: Tensor, blob: Tensor, scales: Tensor, out: Tensor) -> Launch:
    """``x`` (M, K) times the weight in ``blob``, channels times ``scales`` (1, N), into ``out``: as ``gemm_w4a16``."""
    m, n, k_tiles = x.shape[0], blob.shape[0] * 64, blob.shape[1]
    # Their least tile, then whether the GPU is a GeForce Blackwell.
    tile_m, tile_n, split_k = pick_w4_cfg(m, n, k_tiles, 16, get_device_capacity(x.device)[0] == 12, device=x.device)
    shared = None
    if split_k > 1:
        shared = _split_k_buffers(out.t()[None], SplitKMode.SERIAL, tile_m, tile_n, 1, 1, False)
    product = partial(
        _channel_scale.gemm,
        x,
        blob,
        out,
        epi_args={"cs": scales},
        transform_a="fp8",
        transform_sf=None,
        tile_M=tile_m,
        tile_N=tile_n,
        tile_K=_TILE_K,
        cluster_M=1,
        cluster_N=1,
        max_swizzle_size=8,
        split_k=split_k,
        split_k_buffers=shared,
    )

    def launch() -> Tensor:
        product()
        return out

    return launch
