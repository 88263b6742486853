"""Pages written from the code by ``make docs``; ``tests/test_site.py`` compares them.

``command-line.md`` comes from the Typer app, ``reference.md`` from the public names in ``cutekernels/__init__.pyi``,
and ``performance.md`` and the README's table of speed from the recorded rows (``docs/measured.py``).
"""

from __future__ import annotations

import ast
import html
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from cutekernels import cli
from cutekernels.ops import registry
from docs import measured

DOCS = Path(__file__).parent

# Titles of the reference and what stands below each, by name or by the module a name comes from. A family of ops that
# no title names has a section of its own.
SECTIONS = {
    "Matrix products": ("ops.products", "ops.linear", "ops.norm_linear"),
    "Attention": ("ops.attention", "kv_cache", "sdpa"),
    "Norms": ("ops.norms",),
    "Activations": ("ops.activations",),
    "Rotary embedding and embedding": ("ops.rope", "ops.embedding"),
    "Losses": ("ops.loss",),
    "Mixture of experts": ("ops.moe",),
    "Sampling": ("ops.sampling",),
    "Optimizer": ("ops.optimizer", "optim"),
    "Modules": ("nn",),
    "Quantized weights": ("quant",),
    "Models": ("integrations", "models"),
    "Tuned configurations": ("dispatch", "introspection", "lock"),
}


COMMON = ("--help", "--install-completion", "--show-completion")  # options of every command line


def public_names() -> dict[str, str]:
    """Full path of each public function and class, by the name users write."""
    found = {"optim.FusedAdamW": "cutekernels.optim.FusedAdamW", "lock.verify": "cutekernels.lock.verify"}
    for place in ("", "nn", "models", "quant"):
        here = _names(f"cutekernels.{place}".rstrip("."))
        found |= {f"{place}.{name}".lstrip("."): path for name, path in here.items()}
    return found


def _names(package: str) -> dict[str, str]:
    """Full path of each name that the stub of ``package`` takes from a module, through the stubs of other packages."""
    found = {}
    stub = DOCS.parent.joinpath(*package.split("."), "__init__.pyi")
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "cutekernels":
            inner = DOCS.parent.joinpath(*node.module.split("."), "__init__.pyi").exists()
            for alias in node.names:
                found[alias.name] = _names(node.module)[alias.name] if inner else f"{node.module}.{alias.name}"
    return found


def reference() -> str:
    """The page that mkdocstrings fills with signatures and docstrings."""
    about = "Public functions and classes, from their docstrings. [The ops](ops.md) is the guide."
    lines = ["# Reference", "", about, ""]
    left = public_names()
    placed = {place for places in SECTIONS.values() for place in places}
    packages = dict.fromkeys(f"ops.{family.partition('.')[0]}" for family in registry.FAMILIES)
    further = {p.removeprefix("ops.").replace("_", " ").capitalize(): (p,) for p in packages if p not in placed}
    for title, places in (SECTIONS | further).items():
        prefixes = tuple(f"cutekernels.{place}." for place in places)
        here = {name: path for name, path in sorted(left.items()) if path.startswith(prefixes)}
        lines += [f"## {title}", ""] if here else []
        for name, path in here.items():
            del left[name]
            lines += [f"::: {path}", "    options:", f"      heading: {name}", f"      toc_label: {name}", ""]
    if left:
        raise ValueError(f"no section of the reference takes {', '.join(left)}: add its module to SECTIONS")
    return "\n".join(lines)


def commands(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    """Each command that does something, with its context."""
    if not hasattr(command, "list_commands"):
        yield command, context
        return
    for name in command.list_commands(context):
        _, found, _ = command.resolve_command(context, [name])
        yield from commands(found, typer.Context(found, info_name=name, parent=context))


def command_line() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(cli.app)
    lines = ["# Command line", "", "Every command with its arguments and options, as `--help` prints them.", ""]
    for command, context in commands(root, typer.Context(root, info_name="cutekernels")):
        lines += [f"## `{context.command_path}`", "", inspect.cleandoc(command.help or "").replace("\f", ""), ""]
        lines += ["```text", " ".join([context.command_path, *command.collect_usage_pieces(context)]), "```", ""]
        rows = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
        rows = [(name, text) for name, text in rows if not name.startswith(COMMON)]
        if rows:
            lines += ["| | |", "|---|---|", *(f"| {_code(name)} | {_cell(text)} |" for name, text in rows), ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    """``text`` as code in a table, where a bar would end the cell and Python-Markdown shows an escaped one as it is."""
    text = " ".join(text.split())
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    "command-line.md": command_line,
    "reference.md": reference,
    "performance.md": measured.performance,
    "cards.md": lambda: measured.cards(DOCS / "cards.md"),
    "../README.md": lambda: measured.readme(DOCS.parent / "README.md"),
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
