"""How much of a log was understood: the readers count what they could not read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from homeostat.errors import HomeostatError
from homeostat.health.readers import Source, open_run, read_stream, read_text
from homeostat.health.readers.growing import GrowingLog
from homeostat.health.readers.values.given_names import given_names
from homeostat.health.reading import Reading
from homeostat.health.view import RunView


def reading_of(text: str) -> Reading:
    return read_text(text).facts["reading"]


def test_metrics_without_a_name_of_ours_are_listed() -> None:
    rows = [{"loss": 0.5, "flux": 0.1 * n, "wobble/mean": 2.0, "epoch": n / 10} for n in range(8)]
    found = reading_of("\n".join(map(str, rows)))
    assert found.num_rows == 8
    assert found.num_known == 2
    assert found.unknown_metrics == ("flux", "wobble/mean")


def test_lines_that_look_like_metrics_and_are_no_known_format_are_counted_and_shown() -> None:
    lines = [f"update {n} ~ flux=0.{n}1 wobble=1.{n}7" for n in range(7)]
    found = reading_of("loading the model\n" + "\n".join(lines) + "\n")
    assert found.num_lines == 8
    assert found.num_unread_rows == 7
    assert found.unread_rows[0] == lines[0]
    assert len(found.unread_rows) == 5


def test_a_log_that_is_understood_leaves_nothing_unread() -> None:
    rows = [{"loss": 0.5, "grad_norm": 1.5, "epoch": n / 10} for n in range(8)]
    found = reading_of("\n".join(map(str, rows)))
    assert found.num_unread_rows == 0
    assert found.unknown_metrics == ()


def test_the_files_of_a_folder_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\n")
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.4\n")
    assert open_run(tmp_path).facts["reading"].num_lines == 5


# Rows of the same two numbers, in every form that has no name which a reader knows.
UNKNOWN = {
    "json lines": '{{"step": {n}, "flux": 0.{n}, "wobble/mean": 1.{n}}}\n',
    "dicts": "{{'flux': 0.{n}, 'wobble/mean': 1.{n}}}\n",
    "list": "step {n} | flux: 0.{n} | wobble/mean: 1.{n}\n",
    "pairs": "12:00:01 INFO step={n} flux=0.{n} wobble/mean=1.{n}\n",
}


def rows_of(form: str) -> str:
    return "".join(UNKNOWN[form].format(n=n) for n in range(11, 41))


def mapped(text: str, names: dict[str, str]) -> RunView:
    return read_stream(Source(io.BytesIO(text.encode()), name="-"), names=names)


@pytest.mark.parametrize("form", UNKNOWN)
def test_rows_of_only_unknown_names_are_named_and_judged_once_the_user_says_what_they_are(
    form: str,
) -> None:
    found = read_text(rows_of(form))
    assert found.metrics == {}
    assert found.facts["reading"].num_unnamed == 30
    assert found.facts["reading"].unnamed_metrics == ("flux", "wobble/mean")
    told = mapped(rows_of(form), {"flux": "train/loss", "wobble/mean": "grad_norm"})
    assert told.metrics["train/loss"].values.tolist() == [float(f"0.{n}") for n in range(11, 41)]
    assert told.metrics["grad_norm"].latest == 1.40
    assert told.facts["reading"].notes == ()
    first = 1 if form == "dicts" else 11
    assert told.metrics["train/loss"].steps.tolist() == list(range(first, first + 30))


def test_a_table_with_a_column_of_steps_needs_no_known_name() -> None:
    text = "step,flux\n" + "".join(f"{n},0.{n}\n" for n in range(11, 41))
    assert read_text(text).facts["reading"].unknown_metrics == ("flux",)
    assert mapped(text, {"flux": "kl"}).metrics["kl"].latest == 0.40


def test_rows_of_unknown_names_do_not_join_a_run_that_has_known_ones() -> None:
    text = rows_of("dicts") + "".join(f"{{'loss': 0.{n}, 'epoch': 0.{n}}}\n" for n in range(11, 31))
    found = read_text(text)
    assert found.facts["reading"].unnamed_metrics == ()
    assert set(found.metrics) == {"train/loss", "epoch"}


def test_what_the_user_says_goes_before_what_a_name_suggests() -> None:
    rows = "".join(f"{{'loss': 0.{n}, 'policy_obj': 3.{n}, 'epoch': 0.1}}\n" for n in range(11, 41))
    told = mapped(rows, {"policy_obj": "train/loss"})
    assert told.metrics["train/loss"].latest == 3.40
    assert told.metrics["loss"].latest == 0.40
    told = mapped(rows, {"policy_object": "train/loss"})
    assert told.metrics["train/loss"].latest == 0.40, "a name that is not logged changes nothing"
    assert told.facts["reading"].notes[0].endswith("Logged are, for example: policy_obj.")


def test_a_log_that_grows_is_read_by_the_names_that_the_user_gave() -> None:
    log = GrowingLog("-", names={"flux": "train/loss"})
    text = rows_of("list").encode()
    log.feed(text[:200])
    assert len(log.view().metrics["train/loss"]) < 30
    log.feed(text[200:])
    assert len(log.view().metrics["train/loss"]) == 30


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["flux"], "an equals sign"),
        (["=kl"], "an equals sign"),
        (["flux=train/los"], "Did you mean train/loss"),
        (["a=kl", "b=kl"], "another name is mapped to kl already"),
        (["a=kl", "a=entropy"], "a is mapped to kl already"),
    ],
)
def test_a_name_that_cannot_be_mapped_is_refused(words: list[str], why: str) -> None:
    with pytest.raises(HomeostatError, match=why):
        given_names(words)


def test_a_name_of_the_log_may_have_an_equals_sign() -> None:
    assert given_names(["x=1/loss=train/loss"]) == {"x=1/loss": "train/loss"}
