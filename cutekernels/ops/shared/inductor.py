"""Inductor calls launches directly: its generated code names the launch in the place of torch's op.

Through torch's dispatcher a Python kernel costs a graph's call 6 to 10 us. Inductor's interface for this is private:
where it has moved, the op is called as any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cutekernels import torch_names

LAUNCHES: dict[str, Callable[..., Any]] = {}
"""By name of the op: what generated code calls. Cached code keeps this line of import and the names."""


def lowered(
    op: Any, cuda: Callable[..., Any], cpu: Callable[..., Any], fake: Callable[..., Any], into: Any, inputs: int
) -> Callable[..., Any]:
    """``fake``, the op's implementation for fakes, which tells Inductor of the launch once Inductor is loaded.

    Graphs are traced with fakes, so no graph of ours is lowered before. ``into``: the op that writes to results given
    behind that many ``inputs``, if there is one: Inductor then plans their memory.
    """
    name = op._schema.name.rpartition("::")[2]
    tensors = [i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]
    told = False

    def launch(*args: Any) -> Any:
        if getattr(args[0], "is_cuda", False):
            return cuda(*args)
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
            _tell(op, into, inputs)
        return fake(*args)

    return telling


def _tell(op: Any, into: Any, inputs: int) -> None:
    """Registers the lowering of ``op``: an extern kernel called by its name in :data:`LAUNCHES`."""
    names = torch_names.inductor()
    if names is None or op in names.lowering.lowerings:
        return
    ir, lowering, V = names.ir, names.lowering, names.virtualized.V
    Fallback: Any = ir.FallbackKernel
    shape, empty = ir.convert_shape_to_inductor, lowering.empty_strided

    class Launch(Fallback):  # type: ignore[misc]
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:
                wrapper.add_import_once(f"from {__name__} import LAUNCHES as cutekernels_launches")
                name = self.op_overload._schema.name.rpartition("::")[2]
                self.python_kernel_name = f"cutekernels_launches[{name!r}]"
            super().codegen(wrapper)

    def wrap(node: Any) -> Any:
        if not isinstance(node, ir.IRNode):
            return node
        return node.wrap_for_lowering() if hasattr(node, "wrap_for_lowering") else ir.TensorBox.create(node)

    def lower(*args: Any, **options: Any) -> Any:
        arguments = op._schema.arguments
        args += tuple([options.get(a.name, a.default_value) for a in arguments[len(args) :]])
        if into is None:
            made = Launch.create(op, *args)
            return type(made)(map(wrap, made)) if isinstance(made, tuple | list) else wrap(made)
        made = V.graph.current_node.meta["val"]
        results = [
            empty(shape(t.size()), shape(t.stride()), dtype=t.dtype, device=t.device)
            for t in (made if isinstance(made, tuple | list) else (made,))
        ]
        Launch.create(into, *args[:inputs], *results, *args[inputs:])
        return tuple(results) if isinstance(made, tuple | list) else results[0]

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
