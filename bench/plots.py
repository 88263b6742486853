"""Pictures of recorded rows. ``python -m bench.plots`` (``make plots``) draws all of them from ``bench/results``.

One picture for each file of rows (a group of bars per case, a bar per contender), one for each op with published
numbers, and one overview for each GPU, which alone is kept in the repository.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import published, stream
from bench.published import Reproduced
from bench.rows import OURS, Row, is_ours, read

RESULTS = Path(__file__).parent / "results"
OVERVIEW = "overview.png"

_COLORS = ("#76b900", "#9aa0a6", "#5f6368", "#d93025", "#1a73e8", "#f9ab00", "#8430ce", "#12b5cb", "#202124")

_BUSY = 150.0  # FLOP per byte above which arithmetic is the limit on every GPU here


def draw(rows: Sequence[Row], path: Path) -> None:
    """TFLOP/s where arithmetic is the limit, else GB/s, into ``path``. A contender without a time has no bar."""
    matmul = any((r.tflops or 0.0) * 1e3 > _BUSY * (r.gbps or 1e9) for r in rows)
    labels = list(dict.fromkeys(r.label for r in rows))
    value: dict[tuple[str, str], float] = {}
    for r in rows:  # the best of the streaming contenders stands for all
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


def against_best_peer(rows: Sequence[Row]) -> list[float]:
    """For each case with a peer: the time of the fastest correct peer over ours. Streaming kernels are no peers."""
    times: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.median_us is not None and not r.contender.startswith(stream.NAME):
            times.setdefault(f"{r.problem} {r.label}", {})[r.contender] = r.median_us
    ratios = []
    for timed in times.values():
        peers = [us for name, us in timed.items() if not is_ours(name)]
        if peers and OURS in timed:
            ratios.append(min(peers) / timed[OURS])
    return ratios


def draw_overview(folder: Path) -> bool:
    """One bar for each file of rows in ``folder`` with peers: the geometric mean, and the range over its cases."""
    files = [(path.stem, against_best_peer(read(path))) for path in sorted(folder.glob("*.jsonl"), reverse=True)]
    suites = {name: ratios for name, ratios in files if ratios}
    if not suites:
        return False
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9.0, 0.8 + 0.23 * len(suites)), layout="constrained")
    means = [math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) for ratios in suites.values()]
    axes.barh(range(len(suites)), [mean - 1 for mean in means], left=1.0, height=0.7, color=_COLORS[0])
    ends = [(min(ratios), max(ratios)) for ratios in suites.values()]
    axes.hlines(range(len(suites)), [low for low, _ in ends], [high for _, high in ends], color=_COLORS[2], linewidth=1)
    axes.set_yticks(range(len(suites)), [f"{name} ({len(ratios)})" for name, ratios in suites.items()], fontsize=8)
    axes.set_ylim(-0.6, len(suites) - 0.4)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as the fastest peer of each case: geometric mean, and range over the cases")
    axes.set_title(f"cutekernels on {folder.name}: suites (number of cases)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, folder / OVERVIEW)
    return True


def draw_all(folder: Path) -> int:
    """Every picture of one GPU's rows; returns how many were drawn."""
    drawn = 0
    found = {path: read(path) for path in sorted(folder.glob("*.jsonl"))}
    for path, rows in found.items():
        if any(r.status == "ok" for r in rows):
            draw(rows, path.with_suffix(".png"))
            drawn += 1
    for op in dict.fromkeys(rows[0].op for rows in found.values() if rows):
        for warm in (False, True):
            lines = published.reproduce(published.load(op), folder, warm=warm)
            if any(line.ours is not None for line in lines):
                draw_reproduced(lines, folder.name, folder / published.picture(op, warm=warm))
                drawn += 1
    return drawn + draw_overview(folder)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _write(figure: Any, path: Path) -> None:
    """``figure`` as a PNG with a palette: a third of the size, and few colours are drawn."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    _pyplot().close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def _save(
    labels: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    unit: str,
    title: str,
    path: Path,
    ratios: bool = False,
) -> None:
    """A group for each label and in it a bar of each name; ``ratios`` on a logarithmic axis around 1."""
    upright = sum(map(len, labels)) > 70
    lines = [line for label in labels for line in label.splitlines()]
    size = (max(7.0, 0.16 * len(labels) * (len(bars) + 2)), 4.0 + 0.09 * max(map(len, lines)) * upright)
    figure, axes = _pyplot().subplots(figsize=size, layout="constrained")
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
    _write(figure, path)


if __name__ == "__main__":
    for gpu in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        print(f"{draw_all(gpu)} pictures in {gpu}")
