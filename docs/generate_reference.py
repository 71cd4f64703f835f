"""Generates the pages of docs/reference from the code.

Without arguments, compares the committed pages with the code and exits with status 1 if one differs (`make check`).
With --write, writes them (`make generate`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from quartet.cli import config_reference

FOLDER = Path(__file__).parent / "reference"
ROOT = Path(__file__).parents[1]

Json = dict[str, Any]


def table(columns: list[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return a Markdown table, line by line."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows] + [""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or "–"


def metrics() -> str:
    """Return the page of all metrics: those of the run's files and those for Prometheus."""
    from quartet.telemetry.evaluation_metrics import EVALUATION_METRICS
    from quartet.telemetry.step_metrics import STAGE_METRICS, STEP_METRICS

    lines = [
        "# Metrics",
        "",
        "Which metrics exist, in which unit, and what they mean. [Read the curves](../tuning.md) explains how to act on them.",
        "This page is generated from the code by `make generate`.",
        "",
    ]
    columns = ["metric", "unit", "meaning", "healthy", "warning sign"]
    for title, about, definitions in (
        (
            "Training step",
            "Each step writes one object with these keys to `metrics.jsonl`. KL, entropy and log-probs are in nats.",
            STEP_METRICS,
        ),
        (
            "Stages before RLHF",
            "`quartet sft` and `quartet reward-model` write these to `metrics.jsonl`, beside `step`, `seconds` and `entropy`.",
            STAGE_METRICS,
        ),
        ("Evaluation", "Each evaluation writes one object with these keys to `evaluations.jsonl`.", EVALUATION_METRICS),
    ):
        lines += [f"## {title}", "", about, ""]
        rows = ((f"`{item.name}`", item.unit, item.meaning, item.healthy, item.warning) for item in definitions)
        lines += table(columns, rows)
    lines += [
        "## Prometheus",
        "",
        "Each process serves these at `/metrics`; see [Monitoring](../monitoring.md).",
        "",
    ]
    for title, about, families in _prometheus():
        lines += [f"### {title}", "", *([about, ""] if about else [])]
        rows = ((_series(family), family.type, family.documentation) for family in families)
        lines += table(["metric", "type", "meaning"], rows)
    return "\n".join(lines).rstrip() + "\n"


def _series(family: Any) -> str:
    """Return a family's name as Prometheus shows it, with its labels."""
    name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = getattr(family, "_labelnames", ()) or sorted(
        {label for sample in family.samples for label in sample.labels} - {"le"}
    )
    return f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"


