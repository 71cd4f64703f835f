"""The distribution tree: its paths, its fan-out, and the loss of a parent."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import InvalidRequest, ServiceUnavailable
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tree import distribution_tree
from tests.unit.weight_transfer.samples import LocalPeer, assert_equal, cut_after, digest, weights


def test_a_tree_of_seven() -> None:
    assert distribution_tree("actor", list("abcdefg"), fan_out=2) == {
        "a": ("actor",),
        "b": ("actor",),
        "c": ("a", "actor"),
        "d": ("a", "actor"),
        "e": ("b", "actor"),
        "f": ("b", "actor"),
        "g": ("c", "a", "actor"),
    }


def test_generators_that_hold_the_version_are_sources_and_pull_nothing() -> None:
    assert distribution_tree("actor", list("abcde"), {"b", "d"}, fan_out=1) == {
        "a": ("actor",),
        "c": ("b", "actor"),
        "e": ("d", "actor"),
    }


def test_generators_that_can_map_the_memory_of_the_first_process_on_their_machine_do_so() -> None:
    machines = {"actor": "m", "a": "m", "b": "m", "c": "n", "d": "n", "e": "n", "f": "o", "g": ""}
    tree = distribution_tree("actor", list("abcdefg"), fan_out=1, machines=machines)
    assert tree == {
        "a": ("actor",),
        "b": ("actor",),
        # One copy for each other machine, in a tree.
        "c": ("actor",),
        "d": ("c", "actor"),
        "e": ("c", "actor"),
        "f": ("c", "actor"),
        "g": ("f", "c", "actor"),
    }
    # Those that map have nothing to send, so they are no sources when they hold the version.
    held = distribution_tree("actor", list("abcdefg"), {"a", "c", "d"}, fan_out=1, machines=machines)
    assert held == {"b": ("actor",), "e": ("c", "actor"), "f": ("actor",), "g": ("c", "actor")}


@given(count=st.integers(0, 200), fan_out=st.integers(1, 5), held=st.sets(st.integers(0, 199)))
def test_every_path_ends_at_the_root_and_no_source_has_more_children(count: int, fan_out: int, held: set[int]) -> None:
    generators = [f"g{index}" for index in range(count)]
    holders = {f"g{index}" for index in held if index < count}
    tree = distribution_tree("actor", generators, holders, fan_out)
    assert set(tree) == set(generators) - holders
    children = Counter(sources[0] for sources in tree.values())
    assert max(children.values(), default=0) <= fan_out
    for name, sources in tree.items():
        assert sources[-1] == "actor"
        assert name not in sources
        # The rest of a path is the path of the parent.
        parent = sources[0]
        assert sources[1:] == (() if parent == "actor" else ("actor",) if parent in holders else tree[parent])
    if fan_out > 1 and not holders and count:
        depth = max(map(len, tree.values()))
        assert sum(fan_out**level for level in range(1, depth)) < count


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="fan_out 0"):
        distribution_tree("actor", ["a"], fan_out=0)
    for generators in (["a", "a"], ["actor"]):
        with pytest.raises(InvalidRequest, match="distinct names"):
            distribution_tree("actor", generators)


@pytest.mark.parametrize("lost", ["g0", "g1", "g3"])
def test_a_lost_parent_costs_none_of_its_children_the_version(lost: str) -> None:
    tensors = weights()
    source = WeightSource(num_threads=1)
    source.publish(0, tensors.items())
    mirrors = {f"g{index}": WeightMirror(num_threads=1, shares=False) for index in range(8)}
    peers = {"actor": LocalPeer(source)} | {name: LocalPeer(mirror, name) for name, mirror in mirrors.items()}
    peers[lost].fault = cut_after(1, ServiceUnavailable(f"{lost}: unavailable"))
    for name, sources in distribution_tree("actor", list(mirrors)).items():
        result = mirrors[name].pull([peers[each] for each in sources], "run", 0, digest(tensors), timeout=20)
        assert result.source == peers[next(each for each in sources if each != lost)].address
        assert_equal(result.weight_set, tensors)
    for store in (source, *mirrors.values()):
        store.close()
