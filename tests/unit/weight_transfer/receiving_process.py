"""A generator's host copy in a process of its own: ``python -m tests.unit.weight_transfer.receiving_process ADDRESS TIMEOUT``.

For each line "VERSION DIGEST" of standard input, it pulls the version and prints the way.
"""

from __future__ import annotations

import sys

from quartet.contract.status import Role
from quartet.rpc.clients import WeightClient
from quartet.weight_transfer.process_group import GroupSettings
from quartet.weight_transfer.receiver import WeightMirror
from tests.unit.weight_transfer.samples import RUN


def main(address: str, timeout: float) -> None:
    mirror = WeightMirror(num_threads=1, shares=False, group=GroupSettings(timeout=timeout))
    client = WeightClient(Role.ACTOR, address)
    print("ready", flush=True)
    for line in sys.stdin:
        version, digest = line.split()
        mirror.reset()
        pulled = mirror.pull([client], RUN, int(version), bytes.fromhex(digest), 60.0)
        print(pulled.way, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
