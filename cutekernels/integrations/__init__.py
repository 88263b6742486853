"""Other libraries' models on our kernels; each integration needs its library installed and loads it on first use."""
