"""Tables of recorded rows: ``performance.md`` whole, and the README's table of speed.

Every number comes from ``bench/results``; ``python -m docs.generate`` writes the pages and a test compares them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean

from bench import plots, stream
from bench.rows import OURS, Row, files, is_ours, read, suite_of

CARDS = {"h200": "H200", "h100-sxm": "H100 SXM"}
PEERS = {  # names of contenders as readers know them
    "cublas": "cuBLAS",
    "flash-attn-4": "FlashAttention-4",
    "liger": "Liger",
    "nvidia": "NVIDIA's example",
    "quack": "QuACK",
    "torch sdpa cudnn": "cuDNN",
    "torch sdpa flash": "FlashAttention-2",
    "torch AdamW(fused)": "torch's fused AdamW",
    "torch AdamW(foreach)": "torch's foreach AdamW",
}
WIDTH = 110  # columns of prose
WHOLE = 8  # cases of a suite that are all shown; of a larger one the worst three, the median and the best
NO_PEERS = ("naive",)
BODIES = ("cutekernels (cute)", "cutekernels (triton)")
UNPACKED = "our ops in bf16"

# Families of the page, and the suites of each by the beginnings of their files' names.
FAMILIES = {
    "Matrix products": ("gemm_",),
    "Weights of four and eight bits": ("quantized_",),
    "Norm and projection": ("rms_norm_linear",),
    "Attention": ("attention", "decode_attention", "kv_append"),
    "Mixture of experts": ("moe_",),
    "Norms": ("rms_norm", "add_rms_norm", "layer_norm"),
    "Gates, rotary embedding, embedding": ("silu_mul", "gelu_mul", "bias_gelu", "swiglu", "rope", "embedding"),
    "Sampling and optimizer": ("sample_filter", "adamw_step"),
}
NOTES = {  # what a reader of a suite's rows should know
    "decode_attention_decode": "The cases of one sequence with 28/4 heads ran winners from before clusters, which no "
    "longer ship; today's defaults are faster.",
    "gemm_decode": "Taken before three mechanisms that gained 0.1 to 0.5 % were deleted; not timed again.",
    "moe_ffn_layers": "H200: one set of experts, of which few tokens find a part in the L2. H100: experts rotate, so "
    "that they come from DRAM.",
    "decode_attention_fp8": "The peer is our own kernel over a cache of 16 bits.",
    "quantized_moe_ffn": "Peers: our own `moe_ffn` of bf16 weights, and Humming where weights are int4. On the H200 "
    "the configs are defaults.",
    "quantized_linear_heldout": "cuBLAS multiplies by the weight decoded beforehand. The run was cut: FP8 has two of "
    "five weights. Some configs were neighbours' winners, up to 1.27 times as slow as the defaults, shipped no longer.",
    "quantized_linear_backward": "cuBLAS multiplies by the weight decoded beforehand. Since then more columns are "
    "decoded at a time.",
    "rms_norm_linear": "Taken before three mechanisms that gained 0.1 to 0.5 % were deleted; not timed again.",
}
# Rows of the README: what, file names (of all cards), or a model and a suite of its rows.
SPEED: dict[str, tuple[str, ...]] = {
    "`linear`, 1 to 128 tokens": ("gemm_decode_",),
    "`linear`, 128 to 8192 tokens, 8 weight shapes that are not tuned": ("gemm_heldout",),
    "`linear` with int4 and FP8 weights, 1 to 1000 tokens, not tuned": ("quantized_linear_heldout",),
    "`attention`, prompts": ("attention_hopper",),
    "`attention`, backward": ("attention_backward_hopper",),
    "`moe_ffn` of Qwen3-30B-A3B, experts read from DRAM": ("moe_ffn_layers_qwen3",),
    "`Decoder`, Qwen2.5-7B, a decode step at batch 1, 16, 64": ("models/qwen2.5-7b decode",),
    "`Decoder`, Qwen2.5-7B, 60 prompts of 1 to 4096 tokens, each length new, behind `warmup`": (
        "models/qwen2.5-7b_new_lengths new-lengths sum",
    ),
}

MODEL_WAYS = {  # contenders of a model, and their columns
    OURS: "`Decoder`",
    "cutekernels, FP8 cache": "its cache in FP8",
    "cutekernels, int4_g128": "its weights in INT4",
    "cutekernels, fp8_block": "its weights in FP8 blocks",
    "cutekernels patched, compiled": "patched, compiled",
    "cutekernels patched": "patched",
    "transformers compiled": "transformers, compiled",
    "transformers": "transformers",
}

HOW = """\
# Performance

