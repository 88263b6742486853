"""CuTe kernels of mixtures of experts."""
