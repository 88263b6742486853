"""Call a few ops, see how exact they are, which config each takes, and on a GPU how fast they are beside torch.

    python examples/call_ops.py

On a CPU it prints:

    linear      largest error 1.2e-01, torch's 1.2e-01
    attention   largest error 7.3e-03, torch's 7.3e-03
    rms_norm    largest error 1.4e-02, torch's 1.4e-02
    linear on an H200: tile_m=128 ..., default
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import cutekernels as ck
from cutekernels import measure


def pairs(device: str) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]]:
    """For each op: ours, torch's, and torch's in fp64."""
    tokens, width = (4096, 4096) if device == "cuda" else (64, 128)
    x, weight = (torch.randn(n, width, device=device, dtype=torch.bfloat16) for n in (tokens, width))
    q, k, v = (torch.randn(1, tokens // 2, h, 64, device=device, dtype=torch.bfloat16) for h in (8, 2, 2))
    heads, wide = ([t.to(to).transpose(1, 2) for t in (q, k, v)] for to in (torch.bfloat16, torch.float64))
    one = torch.ones(width, device=device, dtype=torch.bfloat16)

    def sdpa(operands: list[Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True).transpose(1, 2)

    return {
        "linear": (
            lambda: ck.linear(x, weight),
            lambda: F.linear(x, weight),
            lambda: F.linear(x.double(), weight.double()),
        ),
        "attention": (lambda: ck.attention(q, k, v, causal=True), lambda: sdpa(heads), lambda: sdpa(wide)),
        "rms_norm": (
            lambda: ck.rms_norm(x, one, eps=1e-6),
            lambda: F.rms_norm(x, (width,), one, 1e-6),
            lambda: F.rms_norm(x.double(), (width,), one.double(), 1e-6),
        ),
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    for name, (ours, theirs, exact) in pairs(device).items():
        errors = [(function().double() - exact()).abs().max().item() for function in (ours, theirs)]
        print(f"{name:11s} largest error {errors[0]:.1e}, torch's {errors[1]:.1e}", end="")
        if device == "cuda":
            times = measure.time_interleaved({"ours": [ours], "torch": [theirs]})
            print(f"; {times['ours'].median:.1f} us, torch {times['torch'].median:.1f}", end="")
        print()
    found = ck.explain("gemm", "m=4096 n=4096 k=4096 b_major=k", gpu="auto" if device == "cuda" else "h200")
    rows = dict(found.rows)
    print(f"linear on an {rows['gpu'].partition(' ')[0].upper()}: {rows['config'].split()[0]} ..., {rows['origin']}")


if __name__ == "__main__":
    main()
