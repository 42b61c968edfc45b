"""Mistakes are refused before torch is imported, with the message of the whole check."""

import subprocess
import sys
from pathlib import Path

import pytest

from legato.config import document
from legato.config.kinds import find_section
from legato.config.load import load
from legato.config.names import KINDS, SECTIONS
from legato.config.quick import check_arguments
from legato.config.schema import Config
from legato.config.sections import section_of, stored_kind, stored_section
from legato.config.sources import from_overrides
from legato.config.validate import validate
from legato.core.parts import lookup
from legato.core.settings import Table
from legato.errors import InputError
from legato.rollouts.registry import engine_names

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny.toml")
OWN_CODE = str(ROOT / "tests/proof/verdicts.py")


def messages(words: list[str]) -> tuple[str, str]:
    """What the quick check and the whole check say; "" where there is no error."""
    said = []
    for check in (lambda: check_arguments([RECIPE, *words]), lambda: load([Path(RECIPE)], words)):
        try:
            check()
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said[0], said[1]


@pytest.mark.parametrize(
    "words",
    [
        ["training.lrr=1"],
        ["trainig.lr=1"],
        ["policy.lora.rnk=3"],
        ["policy.tiny.width=3", "output.names=x", "nothing=1"],
        ["training.samples_per_prompt=4"],
        ["learning_rate=1e-6"],
        ["reward.overlong.share=1"],
        ["policy={tiny={width=3}}"],
        ["training.lr=abc"],
        ["training.lr=2", "training.steps=0", "output.keep_last=true"],
        ["training.steps=9223372036854775808"],
        ["training.betas=[1]"],
        ["training.anchor=nothing"],
        ["policy.lora=5"],
        ["training=3"],
        ["task.kind=arithmetics"],
        ["task.kind=5"],
        ["task.left_digit=3"],
        ["task.left_digits=many"],
        ["task.kind=jsonl"],
        ["task.kind=jsonl", "task.path=3"],
        ["task.stages=2", "task.second.left_digits=2"],
        ["task.stages=2", "task.second.kind=nothing"],
        ["reward.kind=nmber"],
        ["reward.kind=false"],
        ["reward.components.mine.weight=2"],
        ["reward.components.mine.kind=number", "reward.components.mine.weight=x", "reward.components.mine.odd=1"],
        ["reward.kind=number", "reward.components.mine.kind=number"],
        ["algorithm=gsppo"],
        ["algorithm=3"],
        ["algorithm.objective.trust.clip.low=-1"],
        ["algorithm.objective.trust.clip.low=abc", "training.lr=abc"],
        ["algorithm.objective.penalties.kl.beta=[1]"],
        ["algorithm.objective.trust.clip.lwo=1"],
        ["algorithm.objective.trust.clpi.low=1"],
        ["algorithm.objective.trust.clip=0.2"],
        ["algorithm.objective.trsut.clip.low=1"],
        ["algorithm.trust.clip.low=1"],
        ["algorithm.objective.trust=clip"],
        ["algorithm.objective.trust=['clpi']"],
        ["algorithm.objective.trust=['clip', 3]", "algorithm.objective.trust.clip.lwo=1"],
        ["algorithm.advantage=group-zz"],
        ["algorithm.advantage=false"],
        ["algorithm.advantage.ddof=abc", "algorithm.advantage.dof=1"],
        ["algorithm.advantage=group-centre", "algorithm.advantage.ddof=1"],
        ["algorithm=ppo", "algorithm.advantage.ddof=1"],
        ["algorithm.objective.ratio.level=1"],
        ["algorithm.settings.lr=1"],
        ["algorithm.objective={}"],
        ["algorithm=mine", "algorithm.advantage=group-z"],
    ],
)
def test_the_quick_check_says_what_the_whole_check_says(words: list[str]) -> None:
    quick, whole = messages(words)
    if "Type-check error" in whole:
        pytest.skip("the shape checks of the tests refuse this value first")
    assert quick == whole != ""


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("algorithm.adv_estimator=grpo", "algorithm.advantage"),
        ("policy_loss.loss_mode=gspo", "algorithm.name"),
        ("rollout.n=8", "rollouts.samples_per_prompt"),
        ("actor.clip_ratio_low=3e-4", "algorithm.objective.trust.clip.low"),
        ("report_to=trackio", "trackio: output.trackio"),
    ],
)
def test_a_key_of_trl_or_verl_is_answered_in_one_line(word: str, ours: str) -> None:
    quick, whole = messages([word])
    assert quick == whole and len(quick.splitlines()) == 1 and ours in quick


def test_every_option_refuses_the_same_values_in_the_same_words() -> None:
    values = [None, -1e300, -1, 0, 1e300, 2.5, "", "nothing", [1], [], {"x": 1}]
    refused = 0
    for table, options in SECTIONS.items():
        for name in set(options) - {"options", "changes", "algorithm"}:
            path = ".".join(filter(None, (table, name))).replace("NAME", "mine")
            for value in () if path.startswith("algorithm") else values:
                try:
                    layer, quick, whole = from_overrides({path: value}), list[str](), list[str]()
                except InputError:
                    continue  # a list of sets is refused when it is read
                validate(layer, quick, stored_section(), stored_kind)
                validate(layer, whole, section_of(Config), find_section)
                # Making the settings finds more: options that do not go together.
                assert quick == whole or not quick, (path, value)
                refused += bool(quick)
    assert refused > 600


