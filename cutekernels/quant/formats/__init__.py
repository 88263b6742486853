"""Readers of the formats that checkpoints have, a file per family: each gives a ``QuantizedWeight``."""
