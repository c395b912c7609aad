"""The dashboard's server: what it answers, and whom it refuses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.run_folders import write_run
from tests.unit.test_observe_completions import ADVANTAGES, GROUPS

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from homeostat.dashboard.app import make_app
from homeostat.dashboard.shelf import Shelf, distinct_names
from homeostat.observe.completions import write_completions

LOCAL = "http://127.0.0.1:8642"
REWARDS = list(np.linspace(0.1, 0.9, 300))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard")
    losses = list(np.linspace(2.0, 1.0, 300))
    good = write_run(folder / "good", {"reward": REWARDS, "train/loss": losses})
    samples = [sample for group in GROUPS for sample in group.samples]
    differences = [np.full(len(one.completion), 0.25, np.float32) for one in samples]
    write_completions(
        good / "completions",
        7,
        GROUPS,
        advantages=ADVANTAGES,
        logp_differences=[differences[:2], differences[2:]],
    )
    broken = [*losses[:150], *[float("nan")] * 150]
    settings = {"trainer": {"lr": 1e-2}, "api_key": "sk-abcdefghijklmnop1234"}
    write_run(folder / "ill", {"train/loss": broken}, settings=settings, finished=False)
    rows = [f"{{'loss': {2 - step / 100}, 'epoch': {step / 50}}}" for step in range(60)]
    (folder / "theirs").mkdir()
    (folder / "theirs" / "train.log").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Shelf([runs]), look_seconds=0.05), base_url=LOCAL) as made:
        yield made


@pytest.fixture(scope="module")
def ids(client: TestClient) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.get("/api/runs").json()}


def ask(client: TestClient, path: str, **query: Any) -> Any:
    response = client.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_runs_of_any_framework_are_found_and_judged(client: TestClient, ids: dict) -> None:
    assert set(ids) == {"good", "ill", "theirs"}
    found = {name: ask(client, f"/api/runs/{id}") for name, id in ids.items()}
    said = {name: ask(client, f"/api/runs/{id}/health")["verdict"] for name, id in ids.items()}
    assert (said["good"], said["ill"]) == ("no_illness", "ill")
    assert found["good"]["last_step"] == found["good"]["total_steps"] == 300
    assert found["good"]["completion_steps"] == [7]
    assert "train/loss" in found["theirs"]["metrics"]


def test_secrets_of_settings_do_not_reach_the_page(client: TestClient, ids: dict) -> None:
    text = client.get(f"/api/runs/{ids['ill']}").text
    text += client.get("/api/differences", params={"run": [ids["ill"], ids["good"]]}).text
    assert "sk-abcdefghijklmnop1234" not in text


def test_curves_come_by_run_and_range(client: TestClient, ids: dict) -> None:
    both = [ids["good"], ids["ill"]]
    found = ask(client, "/api/curves", run=both, name=["train/loss", "reward"], points=4000)
    assert set(found) == {"train/loss", "reward"}
    assert set(found["reward"]) == {ids["good"]}
    assert found["reward"][ids["good"]] == [list(range(1, 301)), REWARDS]
    assert found["train/loss"][ids["ill"]][1][-1] is None
    part = ask(client, "/api/curves", run=ids["good"], name="reward", first=100, last=110)
    assert part["reward"][ids["good"]][0] == list(range(99, 112))
    few = ask(client, "/api/curves", run=ids["good"], name="reward", points=60)
    assert len(few["reward"][ids["good"]][0]) <= 62


@pytest.mark.parametrize("place", ["damaged", "x" * 5000, "a\0b"])
def test_completions_are_shown_without_a_tokenizer_that_can_be_read(
    place: str, tmp_path: Path
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    settings = {"model": {"path": str(tmp_path / place)}}
    run = write_run(tmp_path / "run", {"reward": REWARDS}, settings=settings)
    differences = [np.full(len(one.completion), 0.25, np.float32) for one in GROUPS[0].samples]
    write_completions(
        run / "completions",
        7,
        GROUPS[:1],
        advantages=ADVANTAGES[:1],
        logp_differences=[differences],
    )
    with TestClient(make_app(Shelf([run])), base_url=LOCAL) as client:
        (found,) = ask(client, "/api/runs")
        page = ask(client, f"/api/runs/{found['id']}/completions")
    assert [row["pieces"] for row in page["rows"]] == [None, None]


def test_completions_are_searched_sorted_and_paged(client: TestClient, ids: dict) -> None:
    path = f"/api/runs/{ids['good']}/completions"
    everything = ask(client, path)
    assert (everything["step"], everything["total"]) == (7, 4)
    rewards = [row["reward"] for row in ask(client, path, order="reward")["rows"]]
    known = [value for value in rewards if value is not None]
    assert known == sorted(known, reverse=True)
    assert rewards[len(known) :] == [None] * (len(rewards) - len(known))
    turned = [row["reward"] for row in ask(client, path, order="reward", descending=0)["rows"]]
    assert turned[: len(known)] == sorted(known)
    assert [row["completion"] for row in ask(client, path, search="HALF")["rows"]] == ["half"]
    second = ask(client, path, offset=1, limit=1)
    assert second["rows"] == everything["rows"][1:2]
    assert everything["rows"][0]["largest_difference"] == 0.25


def test_settings_that_differ_are_shown_and_others_are_not(client: TestClient, ids: dict) -> None:
    rows = ask(client, "/api/differences", run=[ids["good"], ids["ill"]])
    told = {row["key"]: row["values"] for row in rows}
    assert told["trainer.lr"] == [1e-5, 1e-2]
    assert "algorithm.type" not in told


@pytest.mark.parametrize(
    ("path", "query", "message"),
    [
        ("/api/runs/0123", {}, "no run has the id"),
        ("/api/curves", {"first": "x"}, "is not a number"),
        ("/api/curves", {"first": "nan"}, "is not a step"),
        ("/api/curves", {"run": ["a"] * 21, "name": ["b"] * 20}, "are more than"),
    ],
)
def test_bad_questions_are_answered_with_what_is_wrong(
    client: TestClient, path: str, query: dict, message: str
) -> None:
    response = client.get(path, params=query)
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_an_order_that_does_not_exist_is_refused(client: TestClient, ids: dict) -> None:
    response = client.get(f"/api/runs/{ids['good']}/completions", params={"order": "colour"})
    assert response.status_code == 400
    assert "there are order, reward" in response.json()["error"]


def test_files_beside_the_page_are_out_of_reach(client: TestClient) -> None:
    assert client.get("/static/page.css").status_code == 200
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/app.py"):
        assert client.get(path).status_code in (400, 404)


def test_a_page_of_the_web_is_refused_by_the_name_it_asks_for(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:8642", "127.0.0.1.evil.example", ""):
        assert client.get("/api/runs", headers={"host": host}).status_code == 403
    assert client.get("/api/runs", headers={"host": "localhost:8642"}).status_code == 200
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy


def test_beyond_this_machine_a_token_is_needed(runs: Path) -> None:
    app = make_app(Shelf([runs]), token="right")
    with TestClient(app, base_url="http://192.0.2.1:8642") as remote:
        assert remote.get("/api/runs").status_code == 401
        assert remote.get("/static/page.css").status_code == 401
        assert remote.get("/", params={"token": "wrong"}).status_code == 401
        assert remote.get("/", params={"token": "right"}).status_code == 200
        # From then on the browser sends it as a cookie.
        assert remote.get("/api/runs").status_code == 200


def test_a_run_that_grows_is_read_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"reward": [0.1, 0.2]}, finished=False)
    shelf = Shelf([folder])
    (run,) = shelf.runs()
    before = shelf.load(run.id)
    assert shelf.load(run.id) is before
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time": 1.8e9, "reward": 0.7}) + "\n")
    after = shelf.load(run.id)
    assert after.version != before.version
    assert after.view.last_step == 3


def test_runs_of_one_name_are_told_apart() -> None:
    paths = [Path("/a/one/run"), Path("/a/two/run"), Path("/a/three")]
    assert distinct_names(paths) == ["one/run", "two/run", "three"]
    same = [Path("/a/x/run"), Path("/b/x/run")]
    assert distinct_names(same) == ["a/x/run", "b/x/run"]


def test_names_that_are_not_utf_8_do_not_hide_the_other_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "good", {"reward": [0.1, 0.2]})
    write_run(tmp_path / os.fsdecode(b"half\xff"), {"reward": [0.1], "half\ud800": [1.0]})
    with TestClient(make_app(Shelf([tmp_path])), base_url=LOCAL) as client:
        found = {run["name"]: run["id"] for run in ask(client, "/api/runs")}
        id = found.pop("half\udcff")
        assert set(found) == {"good"}
        assert "half\ud800" in ask(client, f"/api/runs/{id}")["metrics"]
        ask(client, f"/api/runs/{id}/health")


def test_a_folder_without_runs_shows_none_until_there_is_one(tmp_path: Path) -> None:
    shelf = Shelf([tmp_path])
    assert shelf.runs() == []
    write_run(tmp_path / "run", {"reward": [0.1, 0.2]})
    assert [run.name for run in shelf.runs()] == ["run"]


def test_two_dashboards_of_one_machine_can_be_open_at_once(runs: Path) -> None:
    addresses = {"first": "http://192.0.2.1:8642", "second": "http://192.0.2.1:8643"}
    cookies: dict[str, str] = {}
    apps = {token: make_app(Shelf([runs]), token=token) for token in addresses}
    for token, address in addresses.items():
        with TestClient(apps[token], base_url=address) as client:
            assert client.get("/", params={"token": token}).status_code == 200
            cookies |= dict(client.cookies)
    # A browser sends the cookies of a host to all of its ports.
    for token, address in addresses.items():
        with TestClient(apps[token], base_url=address, cookies=cookies) as client:
            assert client.get("/api/runs").status_code == 200


def test_a_run_whose_completions_cannot_be_listed_is_shown_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [2.0, 1.5, 1.0]})
    (run / "completions").mkdir()
    listdir = os.listdir

    def listed(path: Any = ".") -> list[str]:
        if str(path).endswith("completions"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listed)
    with TestClient(make_app(Shelf([tmp_path])), base_url=LOCAL) as client:
        id = client.get("/api/runs").json()[0]["id"]
        assert ask(client, f"/api/runs/{id}")["completion_steps"] == []
        assert "verdict" in ask(client, f"/api/runs/{id}/health")
        refused = client.get(f"/api/runs/{id}/completions")
    assert (refused.status_code, "Permission denied" in refused.text) == (400, True)
