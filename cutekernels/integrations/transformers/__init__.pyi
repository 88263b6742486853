from cutekernels.integrations.transformers.attention import register_attention as register_attention
from cutekernels.integrations.transformers.compare import Comparison as Comparison
from cutekernels.integrations.transformers.compare import compare as compare
from cutekernels.integrations.transformers.experts import register_experts as register_experts
from cutekernels.integrations.transformers.patching import Report as Report
from cutekernels.integrations.transformers.patching import patch as patch
from cutekernels.integrations.transformers.patching import unpatch as unpatch
