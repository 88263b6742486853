"""Bodies without a matrix product: the ones to read first. ``entry.py`` calls them as Triton's kernels are called."""
