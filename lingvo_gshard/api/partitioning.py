"""partition: a TensorFlow function as a function of many devices."""

from lingvo_gshard.api.errors import names_arguments
from lingvo_gshard.runtime import partition as partition_lib

partition = names_arguments(partition_lib.partition)
