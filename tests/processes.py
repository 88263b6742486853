"""Other processes of this Python, and waiting for what they do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def python(code: str, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with ``sys.argv[1:]`` of these words, for less than a test may take."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, **({"capture_output": True, "text": True, "timeout": 280} | options), check=check)


def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Waits for an event, however slow the machine is."""
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)