def _prometheus() -> Iterator[tuple[str, str, list[Any]]]:
    from prometheus_client import CollectorRegistry

    from quartet.config.loading import parse_config
    from quartet.gateway.http.request_metrics import GatewayMetrics
    from quartet.rpc.call_interceptors import CallMetrics
    from quartet.services.environment.agents.servicer import AgentMetrics
    from quartet.services.generator.sessions.metrics import TrafficMetrics
    from quartet.services.orchestrator.control.progress import ProgressBoard
    from quartet.services.orchestrator.telemetry.run_metrics import RunMetrics
    from quartet.services.reward.sharing import RunUsage, SharingMetrics
    from quartet.telemetry.prometheus import DeviceMetrics, ServiceMetrics, process_registry

    calls = CollectorRegistry()
    CallMetrics(calls)
    standard = [family for family in process_registry("actor").collect() if family.name != "python_info"]
    standard += DeviceMetrics(tuple).collect()
    standard.sort(key=lambda family: not family.name.startswith("quartet_"))
    yield "Every process", "", [*_with_labels(calls), *standard]
    yield "Model services", "", list(ServiceMetrics(list).collect())
    about = "A reward service with `services.reward.sharing` serves these for each run."
    yield "Shared reward service", about, list(SharingMetrics(lambda: [RunUsage("my", 0, 0, 0, 0.0)]).collect())
    about = "An environment service with `environment.kind: agent` serves these, too."
    yield "Agents", about, list(AgentMetrics(Counter).collect())
    about = "A generator with `environment.kind: traffic` serves these, too. `quartet_tokens_total` has its tokens."
    yield "Live traffic", about, list(TrafficMetrics(dict, lambda: {"open": 0}).collect())
    config = parse_config(
        {
            "data": {"prompts": "p"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "algorithm": {"kl_controller": {"kind": "adaptive"}},
        },
        "reference",
    )
    yield (
        "Orchestrator",
        "Besides these, each metric of the last committed step is exported as `quartet_NAME`, for example `quartet_reward_mean`.",
        list(RunMetrics(config, ProgressBoard(config.run.name, config.run.steps), lambda: 0).collect()),
    )
    own = _with_labels(GatewayMetrics()._registry)
    yield "Gateway", "", [family for family in own if family.name.startswith("quartet_gateway")]


def _with_labels(registry: Any) -> list[Any]:
    """Return a registry's families, each with the label names of its collector."""
    families = []
    for collector in registry._collector_to_names:
        for family in collector.collect():
            family._labelnames = getattr(collector, "_labelnames", ())
            families.append(family)
    return families


def command_line() -> str:
    """Return the page of all commands."""
    from typer.main import get_command

    from quartet.cli.main import app

    lines = [
        "# Command line",
        "",
        "Which commands and options `quartet` has. This page is generated from the code by `make generate`;",
        "`quartet COMMAND --help` shows the same.",
        "",
    ]
    command = get_command(app)
    listed = list(_commands(command, "quartet"))
    lines += table(
        ["command", "does"], ((f"[`{path}`](#{path.replace(' ', '-')})", _first_line(one)) for path, one in listed)
    )
    for path, one in listed:
        lines += _command(path, one)
    return "\n".join(lines).rstrip() + "\n"


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        if below.hidden:
            continue
        if getattr(below, "commands", None):
            yield from _commands(below, f"{path} {name}")
        else:
            yield f"{path} {name}", below


def _first_line(command: Any) -> str:
    return str(command.help or "").strip().split("\n\n")[0]


def _command(path: str, command: Any) -> list[str]:
    lines = [f"## `{path}`", "", *_paragraphs(str(command.help or "")), ""]
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    shown = " ".join(["[OPTIONS]"] * bool(options) + [_argument(item) for item in arguments])
    lines += ["```sh", f"{path} {shown}".rstrip(), "```", ""]
    if arguments:
        lines += table(["argument", "meaning"], ((f"`{_argument(item)}`", item.help or "") for item in arguments))
    if options:
        rows = ((_option(item), _default(item), item.help or "") for item in options)
        lines += table(["option", "default", "meaning"], rows)
    return lines


def _paragraphs(text: str) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")]
    return "\n\n".join(paragraphs).split("\n")


def _argument(item: Any) -> str:
    name = (item.metavar or item.name.upper()).strip("[]")
    name = name.removesuffix("...") + ("..." if item.nargs == -1 else "")
    return name if item.required else f"[{name}]"


_METAVARS = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}


def _option(item: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*item.opts, *item.secondary_opts])
    if item.is_flag:
        return names
    kind = item.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return f"{names} {' or '.join(f'`{choice}`' for choice in get_args(kind))}"
    return f"{names} {item.metavar or _METAVARS[kind]}"


def _default(item: Any) -> str:
    if item.required:
        return "required"
    if item.default is None or item.default in ((), [], False, ""):
        return ""
    return f"`{str(item.default).lower() if isinstance(item.default, bool) else item.default}`"


def engines() -> str:
    """Return the page of the engines' guarantees."""
    from quartet.config.rollout import engine_names
    from quartet.engines.engine import COLUMNS, find_engine

    rows = (
        (f"`{place.properties.name}`", place.runs_in, *place.cells()[1:], place.depends_on, place.tested)
        for name in engine_names()
        for place in find_engine(name).guarantees
    )
    lines = [
        "# Engines",
        "",
        "What can each generation engine guarantee? `quartet doctor` prints the same table. What the engines of a run keep on",
        "their machines, they [declare](../engines.md#what-an-engine-declares). [Generation engines](../engines.md) explains how",
        "to choose and set up one. This page is generated from the code by `make generate`.",
        "",
        *table([COLUMNS[0], "runs in", *COLUMNS[1:], "depends on", "contract suite has run on"], rows),
        "The table holds for default settings.",
        "",
    ]
    meanings = (
        ("seeded", "The seed of a trajectory decides its random numbers."),
        ("batch-invariant", "The other requests in a batch change no bit of a response."),
        (
            "log-probs",
            "Distribution of the reported log-probs: whole, truncated (after penalties, top_k, top_p and min_p), or none. Unless "
            "they are whole, the trainer computes them.",
        ),
        (
            "weights",
            "Way of new weights into the engine. shared: it uses the trained model itself. tensors: through memory. folder, "
            "adapter: through files or requests, while it runs. restart: it starts again with each version. static: never.",
        ),
        (
            "digest",
            "Origin of the digest of the weights. read back: computed from what the engine holds. reported: a server names its "
            "version. none: only the log-probs of the first trajectory show which weights it has.",
        ),
        (
            "in-flight updates",
            "Takes new weights in the middle of a response, and names the weights of each token (rollout.in_flight_updates).",
        ),
    )
    return "\n".join([*lines, *table(["column", "meaning"], meanings)]).rstrip() + "\n"


