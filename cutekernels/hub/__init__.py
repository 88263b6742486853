"""A kernel repository for Hugging Face's hub, written by ``python -m cutekernels.hub OUT``.

``tree.py`` copies what the layers reach, with relative imports; ``layers.py`` and ``winners.py`` are of the copy alone.
"""
