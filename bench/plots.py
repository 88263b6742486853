"""Pictures of recorded rows. ``python -m bench.plots`` (``make plots``) draws all of them from ``bench/results``.

One picture for each file of rows: times over tokens beside the least time that DRAM allows, where a suite steps through
token counts, else speed-ups over the suite's baseline with their intervals. One for each op with published numbers, and
one overview for each GPU, which alone is kept in the repository. A contender has the same colour everywhere.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench import published, stream
from bench.published import Reproduced
from bench.rows import OURS, Row, files, is_ours, read, suite_of

RESULTS = Path(__file__).parent / "results"
OVERVIEW = "overview.png"
OF_WARPS = " †"  # behind the name of a suite that was timed with the warp-MMA kernels alone
_WARPGROUPS_SINCE = "2026-11-23"
_BY_WARPS = {"gemm": ("alphabeta", "square"), "attention": ("prefill", "published"), "attention_backward": ("prefill",)}
WIDTH = 9.0  # inches; at 150 dots each, below 1600 pixels
STREAM = "load and store only"  # how the best of the streaming contenders is called
FLOOR = "least time"

_OURS, _LOSS, _OLDER, _INK = "#76b900", "#c5221f", "#9aa0a6", "#202124"
_COLORS = {  # by the first word or words of a contender's name; the longest match counts
    _OURS: (OURS,),
    "#b7dd79": (
        f"{OURS} (default)", f"{OURS} (triton)", f"{OURS} patched, compiled", f"{OURS}, compiled", "our ops one by one",
    ),
    "#4b7a00": (
        f"{OURS} (in place)", f"{OURS} (<= 99 KiB smem)", f"{OURS} FusedAdamW", f"{OURS} patched",
        f"{OURS}, torch's AdamW", "our ops in bf16",
    ),
    "#2e5000": (
        f"{OURS} (cute)", f"{OURS}, linear_logprob", f"{OURS}, norms and MLPs", f"{OURS}, FP8 cache", f"{OURS}, cold",
    ),
    "#d7ecb0": (f"{OURS} patched, cold",),
    _OLDER: ("16-bit cache", "plain", "transformers", "eager", "torch", "naive", "as published"),
    "#1a73e8": (
        "cublas", "torch._grouped_mm", "torch's kernel", "torch sdpa cudnn", "torch AdamW(fused)",
        "transformers compiled",
    ),
    "#12b5cb": ("tinygemm", "triton", "torch AdamW(foreach)", "nvidia", "rope + index_put"),
    "#8430ce": ("liger", "torch sdpa flash"),
    "#b80672": ("humming", "flash-attn"),
    "#e8710a": ("torch.compile", "plain, compiled", "strongest peer"),
    "#f9ab00": ("quack",),
    "#795548": ("torch sdpa, bool mask",),
    "#5f6368": ("eager (",),
    "#dadce0": (STREAM,),
}  # fmt: skip
_TOKENS = ("m", "rows", "tokens")  # extents that count tokens
_RATIOS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_LEAST_RATIO = 0.25
_FEWEST_STEPS, _MOST_PANELS = 6, 4


def color(contender: str) -> str:
    """The colour of ``contender`` in every picture."""
    known = {name: shade for shade, names in _COLORS.items() for name in names if contender.startswith(name)}
    return known[max(known, key=len)] if known else _INK


def draw(rows: Sequence[Row], path: Path) -> None:
    """``rows`` of one file into ``path``. A contender without a time has no bar and no line."""
    timed = _best_streams(rows)
    first = rows[0]
    load = f"{first.rest_ms:g} ms rests" if first.rest_ms else "sustained load"
    date = first.stamp.get("date", "")[:10]
    title = f"{first.op}, {first.suite}: {first.stamp.get('gpu', '').upper()}, {first.l2} L2, {load}, {date}"
    panels = _over_tokens(timed)
    if panels:
        _draw_lines(panels, title, path)
    else:
        _draw_speedups(timed, title, path)


def _best_streams(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """``rows`` that have a time, by name: the fastest of each case's streaming contenders stands for all."""
    best: dict[tuple[str, str], Row] = {}
    for r in rows:
        name = STREAM if r.contender.startswith(stream.NAME) else r.contender
        key = (f"{r.problem} {r.label}", name)
        if r.median_us and (key not in best or r.median_us < (best[key].median_us or 0.0)):
            best[key] = r
    return [(name, row) for (_, name), row in best.items()]


