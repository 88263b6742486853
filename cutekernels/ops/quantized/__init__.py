"""Linear layers whose weights have four or eight bits."""

from cutekernels.ops.quantized.decode import DEQUANTIZE
from cutekernels.ops.quantized.op import QUANTIZED_LINEAR

OPS = (QUANTIZED_LINEAR, DEQUANTIZE)
