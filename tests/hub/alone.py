"""What a process without cutekernels does with its kernel repository: ``python alone.py VARIANT``. Prints JSON."""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

FORBIDDEN = {"cutekernels", "db", "autotune", "sqlalchemy", "alembic", "optuna", "typer", "rich", "filelock", "ray"}


class Absent:
    """As if these were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"{name} is not there")


def loaded(variant: Path) -> tuple[Any, str]:
    """The package as the ``kernels`` package imports it, and its name."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, name


def stateless(cls: Any) -> bool:
    """Whether a layer is as the ``kernels`` package asks: no constructor, no members, no other methods."""
    import torch

    members = {name for name, _ in inspect.getmembers(cls)} - {name for name, _ in inspect.getmembers(torch.nn.Module)}
    return cls.__init__ is torch.nn.Module.__init__ and members <= {"can_torch_compile", "has_backward"}


def main(variant: str) -> None:
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    package, name = loaded(Path(variant))
    import torch

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(64)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    norm, x = Norm(), torch.randn(3, 64)
    gpu = import_module(f"{name}.gpu").lookup("h200")
    compiled = {}
    for op, problem in (("gemm", "m=16 n=4096 k=4096"), ("norms", "rows=64 cols=4096")):
        home = import_module(f"{name}.ops.{op}.op")
        declared = home.GEMM if op == "gemm" else home.RMS_NORM
        posed = declared.Problem.parse(problem)
        choice = import_module(f"{name}.dispatch").resolve(declared, posed, gpu)
        facts = import_module(f"{name}.compile").prepare(declared, posed, choice.config, gpu)
        compiled[op] = [choice.origin, facts.registers]
    layers = {key: one for key, one in vars(package.layers).items() if isinstance(one, type)}
    layers = {key: one for key, one in layers.items() if one.__module__ == package.layers.__name__}
    q = torch.randn(2, 5, 4, 16)
    print(
        json.dumps(
            {
                "norm": float((package.layers.RMSNorm.forward(norm, x) - norm(x)).abs().max()),
                "own": float((package.layers.RMSNorm.forward(norm.double(), x.bfloat16().double()) - 0).abs().max()),
                "attention": list(package.flash_attn_func(q, q, q, causal=True, window_size=(2, 0)).shape),
                "layers": {key: stateless(one) for key, one in layers.items()},
                "compiled": compiled,
                "there": sorted({module.partition(".")[0] for module in sys.modules} & FORBIDDEN),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
