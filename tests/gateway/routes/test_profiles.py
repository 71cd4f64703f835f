"""Profiles of a run over the API: those that are complete, and their traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from quartet.contract.profile import OperatorTime, ProfileSummary, RunProfile, ServiceProfile
from quartet.run_directory.run_files import PROFILE_SUMMARY, RunFiles
from tests.gateway.serving import Gateway, create_run, serving

SUMMARY = ProfileSummary("cpu", 4.0, {"update": 3.0}, 2.5, 0.5, operators=(OperatorTime("aten::mm", 20, 1.5),))
TRACE = b"\x1f\x8b-the-trace"


def profile(step: int, created: float) -> RunProfile:
    actor = ServiceProfile("actor", "actor-0.json.gz", len(TRACE), "", SUMMARY)
    lost = ServiceProfile("critic", problem="gone")
    return RunProfile(step, step + 1, created, {str(step): 2.0, str(step + 1): 2.0}, (actor, lost))


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    create_run(tmp_path, "some", steps=9)
    files = RunFiles(tmp_path / "some")
    for step, created in ((3, 10.0), (5, 20.0)):
        folder = files.profiles / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / PROFILE_SUMMARY).write_text(json.dumps(asdict(profile(step, created))))
        (folder / "actor-0.json.gz").write_bytes(TRACE)
        (folder / "secret.json.gz").write_bytes(b"not listed")
    return files


@pytest.fixture
def gateway(files: RunFiles) -> Iterator[Gateway]:
    with serving(files.root.parent) as gateway:
        yield gateway


def test_profiles_are_listed_newest_first(gateway: Gateway) -> None:
    listed = gateway.client.get("/runs/some/profiles").json()
    assert listed == [json.loads(json.dumps(asdict(each))) for each in (profile(5, 20.0), profile(3, 10.0))]


def test_a_profile_that_is_under_way_or_damaged_is_not_listed(gateway: Gateway, files: RunFiles) -> None:
    (files.profiles / "step-000003" / PROFILE_SUMMARY).unlink()
    (files.profiles / "step-000005" / PROFILE_SUMMARY).write_text("{")
    assert gateway.client.get("/runs/some/profiles").json() == []


def test_a_trace_is_returned_as_it_is(gateway: Gateway) -> None:
    response = gateway.client.get("/runs/some/profiles/3/actor-0.json.gz")
    assert (response.status_code, response.content) == (200, TRACE)
    assert response.headers["content-type"] == "application/gzip"
    assert response.headers["content-disposition"] == 'attachment; filename="step-3-actor-0.json.gz"'
    assert "content-encoding" not in response.headers


@pytest.mark.parametrize("name", ["secret.json.gz", "summary.json", "critic-0.json.gz", "..%2f..%2fconfig.yaml"])
def test_only_listed_traces_are_returned(gateway: Gateway, name: str) -> None:
    assert gateway.client.get(f"/runs/some/profiles/3/{name}").status_code == 404


def test_a_run_without_profiles_has_none_and_an_unknown_run_is_not_found(gateway: Gateway, files: RunFiles) -> None:
    create_run(files.root.parent, "other", steps=1)
    assert gateway.client.get("/runs/other/profiles").json() == []
    assert gateway.client.get("/runs/none/profiles").status_code == 404
    assert gateway.client.post("/runs/other/profile", json={"steps": 2}).status_code == 409
