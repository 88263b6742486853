"""Whole models over the ops of this library: :class:`Decoder` generates tokens with a Llama-class model."""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
