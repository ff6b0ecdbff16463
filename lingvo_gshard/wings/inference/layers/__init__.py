"""Layers in inference: functions that are registered for a layer's class. See faces.py."""

from lingvo_gshard.wings.inference.layers import attention as attention
from lingvo_gshard.wings.inference.layers import moe as moe
from lingvo_gshard.wings.inference.layers import stored as stored
from lingvo_gshard.wings.inference.layers import transformer as transformer
from lingvo_gshard.wings.inference.layers.faces import cache_shapes as cache_shapes
from lingvo_gshard.wings.inference.layers.faces import decoding_weights as decoding_weights
from lingvo_gshard.wings.inference.layers.faces import extend as extend
from lingvo_gshard.wings.inference.layers.faces import infer as infer
from lingvo_gshard.wings.inference.layers.faces import state_shapes as state_shapes
