"""Makes the pictures of the README: `make pictures` (or `python -m docs.pictures [RUN]`).

docs/figures/train-curve.svg   accuracy over the steps of `make train`, from the run's report
docs/figures/dashboard.png     the dashboard with that run, in headless Chromium

Without RUN, a run directory of recipes/tiny.toml, that recipe is trained first in a temporary folder (minutes, one core).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from legato.errors import InputError
from legato.pages.drawing import draw_svg
from legato.pages.figures import figures
from legato.records.directory import RunDirectory
from tests.dashboard.browser import CHROMIUM, MISSING, browser, dashboard

ROOT = Path(__file__).parents[1]
CURVE, BOARD = (ROOT / "docs" / "figures" / name for name in ("train-curve.svg", "dashboard.png"))
LARGEST = 150_000
"""Most bytes of a picture: each stays in the history of the repository for good."""
_SIZE = 1280, 800


def draw_curve(run: RunDirectory) -> str:
    """Return the first figure of the run's report, accuracy, as SVG."""
    drawn = next((each for each in figures(run.metrics()) if each.title == "Accuracy"), None)
    if drawn is None:
        raise InputError(f"expected a run with evaluations, got one without ({run.path})")
    return draw_svg(drawn)


def photograph_dashboard(run: Path, target: Path) -> None:
    """Write a screenshot of the curves of a run."""
    if CHROMIUM is None:
        raise InputError(MISSING)
    with tempfile.TemporaryDirectory() as home, browser(Path(home), _SIZE) as page, dashboard(run) as (_, address):
        page.ask("Emulation.setDeviceMetricsOverride", width=_SIZE[0], height=_SIZE[1], deviceScaleFactor=1, mobile=False)
        page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        page.open(address)
        page.wait("document.querySelector('.figures')?.dataset.ready")
        # While a long file is read the curves are an overview.
        page.wait("!document.getElementById('note').textContent.includes('reading on')")
        page.wait("[...document.querySelectorAll('.figures .plot')].every(plot => plot.querySelector('.js-line'))")
        page.run("(e => { e.value = 15; e.dispatchEvent(new Event('change')) })(document.getElementById('smooth'))")
        page.picture(target)


def train(folder: Path) -> Path:
    """Train recipes/tiny.toml below `folder` and return the run directory."""
    command = [sys.executable, "-m", "legato", "train", str(ROOT / "recipes" / "tiny.toml"), "output.directory=runs"]
    subprocess.run(command, cwd=folder, check=True)
    return next((folder / "runs").iterdir())


def make_pictures(run: Path) -> None:
    """Write both pictures of a run directory."""
    CURVE.write_text(draw_curve(RunDirectory.open(run)), encoding="utf-8")
    photograph_dashboard(run, BOARD)
    for picture in (CURVE, BOARD):
        size = picture.stat().st_size
        if size > LARGEST:
            raise InputError(f"expected a picture of at most {LARGEST:,} bytes, got {size:,} ({picture})")
        print(f"wrote {picture.relative_to(ROOT)}, {size:,} bytes")


def main() -> None:
    if len(sys.argv) > 1:
        make_pictures(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(train(Path(folder)))


if __name__ == "__main__":
    main()
