"""PNGs: grouped bars, a group per case and a bar per contender, cases in the order they were timed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import stream
from bench.published import Reproduced
from bench.rows import Row

_COLORS = ("#76b900", "#9aa0a6", "#5f6368", "#d93025", "#1a73e8", "#f9ab00", "#8430ce", "#12b5cb", "#202124")

_BUSY = 150.0  # floating-point operations a byte, from which arithmetic is the limit on every GPU here


def draw(rows: Sequence[Row], path: Path) -> None:
    """TFLOP/s where arithmetic is the limit, else GB/s, into ``path``. A contender without a time has no bar."""
    matmul = any((r.tflops or 0.0) * 1e3 > _BUSY * (r.gbps or 1e9) for r in rows)
    labels = list(dict.fromkeys(r.label for r in rows))
    value: dict[tuple[str, str], float] = {}
    for r in rows:  # of the streaming contenders the best
        name = stream.NAME if r.contender.startswith(stream.NAME) else r.contender
        rate = (r.tflops if matmul else r.gbps) or 0.0
        value[r.label, name] = max(rate, value.get((r.label, name), 0.0))
    names = list(dict.fromkeys(name for _, name in value))
    names.sort(key=lambda name: not name.startswith("cutekernels"))  # ours take the first colour
    stamp = rows[0].stamp
    load = f"{rows[0].rest_ms:g} ms rests" if rows[0].rest_ms else "sustained"
    title = (
        f"{rows[0].op} {rows[0].suite}: {stamp.get('gpu', '')}, {rows[0].l2} L2, {load}, {stamp.get('date', '')[:10]}"
    )
    bars = {name: [value.get((label, name), 0.0) for label in labels] for name in names}
    _save(labels, bars, "TFLOP/s" if matmul else "GB/s", title, path)


def draw_reproduced(lines: Sequence[Reproduced], gpu: str, path: Path) -> None:
    """Speed-ups over the published baselines, each on its own GPU. What was not measured or published has no bar."""
    labels = [
        "\n".join(filter(None, (p.case, f"{p.name}, {p.gpu}", p.note))) for p in (line.published for line in lines)
    ]
    bars = {
        f"cutekernels, {gpu}": [line.speedup(line.ours) or 0.0 for line in lines],
        f"strongest peer, {gpu}": [line.speedup(line.strongest) or 0.0 for line in lines],
        "as published, on their GPU": [line.published.speedup or 0.0 for line in lines],
    }
    op = lines[0].published.op
    title = f"{op}: times faster than the published baseline, each on its own GPU"
    _save(labels, bars, "speed-up", title, path, ratios=True)


def _save(
    labels: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    unit: str,
    title: str,
    path: Path,
    ratios: bool = False,
) -> None:
    """A group for each label and in it a bar of each name; ``ratios`` on a logarithmic axis around 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    upright = sum(map(len, labels)) > 70
    lines = [line for label in labels for line in label.splitlines()]
    size = (max(7.0, 0.16 * len(labels) * (len(bars) + 2)), 4.0 + 0.09 * max(map(len, lines)) * upright)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    width = 0.8 / len(bars)
    for i, (name, heights) in enumerate(bars.items()):
        places = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(places, heights, width, label=name, color=_COLORS[i % len(_COLORS)])
    axes.set_xticks(range(len(labels)), labels, rotation=90 * upright)
    if ratios:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=min(4, len(bars)), loc="lower center", bbox_to_anchor=(0.5, 1.08))
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    pyplot.close(figure)
    # Few colours are drawn: a palette makes the file a third as large, and the repository keeps every one.
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)
