"""The ops: a package per family, its declarations (Problem, Config, Op) in ``OPS``, its public functions in ``api.py``.

What an op accepts, how it is configured and what it means belongs here. How a kernel does its work belongs in
``kernels/``, which only an op's ``build`` imports. Declarations import torch where it runs, never at module level.
Importing an ``api.py`` defines its ops in torch (``torch.ops.cutekernels``), ``library.py`` all of them.
"""
