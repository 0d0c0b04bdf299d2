"""Rules from logical axes to mesh axes as text, `embed=fsdp,mlp=tp+ep,norm=none`, or as JSON."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jreshard.cli.errors import UsageError
from jreshard.cli.json_file import read_json
from jreshard.models import DEFAULT_RULES, REPLICA_AXES, Rule
from jreshard.models._rules import as_tuple, near

_EXPECTED = "expected LOGICAL=MESH[+MESH...][,...], such as embed=fsdp,mlp=tp+ep,norm=none"


def read_rules(text: str | None) -> tuple[Rule, ...]:
    """The default rules, with those of `text` in front and in the place of any for the same logical axes.

    Args:
        text: rules as text, or the path of a JSON file: `[["embed", "fsdp"], ["mlp", ["tp", "ep"]], ["norm", null]]`.
            `None` for the default rules alone.

    Raises:
        UsageError: `text` is neither.
    """
    if text is None:
        return DEFAULT_RULES
    given = parse_rules(text) if "=" in text else _read_file(Path(text))
    replaced = {logical for logical, _ in given}
    return (*given, *(rule for rule in DEFAULT_RULES if rule[0] not in replaced))


def parse_rules(text: str) -> list[Rule]:
    """The rules that `text` writes out.

    Raises:
        UsageError: it is not of the form that is expected.
    """
    return [_parse_rule(item, text) for item in text.split(",")]


def check_mesh_axes(rules: Sequence[Rule], mesh_axes: Collection[str]) -> None:
    """Refuse rules that name an axis which no mesh has, unless it is one that meshes often have.

    Args:
        rules: of either side, or of both.
        mesh_axes: the axes of both meshes: rules that serve both may name an axis that only one of them has.

    Raises:
        UsageError: with the axes that there are.
    """
    usual = {axis for _, targets in DEFAULT_RULES for axis in as_tuple(targets)} | REPLICA_AXES
    for logical, targets in rules:
        for axis in as_tuple(targets):
            if axis not in usual.union(mesh_axes):
                hint = near(axis, usual.union(mesh_axes))
                there = ", ".join(sorted(mesh_axes))
                raise UsageError(
                    f"rules: {logical}={axis}: there is no mesh axis {axis!r}{hint}; the meshes have {there}"
                )


def _parse_rule(item: str, text: str) -> Rule:
    logical, equals, targets = (part.strip() for part in item.partition("="))
    axes = tuple(axis.strip() for axis in targets.split("+"))
    if not (logical and equals and all(axes)):
        raise UsageError(f"rules {text!r}: {_EXPECTED}; found {item!r}")
    return logical, None if axes == ("none",) else axes


def _read_file(path: Path) -> list[Rule]:
    data = read_json(path, f"rules {str(path)!r}", hint=f"; {_EXPECTED}")
    if not isinstance(data, list):
        raise UsageError(f"rules {str(path)!r}: expected a JSON list of [LOGICAL, MESH] pairs")
    return [_rule_of(entry, path) for entry in data]


def _rule_of(entry: Any, path: Path) -> Rule:
    match entry:
        case [str(logical), str(axis)]:
            return logical, axis
        case [str(logical), None]:
            return logical, None
        case [str(logical), [*axes]] if axes and all(isinstance(axis, str) for axis in axes):
            return logical, tuple(axes)
    raise UsageError(f"rules {str(path)!r}: expected [LOGICAL, MESH], such as {_EXAMPLE}; found {json.dumps(entry)}")


_EXAMPLE = '["embed", "fsdp"], ["mlp", ["tp", "ep"]] or ["norm", null]'