Each table compares cutekernels with the fastest correct peer of the same case. A ratio is the peer's time
over ours: above 1 cutekernels is faster. Tables list the lowest ratio first.

How it is measured:

- All contenders of a case run in turn, in rounds of a captured CUDA graph; a time is the median over rounds.
- Inputs rotate through three times the L2 cache, so that they come from DRAM (`_warm`: one set of inputs).
- The load is sustained, so large products run at the clock that power allows (`_rested`: pauses in between).
- Each result is checked against fp64, and each contender writes to memory of its own.
- Configs are what a call takes: shipped winners where there are some, else defaults.
- Peers: cuBLAS, cuDNN and FlashAttention-2 of torch 2.11, FlashAttention-4, Liger, QuACK, torch.compile.
- † marks suites of the warp-MMA kernels, which GPUs without warpgroup MMA run, timed on an H200.
- Each row has its card, date and commit. `python -m bench OP --suite SUITE` repeats a suite on your GPU, and
  `python -m bench OP --published` sets recorded rows beside what others published.
"""


@dataclass(frozen=True)
class Case:
    """One problem of a suite on one card: our time and the fastest peer's."""

    label: str
    ours_us: float
    peer_us: float
    peer: str
    stamp: dict[str, str]

    @property
    def ratio(self) -> float:
        return self.peer_us / self.ours_us


