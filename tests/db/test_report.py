"""``db report``: one HTML file that holds what its pictures show, and in which a database's texts do nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cutekernels import db as database
from cutekernels.db.questions import cli, html_report, query
from cutekernels.db.storage.store import Store
from cutekernels.errors import StoreError
from tests.command_line import invoke
from tests.db.trials import trial

pytest.importorskip("plotly")
pytestmark = pytest.mark.usefixtures("shipped")
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
PROBLEMS = ("m=16 n=4096 k=4096", "m=4096 n=4096 k=4096", "m=256 n=1024 k=8192")


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of three problems: failures, predictions of the same configs, a winner with the vendor's time."""
    monkeypatch.setattr(query, "unusable", lambda *row: "")  # these configs are invented
    configs = [f"tile_m={m} tile_n={n}" for m in (64, 128, 256) for n in (64, 128)]
    with Store() as store:
        for number, problem in enumerate(PROBLEMS):
            base = trial(configs[0], problem=problem)
            rows = []
            for i, config in enumerate(configs):
                us = 100.0 / (1 + i) * (number + 1)
                status = "crashed" if i == 2 else "compile_error" if i == 4 else "ok"
                times: dict[str, Any] = (
                    {"median_us": us, "ratio": 1.0 + i, "ratio_low": 0.95 + i, "ratio_high": 1.05 + i}
                    if status == "ok"
                    else {"median_us": None}
                )
                made = trial(config, problem=problem, status=status, baseline_us=us * 1.2 if i == 5 else None, **times)
                rows.append(replace(made, created_at=base.created_at - timedelta(hours=1) + timedelta(seconds=2 * i)))
                rows.append(trial(config, problem=problem, origin="predicted", median_us=us * 0.9))
            store.record(rows)
            store.crown(max((r for r in rows if r.ratio), key=lambda r: r.ratio or 0).id)


def figures(page: str) -> list[list[dict[str, Any]]]:
    """The traces of each picture, read back from the page."""
    found = re.findall(r'Plotly\.newPlot\(\s*"[-0-9a-f]+",\s*(\[.*?\]),\s*\{"', page, re.DOTALL)
    return [json.loads(text) for text in found]


class Outside(HTMLParser):
    """Attributes by which a browser would fetch or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href") or name.startswith("on"):
                self.found.append(f"{tag} {name}={value}")


def written(tmp_path: Path, *words: str) -> str:
    result = invoke(cli.app, "report", str(tmp_path / "out.html"), *words)
    assert result.exit_code == 0, result.output
    return (tmp_path / "out.html").read_text()


@pytest.mark.usefixtures("filled")
def test_the_pictures_hold_the_rows(tmp_path: Path) -> None:
    page = written(tmp_path)
    searches, spent, roofline, predictions, against = figures(page)
    curves = [t for t in searches if not t["showlegend"]]
    assert len(curves) == 3 and all(c["y"][-1] == 100 and c["y"] == sorted(c["y"]) for c in curves)
    assert len(curves[0]["x"]) == 6, "failed attempts count"
    (median,) = [t for t in searches if t["showlegend"]]
    assert median["name"] == "gemm" and median["y"][0] == pytest.approx(100 / 6)
    by_status = {t["name"]: sum(t["x"]) for t in spent}
    assert by_status["crashed"] == by_status["compile_error"] == pytest.approx(3 * 2)
    assert len(roofline[0]["x"]) == 3
    scatter = next(t for t in predictions if t["mode"] == "markers")
    assert len(scatter["x"]) == 3 * 4 and scatter["x"][0] == pytest.approx(0.9 * scatter["y"][0])
    bars, vendor = against
    assert bars["x"] == [6.0] * 3 and bars["error_x"]["array"] == pytest.approx([0.05] * 3)
    assert vendor["x"] == pytest.approx([1.2] * 3)
    assert "3 winners in use" in page and "36 trials" in page


@pytest.mark.usefixtures("filled")
def test_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page = written(tmp_path)
    outside = Outside()
    outside.feed(page)
    assert outside.found == []
    assert page.count("<!doctype html>") == 1 and page.rstrip().endswith("</html>")


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    with Store() as store:
        rows = [trial(HOSTILE, problem=HOSTILE, ratio=1.1, ratio_low=1.0, ratio_high=1.2)]
        rows.append(trial(HOSTILE, problem=HOSTILE, origin="predicted"))
        store.record(rows)
        store.crown(rows[0].id)
    page = written(tmp_path)
    for picture in figures(page):
        assert "<" not in json.dumps(picture).replace("<br>", "")
    outside = Outside()
    outside.feed(page)
    assert outside.found == [] and "alert(2)</script>" not in page
    assert "&lt;img src=x" in json.dumps(figures(page)), "shown as it is stored"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_it_and_runs_nothing_of_the_database(tmp_path: Path, filled: None) -> None:
    with Store() as store:
        bad = "<img src=x onerror=document.body.id='owned'>"
        row = trial(bad, problem=bad, ratio=9.0, ratio_low=8.0, ratio_high=10.0)
        store.record([row])
        store.crown(row.id)
    written(tmp_path)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=8000",
        f"--user-data-dir={tmp_path}/u",
    ]
    address = (tmp_path / "out.html").as_uri()
    dumped = subprocess.run(
        [str(BROWSER), *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    body = dumped[dumped.index("<body") :]
    assert body.count("js-plotly-plot") == 5 and body.count("scatterlayer") + body.count("barlayer") >= 5
    assert 'id="owned"' not in body and "<img" not in body
    assert "% of the roofline" in body and "onerror" in body, "drawn, as text"


def test_conditions_and_an_empty_database(tmp_path: Path, filled: None) -> None:
    page = written(tmp_path, "--problem", "m=4096")
    assert "12 trials, 1 winners in use" in page
    empty = written(tmp_path, "--op", "rope")
    assert empty.count("No rows for this picture") == 5
    assert invoke(cli.app, "report", str(tmp_path / "x.html"), "--op", "gem").exit_code == 2
    refused = invoke(cli.app, "report", str(tmp_path / "no" / "x.html"))
    assert refused.exit_code == 1 and len(refused.stderr.strip().splitlines()) == 1


def test_without_plotly_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, filled: None) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    with database.open() as opened, pytest.raises(StoreError, match=r"pip install .plotly>=6"):
        html_report.page(opened)
