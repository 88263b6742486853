"""Which config the dispatcher serves, and why, for every shipped and bundled problem and for random ones.

    python -m tests.served_configs --check                # against served_configs.txt; names the first differences
    python -m tests.served_configs --check --match gemm   # of the ops whose name contains the word
    python -m tests.served_configs --write

``served_configs.txt`` holds a hash for each op and GPU. The whole dump, from which differences are named, is written to
``build/served_configs/``, a file for each op; keep that of the sources before a change, since git ignores it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

GPUS = ("a100-sxm-80gb", "l4", "l40s", "h100-sxm", "h200", "rtx3090", "rtx5090")
RANDOM = 51  # problems of each op: none changes where an op is added
SEED = 20261126
FILE = Path(__file__).with_suffix(".txt")
DUMP = Path(__file__).parents[1] / "build" / "served_configs"
SHOWN = 5  # differences of an op
_EVERY_TOKEN = "tokens"  # suites of every number of tokens from 1 to 128: one problem a bucket is taken


def bundled(op: Any) -> list[Any]:
    """The problems of the op's own suite and of its benchmarks, each once, in a fixed order."""
    from bench import workloads
    from cutekernels.errors import CuteKernelsError

    found = {op.Problem.parse(text): None for text in op.suite}
    buckets = set()
    for name in workloads.OPS:
        for suite, cases in workloads.get(name).suites.items():
            for dtype, accumulate in (("bf16", "fp32"), ("fp16", "fp32"), ("fp16", "fp16")):
                for case in cases(dtype, accumulate):
                    try:
                        owner, p = workloads.parse_case(case)
                    except CuteKernelsError:  # a suite of another type of sums
                        continue
                    if owner is not op or (_EVERY_TOKEN in suite and p.bucket() in buckets):
                        continue
                    buckets.add(p.bucket())
                    found[p] = None
    return list(found)


def drawn(op: Any, count: int) -> list[Any]:
    """``count`` random problems: extents near those of its suite, each property at random. The same in every run."""
    from cutekernels.errors import UnsupportedProblem

    draw = random.Random(f"{SEED} {op.name}")
    suite = [op.Problem.parse(text) for text in op.suite]
    found: dict[Any, None] = {}
    for _ in range(100 * count):
        p = draw.choice(suite)
        values = {f.name: draw.choice(f.metadata["values"]) for f in fields(op.Problem) if "values" in f.metadata}
        values = {name: value for name, value in values.items() if draw.random() < 0.3}
        sizes = {name: getattr(p, name) for name in p.extent_names()}
        for name, size in sizes.items():
            if draw.random() < 0.5:
                sizes[name] = max(1, round(size * 2 ** draw.uniform(-3, 3)))
        try:
            found[p.replace(**values, **sizes)] = None
        except UnsupportedProblem:
            continue
        if len(found) == count:
            break
    return list(found)


def problems(op: Any, count: int) -> list[Any]:
    """All that an op is asked for: bundled, shipped for any GPU, and ``count`` at random."""
    from cutekernels.db.storage import snapshot

    rows = (t for name in snapshot.shipped_gpus() for t in snapshot.shipped(name))
    shipped = [op.Problem.parse(t.problem) for t in rows if t.op == op.name and t.revision in op.revisions]
    return list(dict.fromkeys([*bundled(op), *shipped, *drawn(op, count)]))


def served(op: Any, gpu_name: str, asked: list[Any]) -> list[str]:
    """A line for each problem: its config and the origin of it."""
    from cutekernels import dispatch, gpu
    from cutekernels.errors import UnsupportedProblem

    spec = gpu.lookup(gpu_name)
    found = []
    for p in asked:
        try:
            choice = dispatch.resolve(op, p, spec)
            found.append(f"{gpu_name} | {p} | {choice.origin} | {choice.config}")
        except UnsupportedProblem as refusal:
            found.append(f"{gpu_name} | {p} | none | {refusal}")
    return found


def _hash(lines: list[str]) -> str:
    """In whatever order shipped rows and suites list the problems."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def _differences(op: str, lines: list[str]) -> list[str]:
    """The first lines of ``op`` that are not in the dump before."""
    file = DUMP / f"{op}.txt"
    if not file.is_file():
        return [f"  {file} does not exist: run --write with the sources before, to see which"]
    before = set(file.read_text().splitlines())
    return [f"  now: {line}" for line in lines if line not in before][:SHOWN]


def main() -> None:
    """Reads the arguments and does what the module's docstring says."""
    from cutekernels.ops.registry import OPS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    parser.add_argument("--match", default="", help="a word that an op's name contains")
    arguments = parser.parse_args()
    if not any(arguments.match in op.name for op in OPS):
        parser.error(f"no op's name contains {arguments.match!r}")
    known = {}
    if FILE.is_file():
        known = {line.split()[0]: line.split()[1:] for line in FILE.read_text().splitlines()[1:]}
    wrong = 0
    for op in (op for op in OPS if arguments.match in op.name):
        asked = problems(op, RANDOM)
        by_gpu = [served(op, name, asked) for name in GPUS]
        hashes, lines = [_hash(found) for found in by_gpu], [line for found in by_gpu for line in found]
        print(f"{op.name}: {len(asked)} problems", flush=True)
        if arguments.check and hashes != known.get(op.name):
            wrong += 1
            differing = [n for n, now, was in zip(GPUS, hashes, known.get(op.name, hashes), strict=True) if now != was]
            print(f"differs: {op.name} on {', '.join(differing) or 'all'}", *_differences(op.name, lines), sep="\n")
        if arguments.write:
            DUMP.mkdir(parents=True, exist_ok=True)
            (DUMP / f"{op.name}.txt").write_text("\n".join(lines) + "\n")
            known[op.name] = hashes
            rows = [f"{name} {' '.join(row)}\n" for name, row in sorted(known.items())]
            FILE.write_text(f"op {' '.join(GPUS)}\n" + "".join(rows))
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cutekernels-served-") as folder:
        os.environ["CUTEKERNELS_DB"] = f"{folder}/none.db"
        main()
