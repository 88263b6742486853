from cutekernels.nn.loss import LinearCrossEntropy as LinearCrossEntropy
from cutekernels.nn.mlp import SwiGLU as SwiGLU
from cutekernels.nn.moe import MoE as MoE
from cutekernels.nn.norms import LayerNorm as LayerNorm
from cutekernels.nn.norms import RMSNorm as RMSNorm
from cutekernels.nn.quantized import QuantizedLinear as QuantizedLinear
from cutekernels.nn.rotary import RotaryEmbedding as RotaryEmbedding
