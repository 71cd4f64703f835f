"""Runs, config, steps, evaluations, checkpoints, guards and logs over the API, compared with the run files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from quartet.run_directory.checkpoints import checkpoint_folders, read_checkpoint
from quartet.run_directory.run_files import RunFiles
from tests.gateway.conftest import STEPS, lines_of, write_metrics
from tests.gateway.serving import TOKEN, Gateway, config_of, create_run, serving
from tests.training.runs import Run


def test_a_finished_run_has_all_details(run_gateway: Gateway, finished_run: Run) -> None:
    result = run_gateway.client.get("/runs/finished").json()
    last = finished_run.metrics[-1]
    assert (result["state"], result["live"], result["step"], result["total_steps"]) == ("finished", False, STEPS, STEPS)
    assert (result["reward_mean"], result["kl_mean"]) == (last["reward_mean"], last["kl_mean"])
    assert (result["estimator"], result["has_critic"], result["kl_target"], result["progress"]) == (
        "gae",
        True,
        None,
        None,
    )
    assert (result["has_scores"], result["has_teacher"]) == (True, False)
    assert (result["alerts"], result["failed_trajectories"]) == (2, 2)
    assert result["evaluations"] == len(lines_of(finished_run.files.evaluation_summaries))
    assert result["checkpoints"] == len(checkpoint_folders(finished_run.files)) > 0
    assert set(result["metric_names"]) == set(last) - {"step"}
    listed = run_gateway.client.get("/runs").json()
    assert listed["items"] == [{name: result[name] for name in listed["items"][0]}]


def test_runs_are_listed_by_name_with_pages_and_state_filter(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(5)]
    for name in names:
        create_run(tmp_path, name, steps=4 if name == "run-3" else 1)
    RunFiles(tmp_path / "run-3").policy.mkdir()
    RunFiles(tmp_path / "run-3").write_policy_step(4)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").write_text("")
    with serving(tmp_path) as gateway:
        results, cursor = [], None
        while True:
            page = gateway.client.get("/runs", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
            results += [item["name"] for item in page["items"]]
            if (cursor := page["next"]) is None:
                break
        assert results == names
        finished = gateway.client.get("/runs?state=finished").json()["items"]
        assert [item["name"] for item in finished] == ["run-3"]
        assert len(gateway.client.get("/runs?state=idle").json()["items"]) == 4


def test_a_link_to_a_run_elsewhere_is_not_served(tmp_path: Path) -> None:
    create_run(tmp_path / "elsewhere", "secret", steps=1)
    runs = tmp_path / "runs"
    create_run(runs, "own", steps=1)
    (runs / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    with serving(runs) as gateway:
        assert [item["name"] for item in gateway.client.get("/runs").json()["items"]] == ["own"]
        assert gateway.client.get("/runs/link").status_code == 404


def test_a_missing_folder_has_no_runs(tmp_path: Path) -> None:
    with serving(tmp_path / "none") as gateway:
        assert gateway.client.get("/runs").json() == {"items": [], "total": 0, "next": None}


def test_the_config_is_resolved_and_without_passwords(tmp_path: Path) -> None:
    config = config_of(tmp_path, "some", buffer={"url": "redis://user:hunter2@127.0.0.1:6379/0"})
    files = RunFiles(config.run_directory)
    # Quartet writes no password to this file, but a user may have edited it.
    files.write_config(config.to_yaml().replace("***", "hunter2"))
    with serving(tmp_path) as gateway:
        result = gateway.client.get("/runs/some/config")
        assert "hunter2" not in result.text
        assert result.json()["config"]["buffer"]["url"] == "redis://user:***@127.0.0.1:6379/0"
        assert yaml.safe_load(result.json()["yaml"]) == result.json()["config"]
        files.write_config(config_of(tmp_path, "some", algorithm={"kl_coefficient": 0.7}).to_yaml())
        assert gateway.client.get("/runs/some/config").json()["config"]["algorithm"]["kl_coefficient"] == 0.7


def test_steps_are_listed_newest_first_with_failed_trajectories(run_gateway: Gateway, finished_run: Run) -> None:
    page = run_gateway.client.get("/runs/finished/steps?limit=2").json()
    assert [item["step"] for item in page["items"]] == [3, 2]
    assert [item["failed_trajectories"] for item in page["items"]] == [0, 2]
    assert page["total"] == STEPS
    last = run_gateway.client.get("/runs/finished/steps", params={"limit": 2, "cursor": page["next"]}).json()
    assert [item["step"] for item in last["items"]] == [1]
    assert last["next"] is None
    for item in (*page["items"], *last["items"]):
        row = finished_run.metrics[item["step"] - 1]
        assert {name: item[name] for name in item if name != "failed_trajectories"} == {
            name: row[name] for name in item if name != "failed_trajectories"
        }
    bounded = run_gateway.client.get("/runs/finished/steps?first=2&last=2").json()
    assert ([item["step"] for item in bounded["items"]], bounded["total"]) == ([2], 1)


def test_a_step_has_metrics_and_timeline(run_gateway: Gateway, finished_run: Run) -> None:
    lines = {line["step"]: line for line in lines_of(finished_run.files.timeline)}
    for step in range(1, STEPS + 1):
        result = run_gateway.client.get(f"/runs/finished/steps/{step}").json()
        row = finished_run.metrics[step - 1]
        assert {name: result["metrics"].get(name) for name in row if name != "step"} == {
            name: value for name, value in row.items() if name != "step"
        }
        assert result["has_tokens"]
        assert result["started"] == lines[step]["started"]
        spans = result["spans"]
        assert spans == sorted(lines[step]["spans"], key=lambda span: (span["service"], span["start"], span["end"]))  # type: ignore[call-overload, index]
        assert {"actor", "critic", "reward", "reference"} <= {span["service"] for span in spans}


def test_evaluations_are_listed_with_their_responses(run_gateway: Gateway, finished_run: Run) -> None:
    summaries = lines_of(finished_run.files.evaluation_summaries)
    result = run_gateway.client.get("/runs/finished/evaluations").json()
    items = result["items"]
    read = [{"step": item["step"], "policy_version": item["policy_version"], **item["metrics"]} for item in items]
    assert read == summaries
    assert [(item["policy_version"], item["sets"]) for item in items] == [(step, ["toy"]) for step in (0, 2, 3)]
    assert "eval_toy_pass_at_2" in items[0]["metrics"]
    for summary in summaries:
        step = summary["step"]
        rows = lines_of(finished_run.files.evaluations / f"step-{step:06d}.jsonl")
        returned_rows, cursor = [], None
        while True:
            page = run_gateway.client.get(
                f"/runs/finished/evaluations/{step}", params={"limit": 2} | ({"cursor": cursor} if cursor else {})
            ).json()
            returned_rows += [item["values"] for item in page["items"]]
            if (cursor := page["next"]) is None:
                break
        assert returned_rows == rows
        assert page["total"] == len(rows) == 3
        assert {row["policy_version"] for row in rows} == {step}


def test_the_samples_of_an_evaluation_set_are_listed(run_gateway: Gateway, finished_run: Run) -> None:
    rows = lines_of(finished_run.files.evaluation_of(2, "toy"))
    path = "/runs/finished/evaluations/2/sets/toy"
    first = run_gateway.client.get(path, params={"limit": 2}).json()
    rest = run_gateway.client.get(path, params={"cursor": first["next"]}).json()
    assert [item["values"] for item in (*first["items"], *rest["items"])] == rows
    assert [len(row["samples"]) for row in rows] == [2, 2, 2]
    other = run_gateway.client.get("/runs/finished/evaluations/2", params={"cursor": first["next"]})
    assert (other.status_code, "belongs to another list" in other.text) == (422, True)
    absent = run_gateway.client.get("/runs/finished/evaluations/2/sets/other")
    assert absent.status_code == 404
    assert absent.json()["detail"].startswith("step 2: has no evaluation of the set other")
    assert run_gateway.client.get("/runs/finished/evaluations/2/sets/%2E%2E%2F..").status_code in (404, 422)
    assert run_gateway.client.get("/runs/finished/evaluations/2/sets/-a").status_code == 422


def test_checkpoints_are_listed_with_their_problems(tmp_path: Path, finished_run: Run) -> None:
    import shutil

    shutil.copytree(finished_run.files.root, tmp_path / "finished", symlinks=True)
    files = RunFiles(tmp_path / "finished")
    folder = checkpoint_folders(files)[-1]
    for tag in ("last", "best"):
        (files.checkpoints / tag).symlink_to(folder.name)
    checkpoint = read_checkpoint(folder)
    with serving(tmp_path) as gateway:

        def listed() -> dict[str, object]:
            newest: dict[str, object] = gateway.client.get("/runs/finished/checkpoints").json()["items"][0]
            return newest

        result = listed()
        assert (result["step"], result["tags"], result["bytes"], result["problem"]) == (
            checkpoint.step,
            ["best", "last"],
            checkpoint.bytes,
            None,
        )
        name = next(iter(checkpoint.files))
        with (folder / name).open("ab") as file:
            file.write(b"x")
        assert "expected" in str(listed()["problem"])
        (folder / name).unlink()
        assert listed()["problem"] == f"{name} is missing"
        (folder / "manifest.json").write_text("{}")
        assert "manifest.json" in str(listed()["problem"])


def test_alerts_and_failed_trajectories_are_listed_newest_first(run_gateway: Gateway, finished_run: Run) -> None:
    result = run_gateway.client.get("/runs/finished/guards").json()
    assert [alert["guard"] for alert in result["alerts"]] == ["repetition", "kl_runaway"]
    assert result["alerts"][1]["remedy"] == "lower the learning rate"
    assert result["settings"]["kl_runaway"]["action"] == "warn"
    failures = run_gateway.client.get("/runs/finished/failed-trajectories?limit=1").json()
    assert (failures["items"][0]["id"], failures["total"]) == ("finished/2/0/1", 2)
    rest = run_gateway.client.get(
        "/runs/finished/failed-trajectories", params={"limit": 1, "cursor": failures["next"]}
    ).json()
    assert (rest["items"][0]["id"], rest["next"]) == ("finished/2/0/0", None)


def test_the_last_lines_of_a_log_are_returned(run_gateway: Gateway) -> None:
    results = {log["name"]: log["bytes"] for log in run_gateway.client.get("/runs/finished/logs").json()}
    assert results["actor"] > 5000
    tail = run_gateway.client.get("/runs/finished/logs/actor?lines=2").json()
    assert tail == {"name": "actor", "lines": ["line 998", "line 999"], "truncated": True}


def test_the_openapi_document_is_complete(run_gateway: Gateway) -> None:
    document = run_gateway.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation_name = f"{method} {path}"
            assert operation["summary"], operation_name
            assert operation["description"], operation_name
            assert operation["security"], operation_name
            assert operation["tags"], operation_name
            for status in ("401", "403", "422", "429"):
                (media,) = operation["responses"][status]["content"].items()
                assert media == ("application/problem+json", {"schema": {"$ref": "#/components/schemas/Problem"}}), (
                    operation_name
                )
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    for name in schemas:
        assert f"#/components/schemas/{name}" in text or name == "Problem"


def test_new_steps_are_visible_at_once(tmp_path: Path) -> None:
    files = create_run(tmp_path)
    with serving(tmp_path) as gateway:
        assert gateway.client.get("/runs/some").json()["step"] == 0
        write_metrics(files, 3)
        assert gateway.client.get("/runs/some").json()["step"] == 3


@pytest.mark.parametrize("path", ["/", "/static/plotly.min.js"])
def test_dashboard_files_are_compressed_and_revalidated(run_gateway: Gateway, path: str) -> None:
    url = f"http://{run_gateway.address}{path}"
    first = run_gateway.client.get(url, headers={"authorization": "", "accept-encoding": "gzip"})
    assert first.status_code == 200
    assert first.headers["content-encoding"] == "gzip"
    plain = run_gateway.client.get(url, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == first.content
    assert plain.headers["etag"] != first.headers["etag"]
    revalidated = run_gateway.client.get(
        url, headers={"accept-encoding": "gzip", "if-none-match": first.headers["etag"]}
    )
    assert (revalidated.status_code, revalidated.content) == (304, b"")
    assert TOKEN not in first.text
