"""Hugging Face transformers: :func:`patch` puts a model's layers onto our kernels, :func:`unpatch` takes them off."""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