def _over_tokens(timed: Sequence[tuple[str, Row]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """``{panel: {contender: [(tokens, us)]}}`` where every other extent takes a few values only; else empty."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, row in timed:
        fields = dict(word.split("=", 1) for word in row.problem.split() if "=" in word)
        axis = next((field for field in _TOKENS if field in fields), None)
        if axis is None or not fields[axis].isdigit():
            return {}
        tokens = int(fields.pop(axis))
        lines = panels.setdefault(" ".join(f"{k}={v}" for k, v in fields.items()), {})
        lines.setdefault(name, []).append((tokens, row.median_us or 0.0))
        if name == OURS and row.roofline_fraction:
            lines.setdefault(FLOOR, []).append((tokens, (row.median_us or 0.0) * row.roofline_fraction))
    steps = [len(set(lines.get(OURS, ()))) for lines in panels.values()]
    return panels if steps and min(steps) >= _FEWEST_STEPS and len(panels) <= _MOST_PANELS else {}


def _draw_lines(panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], title: str, path: Path) -> None:
    """Time over tokens, a panel for each weight; the area below the least time is shaded."""
    figure, grid = _pyplot().subplots(
        len(panels), 1, figsize=(WIDTH, 1.0 + 3.0 * len(panels)), layout="constrained", squeeze=False
    )
    for axes, (panel, lines) in zip(grid[:, 0], panels.items(), strict=True):
        for name in sorted(lines, key=lambda name: (name == OURS, name)):  # ours on top
            x, y = zip(*sorted(lines[name]), strict=True)
            if name == FLOOR:
                axes.fill_between(x, y, color="#e1e5ea", label="below what DRAM and tensor cores allow")
                continue
            marker = "o" if len(x) <= 24 else None
            axes.plot(
                x, y, color=color(name), marker=marker, markersize=4, linewidth=2 if is_ours(name) else 1.5, label=name
            )
        wide = max(n for points in lines.values() for n, _ in points) > 256
        if wide:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(panel, fontsize=9, loc="left")
        axes.set_ylabel("time, µs")
        _plain(axes, "both")
    grid[-1, 0].set_xlabel("tokens")
    _finish(figure, title, path)


def _draw_speedups(timed: Sequence[tuple[str, Row]], title: str, path: Path) -> None:
    """Speed-ups over the first contender of the file with their intervals; times where there is nothing to compare."""
    labels = list(dict.fromkeys(row.label for _, row in timed))
    cells = {(name, row.label): row for name, row in timed}
    names = list(dict.fromkeys(name for name, _ in timed))
    baseline = next((name for name in names if not is_ours(name) and name != STREAM), None)
    bars: dict[str, list[tuple[float, float, float]]] = {}
    for name in sorted(names, key=lambda name: (not is_ours(name), name == STREAM, name)):
        if name == baseline:
            continue
        bars[name] = [_speedup(cells.get((name, at)), cells.get((baseline or "", at))) for at in labels]
    if baseline is None:
        bars = {
            name: [(r.median_us or 0.0,) * 3 if (r := cells.get((name, at))) else (0.0,) * 3 for at in labels]
            for name in names
        }
    unit = "time, µs" if baseline is None else f"times as fast as {baseline}, with 95 % intervals"
    _bars(labels, bars, unit, title, path, ratios=baseline is not None)


def _speedup(row: Row | None, base: Row | None) -> tuple[float, float, float]:
    """``row`` over ``base``, with the recorded interval where there is one; zeros where either has no time."""
    if row is None or base is None or not row.median_us or not base.median_us:
        return (0.0, 0.0, 0.0)
    ratio = base.median_us / row.median_us
    recorded = row.speedup is not None and abs(row.speedup / ratio - 1) < 0.02  # over this baseline, not another
    return (ratio, row.speedup_low or ratio, row.speedup_high or ratio) if recorded else (ratio,) * 3


def draw_reproduced(lines: Sequence[Reproduced], gpu: str, path: Path) -> None:
    """Speed-ups over the published baselines, each on its own GPU. What was not measured or published has no bar."""
    labels = [
        "\n".join(filter(None, (p.case, f"{p.name}, {p.gpu}", p.note))) for p in (line.published for line in lines)
    ]
    ratios = {
        f"{OURS}, {gpu}": [line.speedup(line.ours) or 0.0 for line in lines],
        f"strongest peer, {gpu}": [line.speedup(line.strongest) or 0.0 for line in lines],
        "as published, on their GPU": [line.published.speedup or 0.0 for line in lines],
    }
    bars = {name: [(ratio,) * 3 for ratio in values] for name, values in ratios.items()}
    op = lines[0].published.op
    title = f"{op}: speed-up over the published baseline, each on its own GPU"
    _bars(labels, bars, "speed-up", title, path, ratios=True)


def by_warps(rows: Sequence[Row]) -> bool:
    """Whether ``rows`` are of the warp-MMA kernels alone: what GPUs without warpgroup MMA run, and the H200 did."""
    first = rows[0]
    return first.suite in _BY_WARPS.get(first.op, ()) and first.stamp.get("date", "") < _WARPGROUPS_SINCE


def against_best_peer(rows: Sequence[Row]) -> dict[str, float]:
    """For each case with a peer: the time of the fastest correct peer over ours. Streaming kernels are no peers."""
    times: dict[str, dict[str, float]] = {}
    for r in rows:
        if r.median_us is not None and not r.contender.startswith(stream.NAME):
            times.setdefault(f"{r.problem} {r.label}", {})[r.contender] = r.median_us
    ratios = {}
    for case, timed in times.items():
        peers = [us for name, us in timed.items() if not is_ours(name)]
        if peers and OURS in timed:
            ratios[case] = min(peers) / timed[OURS]
    return ratios


def draw_overview(folder: Path) -> bool:
    """One bar for each op and suite with peers, cold: the geometric mean, and the range over its cases."""
    suites: dict[str, dict[str, float]] = {}
    for path in files(folder):
        rows = read(path)
        if rows and rows[0].l2 == "cold" and not rows[0].rest_ms:
            name = f"{rows[0].op}, {rows[0].suite}" + (OF_WARPS if by_warps(rows) else "")
            suites.setdefault(name, {}).update(against_best_peer(rows))
    means = {name: geometric_mean(r.values()) for name, r in suites.items() if r}
    if not means:
        return False
    names = sorted(means, key=lambda name: means[name])
    figure, axes = _pyplot().subplots(figsize=(WIDTH, 1.2 + 0.25 * len(names)), layout="constrained")
    for y, name in enumerate(names):
        mean, ratios = means[name], suites[name].values()
        shade = _OURS if mean >= 1 else _OLDER if name.endswith(OF_WARPS) else _LOSS
        axes.barh(y, mean - 1, left=1.0, height=0.7, color=shade)
        axes.hlines(y, min(ratios), max(ratios), color="#5f6368", linewidth=1)
        axes.annotate(
            f"{mean:.2f}", (max(*ratios, 1.0), y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(names)), [f"{name} ({len(suites[name])})" for name in names], fontsize=8)
    axes.set_ylim(-0.6, len(names) - 0.4)
    _ratio_axis(axes)
    axes.set_xlabel("times as fast as the fastest peer of each case: geometric mean (bar), range (line)")
    axes.set_title(f"{folder.name.upper()}, cold L2: op, suite (number of cases)", fontsize=10, loc="left")
    _plain(axes, "x")
    _write(figure, folder / OVERVIEW)
    return True


def draw_all(folder: Path) -> int:
    """Every picture of one GPU's rows; returns how many were drawn."""
    drawn = 0
    found = {path: read(path) for path in files(folder)}
    for path, rows in found.items():
        if any(r.status == "ok" for r in rows):
            draw(rows, folder / f"{suite_of(path)}.png")
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
    figure.savefig(drawn, dpi=80)
    _pyplot().close(figure)
    Image.open(drawn).convert("RGB").quantize(16).save(path, optimize=True)


def _bars(
    labels: Sequence[str],
    bars: Mapping[str, Sequence[tuple[float, float, float]]],
    unit: str,
    title: str,
    path: Path,
    *,
    ratios: bool,
) -> None:
    """A group for each label, from the top, and in it a bar of each name: value, low, high. 0 is no bar."""
    height = max(0.16 * len(bars), 0.13 * max(label.count("\n") + 1 for label in labels)) + 0.12
    figure, axes = _pyplot().subplots(figsize=(WIDTH, 1.6 + height * len(labels)), layout="constrained")
    thick = 0.8 / len(bars)
    for i, (name, values) in enumerate(bars.items()):
        y = [at + (i - (len(bars) - 1) / 2) * thick for at in range(len(labels))]
        kept = [(at, *value) for at, value in zip(y, values, strict=True) if value[0]]
        if not kept:
            continue
        places, middles, lows, highs = zip(*kept, strict=True)
        errors = [
            [max(m - low, 0.0) for m, low in zip(middles, lows, strict=True)],
            [max(high - m, 0.0) for m, high in zip(middles, highs, strict=True)],
        ]
        begin = 1.0 if ratios else 0.0
        axes.barh(places, [m - begin for m in middles], thick * 0.9, left=begin, color=color(name), label=name)
        axes.errorbar(middles, places, xerr=errors, fmt="none", ecolor="#5f6368", elinewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    if ratios:
        shown = [value for values in bars.values() for value, *_ in values if value]
        cut = bool(shown) and min(shown) < _LEAST_RATIO
        _ratio_axis(axes, _LEAST_RATIO if cut else None)
        unit += f"; bars below {_LEAST_RATIO:g} are cut there" * cut
    axes.set_xlabel(unit)
    _plain(axes, "x")
    _finish(figure, title, path)


def _ratio_axis(axes: Any, left: float | None = None) -> None:
    """A logarithmic axis with a line at 1."""
    axes.set_xscale("log", base=2)
    axes.axvline(1.0, color=_INK, linewidth=1)
    axes.set_xlim(left=left)
    low, high = axes.get_xlim()
    ticks = [tick for tick in _RATIOS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.minorticks_off()


def _plain(axes: Any, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#e8eaed", linewidth=0.6)
    axes.set_axisbelow(True)


def _finish(figure: Any, title: str, path: Path) -> None:
    """Title and legend outside the axes, in the figure's layout, so that neither is cut."""
    figure.suptitle(title, fontsize=10)
    found = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = sorted(found, key=lambda name: not is_ours(name))
    handles = [found[name] for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    _write(figure, path)


if __name__ == "__main__":
    for gpu in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        print(f"{draw_all(gpu)} pictures in {gpu}")
