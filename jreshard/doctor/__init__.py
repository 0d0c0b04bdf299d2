"""What a process can move weights with, and why not with more.

`python -m jreshard doctor` examines a process of its own. To examine one of a cluster, call `examine` in it once
`jax.distributed` has been initialised, in all processes at about the same time.
"""

from jreshard.doctor.facts import Facts as Facts
from jreshard.doctor.probe import gather
from jreshard.doctor.report import as_json, as_text
from jreshard.doctor.verdicts import findings, verdicts


def examine(*, json: bool = False) -> tuple[str, bool]:
    """Examines this process and its devices; starts JAX if it has not started, and takes no device memory.

    Args:
        json: return JSON, not a page to read.

    Returns:
        The report, and whether all is well: some transport works between every pair of devices.

    Example:
        >>> report, ok = examine()
        >>> ok
        True
    """
    facts = gather()
    judged = verdicts(facts)
    found = findings(facts, judged)
    report = (as_json if json else as_text)(facts, judged, found)
    return report, not any(finding.fault for finding in found)
