"""Inductor calls launches directly: its generated code names the launch in the place of torch's op.

Through torch's dispatcher a Python kernel costs a graph's call 6 to 10 us. Inductor's interface for this is private:
where it has moved, the op is called as any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

LAUNCHES: dict[str, Callable[..., Any]] = {}
"""By name of the op: what generated code calls. Cached code keeps this line of import and the names."""


def lowered(op: Any, cuda: Callable[..., Any], cpu: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, the op's implementation for fakes, which tells Inductor of the launch once Inductor is loaded.

    Graphs are traced with fakes, so no graph of ours is lowered before.
    """
    name = op._schema.name.rpartition("::")[2]
    tensors = [i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]
    told = False

    def launch(*args: Any) -> Any:
        for i in tensors:
            t = args[i]
            if t is not None:
                return cuda(*args) if t.is_cuda else cpu(*args) if t.is_cpu else op(*args)
        return op(*args)

    LAUNCHES[name] = launch

    def telling(*args: Any) -> Any:
        nonlocal told
        if not told and "torch._inductor.compile_fx" in sys.modules:
            told = True
            _tell(op, name)
        return fake(*args)

    return telling


def _tell(op: Any, name: str) -> None:
    """Registers the lowering of ``op``: an extern kernel called by its name in :data:`LAUNCHES`."""
    try:
        from torch._inductor import ir, lowering
        from torch._inductor.virtualized import V
        from torch.utils import _pytree as pytree
    except ImportError:
        return
    if not hasattr(ir, "FallbackKernel") or op in lowering.lowerings:
        return

    def wrapped(node: Any) -> Any:
        return node.wrap_for_lowering() if hasattr(node, "wrap_for_lowering") else node

    class Launch(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                line = f"from {__name__} import LAUNCHES as cutekernels_launches"
                wrapper.add_import_once(line)
                self.python_kernel_name = f"cutekernels_launches[{name!r}]"
            super().codegen(wrapper)

    def lower(*args: Any, **options: Any) -> Any:
        arguments = op._schema.arguments
        args += tuple([options.get(a.name, a.default_value) for a in arguments[len(args) :]])
        return pytree.tree_map(wrapped, Launch.create(op, *args))

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
