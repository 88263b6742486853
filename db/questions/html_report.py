"""``cutekernels db report``: a database as one HTML file of pictures, which loads nothing from anywhere.

Texts of a database are not trusted: each is escaped, in the page as in the labels, which plotly reads as HTML.
"""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Any

from cutekernels import terminal
from cutekernels.db.questions.reader import Database, Winner
from cutekernels.db.storage.engine import shown
from cutekernels.db.storage.store import Trial
from cutekernels.errors import StoreError

MOST_SEARCHES = 150  # curves in one picture
MOST_WINNERS = 120  # bars in one picture
_PAUSE_S = 300.0  # a longer gap between two rows of a task lies between two runs
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#333333")
_STATUS = {
    "ok": "#009e73",
    "pruned": "#bbbbbb",
    "compile_error": "#e69f00",
    "wrong_result": "#d55e00",
    "crashed": "#cc79a7",
    "timeout": "#56b4e9",
    "invalid": "#dddddd",
}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em; margin-bottom: 0 } h2 { font-size: 1.15em; margin: 2em 0 0 } p { color: #555; margin: .2em 0 }
table { border-collapse: collapse; margin-top: 1em } td, th { padding: .15em .9em .15em 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
"""

Trace = dict[str, Any]


def page(database: Database, *, gpu: str | None = None, op: str | None = None, problem: str | None = None) -> str:
    """The whole file.

    Raises:
        StoreError: plotly is not installed, or the database cannot be read.
    """
    try:
        from plotly import io, offline
    except ImportError as error:
        raise StoreError("a report is drawn with plotly: pip install 'plotly>=6'") from error
    trials = database.trials(gpu=gpu, op=op, problem=problem)
    winners = [w for w in database.winners(gpu=gpu, op=op, problem=problem) if w.serves]
    url = "" if database.store is None else shown(database.store.url)
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>cutekernels: tuned configs</title>",
        f"<style>{_CSS}</style><script>{offline.get_plotlyjs()}</script></head><body>",
        f"<h1>Tuned configs</h1><p>{_safe(url)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: "
        f"{len(trials)} trials, {len(winners)} winners in use.</p>",
        _table(trials, winners),
    ]
    for title, about, traces, layout in _pictures(trials, winners):
        parts.append(f"<h2>{title}</h2><p>{about}</p>")
        if traces:
            figure = {"data": traces, "layout": _LAYOUT | layout}
            config = {"displaylogo": False, "responsive": True}
            parts.append(io.to_html(figure, config, full_html=False, include_plotlyjs=False, validate=False))
        else:
            parts.append("<p><em>No rows for this picture.</em></p>")
    return "\n".join([*parts, "</body></html>\n"])


_LAYOUT: dict[str, Any] = {
    "height": 460,
    "margin": {"l": 70, "r": 20, "t": 20, "b": 60},
    "hovermode": "closest",
    "font": {"family": "system-ui, sans-serif", "size": 13},
}


def _pictures(
    trials: Sequence[Trial], winners: Sequence[Winner]
) -> Iterable[tuple[str, str, list[Trace], dict[str, Any]]]:
    yield (
        "Best so far",
        f"Speed of the best config after each attempt, over the best at the end; one line for each search, the latest "
        f"{MOST_SEARCHES}. The thick line is the median of an op.",
        *_searches(trials),
    )
    yield (
        "Time by status",
        "Where the tuner's time went: seconds from one row of a task to the next, by how the attempt ended. "
        "Tasks overlap in lanes, so the sum can exceed the run's own time. "
        f"Gaps above {_PAUSE_S:.0f} s lie between runs and are left out.",
        *_time_by_status(trials),
    )
    yield (
        "Roofline",
        "Winners: share of the time that the GPU's peaks allow, over flops for each byte. "
        "Left of a GPU's ridge memory is the limit, right of it arithmetic.",
        *_roofline(winners),
    )
    yield (
        "Prediction against measurement",
        "Configs with both, on one GPU: on the diagonal the model was right. What decides is the order.",
        *_predictions(trials),
    )
    yield (
        "Winners against default and vendor",
        f"Times faster, with the 95 % interval: over the op's default config, and over the vendor's library where it "
        f"was measured. Above 1 the winner is faster. The {MOST_WINNERS} that gain most.",
        *_against(winners),
    )


# ---- the pictures: traces and layout ------------------------------------------------------------------------


def _searches(trials: Sequence[Trial]) -> tuple[list[Trace], dict[str, Any]]:
    tasks: dict[tuple[str, str, int, str], list[Trial]] = defaultdict(list)
    for t in trials:
        if t.origin == "measured":
            tasks[t.key].append(t)
    curves: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    latest = sorted(tasks.items(), key=lambda item: item[1][-1].created_at)[-MOST_SEARCHES:]
    for (gpu, op, _, problem), rows in latest:
        best, reached = 0.0, []
        for t in rows:
            best = max(best, (t.ratio or 0.0) if t.status == "ok" else 0.0)
            reached.append(best)
        if best > 0:
            curves[op].append((f"{gpu} {op} [{problem}]", [100 * r / best for r in reached]))
    traces = []
    for op, colour in _colours(curves):
        for name, values in curves[op]:
            traces.append(
                _line(range(1, len(values) + 1), values, op, colour, width=1, opacity=0.35, text=name, legend=False)
            )
        longest = max(len(values) for _, values in curves[op])
        # A search that has ended stays where it is.
        middle = [median(v[min(i, len(v) - 1)] for _, v in curves[op]) for i in range(longest)]
        traces.append(_line(range(1, longest + 1), middle, op, colour, width=4, text=f"median of {op}"))
    return traces, {"xaxis": {"title": {"text": "attempts"}}, "yaxis": {"title": {"text": "% of the final best"}}}


def _time_by_status(trials: Sequence[Trial]) -> tuple[list[Trace], dict[str, Any]]:
    tasks: dict[tuple[object, ...], list[Trial]] = defaultdict(list)
    for t in trials:
        tasks[(*t.key, t.origin)].append(t)
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    for rows in tasks.values():
        for before, after in pairwise(rows):
            seconds = (after.created_at - before.created_at).total_seconds()
            if 0 <= seconds <= _PAUSE_S:
                spent[after.status][f"{after.op} ({after.origin})"] += seconds  # type: ignore[assignment]
    names = sorted({name for sums in spent.values() for name in sums})
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": status,
            "y": [_safe(name) for name in names],
            "x": [spent[status][name] for name in names],
            "marker": {"color": colour},
        }
        for status, colour in _STATUS.items()
        if spent[status]
    ]
    return traces, _rows(len(names), "seconds") | {"barmode": "stack"}


def _roofline(winners: Sequence[Winner]) -> tuple[list[Trace], dict[str, Any]]:
    shown_by: dict[str, list[Winner]] = defaultdict(list)
    for w in winners:
        if w.roofline is not None and w.gbps and w.tflops is not None and w.origin == "measured":
            shown_by[w.op].append(w)
    traces = []
    for op, colour in _colours(shown_by):
        x = [1e3 * (w.tflops or 0) / (w.gbps or 1) for w in shown_by[op]]
        y = [100 * (w.roofline or 0) for w in shown_by[op]]
        rates = [f"<br>{w.tflops:.4g} TFLOP/s, {w.gbps:.4g} GB/s" for w in shown_by[op]]
        names = [_safe(f"{w.gpu} {op} [{w.problem_text}]") for w in shown_by[op]]
        told = [name + rate for name, rate in zip(names, rates, strict=True)]
        traces.append(
            _points(_safe(op), x, y, {"color": colour, "size": 8, "opacity": 0.7}, text=told, hoverinfo="text")
        )
    return traces, {
        "xaxis": {"title": {"text": "flops for each byte"}, "type": "log"},
        "yaxis": {"title": {"text": "% of the roofline"}, "rangemode": "tozero"},
    }


def _predictions(trials: Sequence[Trial]) -> tuple[list[Trace], dict[str, Any]]:
    latest: dict[str, dict[tuple[object, ...], Trial]] = {"measured": {}, "predicted": {}}
    for t in trials:
        if t.status == "ok" and t.median_us:
            latest[t.origin][(*t.key, t.config)] = t
    both: dict[str, list[tuple[Trial, Trial]]] = defaultdict(list)
    for key, measured in latest["measured"].items():
        if key in latest["predicted"]:
            both[measured.op].append((latest["predicted"][key], measured))
    traces: list[Trace] = []
    times: list[float] = []
    for op, colour in _colours(both):
        x = [p.median_us or 0.0 for p, _ in both[op]]
        y = [m.median_us or 0.0 for _, m in both[op]]
        times += x + y
        told = [_safe(f"{m.gpu.name} [{m.problem}] with [{m.config}]") for _, m in both[op]]
        traces.append(_points(_safe(op), x, y, {"color": colour, "size": 6, "opacity": 0.6}, text=told))
    if times:
        ends = [min(times), max(times)]
        traces.append(_line(ends, ends, "as predicted", "#999999", width=1))
    return traces, {
        "xaxis": {"title": {"text": "predicted, µs"}, "type": "log"},
        "yaxis": {"title": {"text": "measured, µs"}, "type": "log"},
    }


def _against(winners: Sequence[Winner]) -> tuple[list[Trace], dict[str, Any]]:
    measured = [w for w in winners if w.origin == "measured" and w.ratio is not None and w.median_us]
    rows = sorted(measured, key=lambda w: -(w.ratio or 0))[:MOST_WINNERS][::-1]
    if not rows:
        return [], {}
    names = [_safe(f"{w.gpu} {w.op} [{w.problem_text}]") for w in rows]
    ratios = [w.ratio or 0.0 for w in rows]
    above = [(w.ratio_high or r) - r for w, r in zip(rows, ratios, strict=True)]
    below = [r - (w.ratio_low or r) for w, r in zip(rows, ratios, strict=True)]
    interval = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    marker: dict[str, Any] = {"color": _COLOURS[0], "size": 8}
    told = [_safe(w.config_text) for w in rows]
    traces = [_points("over the default", ratios, names, marker, text=told, error_x=interval)]
    vendor = [(n, w.vendor_us / w.median_us) for n, w in zip(names, rows, strict=True) if w.vendor_us and w.median_us]
    if vendor:
        x, y = [ratio for _, ratio in vendor], [name for name, _ in vendor]
        traces.append(_points("over the vendor's", x, y, {"color": _COLOURS[1], "size": 9, "symbol": "diamond"}))
    ends = {"x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper"}
    one = {"type": "line", **ends, "line": {"color": "#999", "dash": "dot"}}
    return traces, _rows(len(rows), "times faster") | {"shapes": [one]}


def _rows(count: int, title: str) -> dict[str, Any]:
    """Layout with one line for each of ``count`` names on the left."""
    names = {"automargin": True, "tickfont": {"size": 11}, "dtick": 1}
    return {"height": 120 + 20 * count, "xaxis": {"title": {"text": title}}, "yaxis": names}


def _points(name: str, x: Sequence[float], y: Sequence[Any], marker: dict[str, Any], **more: Any) -> Trace:
    """``more``: of the trace. All texts are safe."""
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker, **more}


def _line(
    x: Iterable[float], y: Sequence[float], name: str, colour: str, *, width: int, opacity: float = 1.0, **more: Any
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "name": _safe(name),
        "legendgroup": _safe(name),
        "showlegend": more.get("legend", True),
        "text": _safe(more.get("text", name)),
        "line": {"color": colour, "width": width},
        "opacity": opacity,
    }


def _colours(names: Mapping[str, object]) -> list[tuple[str, str]]:
    """A colour of its own for each op: the first few well told apart, further ones around the colour circle."""
    more = max(1, len(names) - len(_COLOURS))
    others = [f"hsl({360 * i // more} 70% {(45, 62)[i % 2]}%)" for i in range(more)]
    return list(zip(sorted(names), [*_COLOURS, *others], strict=False))


# ---- text ---------------------------------------------------------------------------------------------------


def _table(trials: Sequence[Trial], winners: Sequence[Winner]) -> str:
    counted: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for t in trials:
        counted[t.gpu.name, t.op, t.origin][t.status] += 1
    used = Counter((w.gpu, w.op, w.origin) for w in winners)
    head = "".join(f"<th>{name}</th>" for name in ("gpu", "op", "origin", "trials", "ok", "winners in use"))
    lines = []
    for key in sorted(counted.keys() | used.keys()):
        numbers = (sum(counted[key].values()), counted[key]["ok"], used[key])
        cells = [f"<td>{_safe(word)}</td>" for word in key] + [f"<td class=number>{n}</td>" for n in numbers]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _safe(text: str) -> str:
    return html.escape(terminal.clean(text))
