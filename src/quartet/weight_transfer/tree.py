"""The distribution tree: the source from which each generator pulls a new version."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quartet.errors import InvalidRequest

FAN_OUT = 2
"""Default number of generators that pull from one source at the same time; docs/evidence/performance.md has the measurement."""


def distribution_tree(
    root: str,
    generators: Sequence[str],
    holders: Collection[str] = (),
    fan_out: int = FAN_OUT,
    machines: Mapping[str, str] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return for each generator the sources to pull from, in order of preference: its parent, its parent's parent, ..., ``root``.

    ``root`` is the actor. ``holders`` are the generators that hold the version already: they get no sources, and have children
    like the root. Every source has at most ``fan_out`` children. A parent may not have the version yet when its children ask, so
    a child waits for it (``WeightsRequest.wait_seconds``). If a parent is lost, its children pull from the next source.

    ``machines``: the machine of a process whose memory others there can map, see ``shared_memory.machine``. The first of a
    machine has a copy, and all others there map it: they are not in the tree, because they have nothing to send. The result
    depends on the arguments only. Raises InvalidRequest for repeated names, and for a fan-out below 1.
    """
    if fan_out < 1:
        raise InvalidRequest(f"fan_out {fan_out}: expected at least 1")
    if len({root, *generators}) != len(generators) + 1:
        raise InvalidRequest("generators: expected distinct names, different from the root's")
    machines = machines or {}
    copies = {machine: root for machine in [machines.get(root, "")] if machine}
    sharers: dict[str, str] = {}
    for name in generators:
        first = copies.setdefault(machine, name) if (machine := machines.get(name, "")) else name
        if first != name:
            sharers[name] = first
    paths: dict[str, tuple[str, ...]] = {root: ()}
    paths |= {name: (root,) for name in generators if name in holders and name not in sharers}
    # Breadth first, so that the tree is as flat as the fan-out allows.
    order = list(paths)
    result: dict[str, tuple[str, ...]] = {}
    for index, name in enumerate(each for each in generators if each not in holders and each not in sharers):
        parent = order[index // fan_out]
        paths[name] = result[name] = (parent, *paths[parent])
        order.append(name)
    shared = {name: (first, *paths[first]) for name, first in sharers.items() if name not in holders}
    return result | shared
