"""``linear`` with packed weights, its chains, ``nn.QuantizedLinear``."""
