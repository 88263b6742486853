"""The list of planted bugs names places that are still there."""

from __future__ import annotations

import pytest

from tests.mutants import MODULES, ROOT, Module


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_each_bug_has_one_place(module: Module) -> None:
    text = (ROOT / module.file).read_text()
    assert len(set(module.bugs)) == len(module.bugs) >= 20
    for old, new in module.bugs:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {module.file}: name its place anew"
        assert old != new
    assert all((ROOT / test).is_file() for test in module.tests)
