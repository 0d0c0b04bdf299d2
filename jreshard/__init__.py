"""Move JAX weights from the mesh that trains to the mesh that serves, any sharding to any sharding."""

from importlib.metadata import version as _version

from jreshard import models as models
from jreshard._control import MismatchError as MismatchError
from jreshard._control import PeerLost as PeerLost
from jreshard._control import PeerTimeout as PeerTimeout
from jreshard._paper import PaperDevice as PaperDevice
from jreshard._paper import paper_devices as paper_devices
from jreshard._plan import Move as Move
from jreshard._plan import Part as Part
from jreshard._plan import Plan as Plan
from jreshard._planning.figures import Figures as Figures
from jreshard._planning.topology import HostCosts as HostCosts
from jreshard._planning.topology import Topology as Topology
from jreshard._runtime.native import TransferError as TransferError
from jreshard._runtime.verify import VerificationError as VerificationError
from jreshard._transfer import plan as plan
from jreshard._transfer import transfer as transfer

__version__ = _version("jreshard")
