"""Move JAX weights from the mesh that trains to the mesh that serves, any sharding to any sharding."""

from importlib.metadata import version as _version

from jreshard._plan import Move as Move
from jreshard._plan import Plan as Plan
from jreshard._transfer import plan as plan
from jreshard._transfer import transfer as transfer
from jreshard._verify import VerificationError as VerificationError

__version__ = _version("jreshard")
