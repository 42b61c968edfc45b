"""The figure of an adaptive clip band is drawn from recorded metrics, whatever the part is called."""

from typing import Any

from legato.pages.figures import figures


def step(number: int, **more: Any) -> dict[str, Any]:
    band = {"clip/band_low": 3e-4 / number, "clip/band_high": 4e-4 / number}
    return {"kind": "step", "step": number, **band, **more}


def traces(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    drawn = [each for each in figures(records) if each.title == "Clip band"]
    return {trace["name"]: trace["y"] for each in drawn for trace in each.data}


def test_a_band_that_adapts_is_drawn_with_its_noise_floor() -> None:
    measured = {"clip/beyond_positive": 0.1, "state/my-band.noise": 1e-5}
    drawn = traces([step(number, **measured) for number in (1, 2, 3)])
    assert set(drawn) == {"upper bound", "lower bound", "noise floor"}
    assert drawn["upper bound"][0] == 4e-4 and drawn["upper bound"][-1] < 4e-4


def test_a_fixed_band_has_no_figure() -> None:
    assert traces([step(number) for number in (1, 2, 3)]) == {}