def rest() -> str:
    """Return the page of the REST API, from its OpenAPI document."""
    from quartet.gateway.app import create_app
    from quartet.gateway.settings import GatewaySettings

    with tempfile.TemporaryDirectory() as folder:
        document = create_app(GatewaySettings(Path(folder), None, "127.0.0.1:1", "a-token-of-twenty-signs")).openapi()
    schemas = document["components"]["schemas"]
    lines = [
        "# REST API",
        "",
        "Which requests the gateway answers. This page is generated from its OpenAPI document by `make generate`;",
        "a running gateway serves the document at `/api/v1/openapi.json`. [Gateway](../gateway.md) shows how to use it.",
        "",
        *_docstring(document["info"]["description"]),
        "",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += _operation(method.upper(), path.removeprefix("/api/v1"), operation)
    lines += ["## Status codes", "", "Every request may return these:", ""]
    common = next(iter(next(iter(document["paths"].values())).values()))["responses"]
    lines += table(
        ["status", "meaning"],
        ((code, answer["description"]) for code, answer in common.items() if code >= "400"),
    )
    lines += ["## Schemas", ""]
    for name, schema in schemas.items():
        lines += _schema(name, schema)
    return "\n".join(lines).rstrip() + "\n"


def _docstring(text: str) -> list[str]:
    return text.replace("``", "`").strip().splitlines()


def _operation(method: str, path: str, operation: Json) -> list[str]:
    lines = [f"## {method} {path}", "", *_docstring(operation.get("description", operation["summary"])), ""]
    parameters = operation.get("parameters", [])
    if parameters:
        rows = (
            (
                f"`{item['name']}`",
                item["in"],
                _type(item["schema"]),
                "required" if item.get("required") else _json(item["schema"].get("default")),
                item.get("description", ""),
            )
            for item in parameters
        )
        lines += table(["parameter", "in", "type", "default", "meaning"], rows)
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        lines += [f"Body: {_type(body['schema'])} (`{kind}`).", ""]
    for code, answer in operation["responses"].items():
        if code < "400":
            kinds = ", ".join(
                f"{_type(content.get('schema', {}))} (`{kind}`)" for kind, content in answer.get("content", {}).items()
            )
            lines += [f"Returns {code}: {kinds}." if kinds else f"Returns {code}.", ""]
    return lines


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{item}`" for item in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    return str(kind)


def _json(value: Any) -> str:
    import json

    return "" if value is None else f"`{json.dumps(value)}`"


def _schema(name: str, schema: Json) -> list[str]:
    lines = [f"### {name}", "", *_docstring(schema.get("description", "")), ""]
    if "enum" in schema:
        return [*lines, f"One of {_type(schema)}.", ""]
    rows = (
        (f"`{key}`", _type(field), field.get("description", "")) for key, field in schema.get("properties", {}).items()
    )
    return lines + table(["field", "type", "meaning"], rows)


def protobuf() -> str:
    """Return the page of the protobuf contract, from the comments in proto/."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "contract.pb"
        paths = sorted((ROOT / "proto/quartet/v1").glob("*.proto"))
        with contextlib.redirect_stderr(io.StringIO()):
            status = protoc.main(
                [
                    "protoc",
                    f"--proto_path={ROOT / 'proto'}",
                    f"--proto_path={Path(protoc.__file__).parent / '_proto'}",
                    "--include_source_info",
                    f"--descriptor_set_out={output}",
                    *[str(path.relative_to(ROOT / "proto")) for path in paths],
                ]
            )
        if status:
            raise SystemExit(f"error: protoc failed with status {status}; run make proto to see why")
        files = FileDescriptorSet.FromString(output.read_bytes()).file
    lines = [
        "# Protobuf contract",
        "",
        "Which RPCs and messages connect the services. This page is generated from the comments in `proto/quartet/v1` by",
        "`make generate`. Token ids travel, never text; batches are ragged: one flat array and the lengths.",
        "",
        "## Services",
        "",
    ]
    for file in files:
        comments = _comments(file)
        for index, service in enumerate(file.service):
            lines += [f"### {service.name}", "", comments.get((6, index), ""), ""]
            rows = (
                (
                    f"`{method.name}`",
                    _message(method.input_type, method.client_streaming),
                    _message(method.output_type, method.server_streaming),
                    comments.get((6, index, 2, number), ""),
                )
                for number, method in enumerate(service.method)
            )
            lines += table(["RPC", "request", "response", "meaning"], rows)
    for file in files:
        comments = _comments(file)
        if file.message_type or file.enum_type:
            lines += [f"## {Path(file.name).name}", ""]
        for index, message in enumerate(file.message_type):
            lines += _fields(message.name, message, comments, (4, index))
        for index, enum in enumerate(file.enum_type):
            lines += _values(enum.name, enum, comments, (5, index))
    return "\n".join(lines).rstrip() + "\n"


def _comments(file: Any) -> dict[tuple[int, ...], str]:
    return {
        tuple(item.path): " ".join((item.leading_comments or item.trailing_comments).split())
        for item in file.source_code_info.location
    }


def _message(name: str, stream: bool) -> str:
    short = name.rpartition(".")[2]
    return f"{'stream of ' if stream else ''}[{short}](#{short.lower()})"


_TYPES = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32",
}  # fmt: skip


def _fields(name: str, message: Any, comments: dict[tuple[int, ...], str], path: tuple[int, ...]) -> list[str]:
    lines = [f"### {name}", "", comments.get(path, ""), ""]
    maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    rows = [
        (f"`{field.name}`", str(field.number), _field_type(field, maps), comments.get((*path, 2, number), ""))
        for number, field in enumerate(message.field)
    ]
    if rows:
        lines += table(["field", "number", "type", "meaning"], rows)
    for number, below in enumerate(message.nested_type):
        if below.name not in maps:
            lines += _fields(f"{name}.{below.name}", below, comments, (*path, 3, number))
    for number, enum in enumerate(message.enum_type):
        lines += _values(f"{name}.{enum.name}", enum, comments, (*path, 4, number))
    return lines


def _field_type(field: Any, maps: dict[str, Any]) -> str:
    short = field.type_name.rpartition(".")[2]
    if short in maps:
        key, value = maps[short].field
        return f"map of {_field_type(key, {})} to {_field_type(value, {})}"
    repeated = "repeated " if field.label == 3 else "optional " if field.proto3_optional else ""
    if field.type_name.startswith(".quartet.v1."):
        inner = field.type_name.removeprefix(".quartet.v1.")
        return f"{repeated}[{inner}](#{inner.lower().replace('.', '')})"
    return repeated + (short or _TYPES[field.type])


def _values(name: str, enum: Any, comments: dict[tuple[int, ...], str], path: tuple[int, ...]) -> list[str]:
    rows = (
        (f"`{value.name}`", str(value.number), comments.get((*path, 2, number), ""))
        for number, value in enumerate(enum.value)
    )
    return [f"### {name}", "", comments.get(path, ""), "", *table(["value", "number", "meaning"], rows)]


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": config_reference.reference,
    "stages.md": config_reference.stages,
    "command-line.md": command_line,
    "metrics.md": metrics,
    "engines.md": engines,
    "rest-api.md": rest,
    "protobuf.md": protobuf,
}


def stale_pages() -> list[str]:
    """Return the names of committed pages that differ from the code."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != page()
    ]


def main() -> int:
    """Compare the pages with the code, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the pages instead of comparing them")
    if parser.parse_args().write:
        FOLDER.mkdir(exist_ok=True)
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page(), encoding="utf-8")
        return 0
    stale = stale_pages()
    for name in stale:
        print(f"error: docs/reference/{name} differs from the code; run make generate and commit", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
