"""Files of shipped winners, as the package has them."""

from __future__ import annotations

import lzma
from pathlib import Path


def ship(folder: Path, gpu: str, text: str) -> None:
    """Write the JSON lines ``text`` as the winners that ``folder`` has for ``gpu``."""
    (folder / f"{gpu}.jsonl.xz").write_bytes(lzma.compress(text.encode()))


def text_of(file: Path) -> str:
    """The JSON lines of such a file."""
    return lzma.decompress(file.read_bytes()).decode()
