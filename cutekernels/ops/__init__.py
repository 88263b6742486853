"""The ops: one module or package per family, each with its declarations (Problem, Config, Op) and public functions.

What an op accepts, how it is configured and what it means belongs here. How a kernel does its work belongs in
``kernels/``, which only an op's ``build`` imports. Importing any module of this package registers every op with torch
(``torch.ops.cutekernels``).
"""

from cutekernels.ops import registry as registry
