"""Hashes of what kernels compile to, so that a change of their sources alone can be shown to change nothing.

    python -m tests.kernel_hashes --check                     # compiles every case again; names those that differ
    python -m tests.kernel_hashes --check --match warpgroup   # only cases whose line contains the word; !word: lacks it
    python -m tests.kernel_hashes --write                     # the same cases, with the hashes of these sources
    python -m tests.kernel_hashes --choose                    # new cases, from suites, defaults and shipped winners;
                                                              # with --match they come to those that are there

A line of ``kernel_hashes.txt.bz2`` is ``op | GPU | problem | config | device hash | host hash``. The device hash is of
the machine code and of the sections a launch reads (registers, constants, shared memory); kernel names, which hold the
names and fields of Python classes, are no part of it. The host hash is of the launcher, its grid, cluster, shared
memory and tensor maps; for a Triton kernel, of the metadata of its launch. Line tables are off.
"""

from __future__ import annotations

import argparse
import bz2
import hashlib
import json
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

GPUS = ("a100", "l40s", "h200", "rtx5090")  # one for each compile target
FILE = Path(__file__).with_suffix(".txt.bz2")
DIGITS = 8  # of a hash
# What decides how a kernel is built, rather than how large a tile is: one case for each value and GPU.
STRUCTURE = ("body", "path", "method", "order", "grid", "lazy", "turns", "evict", "q_in_registers", "in_registers")


@dataclass(frozen=True)
class Case:
    """One kernel to compile, as text."""

    op: str
    gpu: str
    problem: str
    config: str

    def __str__(self) -> str:
        return f"{self.op} | {self.gpu} | {self.problem} | {self.config}"


def read(file: Path) -> dict[Case, str]:
    """Cases of ``file`` with their hashes."""
    found = {}
    for line in bz2.decompress(file.read_bytes()).decode().splitlines():
        op, gpu, problem, config, device, host = (word.strip() for word in line.split("|"))
        found[Case(op, gpu, problem, config)] = f"{device} | {host}"
    return found


# ---- hashes ---------------------------------------------------------------------------------------------


def hashed(case: Case) -> str:
    """The hashes of what ``case`` compiles to; of a config without a kernel of its own, its backend's name."""
    from cutekernels import gpu
    from cutekernels.ops import registry

    op = registry.get(case.op)
    artifact = op.build(op.Problem.parse(case.problem), op.Config.parse(case.config), gpu.lookup(case.gpu))
    if artifact.backend == "cute":
        return f"{device_hash(artifact._function.artifacts.CUBIN)} | {_hash(launcher(artifact))}"
    if artifact.backend == "triton":
        compiled = artifact.binary.compiled()
        metadata = {k: v for k, v in compiled.metadata._asdict().items() if k not in ("name", "hash")}
        metadata["extern_libs"] = [name for name, _ in metadata["extern_libs"]]  # not where they are installed
        text = json.dumps(metadata, sort_keys=True, default=str)
        return f"{device_hash(compiled.asm['cubin'])} | {_hash(text.encode())}"
    return f"{artifact.backend} | -"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def device_hash(elf: bytes) -> str:
    """Hash of a cubin's code, constants, kernel attributes and static shared memory, whatever its kernel is called."""
    digest = hashlib.sha256()
    for name, content in sorted(sections(elf)):
        digest.update(f"{name} {len(content)}\0".encode() + content)
    return digest.hexdigest()[:DIGITS]


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections of a cubin that a launch depends on, kernel names taken off theirs."""
    assert elf[:6] == b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]  # name .. offset, size
    names = headers[names_at][4]
    for at, kind, _, _, offset, length in headers:
        name = elf[names + at : elf.index(b"\0", names + at)].decode()
        short = re.match(r"\.(text|nv\.info|nv\.constant\d|nv\.shared|nv\.global(\.init)?)\b", name)
        if short:
            empty = kind == 8  # SHT_NOBITS: a size alone
            yield short[0], str(length).encode() if empty else elf[offset : offset + length]


def launcher(artifact: Any) -> bytes:
    """The host program that launches a CuTe kernel, without the names in it."""
    program = str(artifact._function.ir_module)
    start = program.index("llvm.func @cutlass_")
    text = program[start : program.find("\n  }\n", start)]
    text = re.sub(r"(kernel_)?cutlass_\w+", "kernel", text)
    return re.sub(r"\\?@\"[^\"]*\"|@printfFormat_\d+", "@text", text).encode()


# ---- which kernels --------------------------------------------------------------------------------------


def choose() -> list[Case]:
    """Defaults and shipped winners that together have each static problem and, on each GPU, every value of each knob
    and every structure with each property of a problem; of Triton kernels, on any GPU.
    """
    from cutekernels import gpu
    from cutekernels.db.storage import snapshot
    from cutekernels.ops.registry import OPS
    from tests.served_configs import bundled

    chosen: list[Case] = []
    shipped = {spec: snapshot.shipped(spec) for spec in snapshot.shipped_gpus()}
    for op in OPS:
        pool: dict[Any, None] = {}
        problems = bundled(op)
        for turn, p in enumerate(problems):
            for i in range(len(GPUS)):
                spec = gpu.lookup(GPUS[(turn + i) % len(GPUS)])
                pool[spec, p, op.default(p, spec)] = None
        for name, trials in shipped.items():
            for t in trials:
                if t.op == op.name and t.revision in op.revisions:
                    text = op.spell(t.revision, t.problem, t.config)
                    p, c, spec = op.Problem.parse(t.problem), op.Config.parse(text), gpu.lookup(name)
                    if op.why_not(p, c, spec) is None:
                        pool[spec, p, c] = None
        pool |= dict.fromkeys(_fused(op, problems))
        for spec, p, c in list(pool)[:: 1 + len(pool) // 200]:
            for knob, values in op.Config.space().items():
                for value in values if knob in STRUCTURE else ():
                    if op.why_not(p, changed := c.replace(**{knob: value}), spec) is None:
                        pool[spec, p, changed] = None
        chosen += _covering(op, list(pool))
    return chosen


def _fused(op: Any, problems: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Cases of an op whose default may be a chain: each static problem with the first fused configs it takes."""
    from cutekernels import gpu

    if "path" in op.Config.space():
        for p in {p.static(): p for p in reversed(problems)}.values():
            for spec in map(gpu.lookup, GPUS):
                valid = (c for c in op.Config.every() if c.path == "fused" and op.why_not(p, c, spec) is None)
                for c in islice(valid, 1):
                    changed = (c, c.replace(split_k=2), c.replace(pdl=True), c.replace(pdl=True, prefetch_l2=2))
                    yield from ((spec, p, found) for found in changed if op.why_not(p, found, spec) is None)