def test_the_stored_rules_are_the_declared_ones() -> None:
    def compare(stored: object, declared: object) -> int:
        left, right = section_of(stored), section_of(declared)
        assert list(left.fields) == list(right.fields)
        compared = 0
        for name in left.names:
            mine, theirs = left.fields[name], right.fields[name]
            assert mine.needed == theirs.needed, name
            assert mine.rule is not None and theirs.rule is not None
            assert (mine.rule.allowed, mine.rule.optional) == (theirs.rule.allowed, theirs.rule.optional), name
            compared += 1
            if isinstance(theirs.rule, Table) and theirs.rule.section is not None:
                assert isinstance(mine.rule, Table)
                compared += compare(mine.rule.section, theirs.rule.section)
        return compared

    assert compare(stored_section(), Config) > 100
    engine_names()  # registers the engines
    for kind, parts in KINDS.items():
        for name, stored in parts.items():
            assert list(stored["fields"]) == list(section_of(lookup(kind, name)).fields), (kind, name)


def test_the_table_is_what_the_declarations_say() -> None:
    assert (ROOT / "src/legato/config/names.py").read_text() == document.names_module(), "run python -m docs.generate"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["algorithm=grpo", "algorithm.objective.trust.clip.low=0.1"],
        ["algorithm.advantage=group-centre", "algorithm.objective.trust=[]", "algorithm.objective.penalties.kl=false"],
        ["task.left_digits=1", "task.stages=2", "task.second.kind=arithmetic", "task.second.left_digits=2"],
        ["reward.components.mine.kind=number", "reward.components.mine.weight=2.0"],
        ["policy.lora=true", "policy.warm_up=false"],
        ["task.kind=reversal"],
        [f"reward.kind={OWN_CODE}:early", "reward.whatever=3"],
        [f"algorithm.objective.trust=['{OWN_CODE}:Nothing']", "algorithm.objective.trust.mine.low=x"],
        ["algorithm=ppo", "algorithm.advantage.lam=0.9", "algorithm.objective.trust.dual-clip.cap=3"],
        ["algorithm.objective.trust.nothing=false", "algorithm.objective.trust.clip=false"],
        ["algorithm=mine", "algorithm.advantage=group-z", "algorithm.aggregate=token-mean", "objective.ratio=product"],
        ["policy.model=owner/name"],
    ],
)
def test_what_may_be_right_is_left_to_the_whole_check(words: list[str]) -> None:
    check_arguments([RECIPE, *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["task.kind=jsonl", "task.path=nothing.jsonl"], f"nothing.jsonl: there is no such file in {Path.cwd()}"),
        (["task.kind=parquet", f"task.path={RECIPE}"], "expected a name that ends in .parquet"),
        (["reward.kind=nothing.py:reward"], "reward 'nothing.py:reward': there is no file"),
        (["rollouts.engine=nothing.py:Engine"], "engine 'nothing.py:Engine': there is no file"),
        (["policy.model=./nothing"], "policy.model = 'nothing': there is no such folder"),
    ],
)
def test_missing_files_are_told_at_once(words: list[str], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        check_arguments([RECIPE, *words])
    assert expected in str(refused.value)


def test_every_recipe_passes_the_quick_check() -> None:
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        check_arguments([str(recipe)])


def test_mistakes_and_configurations_of_trl_are_answered_without_torch(tmp_path: Path) -> None:
    settings = tmp_path / "trl.json"
    settings.write_text('{"loss_type": "grpo"}')
    code = f"""
import sys
from legato.cli.main import main
words = ("training.lrr=1", "training.lr=abc", "task.kind=jsonl", "algorithm=gsppo", "objective.trust.clip.lwo=1")
for words, code in (
    *((["train", {RECIPE!r}, word], 2) for word in words),
    (["train", "actor_rollout_ref.actor.optim.lr=1"], 2),
    (["train", "--from-trl", {str(settings)!r}, "--print-recipe"], 0),
    *(([verb, "runs/nothing"], 2) for verb in ("resume", "eval", "sample", "serve", "mismatch", "doctor", "report")),
    (["export", "runs/nothing", "folder"], 2),
    (["compare", {RECIPE!r}, "--arm", "gspo", "--arm", "gsppo"], 2),
    (["compare", {RECIPE!r}, "--arm", "gspo", "--arm", "wide algorithm.objective.trust.clip.lwo=1"], 2),
):
    sys.argv = ["legato", *words]
    try:
        main()
    except SystemExit as ending:
        assert (ending.code or 0) == code
heavy = {{"torch", "transformers", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "did you mean 'lr'" in ended.stderr and "did you mean 'training.lr'" in ended.stderr
    assert ended.stderr.count("legato: ") == 16
    assert ended.stderr.count("did you mean 'low'") == 2 and ended.stderr.count("there is no such folder") == 7
    assert 'aggregate = "sequence-mean"' in ended.stdout


@pytest.mark.parametrize(
    "word",
    [
        "task.path=q.jsonl",
        "task.split=test",
        "reward.components.format.weight=0.5",
        "evaluation.sets.mine.problems=8",
        "evaluation.sets.mine.task.path=q.jsonl",
        "task.second.path=q.jsonl",
    ],
)
def test_options_of_kinds_that_a_run_names_are_left_to_the_whole_check(word: str) -> None:
    check_arguments([word], whole=False)
    with pytest.raises(InputError):
        check_arguments([word])


def test_parts_that_a_run_names_are_left_to_the_whole_check() -> None:
    words = ["algorithm.objective.trust.my-clip.low=1", "algorithm.advantage.gamma=1"]
    check_arguments(words, whole=False)
    for word in words:
        with pytest.raises(InputError):
            check_arguments([word])
