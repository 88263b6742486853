"""Drop-in modules over the ops: state dicts are those of their Hugging Face or PyTorch twins.

One file per family. The names stand in ``__init__.pyi``; importing this package loads nothing heavy.
"""

from cutekernels import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