def timed(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """``{label: {contender: row}}`` of what was timed."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.median_us is not None and not row.contender.startswith((stream.NAME, *NO_PEERS)):
            found.setdefault(row.label + _scales(row, rows), {})[row.contender] = row
    return found


def cases(rows: Sequence[Row], ours: str = OURS) -> list[Case]:
    """The cases that have our time and a peer's, slowest ratio first. Where nobody else ran, the peer is bf16."""
    found = []
    for label, by_name in timed(rows).items():
        peers = [row for name, row in by_name.items() if not is_ours(name)]
        peers = peers or [row for name, row in by_name.items() if name == UNPACKED]
        if peers and ours in by_name:
            best = min(peers, key=_us)
            found.append(Case(label, _us(by_name[ours]), _us(best), peer_name(best.contender), by_name[ours].stamp))
    return sorted(found, key=lambda case: case.ratio)


def _scales(row: Row, rows: Sequence[Row]) -> str:
    """Alpha and beta, where a suite has several."""
    several = len({(r.alpha, r.beta) for r in rows}) > 1
    told = f"α={row.alpha:g} β={row.beta:g}"
    return f", {told}" if several and told not in row.label else ""


def _us(row: Row) -> float:
    assert row.median_us is not None
    return row.median_us


def peer_name(contender: str) -> str:
    """A contender's name as readers know it."""
    return next((name for start, name in PEERS.items() if contender.startswith(start)), contender)


def suites(starts: Sequence[str]) -> dict[str, dict[str, list[Row]]]:
    """``{suite: {card: rows}}`` of the files whose names begin so; a card's part of a suite joins the whole one."""
    found: dict[str, dict[str, list[Row]]] = {}
    for card in CARDS:
        for path in files(plots.RESULTS / card):
            stem = suite_of(path)
            if stem.startswith(tuple(starts)):
                whole = [name for name in found if stem.startswith(name + "_")]
                name = whole[0] if card != "h200" and whole else stem
                found.setdefault(name, {})[card] = read(path)
    return found


def _model_cases(name: str) -> dict[str, list[Case]]:
    """Cases of ``models/MODEL SUITE``, or those whose label ends in a third word, by card: ours is the Decoder."""
    place, suite, *end = name.split()
    found = {}
    for card in CARDS:
        path = plots.RESULTS / card / f"{place}.jsonl.xz"
        if path.exists():
            found[card] = cases([r for r in read(path) if r.suite == suite and r.label.endswith(("", *end)[-1])])
    return found


def speed() -> str:
    """The README's table."""
    lines = ["| op, suite | mean | worst | fastest peers | card, date |", "|---|---|---|---|---|"]
    for what, names in SPEED.items():
        by_card: dict[str, list[Case]] = {}
        for name in names:
            if name.startswith("models/"):
                by_card = _model_cases(name)
                continue
            for card in CARDS:
                for path in files(plots.RESULTS / card, name):
                    if card == "h200" or not by_card:
                        by_card.setdefault(card, []).extend(cases(read(path)))
        card, found = next(iter(by_card.items()))
        ratios = [case.ratio for case in found]
        peers = ", ".join(dict.fromkeys(case.peer for case in found))
        date = max(case.stamp["date"] for case in found)[:10]
        lines.append(f"| {what} | {geometric_mean(ratios):.2f} | {min(ratios):.2f} | {peers} | {CARDS[card]}, {date} |")
    return "\n".join(lines) + "\n"


def performance() -> str:
    """The page."""
    parts = [HOW, *_pictures(), "## All suites\n", _overview()]
    for title, starts in FAMILIES.items():
        others = [s for t, each in FAMILIES.items() if t != title for s in each if s.startswith(starts)]
        found = {
            name: cards
            for name, cards in suites(starts).items()
            if not (others and name.startswith(tuple(others))) and not name.endswith("_warm")
        }
        tables = [table for name, cards in found.items() if (table := _suite(name, cards))]
        if tables:
            parts += [f"## {title}\n", *tables]
    last = {"Triton beside CuTe": _bodies, "Models": _models, "New lengths": _new_lengths, "Host time of a call": _host}
    for title, written in last.items():
        parts += [f"## {title}\n", written()]
    return "\n".join(parts)


def _pictures() -> Iterator[str]:
    for card, title in CARDS.items():
        if (plots.RESULTS / card / plots.OVERVIEW).exists():
            place = f"../bench/results/{card}/{plots.OVERVIEW}"
            yield f"![Speed of each op over the fastest peer of each case on an {title}]({place})\n"


def _overview() -> str:
    lines = ["| suite | card | mean | worst to best | cases, lost |", "|---|---|---|---|---|"]
    starts = [start for each in FAMILIES.values() for start in each]
    for name, cards in suites(starts).items():
        for card, rows in cards.items():
            found = cases(rows)
            if found:
                ratios = [case.ratio for case in found]
                sign = plots.OF_WARPS if plots.by_warps(rows) else ""
                lines.append(
                    f"| `{name}`{sign} | {CARDS[card]} | {geometric_mean(ratios):.2f} | {ratios[0]:.2f} to "
                    f"{ratios[-1]:.2f} | {len(found)}, {sum(ratio < 1 for ratio in ratios)} |"
                )
    return "\n".join(lines) + "\n"


def _when(stamp: dict[str, str]) -> str:
    return f"{stamp['date'][:10]}, {stamp['commit'][:7]}"


def _suite(name: str, cards: dict[str, list[Row]]) -> str:
    """A suite's caption and cases, the cards side by side; empty where nobody else was timed."""
    by_card = {card: found for card, rows in cards.items() if (found := cases(rows))}
    if not by_card:
        return ""
    sign = plots.OF_WARPS if any(plots.by_warps(rows) for rows in cards.values()) else ""
    taken = "; ".join(f"{CARDS[card]}, {_when(found[0].stamp)}" for card, found in by_card.items())
    labels, count = _shown(by_card), len({case.label for found in by_card.values() for case in found})
    some = f"; {len(labels)} of {count} cases" if len(labels) < count else ""
    several = len(by_card) > 1
    heads = [f"{CARDS[card]}: ours; peer, µs | ratio" if several else "ours, µs | peer, µs | ratio" for card in by_card]
    lines = [f"**`{name}`**{sign} ({taken}{some})", "", f"| case | {' | '.join(heads)} |"]
    lines.append("|---" * (1 + " | ".join(heads).count("|") + 1) + "|")
    for label in labels:
        cells = [label.replace(" | ", ", ")]
        for found in by_card.values():
            case = next((case for case in found if case.label == label), None)
            if case is None:
                cells += [""] * (2 if several else 3)
            elif several:
                cells += [f"{_time(case.ours_us)}; {_peer(case)}", f"{case.ratio:.2f}"]
            else:
                cells += [_time(case.ours_us), _peer(case), f"{case.ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    note = next((text for start, text in NOTES.items() if name.startswith(start)), "")
    return "\n".join([*lines, *(["", *textwrap.wrap(note, WIDTH)] if note else [])]) + "\n"


def _shown(each: dict[str, list[Case]]) -> list[str]:
    """Labels of a suite's cases: all of a small one; else the worst, the median, the best, and what two cards have."""
    labels = list(dict.fromkeys(case.label for found in each.values() for case in found))
    if len(labels) <= WHOLE:
        return labels
    first = [case.label for case in next(iter(each.values()))]
    kept = {*first[:3], first[len(first) // 2], first[-1]}
    kept |= {case.label for found in list(each.values())[1:] for case in found}
    return [label for label in labels if label in kept]


def _time(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:.0f}"


def _peer(case: Case) -> str:
    return f"{_time(case.peer_us)} {case.peer}"


def _bodies() -> str:
    """Kernels in Triton and in CuTe for one op, each at its fastest config."""
    parts = [
        "`rms_norm` has a body in Triton and one in CuTe; those of `silu_mul` and `rope` in CuTe are examples,\n"
        "`examples/silu_mul_cute.py` and `rope_cute.py`. Each ran with its fastest config. A ratio above 1 means that\n"
        "CuTe's is faster. The shapes are those of published comparisons, in fp16.\n"
    ]
    for op, card in product(("rms_norm", "silu_mul", "rope"), CARDS):
        if rows := [row for cards in suites([f"{op}_headtohead"]).values() for row in cards.get(card, [])]:
            found = {label: each for label, each in timed(rows).items() if set(BODIES) <= set(each)}
            mean = geometric_mean(_us(each[BODIES[1]]) / _us(each[BODIES[0]]) for each in found.values())
            lines = [
                f"**`{op}`** ({CARDS[card]}, {_when(rows[0].stamp)}): {mean:.3f} in the mean\n",
                "| case | CuTe, µs | Triton, µs | ratio | fastest peer, µs |",
                "|---|---|---|---|---|",
            ]
            for label, each in found.items():
                cute, triton = (_us(each[name]) for name in BODIES)
                best = min((row for name, row in each.items() if not is_ours(name)), key=_us, default=None)
                peer = f"{_time(_us(best))} {peer_name(best.contender)}" if best else ""
                lines.append(f"| {label} | {_time(cute)} | {_time(triton)} | {triton / cute:.3f} | {peer} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _models() -> str:
    """Decode steps and prompts of whole models, milliseconds; every contender that ran."""
    intro = (
        "Random weights, bf16, milliseconds: a step with so many tokens in the cache of each request, or a prompt.\n"
        'transformers has a `StaticCache` and is compiled with `mode="reduce-overhead"`. Eager times depend on the\n'
        "host. On the H200, the 16 requests of qwen3-30b-a3b had one prompt, so that they shared experts.\n"
    )
    parts = [intro]
    for card in CARDS:
        by_model: dict[str, list[Row]] = {}
        for path in files(plots.RESULTS / card / "models"):
            if not suite_of(path).endswith(("_published", "_new_lengths")):
                for row in read(path):
                    by_model.setdefault(row.op, []).append(row)
        for model, rows in by_model.items():
            by_case: dict[tuple[str, str], dict[str, Row]] = {}
            for row in rows:
                if row.median_us is not None:
                    by_case.setdefault((row.suite, row.label), {})[row.contender] = row
            ours = [timed[OURS] for timed in by_case.values()]
            taken: dict[str, set[str]] = {}
            for row in (row for timed in by_case.values() for row in timed.values()):
                taken.setdefault(row.stamp["date"][:10], set()).add(row.stamp["commit"][:7])
            days = "; ".join(f"{day}, {', '.join(sorted(commits))}" for day, commits in sorted(taken.items()))
            memory = min(row.memory_gib for row in ours if row.memory_gib is not None)
            parts.append(f"**{model}** ({CARDS[card]}, {days}; from {memory:.1f} GiB of GPU memory)\n")
            ways = {name: way for name, way in MODEL_WAYS.items() if any(name in timed for timed in by_case.values())}
            lines = [f"| case | {' | '.join(ways.values())} |", "|---" * (1 + len(ways)) + "|"]
            for (suite, label), timed in by_case.items():
                batch, tokens = (word.split("=")[1] for word in label.split())
                case = f"step, batch {batch}, {tokens} tokens" if suite == "decode" else f"prompt of {tokens}"
                cells = [f"{_us(timed[name]) / 1e3:.3g}" if name in timed else "" for name in ways]
                lines.append(f"| {' | '.join([case, *cells])} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _new_lengths() -> str:
    """First and second calls of prompts whose lengths a process has not met, milliseconds."""
    intro = (
        "Milliseconds of a first call and a second one, over random lengths of 1 to 4096 tokens (`cold`: the first\n"
        "twelve, on an empty cache; all others of ours behind `warmup`). transformers pays for new lengths too:\n"
        "its allocator and cuBLAS meet them.\n"
    )
    parts = [intro]
    for card in CARDS:
        for path in files(plots.RESULTS / card / "models", "*_new_lengths"):
            rows = read(path)
            labels = dict.fromkeys(row.problem.partition("of=")[2] for row in rows)
            times = [(row, _us(row) / 1e3) for row in rows]
            shown = {(r.contender, r.problem.partition("of=")[2]): f"{ms:.{0 if ms > 99 else 2}f}" for r, ms in times}
            taken = "; ".join(sorted({_when(row.stamp) for row in rows}))
            parts.append(f"**{rows[0].op}** ({CARDS[card]}, {taken})\n")
            lines = [f"| contender | {' | '.join(labels)} |", "|---" * (1 + len(labels)) + "|"]
            for name in dict.fromkeys(row.contender for row in rows):
                lines.append(f"| {name} | {' | '.join(shown.get((name, label), '') for label in labels)} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _host() -> str:
    """Host time of ours over the peer's, by way of the call."""
    intro = (
        "Microseconds that a call takes of the host, over the peer's in the same run: below 1 ours costs less. Calls\n"
        "alternate between two shapes and two weights; `graph` is a call in an Inductor graph.\n"
    )
    found = read(plots.RESULTS / "h200" / "host" / "host.jsonl.xz")
    ways = ("no_grad", "out", "forward", "backward", "graph")
    lines = [intro, f"| call | {' | '.join(ways)} | peer |", "|---|" + "---|" * (len(ways) + 1)]
    for op in sorted({row.op for row in found}):
        each = {way: cases([row for row in found if (row.op, row.problem) == (op, way)]) for way in ways}
        cells = [f"{1 / case.ratio:.2f}" if (case := next(iter(each[way]), None)) else "" for way in ways]
        peers = ", ".join(dict.fromkeys(case.peer for some in each.values() for case in some))
        lines.append(f"| `{op}` | {' | '.join(cells)} | {peers} |")
    runs = "; ".join(sorted({_when(row.stamp) for row in found}))
    return "\n".join([*lines, "", f"H200 machine, 16 cores, Python 3.12: {runs}.\n"])


def fill(text: str, name: str, table: str) -> str:
    """``text`` with ``table`` between the comments that name it."""
    start, end = f"<!-- {name}: written by python -m docs.generate -->\n", "<!-- end -->\n"
    before, found, rest = text.partition(start)
    if not found or end not in rest:
        raise ValueError(f"no place for {name}: {start.strip()} ... {end.strip()}")
    return before + start + table + end + rest.partition(end)[2]


def stand_ins() -> str:
    """Suites of Hopper cards that stood in for others: our speed over that of the peers of the same instructions."""
    lines = ["| suite | card for which | mean | worst to best | cases, lost | peers |", "|---|---|---|---|---|---|"]
    for folder in sorted(path for path in plots.RESULTS.glob("*-as-*") if path.is_dir()):
        for path in files(folder):
            if found := cases(rows := read(path)):
                ratios, peers = [case.ratio for case in found], dict.fromkeys(case.peer for case in found)
                lines.append(
                    f"| `{suite_of(path)}` | {folder.name} ({_when(rows[0].stamp)}) | {geometric_mean(ratios):.2f} | "
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f} | {len(found)}, {sum(ratio < 1 for ratio in ratios)} | "
                    f"{', '.join(peers)} |"
                )
    return "\n".join(lines) + "\n"


def cards(path: Path) -> str:
    """The page of the cards that nobody has timed, with its table of stand-ins written anew."""
    return fill(path.read_text(), "stand-ins", stand_ins())


def readme(path: Path) -> str:
    """The README with its table of speed written anew."""
    return fill(path.read_text(), "speed", speed())
