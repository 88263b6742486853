from cutekernels.quant.layout import pack as pack
from cutekernels.quant.layout import unpack as unpack
