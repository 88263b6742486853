"""``python -m cutekernels.hub OUT``: write the kernel repository into a new or empty folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cutekernels.errors import CuteKernelsError
from cutekernels.hub.tree import BACKENDS, write


def main() -> int:
    parser = argparse.ArgumentParser("python -m cutekernels.hub", description=__doc__)
    parser.add_argument("out", type=Path, help="a folder that does not exist, or is empty")
    parser.add_argument("--backend", choices=BACKENDS, default="cuda", help="cpu: reference implementations, to try it")
    given = parser.parse_args()
    try:
        variant = write(given.out, given.backend)
    except CuteKernelsError as error:
        print(error, file=sys.stderr)
        return 1
    print(variant)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
