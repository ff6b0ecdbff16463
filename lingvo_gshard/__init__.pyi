from . import keras as keras
from .api.experiments import describe as describe
from .api.experiments import experiment as experiment
from .api.experiments import experiments as experiments
from .api.export import DecoderSettings as DecoderSettings
from .api.importing import import_model as import_model
from .api.importing import open_model as open_model
from .api.options import ClusterOptions as ClusterOptions
from .api.options import RuntimeOptions as RuntimeOptions
from .api.partitioning import partition as partition
from .api.partitioning import verify as verify
from .api.planning import plan as plan
from .api.planning import plan_generation as plan_generation
from .api.preparation import PrepareOptions as PrepareOptions
from .api.preparation import Source as Source
from .api.preparation import preparation_params as preparation_params
from .api.preparation import prepare as prepare
from .api.run import DecodingOptions as DecodingOptions
from .api.run import Run as Run
from .api.run import load as load
from .api.run import report as report
from .api.training import train as train

__version__: str
