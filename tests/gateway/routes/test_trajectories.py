"""Trajectories over the API: filters, order, pages without gaps or repeats, and tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from quartet.gateway.routes.trajectories import DEFAULT_STEPS, MAX_STEPS
from quartet.run_directory.run_files import RunFiles
from tests.gateway.conftest import STEPS, write_metrics
from tests.gateway.serving import Gateway, create_run, serving
from tests.training.runs import Run

PROMPTS = 5
SAMPLES = 2


def rows_of(step: int) -> list[dict[str, Any]]:
    """Return the trajectories of a step. They have few distinct values, so that many are equal."""
    generator = random.Random(step)
    return [
        {
            "id": f"some/{step}/{prompt}/{sample}",
            "policy_version": step - 1,
            "prompt": f"Prompt {prompt}",
            "response": f"says {generator.choice(['Ja', 'nein', 'ÄPFEL'])}",
            "score": generator.choice([-1.5, 0.0, 0.5, 2.0]),
            "kl": generator.choice([0.0, 3.25, 10.0]),
            "response_tokens": generator.randint(1, 4),
            "finished": generator.random() < 0.5,
        }
        for prompt in range(PROMPTS)
        for sample in range(SAMPLES)
    ]


def with_trajectories(folder: Path, steps: int) -> tuple[RunFiles, list[dict[str, Any]]]:
    """Create a run with this number of steps; return its files and all its trajectories."""
    files = create_run(folder)
    write_metrics(files, steps)
    files.trajectories.mkdir()
    results = []
    # The trajectories of a step are written before its commit.
    for step in range(1, steps + 2):
        rows = rows_of(step)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (files.trajectories / f"step-{step:06d}.jsonl").write_text(text, encoding="utf-8")
        results += [{**row, "step": step} for row in rows if step <= steps]
    return files, results


def pages(gateway: Gateway, limit: int = 7, **query: Any) -> list[str]:
    """Return the ids on all pages."""
    results, cursor = [], None
    while True:
        response = gateway.client.get(
            "/runs/some/trajectories", params={**query, "limit": limit} | ({"cursor": cursor} if cursor else {})
        )
        assert response.status_code == 200, response.text
        page = response.json()
        results += [item["id"] for item in page["items"]]
        cursor = page["next"]
        assert len(page["items"]) == limit or cursor is None
        if cursor is None:
            assert page["total"] == len(results)
            return results


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, list[dict[str, Any]]]]:
    """A gateway with a run of 7 steps, and all trajectories of the run."""
    folder = tmp_path_factory.mktemp("many")
    _, rows = with_trajectories(folder, 7)
    with serving(folder) as gateway:
        yield gateway, rows


def id_numbers(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in row["id"].split("/")[1:])


@pytest.mark.parametrize("sort", ["id", "score", "-score", "kl", "-kl", "response_tokens", "-response_tokens"])
def test_pages_contain_each_trajectory_once_in_order(many: tuple[Gateway, list[dict[str, Any]]], sort: str) -> None:
    gateway, rows = many
    name, sign = sort.removeprefix("-"), -1 if sort.startswith("-") else 1
    expected = sorted(rows, key=lambda row: (sign * row[name] if name != "id" else 0, id_numbers(row)))
    assert pages(gateway, sort=sort) == [row["id"] for row in expected]


@pytest.mark.parametrize(
    "query",
    [
        {"min_score": 0.0, "max_score": 0.5},
        {"min_kl": 3.25, "finished": True},
        {"max_kl": 3.25, "finished": False},
        {"min_response_tokens": 2, "max_response_tokens": 3},
        {"step": 2},
        {"step": 7},
        {"step": 8},
        {"first_step": 2, "last_step": 4},
        {"last_step": 3},
        {"first_step": 5},
        {"text": "äpfel"},
        {"text": "prompt 3", "min_score": 0.0},
        {"text": "nowhere"},
    ],
)
def test_filters_are_combined(many: tuple[Gateway, list[dict[str, Any]]], query: dict[str, Any]) -> None:
    gateway, rows = many

    def matches(row: dict[str, Any]) -> bool:
        text = query.get("text", "").casefold()
        return (
            all(query.get(f"min_{name}", row[name]) <= row[name] for name in ("score", "kl", "response_tokens"))
            and all(row[name] <= query.get(f"max_{name}", row[name]) for name in ("score", "kl", "response_tokens"))
            and query.get("finished", row["finished"]) == row["finished"]
            and query.get("step", row["step"]) == row["step"]
            and query.get("first_step", 1) <= row["step"] <= query.get("last_step", 7)
            and (text in row["prompt"].casefold() or text in row["response"].casefold())
        )

    expected = [row["id"] for row in rows if matches(row)]
    assert expected or query.get("text") == "nowhere" or query.get("step") == 8
    assert pages(gateway, **query) == expected


def test_by_default_the_newest_steps_are_searched_on_all_pages(tmp_path: Path) -> None:
    files, _ = with_trajectories(tmp_path, DEFAULT_STEPS + 3)
    first, size = 4, PROMPTS * SAMPLES
    with serving(tmp_path) as gateway:
        page = gateway.client.get("/runs/some/trajectories?limit=1").json()
        assert (page["items"][0]["step"], page["total"]) == (first, DEFAULT_STEPS * size)
        # After another commit, the next page is still of the steps of the first page.
        with files.metrics.open("a") as file:
            file.write(json.dumps({"step": DEFAULT_STEPS + 4}) + "\n")
        after = gateway.client.get(f"/runs/some/trajectories?limit=1&cursor={page['next']}").json()
        assert (after["items"][0]["id"], after["total"]) == (f"some/{first}/0/1", DEFAULT_STEPS * size)
        assert gateway.client.get("/runs/some/trajectories?limit=1").json()["items"][0]["step"] == first + 1


def test_a_cursor_is_refused_with_another_request(tmp_path: Path) -> None:
    with_trajectories(tmp_path, 2)
    with serving(tmp_path) as gateway:
        cursor = gateway.client.get("/runs/some/trajectories?limit=1&sort=-kl").json()["next"]
        for query in ("sort=kl", "sort=-kl&min_kl=1", "sort=-kl&step=1"):
            response = gateway.client.get(f"/runs/some/trajectories?{query}&cursor={cursor}")
            assert response.status_code == 422
            assert response.json()["fields"][0]["field"] == "query.cursor"
        for broken in (cursor[:-3], cursor[::-1], "W10", "bnVsbA", "é"):
            response = gateway.client.get("/runs/some/trajectories", params={"sort": "-kl", "cursor": broken})
            assert response.status_code == 422


def test_too_many_steps_are_refused(tmp_path: Path) -> None:
    write_metrics(create_run(tmp_path), MAX_STEPS + 1)
    with serving(tmp_path) as gateway:
        response = gateway.client.get("/runs/some/trajectories?first_step=1")
        assert response.status_code == 422
        assert f"at most {MAX_STEPS}" in response.json()["detail"]
        assert gateway.client.get("/runs/some/trajectories?first_step=2").json()["items"] == []


@pytest.mark.parametrize("line", ['{"id": "x"}', "[]", '{"id": "some/1/0/0", "prompt": 1}'])
def test_a_damaged_line_is_reported_with_its_number(tmp_path: Path, line: str) -> None:
    files, _ = with_trajectories(tmp_path, 1)
    with (files.trajectories / "step-000001.jsonl").open("a") as file:
        file.write(line + "\n")
    with serving(tmp_path) as gateway:
        response = gateway.client.get("/runs/some/trajectories")
        assert response.status_code == 409
        assert f"step-000001.jsonl:{PROMPTS * SAMPLES + 1}" in response.json()["detail"]


@pytest.mark.parametrize("sort", ["score", "-score"])
def test_trajectories_without_scores_are_listed_and_have_no_neighbours(tmp_path: Path, sort: str) -> None:
    files, rows = with_trajectories(tmp_path, 1)
    lines = [{**row, "score": None} for row in rows]
    (files.trajectories / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(tmp_path) as gateway:
        assert pages(gateway, sort=sort) == [row["id"] for row in rows]
        assert pages(gateway, min_score=-9) == []
        detail = gateway.client.get("/runs/some/trajectories/1/0/1").json()
    assert (detail["score"], detail["lower"], detail["higher"]) == (None, None, None)


def test_a_trajectory_shows_its_generator_and_the_versions_of_its_weights(tmp_path: Path) -> None:
    files, rows = with_trajectories(tmp_path, 1)
    spans = [{"policy_version": 0, "weights_digest": "0b", "tokens": 2}]
    origin = {"generator": "10.0.0.1:9000", "weights_digest": "0a", "version_spans": spans}
    lines = [rows[0], rows[1] | origin]
    (files.trajectories / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(tmp_path) as gateway:
        by_actor, by_generator = (
            gateway.client.get(f"/runs/some/trajectories/1/0/{sample}").json() for sample in (0, 1)
        )
    assert [by_actor[name] for name in origin] == ["", "", []]
    assert {name: by_generator[name] for name in origin} == origin


def test_an_episode_shows_its_turns_and_which_tokens_are_of_observations(tmp_path: Path) -> None:
    files, rows = with_trajectories(tmp_path, 1)
    segments = [
        {"role": "policy", "text": "a", "tokens": 1, "reward": 0.5},
        {"role": "observation", "text": "b", "tokens": 2},
        {"role": "policy", "text": "c", "tokens": 1, "reward": -1.0},
    ]
    lines = [rows[0], rows[1] | {"segments": segments}]
    (files.trajectories / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers = np.array([-1, 0, 0, -2, -3], np.float32)
    names = ("log_probs", "reference_log_probs", "kl", "advantages", "returns")
    files.write_tokens(
        1,
        {
            "prompt_lengths": np.array([1, 1], np.int32),
            "response_lengths": np.array([1, 4], np.int32),
            "prompt_ids": np.array([3, 3], np.int32),
            "response_ids": np.array([9, 4, 5, 6, 7], np.int32),
            "response_mask": np.array([True, True, False, False, True]),
            **dict.fromkeys(names, numbers),
        },
    )
    with serving(tmp_path) as gateway:
        plain, episode = (gateway.client.get(f"/runs/some/trajectories/1/0/{sample}").json() for sample in (0, 1))
    assert plain["segments"] == []
    assert [token["observation"] for token in plain["tokens"]] == [False]
    assert episode["segments"] == [segments[0], segments[1] | {"reward": None}, segments[2]]
    assert [token["id"] for token in episode["tokens"]] == [4, 5, 6, 7]
    assert [token["observation"] for token in episode["tokens"]] == [False, True, True, False]
    assert [token["log_prob"] for token in episode["tokens"]] == [0, None, None, -3]


def test_an_episode_shows_the_tree_of_its_branches(tmp_path: Path) -> None:
    files, rows = with_trajectories(tmp_path, 1)
    turn, later = ({"role": "policy", "text": text, "tokens": 1, "reward": 0.5} for text in "ac")
    branch = {"parent": 0, "shared_tokens": 1, "prompt_tokens": 2, "prompt": "b", "segments": [later]}
    lines = [rows[0], rows[1] | {"segments": [turn], "further_branches": [branch]}]
    (files.trajectories / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ("log_probs", "reference_log_probs", "kl", "advantages", "returns")
    arrays = {
        "branches": np.array([1, 2], np.int32),
        "prompt_lengths": np.array([1, 1, 2], np.int32),
        "response_lengths": np.array([1, 1, 1], np.int32),
        "prompt_ids": np.array([3, 3, 3, 4], np.int32),
        "response_ids": np.array([9, 5, 6], np.int32),
        **dict.fromkeys(names, np.array([-1, -2, -3], np.float32)),
    }
    with serving(tmp_path) as gateway:
        without = gateway.client.get("/runs/some/trajectories/1/0/1").json()
        files.write_tokens(1, arrays)
        plain, episode = (gateway.client.get(f"/runs/some/trajectories/1/0/{sample}").json() for sample in (0, 1))
    assert plain["further_branches"] == []
    assert [token["id"] for token in plain["tokens"]] == [9]
    assert (episode["segments"], [token["id"] for token in episode["tokens"]]) == ([turn], [5])
    (shown,) = episode["further_branches"]
    assert [token["id"] for token in shown.pop("prompt_tokens")] == [3, 4]
    assert [(token["id"], token["log_prob"]) for token in shown.pop("tokens")] == [(6, -3)]
    assert shown == {
        "parent": 0,
        "shared_tokens": 1,
        "prompt": "b",
        "prompt_length": 2,
        "segments": [later],
    }
    assert without["further_branches"] == [shown | {"prompt_tokens": [], "tokens": []}]


def test_tokens_match_the_token_files(run_gateway: Gateway, finished_run: Run) -> None:
    tokenizer = Tokenizer.from_file(str(finished_run.files.tokenizer / "tokenizer.json"))
    for step in range(1, STEPS + 1):
        arrays = load_file(finished_run.files.tokens / f"step-{step:06d}.safetensors")
        start = 0
        for row in finished_run.trajectories(step):
            result = run_gateway.client.get(f"/runs/finished/trajectories/{row['id'].split('/', 1)[1]}").json()
            end = start + row["response_tokens"]
            assert [result[name] for name in ("id", "step", "score", "kl", "response")] == [
                row["id"],
                step,
                row["score"],
                row["kl"],
                row["response"],
            ]
            assert result["kl_coefficient"] == finished_run.metrics[step - 1]["kl_coefficient"]
            assert "".join(token["text"] for token in result["prompt_tokens"]) == row["prompt"]
            ids = [token["id"] for token in result["tokens"]]
            assert ids == arrays["response_ids"][start:end].tolist()
            assert "".join(token["text"] for token in result["tokens"]) == tokenizer.decode(
                ids, skip_special_tokens=False
            )
            for field, array in (
                ("log_prob", "log_probs"),
                ("reference_log_prob", "reference_log_probs"),
                ("kl", "kl"),
                ("value", "values"),
                ("advantage", "advantages"),
                ("return", "returns"),
            ):
                assert [token[field] for token in result["tokens"]] == pytest.approx(arrays[array][start:end].tolist())
            assert sum(token["kl"] for token in result["tokens"]) == pytest.approx(row["kl"], abs=1e-4)
            start = end


def test_neighbours_are_the_next_lower_and_higher_scores(run_gateway: Gateway, finished_run: Run) -> None:
    rows = sorted(finished_run.trajectories(2), key=lambda row: row["score"])
    current: str | None = rows[0]["id"]
    visited = []
    while current is not None:
        result = run_gateway.client.get(f"/runs/finished/trajectories/{current.split('/', 1)[1]}").json()
        assert result["lower"] == (visited[-1] if visited else None)
        visited.append(current)
        current = result["higher"]
    assert visited == [row["id"] for row in rows]


def test_without_token_files_only_the_text_is_returned(tmp_path: Path) -> None:
    with_trajectories(tmp_path, 1)
    with serving(tmp_path) as gateway:
        result = gateway.client.get("/runs/some/trajectories/1/2/1").json()
        assert (result["prompt"], result["tokens"], result["prompt_tokens"]) == ("Prompt 2", [], [])
        assert gateway.client.get("/runs/some/trajectories/2/2/1").status_code == 404
