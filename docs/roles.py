"""Hook of mkdocs: docstrings are written for ``help()``, with Sphinx's roles, which a page would show as they are."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """A page without ``:class:`` and the like in front of names, and without the ``::`` in front of code."""
    html = re.sub(r":(?:func|class|meth|data|mod):\s*(?=<code>)", "", html)
    return re.sub(r"(?m)^\s*<p>::</p>\n?", "", html).replace("::</p>", ":</p>")
