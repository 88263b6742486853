"""Public names stand once, in a stub beside the package, and resolve at first use."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from cutekernels import lazy
from tests.processes import python


def test_modules_and_functions_resolve_without_an_import_of_their_own() -> None:
    """``cutekernels.ops.rope`` is a module and ``cutekernels.rope`` the function, whichever was imported first."""
    code = (
        "import cutekernels as ck; print(ck.db.__name__, ck.optim.FusedAdamW.__name__, ck.nn.SwiGLU.__name__)\n"
        "import cutekernels.ops.rope; print(callable(ck.rope), callable(ck.embedding))"
    )
    done = python(code)
    assert done.stdout.split() == ["cutekernels.db", "FusedAdamW", "SwiGLU", "True", "True"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "__init__.pyi").write_text(
        "from __future__ import annotations\nfrom json import dumps as dumps\n"
        "from toy import part as part\nversion: str\n"
    )
    module = ModuleType("toy")
    module.__path__ = [str(tmp_path)]
    (tmp_path / "part.py").write_text("value = 3\n")
    monkeypatch.setitem(sys.modules, "toy", module)
    module.__getattr__, module.__dir__, module.__all__ = lazy.attach("toy", str(tmp_path / "__init__.py"))  # type: ignore[attr-defined]
    return module


def test_a_stub_says_where_names_live(package: ModuleType) -> None:
    assert package.__all__ == ["dumps", "part"]
    assert package.dumps({}) == "{}"
    assert package.part.value == 3
    assert {"dumps", "part"} <= set(dir(package))
    with pytest.raises(AttributeError, match="module 'toy' has no attribute 'version'"):
        _ = package.version
