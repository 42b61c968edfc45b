"""The pictures of the README: made by a command, small, and of a run."""

from pathlib import Path

import pytest

from docs import pictures
from legato.errors import InputError
from legato.records.directory import RunDirectory
from tests.dashboard.browser import CHROMIUM, MISSING
from tests.dashboard.synthetic import synthetic_run


def test_the_curve_of_a_run_is_its_accuracy(tmp_path: Path) -> None:
    text = pictures.draw_curve(synthetic_run(tmp_path, steps=40))
    assert text.startswith("<svg") and "<title>Accuracy</title>" in text and "held-out, greedy" in text
    empty = RunDirectory.create(tmp_path, "empty")
    with pytest.raises(InputError, match="expected a run with evaluations"):
        pictures.draw_curve(empty)


def test_the_stored_pictures_are_small() -> None:
    assert pictures.CURVE.read_text().startswith("<svg")
    assert pictures.BOARD.read_bytes().startswith(b"\x89PNG")
    assert max(picture.stat().st_size for picture in (pictures.CURVE, pictures.BOARD)) <= pictures.LARGEST


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_both_pictures_are_made_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    for name in ("CURVE", "BOARD"):
        monkeypatch.setattr(pictures, name, tmp_path / name)
    pictures.make_pictures(synthetic_run(tmp_path, steps=40).path)
    assert (tmp_path / "CURVE").read_text().startswith("<svg") and (tmp_path / "BOARD").read_bytes().startswith(b"\x89PNG")
