"""Whole models over the ops of this library: :class:`Decoder` generates tokens."""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
