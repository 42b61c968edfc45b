"""No snippet of README and docs is left out: each block is run by a test that is named here, and the rest are commands."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from legato.config.load import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

RUN_BY = {
    "README.md": "test_documents.py",
    "docs/data.md": "test_evaluation_pages.py",
    "docs/engines.md": "test_documents.py",
    "docs/environments.md": "test_documents.py",
    "docs/tools.md": "test_documents.py",
    "docs/evaluation.md": "test_evaluation_pages.py",
    "docs/first-run.md": "test_commands.py",
    "docs/library.md": "test_documents.py",
    "docs/migrating.md": "test_migrating.py",
    "docs/operations.md": "test_operations.py",
    "docs/parts.md": "test_documents.py",
    "docs/scaling.md": "test_snippets.py",
    "docs/serve.md": "../serve/test_foreign.py",
}
"""The test file that runs the files and snippets of a page."""

COMMANDS = re.compile(
    r"(\.venv/bin/)?legato |make |curl "  # test_commands.py
    r"|python -m pytest .*examples/"  # test_commands.py, slow
    r"|python -m pytest tests/contracts/\S+ tests/contracts/\S+ --environment my_env"  # below, slow
    r"|python write_problems\.py$"  # test_commands.py
    r"|pip install|source \.venv/bin/activate"  # an installation; the extras exist by test_commands.py
    r"|VLLM_SERVER_DEV_MODE=1 python -m vllm|python -m sglang\.launch_server"  # tests/vllm; benchmarks/gpu/with_sglang.py
    r"|torchrun |lm_eval |python3 -m verl"  # below; tests/serve/test_foreign.py; verl's own, translated in test_migrating.py
)
OUTPUT = {
    "docs/algorithms.md": "formulas, generated",
    "docs/plan.md": "what `legato plan` prints, generated",
    "docs/first-run.md": "the figures of a run, with its date",
}
"""Pages with blocks that are no commands, and what those are."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_page_is_run_by_a_test(page: Path) -> None:
    for language, text in blocks(page):
        if language:
            test = Path(__file__).parent / RUN_BY[name_of(page)]
            assert page.name.partition(".")[0] in test.read_text(), f"{test.name} does not read {page.name}"
            continue
        lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
        others = [line for line in lines if not COMMANDS.match(line)]
        assert not others or name_of(page) in OUTPUT, f"{page.name}: no test runs {others[0]!r}"


def test_the_recipe_with_a_part_of_ones_own_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dict(blocks(ROOT / "docs/parts.md"))
    (tmp_path / "my_clip.py").write_text(parts["python"])
    (tmp_path / "recipe.toml").write_text(parts["toml"])
    monkeypatch.chdir(tmp_path)
    resolved = load([Path("recipe.toml")])
    assert resolved.values["algorithm.objective.trust.my-clip.over"] == 0.1


def torchrun_commands() -> list[str]:
    """The commands of the scaling page that start torchrun: one is typed, two are in files of schedulers."""
    yaml = pytest.importorskip("yaml")
    page = blocks(ROOT / "docs/scaling.md")
    typed = [line for language, text in page if not language for line in text.splitlines() if line.startswith("torchrun ")]
    (script,) = [text.replace("\\\n", " ") for language, text in page if language == "bash"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    submitted = [line.removeprefix("srun ") for line in script.splitlines() if line.startswith("srun ")]
    documents = [each for language, text in page if language == "yaml" for each in yaml.safe_load_all(text)]
    (job,) = [each for each in documents if each["kind"] == "Job"]
    containers = job["spec"]["template"]["spec"]["containers"]
    return [*typed, *submitted, *(shlex.join(map(str, each["command"])) for each in containers)]


def test_the_commands_for_several_machines_are_torchruns_and_ours() -> None:
    commands = torchrun_commands()
    assert len(commands) == 3
    for command in commands:
        # A scheduler puts numbers in place of these.
        plain = re.sub(r"\$\(?\w+\)?", "2", command)
        arguments = get_args_parser().parse_args(shlex.split(plain)[1:])
        assert arguments.module and arguments.training_script == "legato", command
        verb, recipe, *words = arguments.training_script_args
        assert verb == "train" and recipe.endswith(".toml")
        options = [word for word in words if "=" in word]
        assert set(words) - set(options) <= {"--resume-if-exists"}
        load([ROOT / "recipes/tiny.toml"], options)


@pytest.mark.slow
def test_the_contracts_run_on_files_of_a_user(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text((ROOT / "examples/second_guess.py").read_text().replace("SecondGuess", "MyEnv"))
    (tmp_path / "my_reward.py").write_text("def score(rollout):\n    return float(rollout.text == rollout.problem.answer)\n")
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)]
    (tmp_path / "my_problems.jsonl").write_text("\n".join(rows))
    page = (ROOT / "docs/environments.md").read_text()
    (command,) = re.findall(
        r"^python -m pytest tests/contracts/\S+ tests/contracts/\S+ --environment my_env.*$", page, re.MULTILINE
    )
    words = shlex.split(command.replace("tests/contracts", f"{ROOT}/tests/contracts"))[1:]
    subprocess.run(
        [sys.executable, *words, "-q", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"], check=True, cwd=tmp_path
    )
