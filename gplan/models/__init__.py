"""Models: what a checkpoint states, and the decoder that its weights fill."""

from gplan.models.base import Attend, ForwardInputs, Model
from gplan.models.checkpoint import Headers, locate_checkpoint, read_headers
from gplan.models.decoder import Decoder
from gplan.models.loader import load_model, random_model, read_spec
from gplan.models.rope import RopeSpec, cos_sin_table
from gplan.models.spec import ModelSpec
from gplan.models.weights import check_tensors, weights_nbytes

__all__ = [
    "Attend",
    "Decoder",
    "ForwardInputs",
    "Headers",
    "Model",
    "ModelSpec",
    "RopeSpec",
    "check_tensors",
    "cos_sin_table",
    "load_model",
    "locate_checkpoint",
    "random_model",
    "read_headers",
    "read_spec",
    "weights_nbytes",
]
