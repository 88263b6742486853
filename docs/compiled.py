"""The table of ``cards.md``: what compiling tells of every op's default on cards that nobody has timed.

``python -m docs.compiled`` compiles them, some minutes of one CPU, and writes the table. Of each op it takes the
problem of its suite with the least work. Warps and shared memory of a block and registers of a thread say how many
blocks an SM holds.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cutekernels import gpu as gpus
from cutekernels.backends import cubin
from cutekernels.backends.chained import Chained
from cutekernels.gpu import KIB, GpuSpec
from cutekernels.ops import registry
from cutekernels.ops.products.schedules.schedule import resident_ctas

CARDS = {"a100": 32, "l40s": 24, "rtx5090": 24}  # blocks that an SM holds at most, by CUDA's programming guide
PAGE = Path(__file__).parent / "cards.md"
BEGIN, END = "<!-- compiled: written by python -m docs.compiled -->\n", "<!-- end -->\n"
_THREADS = re.compile(r"EIATTR_REQNTID\s+Format:\s+EIFMT_SVAL\s+Value:\s+(0x\w+) (0x\w+) (0x\w+)")


def threads(binary: bytes) -> int:
    """The most threads that a kernel of the binary is launched with."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(cubin.cuobjdump()), "-elf", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(int(x, 16) * int(y, 16) * int(z, 16) for x, y, z in _THREADS.findall(told))


def cell(op: Any, gpu: GpuSpec, most: int) -> str:
    """Registers, spills, shared memory and blocks on an SM of an op's default."""
    problem = min(map(op.Problem.parse, op.suite), key=lambda p: op.work(p).floor_us(gpu))
    artifact = op.build(problem, op.default(problem, gpu), gpu)
    if isinstance(artifact, Chained):
        return "other ops'"
    binary = artifact.binary.cubin if artifact.backend == "triton" else artifact._function.artifacts.CUBIN
    facts, warps = artifact.facts, -(-threads(binary) // 32)
    held = min(most, resident_ctas(gpu, warps=warps, registers=facts.registers, smem=facts.smem_bytes))
    return f"{facts.registers}, {facts.stack_bytes} B, {facts.smem_bytes / KIB:.3g} KiB, {held} x {warps}"


def table() -> Iterator[str]:
    yield f"| op | {' | '.join(CARDS)} |\n|---|{'---|' * len(CARDS)}\n"
    for op in registry.OPS:
        cells = [cell(op, gpus.lookup(card), most) for card, most in CARDS.items()]
        yield f"| `{op.name}` | {' | '.join(cells)} |\n"
        print(op.name, *cells, sep="\t", flush=True)


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "".join(table()) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
