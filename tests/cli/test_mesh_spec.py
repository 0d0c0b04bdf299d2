"""Mesh shapes as the command line takes them."""

import pytest

from jreshard.cli.errors import UsageError
from jreshard.cli.mesh_spec import format_mesh_spec, parse_mesh_spec


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("tp=4", {"tp": 4}),
        ("fsdp=4,tp=2", {"fsdp": 4, "tp": 2}),
        ("tp=2,fsdp=4", {"tp": 2, "fsdp": 4}),
        ("data=1,fsdp=16,tp=8", {"data": 1, "fsdp": 16, "tp": 8}),
    ],
)
def test_axes_keep_their_order(text: str, axes: dict[str, int]) -> None:
    assert list(parse_mesh_spec(text).items()) == list(axes.items())
    assert format_mesh_spec(axes) == text


def test_spaces_are_ignored() -> None:
    assert parse_mesh_spec(" fsdp = 4, tp=2 ") == {"fsdp": 4, "tp": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected AXIS=SIZE"),
        ("fsdp", "found 'fsdp'"),
        ("fsdp=4,", "found ''"),
        ("=4", "found '=4'"),
        ("fsdp=4,tp=2,fsdp=2", "axis 'fsdp' is repeated"),
        ("tp=", "size of axis 'tp' must be a positive integer, not ''"),
        ("tp=two", "not 'two'"),
        ("tp=2.0", "not '2.0'"),
        ("tp=2=2", "not '2=2'"),
        ("tp=0", "not '0'"),
        ("tp=-2", "not '-2'"),
    ],
)
def test_a_bad_mesh_is_refused_and_quoted(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mesh_spec(text)
    assert str(caught.value).startswith(f"mesh {text!r}: ")
    assert message in str(caught.value)
