"""Style of the proto files (comments, names, enums), and up-to-date stubs."""

from __future__ import annotations

import filecmp
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "proto/quartet/v1").glob("*.proto"))


@pytest.fixture(scope="session")
def protos(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """The proto files parsed by protoc, with comments."""
    out = tmp_path_factory.mktemp("protos") / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=proto", f"--descriptor_set_out={out}"]
    command += ["--include_source_info", *(f"quartet/v1/{name}" for name in FILES)]
    subprocess.run(command, cwd=ROOT, check=True)
    result = list(FileDescriptorSet.FromString(out.read_bytes()).file)
    assert sorted(Path(file.name).name for file in result) == FILES
    return result


# Field numbers of FileDescriptorProto and its messages. Source info uses them in paths.
MESSAGE, ENUM, SERVICE, FIELD, NESTED, VALUE, METHOD = 4, 5, 6, 2, 3, 2, 2


def documented_items(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield everything in a file that needs a comment, with its name and its path in the source info."""

    def message_items(message: DescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield message.name, path
        for index, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", (*path, FIELD, index)
        for index, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                yield from message_items(inner, (*path, NESTED, index))
        assert not message.enum_type, f"{message.name}: an enum inside a message"

    for index, message in enumerate(file.message_type):
        yield from message_items(message, (MESSAGE, index))
    for index, enum in enumerate(file.enum_type):
        yield enum.name, (ENUM, index)
        for inner, value in enumerate(enum.value):
            yield f"{enum.name}.{value.name}", (ENUM, index, VALUE, inner)
    for index, service in enumerate(file.service):
        yield service.name, (SERVICE, index)
        for inner, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (SERVICE, index, METHOD, inner)


def test_everything_has_a_comment_with_a_full_stop(protos: list[FileDescriptorProto]) -> None:
    problems, count = [], 0
    for file in protos:
        comments = {
            tuple(location.path): location.leading_comments.strip() for location in file.source_code_info.location
        }
        for name, path in documented_items(file):
            count += 1
            if not re.fullmatch(r".{3,}[.]|.+, \.\.\.", comments.get(path, ""), re.DOTALL):
                problems.append(f"{file.name}: {name}: {comments.get(path, '')!r}")
    assert problems == []
    assert count > 150


def test_comments_of_tensors_contain_dtype_and_shape(protos: list[FileDescriptorProto]) -> None:
    problems = []
    for file in protos:
        comments = {tuple(location.path): location.leading_comments for location in file.source_code_info.location}
        for index, message in enumerate(file.message_type):
            for inner, field in enumerate(message.field):
                text = comments[(MESSAGE, index, FIELD, inner)]
                if field.type_name == ".quartet.v1.Tensor" and not re.search(r"(int32|float32|uint16) \[[^]]+\]", text):
                    problems.append(f"{message.name}.{field.name}: {text!r}")
    assert problems == []


def test_the_package_is_quartet_v1_and_the_syntax_proto3(protos: list[FileDescriptorProto]) -> None:
    assert {(file.package, file.syntax) for file in protos} == {("quartet.v1", "proto3")}


def test_enums_start_with_unspecified_and_values_have_the_prefix(protos: list[FileDescriptorProto]) -> None:
    enums = [enum for file in protos for enum in file.enum_type]
    assert len(enums) >= 6
    for enum in enums:
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}_UNSPECIFIED", 0)
        assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


def test_messages_are_named_after_their_methods(protos: list[FileDescriptorProto]) -> None:
    services = [service for file in protos for service in file.service]
    assert {service.name for service in services} == {
        f"{name}Service"
        for name in (
            "Actor",
            "Critic",
            "Environment",
            "Generation",
            "Orchestrator",
            "Profile",
            "Reference",
            "Reward",
            "Status",
            "Weight",
        )
    }
    used: list[str] = []
    for service in services:
        for method in service.method:
            request, response = method.input_type.rpartition(".")[2], method.output_type.rpartition(".")[2]
            assert request in (f"{method.name}Request", f"{service.name}{method.name}Request")
            assert response == request.removesuffix("Request") + "Response"
            used += [request, response]
    shared = {name for name in used if used.count(name) > 1}
    # Actor and critic share these messages.
    assert shared == {f"{name}{kind}" for name in ("Update", "Save", "Restore") for kind in ("Request", "Response")}


def test_field_names_are_snake_case_and_numbers_are_not_reused(protos: list[FileDescriptorProto]) -> None:
    for message in (message for file in protos for message in file.message_type):
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name) for field in message.field)
        assert [field.number for field in message.field] == list(range(1, len(message.field) + 1))


def test_the_committed_stubs_match_the_protos(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "proto/generate.sh", tmp_path], env=environment, check=True, capture_output=True)
    committed, generated = ROOT / "src/quartet/v1", tmp_path / "quartet/v1"
    names = sorted(path.name for path in generated.iterdir())
    assert len(names) > 20
    assert names == sorted(path.name for path in committed.glob("*_pb2*"))
    different = [name for name in names if not filecmp.cmp(committed / name, generated / name, shallow=False)]
    assert different == []
