"""Hooks of mkdocs: Sphinx's roles in docstrings, which pages would show, and pictures outside ``docs/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PICTURE = re.compile(r"\.\./bench/results/([\w-]+)/overview\.png")
RESULTS = Path(__file__).parents[1] / "bench" / "results"


def on_page_content(html: str, **_: Any) -> str:
    """A page without ``:class:`` and the like in front of names, and without the ``::`` in front of code."""
    html = re.sub(r":(?:func|class|meth|data|mod):\s*(?=<code>)", "", html)
    return re.sub(r"(?m)^\s*<p>::</p>\n?", "", html).replace("::</p>", ":</p>")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """The site's files and the overview picture of each GPU."""
    from mkdocs.structure.files import File

    for path in RESULTS.glob("*/overview.png"):
        files.append(File.generated(config, f"overview-{path.parent.name}.png", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page whose pictures are the site's own."""
    return PICTURE.sub(r"overview-\1.png", markdown)
