"""Quantized weights of four and eight bits: one packed layout, and readers of the formats that checkpoints have.

The names stand in ``__init__.pyi``; importing this package loads nothing heavy.
"""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
