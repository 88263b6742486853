"""Files of shipped winners, as the package has them."""

from __future__ import annotations

import gzip
from pathlib import Path


def ship(folder: Path, gpu: str, text: str) -> None:
    """Write the JSON lines ``text`` as the winners that ``folder`` has for ``gpu``."""
    (folder / f"{gpu}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def text_of(file: Path) -> str:
    """The JSON lines of such a file."""
    return gzip.decompress(file.read_bytes()).decode()
