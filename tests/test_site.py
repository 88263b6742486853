"""The site: every page is in the navigation, links between pages lead somewhere, generated pages are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from bench.rows import Row
from docs import measured
from tests.test_docs import anchors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text()
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def script(name: str) -> ModuleType:
    """A module beside the pages, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate, roles = script("generate"), script("roles")


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = CONFIG[CONFIG.index("\nnav:") : CONFIG.index("\nplugins:")]
    assert sorted(re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)) == PAGES


def test_links_stay_in_the_site() -> None:
    """A link to a file of the repository would be dead on the site, and an anchor must be a heading of its page."""
    for page in PAGES:
        text = (DOCS / page).read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            if roles.PICTURE.fullmatch(target):  # a hook puts it into the site
                assert (DOCS / target).is_file(), f"{page} shows {target}"
                continue
            found = (DOCS / page).parent / name if name else DOCS / page
            assert found.resolve().is_relative_to(DOCS), f"{page} links to {target}"
            assert found.is_file(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(found.read_text()), f"{page} links to {target}"


def test_pages_of_other_files_name_them() -> None:
    for page in PAGES:
        for name in re.findall(r'^--8<-- "([^"]+)"', (DOCS / page).read_text(), re.MULTILINE):
            assert (ROOT / name).is_file(), f"{page} includes {name}"


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text() == generate.PAGES[name](), f"python -m docs.generate writes docs/{name} anew"


def test_the_reference_has_every_public_name() -> None:
    import cutekernels

    found = {*generate.public_names(), *(name.partition(".")[0] for name in generate.public_names())}
    assert set(cutekernels.__all__) - {"autotune", "db"} <= found


def test_sphinx_roles_do_not_reach_the_pages() -> None:
    html = "<p>As :func:<code>gemm</code> and\n:class:<code>KVCache</code>::</p>\n<p>::</p>\n<pre>a::b</pre>"
    assert roles.on_page_content(html) == ("<p>As <code>gemm</code> and\n<code>KVCache</code>:</p>\n<pre>a::b</pre>")


def test_a_case_has_its_fastest_peer_and_the_worst_stands_first() -> None:
    def row(label: str, contender: str, us: float) -> Row:
        return Row("gemm", "planted", "m=1", label, 1.0, 0.0, contender, "ok", median_us=us, stamp={"date": "2026"})

    times = {"cutekernels": 10.0, "cutekernels (default)": 5.0, "cublas": 12.0, "quack (untuned)": 11.0}
    rows = [row("won", name, us) for name, us in times.items()]
    rows += [row("lost", name, us) for name, us in {"cutekernels": 10.0, "cublas": 8.0, "naive": 1.0}.items()]
    rows += [row("alone", "cutekernels", 10.0), row("lost", "streaming 1:1 (1024x4)", 2.0)]
    lost, won = measured.cases(rows)
    assert (lost.label, lost.peer, lost.ratio) == ("lost", "cuBLAS", 0.8)
    assert (won.label, won.peer, won.ratio) == ("won", "QuACK", 1.1)


def test_the_readme_has_the_speed_of_the_rows() -> None:
    readme = (ROOT / "README.md").read_text()
    assert measured.speed() in readme
    with pytest.raises(ValueError, match="no place for speed"):
        measured.fill(readme.replace("<!-- speed", "<!--"), "speed", "")