def _features(op: Any, spec: Any, p: Any, c: Any) -> set[Any]:
    from cutekernels.ops.shared.triton_op import TritonOp

    structure = tuple((k, getattr(c, k)) for k in ("body", "path", "method", "swap_ab") if hasattr(c, k))
    target = "any" if isinstance(op, TritonOp) else spec.target  # Triton's kernels are written for no target
    found: set[Any] = {(p.static(),), (spec.target,)}
    found |= {(target, structure, pair) for pair in p.static()}
    found |= {(target, "knob", structure[:1], k, getattr(c, k)) for k in op.Config.space()}
    return found


def _covering(op: Any, pool: Sequence[tuple[Any, Any, Any]]) -> list[Case]:
    """Greedily the candidate that adds most features, the first of equals, until there are none to add."""
    features = [_features(op, *candidate) for candidate in pool]
    left = set().union(*features)
    chosen = []
    while left:
        best = max(range(len(pool)), key=lambda i: len(features[i] & left))
        left -= features[best]
        spec, p, c = pool[best]
        if not c.vendors:
            chosen.append(Case(op.name, spec.name, str(p), str(c)))
    return chosen


# ---- command --------------------------------------------------------------------------------------------


def _run(cases: Iterable[Case], before: dict[Case, str], check: bool) -> dict[Case, str]:
    found, differing = {}, 0
    started = time.process_time()
    for case in cases:
        found[case] = hashed(case)
        if check and found[case] != before[case]:
            differing += 1
            print(f"differs: {case}: {before[case]} was, {found[case]} is", flush=True)
    verdict = f"; {differing} differ" if check else ""
    print(f"{len(found)} kernels in {time.process_time() - started:.0f} CPU seconds{verdict}")
    if differing:
        sys.exit(1)
    return found


def _matches(line: str, words: Iterable[str]) -> bool:
    return all((word[1:] not in line) if word.startswith("!") else (word in line) for word in words)


def main() -> None:
    """Reads the arguments and does what the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="?", const=FILE, type=Path, metavar="FILE", help=f"default: {FILE.name}")
    parser.add_argument("--write", nargs="?", const=FILE, type=Path, metavar="FILE", help="with --match, merges")
    parser.add_argument("--choose", action="store_true", help="choose the cases anew, then --write")
    parser.add_argument("--match", action="append", default=[], help="words that a case's line contains; !word: lacks")
    parser.add_argument("--list", action="store_true", help="the cases alone")
    chosen = parser.parse_args()
    before = {} if chosen.choose and not chosen.match else read(chosen.check or FILE)
    cases = [c for c in (choose() if chosen.choose else before) if _matches(str(c), chosen.match)]
    if not cases:
        parser.error(f"no case has {' and '.join(chosen.match)}: an op that is new has none before --choose")
    if chosen.list:
        print(*cases, sep="\n")
        return
    made = _run(cases, before, check=chosen.check is not None)
    if chosen.write or chosen.choose:
        lines = [f"{case} | {hashes}\n" for case, hashes in (before | made).items()]
        (chosen.write or FILE).write_bytes(bz2.compress("".join(lines).encode()))


if __name__ == "__main__":
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    with tempfile.TemporaryDirectory(prefix="cutekernels-hashes-") as cache:
        os.environ["CUTEKERNELS_CACHE"] = cache
        os.environ["CUTEKERNELS_DB"] = f"{cache}/none.db"
        from cutekernels.backends.cute import WITHOUT_GPU

        os.environ.update(WITHOUT_GPU)
        main()
