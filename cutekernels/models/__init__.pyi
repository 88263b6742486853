from cutekernels.models.decoder import Decoder as Decoder
from cutekernels.models.decoder import Generated as Generated
from cutekernels.models.loading import load as load
from cutekernels.models.sampling import Sampling as Sampling
