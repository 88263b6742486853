"""Every op as an op of torch's: importing this defines all of ``torch.ops.cutekernels``.

Public functions define their own family's when they are first used. Loading an exported program needs those it names.
"""

from __future__ import annotations

from importlib import import_module

from cutekernels.ops.registry import FAMILIES

_MODULES = {"loss": ("logprob", "cross_entropy"), "products": ("api", "grouped_api", "packed_api")}
for package in dict.fromkeys(family.partition(".")[0] for family in FAMILIES):
    for module in _MODULES.get(package, ("api",)):
        import_module(f"cutekernels.ops.{package}.{module}")
for module in ("linear", "norm_linear"):
    import_module(f"cutekernels.ops.{module}")
