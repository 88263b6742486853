"""Ask the database of winners from Python, and ask why a call takes its config. Needs no GPU.

    python examples/query_winners.py

It prints:

    h200: 69 winners of gemm, 39 faster than the default
      the largest gains:
      m=16    n=4096   k=4096    1.29x  13.6 us
      m=16384 n=4096   k=2048    1.15x  345.8 us
      m=256   n=3584   k=18944   1.15x  55.4 us
    m=16 n=4096 k=4096 on an h200: tuned
    m=16 n=4096 k=4096 on an rtx5090: default
"""

from __future__ import annotations

import cutekernels as ck


def main() -> None:
    with ck.db.open() as database:
        winners = database.winners(gpu="h200", op="gemm", origin="measured")
    faster = [w for w in winners if w.ratio is not None and w.ratio > 1]
    print(f"h200: {len(winners)} winners of gemm, {len(faster)} faster than the default")
    print("  the largest gains:")
    for w in sorted(faster, key=lambda w: w.ratio or 0, reverse=True)[:3]:
        m, n, k = (w.problem[name] for name in "mnk")
        print(f"  m={m:<5} n={n:<6} k={k:<7} {w.ratio:.2f}x  {w.median_us:.1f} us")
    for gpu in ("h200", "rtx5090"):
        rows = dict(ck.explain("gemm", "m=16 n=4096 k=4096", gpu=gpu).rows)
        print(f"{rows['problem']} on an {gpu}: {rows['origin']}")


if __name__ == "__main__":
    main()
