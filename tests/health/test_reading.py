"""How much of a log was understood: the readers count what they could not read."""

from __future__ import annotations

from pathlib import Path

from homeostat.health.readers import open_run, read_text
from homeostat.health.reading import Reading


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
