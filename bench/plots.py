"""One PNG per run: grouped bars, a group per case and a bar per contender, cases in the order they were timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.rows import Row

_COLORS = ("#76b900", "#9aa0a6", "#5f6368", "#d93025", "#1a73e8", "#f9ab00", "#8430ce", "#12b5cb", "#202124")

_BUSY = 150.0  # floating-point operations a byte, from which arithmetic is the limit on every GPU here


def draw(rows: Sequence[Row], path: Path) -> None:
    """TFLOP/s where arithmetic is the limit, else GB/s, into ``path``. A contender without a time has no bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matmul = any((r.tflops or 0.0) * 1e3 > _BUSY * (r.gbps or 1e9) for r in rows)
    labels = list(dict.fromkeys(r.label for r in rows))
    names = list(dict.fromkeys(r.contender for r in rows))
    names.sort(key=lambda name: not name.startswith("cutekernels"))  # ours take the first colour
    value = {(r.label, r.contender): (r.tflops if matmul else r.gbps) for r in rows}
    figure, axes = pyplot.subplots(figsize=(max(7.0, 0.16 * len(labels) * (len(names) + 2)), 4.5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [value.get((label, name)) or 0.0 for label in labels]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(places, heights, width, label=name, color=_COLORS[i % len(_COLORS)])
    axes.set_xticks(range(len(labels)), labels, rotation=0 if sum(map(len, labels)) <= 70 else 90)
    axes.set_ylabel("TFLOP/s" if matmul else "GB/s")
    stamp = rows[0].stamp
    load = f"{rows[0].rest_ms:g} ms rests" if rows[0].rest_ms else "sustained"
    axes.set_title(
        f"{rows[0].op} {rows[0].suite}: {stamp.get('gpu', '')}, {rows[0].l2} L2, {load}, {stamp.get('date', '')[:10]}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=min(4, len(names)), loc="lower center", bbox_to_anchor=(0.5, 1.08))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
