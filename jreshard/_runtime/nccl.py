"""Which copy of NCCL this process uses.

JAX's CUDA plugin brings NCCL into the process. A second copy would have state of its own and could be another version,
so the copy that is mapped is used if there is one, and else the one that JAX would load.
"""

import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

SONAME = "libnccl.so.2"
#: Older ones lack fixes that the `nccl` transport needs.
MINIMUM = (2, 27, 7)

_MAPS = Path("/proc/self/maps")
_HOW = 'pip install "jreshard[cuda13]" brings one (the package nvidia-nccl-cu13)'

Version = tuple[int, int, int]


class NcclUnavailable(RuntimeError):
    """No copy of NCCL in this process or on this machine can be used."""


class TwoCopies(NcclUnavailable):
    """The process has more than one copy of NCCL."""


@dataclass(frozen=True)
class Nccl:
    """A copy of NCCL.

    Attributes:
        path: the file, by which `dlopen` finds this very copy.
        version: its version, such as `(2, 28, 9)`.
        loaded: whether it was in the process already.
    """

    path: str
    version: Version
    loaded: bool


def find() -> Nccl:
    """The copy of NCCL to use; it is in the process afterwards.

    To be called after JAX has started its backends: the copy that they bring is the one to use.

    Raises:
        NcclUnavailable: there is none, or it is too old.
        TwoCopies: the process has more than one.
    """
    loaded = _mapped()
    path = loaded or _from_wheel() or SONAME
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NcclUnavailable(f"NCCL ({SONAME}) cannot be loaded: {error}; {_HOW}") from error
    version = _version(library, path)
    if version < MINIMUM:
        found, least = (".".join(map(str, v)) for v in (version, MINIMUM))
        raise NcclUnavailable(f"NCCL {found} at {path} is too old: {least} or newer is needed; {_HOW}")
    return Nccl(_mapped() or path, version, loaded is not None)


def _mapped() -> str | None:
    """The file of the copy in this process, if there is one."""
    copies: dict[tuple[str, str], str] = {}
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and re.fullmatch(r"libnccl\.so[.\d]*( \(deleted\))?", os.path.basename(fields[5])):
            copies[fields[3], fields[4]] = fields[5]  # device and inode: one file may have several names
    if len(copies) > 1:
        places = " and ".join(sorted(copies.values()))
        raise TwoCopies(f"the process has {len(copies)} copies of NCCL: {places}; let only one be loaded")
    path = next(iter(copies.values()), None)
    if path and path.endswith(" (deleted)"):
        raise NcclUnavailable(f"the process's copy of NCCL was replaced on disk: {path}; start the process anew")
    return path


def _from_wheel() -> str | None:
    """The file in the package that JAX's CUDA plugin depends on."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((str(path) for folder in folders if (path := Path(folder) / "lib" / SONAME).exists()), None)


def _version(library: ctypes.CDLL, path: str) -> Version:
    code = ctypes.c_int()
    try:
        result = library.ncclGetVersion(ctypes.byref(code))
    except AttributeError as error:
        raise NcclUnavailable(f"{path} is no NCCL: it has no ncclGetVersion") from error
    if result:
        raise NcclUnavailable(f"ncclGetVersion of {path} failed with {result}")
    # nccl.h: NCCL_VERSION counts thousands up to 2.8 and ten thousands since.
    major, rest = divmod(code.value, 10000) if code.value >= 10000 else divmod(code.value, 1000)
    return major, rest // 100, rest % 100
