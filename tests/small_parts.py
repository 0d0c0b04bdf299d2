"""Has routes go in parts whose leaves are too small for that."""

import pytest

from jreshard._runtime import parts


def launch_in_parts(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """From now on launching a leaf counts as long as copying so many bytes between devices, and a part no more."""
    patch.setattr(parts, "_PART_SECONDS", 0.0)
    patch.setattr(parts, "_LEAF_SECONDS", dict.fromkeys(parts._LEAF_SECONDS, nbytes / parts._COPY_RATE))
