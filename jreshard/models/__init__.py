"""Shapes, logical axes and shardings of well-known models, by name; no array is made.

Example:
    >>> from jax.sharding import AbstractMesh
    >>> from jreshard import models
    >>> mesh = AbstractMesh((16, 8), ("dp", "tp"))
    >>> models.shardings("deepseek-v3", mesh)["moe_layers"]["mlp"]["experts"]["up"].spec
    P(None, None, None, 'tp')
"""

from jreshard.models._registry import names as names
from jreshard.models._rules import DEFAULT_RULES as DEFAULT_RULES
from jreshard.models._rules import REPLICA_AXES as REPLICA_AXES
from jreshard.models._rules import Rule as Rule
from jreshard.models._rules import mesh_axes_of as mesh_axes_of
from jreshard.models._shardings import shardings as shardings
from jreshard.models._trees import logical_axes as logical_axes
from jreshard.models._trees import num_layers as num_layers
from jreshard.models._trees import num_params as num_params
from jreshard.models._trees import shapes as shapes
from jreshard.models._trees import source as source
from jreshard.models._trees import weights as weights
from jreshard.models._weights import Weight as Weight
from jreshard.models._weights import stage_sizes as stage_sizes
