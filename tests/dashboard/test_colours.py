"""Colours that carry a meaning: text on them is readable, and colour-blind readers tell plus from minus."""

import re
from importlib.resources import files
from itertools import pairwise

import pytest

from legato.pages.page import STYLE
from legato.pages.traces import AMBER, BLUE, GREEN, GREY, RED, UPDATES, VIOLET

Colour = tuple[float, ...]

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as it looks to someone who lacks a kind of cones.
VISION = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def variables(theme: str) -> dict[str, str]:
    block = re.search(rf":root\[data-theme={theme}\] {{([^}}]*)}}", STYLE)
    assert block is not None
    return dict(re.findall(r"--([\w-]+): (#\w{6});", block.group(1)))


def shades() -> list[int]:
    """The share of the colour in each shade of a token, in per cent, weakest first."""
    css = (files("legato.dashboard") / "static" / "board.css").read_text()
    minus, plus = (
        [int(share) for share in re.findall(rf"\.{letter}\d {{ background: color-mix\([^)]*\) (\d+)%", css)]
        for letter in "mp"
    )
    assert minus == plus and len(plus) == 5
    return plus


def rgb(text: str) -> Colour:
    return tuple(int(text[at : at + 2], 16) / 255 for at in (1, 3, 5))


def mix(over: Colour, share: float, under: Colour) -> Colour:
    return tuple(share * a + (1 - share) * b for a, b in zip(over, under, strict=True))


def linear(colour: Colour) -> Colour:
    return tuple(x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour)


def contrast(one: Colour, other: Colour) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted(sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: Colour, vision: str) -> Colour:
    seen = [min(1.0, max(0.0, sum(w * x for w, x in zip(row, linear(colour), strict=True)))) for row in VISION[vision]]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [
        sum(w * x for w, x in zip(row, seen, strict=True)) / white
        for row, white in zip(rows, (0.95047, 1, 1.08883), strict=True)
    ]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one: Colour, other: Colour, vision: str) -> float:
    """The distance in CIELAB; 10 is plain to see side by side."""
    return sum((a - b) ** 2 for a, b in zip(lab(one, vision), lab(other, vision), strict=True)) ** 0.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_on_every_shade_of_a_token_and_in_the_colours_of_right_and_wrong(theme: str) -> None:
    colours = {name: rgb(value) for name, value in variables(theme).items()}
    for ground in ("well", "card"):
        for word in ("plus", "minus"):
            for share in shades():
                shade = mix(colours[f"{word}-shade"], share / 100, colours[ground])
                assert contrast(colours["text"], shade) >= 4.5, (ground, word, share)
            assert contrast(colours[word], colours[ground]) >= 4.5, (ground, word)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_plus_and_minus_differ_for_every_eye_and_a_stronger_shade_looks_stronger(theme: str, vision: str) -> None:
    colours = {name: rgb(value) for name, value in variables(theme).items()}
    well = colours["well"]
    scales = {word: [mix(colours[f"{word}-shade"], share / 100, well) for share in shades()] for word in ("plus", "minus")}
    for plus, minus in zip(scales["plus"], scales["minus"], strict=True):
        assert difference(plus, minus, vision) >= 10
    for scale in scales.values():
        assert all(difference(strong, weak, vision) >= 4 for weak, strong in pairwise([well, *scale]))
    assert difference(colours["plus"], colours["minus"], vision) >= 30


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_stand_out_from_the_card(theme: str) -> None:
    card = rgb(variables(theme)["card"])
    poor = [colour for colour in (BLUE, GREEN, AMBER, RED, VIOLET, GREY, *UPDATES) if contrast(rgb(colour), card) < 2.4]
    assert not poor
    for colour in (BLUE, GREEN, AMBER, RED, VIOLET, GREY):
        assert contrast(rgb(colour), card) >= 3
