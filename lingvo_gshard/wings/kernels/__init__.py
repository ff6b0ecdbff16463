"""Kernels of the hardware: functions that a platform computes with code of its own.

    out_BNLD = attention.attend(call, query_BNLD, keys_BNKD, values_BNKD, segments, [])

marks a call in a TensorFlow program. `splicing.replace_markers` replaces the mark, when the program
is lowered, by code of jax for the platform of the devices: Pallas for TPUs, cuDNN or Pallas for
CUDA. `grouped.products` multiplies the rows of each expert by its weights. Layers ask for the
`obstacle` first, and compute with TensorFlow's operations where a platform has no kernel for a
call. `interpret` has a kernel computed on CPUs, step by step.
"""

from lingvo_gshard.wings.kernels import attention as attention
from lingvo_gshard.wings.kernels import block_products as block_products
from lingvo_gshard.wings.kernels import cache_attention as cache_attention
from lingvo_gshard.wings.kernels import exchange as exchange
from lingvo_gshard.wings.kernels import grouped as grouped
from lingvo_gshard.wings.kernels import kernel as kernel
