"""The findings as text and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby

from jreshard._runtime.transport import UNEXPORTABLE
from jreshard.doctor.facts import TRANSPORTS, Facts
from jreshard.doctor.verdicts import Finding, Verdict

_LABEL_WIDTH = 22
_MOST_PAIRS = 6  # lines of a kind


def as_text(facts: Facts, judged: list[Verdict], found: list[Finding]) -> str:
    """A page to read."""
    return "\n".join(_lines(facts, judged, found))


def as_json(facts: Facts, judged: list[Verdict], found: list[Finding]) -> str:
    """The same for programs; devices are numbered in the order of `devices`."""
    out = asdict(replace(facts, links={}, machines={}, refusals={}))
    out["links"] = [{"pair": pair, "kind": link.kind, "lanes": link.lanes} for pair, link in facts.links.items()]
    del out["machines"], out["refusals"]  # which the verdicts repeat
    out["transports"] = [asdict(verdict) for verdict in judged]
    out["findings"] = [asdict(finding) for finding in found]
    out["ok"] = not any(finding.fault for finding in found)
    return json.dumps(out, indent=1)


def _lines(facts: Facts, judged: list[Verdict], found: list[Finding]) -> Iterator[str]:
    for name, text in facts.versions.items():
        yield _fact(name, text)
    yield from _devices(facts)
    for (a, b), link in list(facts.links.items())[:_MOST_PAIRS]:
        yield _fact("link", f"{facts.devices[a].name} - {facts.devices[b].name}: {link}")
    if len(facts.links) > _MOST_PAIRS:
        yield _fact("", f"... and {len(facts.links) - _MOST_PAIRS} pairs more (--json has all)")
    can = "cannot" if facts.allocator in UNEXPORTABLE else "can"
    on_gpus = any(device.platform == "gpu" for device in facts.devices)
    yield _fact("allocator", facts.allocator + (f"; {can} export memory to other processes" if on_gpus else ""))
    for name, text in facts.limits.items():
        yield _fact(name, text)
    if not judged:
        yield _fact("transports", "nothing to move between: fewer than two devices")
    for transport in TRANSPORTS if judged else ():
        yield from _transport(facts, transport, [verdict for verdict in judged if verdict.transport == transport])
    for finding in found:
        yield f"{'WRONG' if finding.fault else 'note'}: {finding.text}"
    if not any(finding.fault for finding in found):
        yield "All well: " + _conclusion(facts, judged)


def _devices(facts: Facts) -> Iterator[str]:
    key = [(d.kind, d.platform, d.process, d.memory) for d in facts.devices]
    for (kind, platform, process, memory), group in groupby(zip(key, facts.devices, strict=True), lambda pair: pair[0]):
        names = [device.name for _, device in group]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        text = f"{len(names)} x {kind} ({platform}), {span}, of process {process}"
        if host := facts.hosts.get(process):
            text += f" on {host}"
        if memory:
            text += f", {memory / 1e9:.1f} GB each for JAX"
        yield _fact("devices", text)
    if facts.devices and all(device.platform == "cpu" for device in facts.devices):
        yield _fact("GPUs", "none used by JAX")


def _transport(facts: Facts, transport: str, judged: list[Verdict]) -> Iterator[str]:
    """A line for each outcome, with the pairs that have it."""
    outcomes: dict[tuple[bool | None, str], list[str]] = {}
    for verdict in judged:
        names = " - ".join(facts.devices[i].name for i in verdict.pair)
        outcomes.setdefault((verdict.works, verdict.reason), []).append(names)
    for (works, reason), pairs in outcomes.items():
        where = "every pair" if len(outcomes) == 1 else ", ".join(pairs[:_MOST_PAIRS])
        if len(outcomes) > 1 and len(pairs) > _MOST_PAIRS:
            where += f", and {len(pairs) - _MOST_PAIRS} more"
        word = {True: "works", False: "no", None: "unknown"}[works]
        yield _fact(f"transport {transport}", f"{word} ({where})" + (f": {reason}" if reason else ""))


def _conclusion(facts: Facts, judged: list[Verdict]) -> str:
    if not judged:
        return "nothing is wrong, and there is nothing to move between."
    if any(device.platform == "gpu" for device in facts.devices):
        return "a transport works between all devices."
    return "no GPUs, and host works between the CPU devices."


def _fact(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"
