"""The ops: one module per family, each with its declarations (Problem, Config, Op) and public functions.

A line about what an op accepts, how it is configured or what it means belongs here; how a kernel does its
work belongs in ``kernels/``, which only an op's ``build`` imports. ``registry.py`` lists every op.
"""
