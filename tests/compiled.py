"""Compiled CuTe kernels as tests look at them: machine code, disassembly, opcodes."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from typing import Any

from cutekernels.backends.cubin import cuobjdump


def cubin(artifact: Any) -> bytes:
    """The ELF file of a CuTe artifact's kernel."""
    return artifact._function.artifacts.CUBIN  # type: ignore[no-any-return]


def code(artifact: Any) -> bytes:
    """The machine code: the ELF's text sections. Kernel names, which hold the config, are no part of it."""
    elf = cubin(artifact)
    assert elf[:6] == b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]  # name .. offset, size
    names = headers[names_at][4]
    return b"".join(
        elf[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if elf.startswith(b".text.", names + name)
    )


def sass(elf: bytes) -> str:
    """The disassembly of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(elf)
        file.flush()
        command = [str(cuobjdump()), "-sass", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def opcodes(artifact: Any) -> Counter[str]:
    """Opcodes with their modifiers, counted."""
    lines = sass(cubin(artifact))
    found = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", lines, re.MULTILINE))
    assert found["EXIT"], lines[:500]
    return found
