"""``python -m tests.lock REQUIREMENTS``: the same with the hashes alone of files that Linux with Python 3.11 to 3.13
installs: source archives, and wheels for x86-64 and Arm. Part of ``make lock``; asks PyPI for the files' names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from packaging.utils import parse_wheel_filename

PYTHONS = {"cp311", "cp312", "cp313"}
PLATFORMS = re.compile(r"any|(many)?linux\w*_(x86_64|aarch64)")
JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}


def installs(filename: str) -> bool:
    """Whether such a machine may install a file of this name."""
    if not filename.endswith(".whl"):
        return filename.endswith((".tar.gz", ".zip"))
    for tag in parse_wheel_filename(filename)[3]:
        stable = tag.abi == "abi3" and re.fullmatch(r"cp3(\d|1[0-3])", tag.interpreter)
        if PLATFORMS.fullmatch(tag.platform) and (stable or tag.interpreter in PYTHONS | {"py3", "py2.py3"}):
            return True
    return False


def kept(text: str) -> str:
    """``text`` without the hashes of other files."""
    lines = []
    for entry in re.split(r"^(?=[\w.-]+==)", text, flags=re.M):
        found = re.match(r"([\w.-]+)==", entry)
        if found is None:
            lines.append(entry)
            continue
        with urlopen(Request(f"https://pypi.org/simple/{found[1].lower()}/", headers=JSON), timeout=60) as answer:
            files = {f["hashes"]["sha256"]: f["filename"] for f in json.load(answer)["files"]}
        head, *hashes = entry.rstrip("\n").split(" \\\n")
        ours = [line for line in hashes if installs(files[line.rpartition(":")[2]])]
        if not ours:
            raise SystemExit(f"{head} has no file for Linux and Python 3.11 to 3.13")
        lines.append(" \\\n".join([head, *ours]) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(kept(path.read_text()))
