"""`quartet plan`: print the placement of the roles of a run on given GPUs, their memory, and the expected seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import join

import yaml
from rich.table import Table

from quartet.cli.console import make_console
from quartet.config.loading import load_config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.errors import ConfigError
from quartet.planner.device_memory import PARTS
from quartet.planner.gpus import parse_gpus
from quartet.planner.helm_values import helm_values
from quartet.planner.plan import Phase, Plan, make_plan
from quartet.planner.proposal import proposed_config, proposed_settings, requirements
from quartet.system.durable_files import write_durably

GIB, MIB = 2**30, 2**20
WIDTH = 160
"""Columns of the tables if the output is not a terminal."""


def plan(
    config_path: Path,
    gpus: str,
    nodes: int,
    overrides: list[str],
    overlays: list[Path],
    mean_prompt: int | None,
    mean_response: int | None,
    one_device_per_role: bool,
    output: Path | None,
    values: Path | None = None,
) -> None:
    """Print the plan with the shortest step, and write the proposed config to ``output``, or values of the chart to ``values``.

    Raises ConfigError if nothing fits.
    """
    config = load_config(config_path, overrides, overlays)
    cluster = parse_gpus(gpus, nodes)
    for option, path in (("--output", output), ("--helm-values", values)):
        if path is not None and (path.exists() or not path.parent.is_dir()):
            problem = "exists already" if path.exists() else f"the folder {path.parent} does not exist"
            raise ConfigError(
                f"{option} {path}: {problem}; expected a new file in an existing folder; choose another path"
            )
    result = make_plan(
        config, cluster, mean_prompt, mean_response, one_device_per_role, separate_pods=values is not None
    )
    command = ["quartet", "plan", str(config_path), "--gpus", gpus]
    command += ["--nodes", str(nodes)] if nodes > 1 else []
    console = make_console(file_width=WIDTH)
    for item in describe(result):
        console.print(item, soft_wrap=isinstance(item, str))
    settings = proposed_settings(config, result)
    console.print("\nProposed settings:", soft_wrap=True)
    console.print(yaml.safe_dump(settings, sort_keys=False, default_flow_style=None), soft_wrap=True, end="")
    if output is not None:
        write_durably(output, proposed_config(config, result, join(command)))
        console.print(f"\nconfig: {output}", soft_wrap=True)
    if values is not None:
        write_durably(values, helm_values(config, result, join([*command, "--helm-values", str(values)])))
        console.print(f"\nvalues of the Helm chart: {values}", soft_wrap=True)


def describe(result: Plan) -> list[str | Table]:
    """Return the lines and tables of a plan."""
    load = result.load
    items: list[str | Table] = [
        f"{result.cluster}: {result.seconds:.1f} s per step, {result.tokens_per_second:,.0f} response tokens/s. "
        f"{load.responses} responses of {load.mean_response} tokens after prompts of {load.mean_prompt}.",
        f"Bottleneck: {_bottleneck(result)}",
        "",
        _placements(result),
        "",
        _memory(result),
        "",
        _phases(result),
    ]
    actor = load.role(Role.ACTOR)
    if load.generates and actor is not None and (fixed := actor.shape.state.fixed_bytes(actor.dtype_bytes)):
        kept = actor.shape.state.token_bytes(actor.dtype_bytes, load.longest, load.engine != "torch")
        items += [
            "",
            f"State of each sequence of actor: {fixed / MIB:.1f} MiB of recurrent and convolution states, and up to "
            f"{kept / MIB:.1f} MiB that grow with its {load.longest} tokens.",
        ]
    if load.remote:
        items += ["", f"Not in the plan, because they have an address: {', '.join(load.remote)}."]
    if not load.generates:
        items += ["", f"Not in the plan: generation, on the server of rollout.engine {load.engine}."]
    if needed := requirements(result):
        items += ["", "The plan also needs what follows, which the proposed settings leave out:"]
        items += [f"  {line}" for line in needed]
    return items


def _bottleneck(result: Plan) -> str:
    phase = result.bottleneck
    share = phase.duration.seconds / result.seconds
    took = f"{phase.duration.seconds:.1f} s ({share:.0%} of a step)"
    return f"{phase.name} of {phase.role}, {took}, limited by {phase.duration.limit}."


def _placements(result: Plan) -> Table:
    table = _table(
        "Placement",
        "role",
        "devices",
        "replicate",
        "shard",
        "tensor",
        "parameters",
        "micro-batch tokens",
        "checkpointing",
    )
    for each in result.placed.placements:
        parallel, is_generator = each.parallel, each.role is Role.GENERATOR
        tokens = f"{result.placed.concurrent} sequences" if is_generator else f"{each.tokens}"
        cells = [
            each.name,
            _range(each.group.devices),
            *(str(n) for n in (parallel.replicate, parallel.shard, parallel.tensor)),
        ]
        recomputes = ("yes" if each.checkpointing else "no") if each.role in TRAINED_ROLES else ""
        table.add_row(*cells, f"{each.work.parameters / 1e9:.2f}B", tokens, recomputes)
    return table


def _memory(result: Plan) -> Table:
    """Return the memory of each kind of device in GiB, by role and part, and the most that it needs at a time."""
    placed, peak = result.placed, "most at a time" if result.placed.shared else "sum"
    parts = [part for part in PARTS if any(each.memory.get(part) for each in placed.placements)]
    table = _table(
        f"Memory of each device in GiB, of {result.cluster.device.memory / GIB:.1f}", "devices", "role", *parts, "total"
    )
    kinds: dict[tuple[str, ...], list[int]] = {}
    for device in range(result.cluster.total):
        kinds.setdefault(tuple(each.name for each in placed.on(device)), []).append(device)
    for names, devices in kinds.items():
        rows = [(each.name, each.memory) for each in placed.on(devices[0])]
        for name, memory in [*rows, (peak, placed.memory(devices[0]))] if names else []:
            cells = [f"{memory.get(part, 0.0) / GIB:.2f}" for part in parts]
            table.add_row(_range(devices), name, *cells, f"{sum(memory.values()) / GIB:.2f}")
    return table


def _phases(result: Plan) -> Table:
    table = _table("Expected seconds of a step", "phase", "role", "seconds", "limited by")
    for phase in result.phases:
        table.add_row(*_cells(phase))
    return table


def _cells(phase: Phase) -> tuple[str, str, str, str]:
    return phase.name, phase.role, f"{phase.duration.seconds:.2f}", phase.duration.limit


def _range(devices: Sequence[int]) -> str:
    """Return device indices as ranges, such as 0-3,8."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="left" if column in ("role", "phase", "devices", "limited by") else "right")
    return table
