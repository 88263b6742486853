"""Reads sm_90a machine code: which instructions write registers that a warpgroup product under way still reads."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from cutekernels.backends.cubin import cuobjdump

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2, "LDSM.16.M88.4": 4, "LDSM.16.MT88.4": 4, "LDSM.16.M88.2": 2}
Batch = tuple[int, ...]  # registers that it reads
Batches = tuple[Batch, ...]


def instructions(cubin: bytes, folder: Path) -> list[tuple[str, str]]:
    """Opcodes and operands in order; labels as ``("LABEL", name)``. Where a predicate decides whether a branch is taken
    or the thread ends, the opcode begins with ``@``.
    """
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(cuobjdump()).with_name("nvdisasm")
    text = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout
    found = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            found.append(("LABEL", label[1]))
        elif made := _LINE.search(line):
            decided = made[1] and made[2].startswith(("BRA", "EXIT"))
            found.append(("@" + made[2] if decided else made[2], made[3]))
    return found


def written(opcode: str, operands: str) -> range:
    """The registers of an instruction's first operand that is none of predicates."""
    if opcode.startswith(("ST", "RED", "BAR")):
        return range(0)
    for operand in map(str.strip, operands.split(",")):
        if re.fullmatch(r"!?U?P(\d|T)", operand):
            continue
        register = re.fullmatch(r"R(\d+)(?:\.\w+)*", operand)
        width = 2 if opcode == "CS2R" else next((n for part, n in _WIDTHS.items() if part in opcode), 1)
        return range(int(register[1]), int(register[1]) + width) if register else range(0)
    return range(0)


def overwritten(code: list[tuple[str, str]]) -> list[str]:
    """Instructions that write a register of weights before its product has been waited for, on any path."""
    labels = {operand: i for i, (opcode, operand) in enumerate(code) if opcode == "LABEL"}
    found: dict[int, str] = {}
    seen: set[tuple[int, Batches, Batch]] = set()
    paths: list[tuple[int, Batches, Batch]] = [(0, (), ())]
    while paths:
        at, batches, building = paths.pop()
        for i in range(at, len(code)):
            opcode, operands = code[i]
            if opcode == "LABEL":
                if (i, batches, building) in seen:
                    break
                seen.add((i, batches, building))
            elif opcode.startswith("HGMMA"):
                weights = re.match(r"R(\d+)", operands.split(",")[1].strip())
                first = int(weights[1]) if weights else 0
                building += tuple(range(first, first + 4)) if weights else ()
                if "gsb0" in operands:
                    batches, building = (*batches, building), ()
            elif opcode.startswith("WARPGROUP.DEPBAR"):
                left = re.search(r"0x(\w+)", operands)
                assert left is not None
                batches = batches[len(batches) - int(left[1], 16) :] if int(left[1], 16) < len(batches) else batches
            elif opcode.lstrip("@").startswith(("BRA", "EXIT")):
                target = re.search(r"\.L_x_\d+", operands)
                if target:
                    paths.append((labels[target[0]], batches, building))
                if opcode in ("BRA", "EXIT") and not re.match(r"!?U?P\d", operands):
                    break
            else:
                held = {r for batch in (*batches, building) for r in batch}
                if set(written(opcode, operands)) & held:
                    found[i] = f"{opcode} {operands}"
    return list(found.values())
