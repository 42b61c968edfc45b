"""The configuration of a run: the sources of values, dumping and loading, and its documentation."""

import dataclasses
import re
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

import legato
from legato.config import kinds, lora_lr, schema
from legato.config.document import document, options
from legato.config.load import dump, load
from legato.config.locate import locate, locate_items
from legato.config.resolved import part_tree
from legato.config.sections import FAMILIES
from legato.config.sources import read_word
from legato.config.unusual import unusual_values
from legato.core.parts import Part, lookup, names
from legato.policy.model.adapters import Lora
from legato.policy.model.supervised import WarmUp
from legato.rewards.overlong import OverlongPunishment
from legato.run import wire

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def file(folder: Path, text: str, name: str = "a.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


OTHER_UPDATES = {"smollm2-moe-long": 16, "smollm2": 2, "tiny-moe-long": 32, "tiny-dense-long": 32}
"""The only way in which recipes deviate from GSPO as published."""
BY_TURN = ("advantage", "objective.trust.clip.", "training.updates_per_step")
"""Recipes of environments have credit by turn, and bands and updates for turns of a few tokens."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_header_has_command_and_machine(path: Path) -> None:
    resolved = load([path])
    header = path.read_text().split("\n\n")[0]
    assert re.search(rf"# Command: .*legato (train|eval .*--sets) recipes/{path.name}", header)
    assert "# Machine: " in header
    if resolved.config.task.environment is not None:
        assert resolved.algorithm.name == "turn-gspo" and all(each.startswith(BY_TURN) for each in resolved.deviations)
        return
    if path.stem == "tiny-reversal":  # a teacher's advantages per token, and responses of four tokens
        assert resolved.algorithm.name == "gspo-token" and all(each.startswith(BY_TURN[1:]) for each in resolved.deviations)
        return
    updates = next((count for name, count in OTHER_UPDATES.items() if path.stem.startswith(name)), None)
    assert resolved.deviations == (() if updates is None else (f"training.updates_per_step = {updates} (gspo: 4)",))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_finds_the_held_out_problems_it_asks_for(path: Path) -> None:
    config = load([path]).config
    if config.task.kind in names("task"):
        assert len(wire.source_of(config, wire.PythonObjects()).held_out(config.task.held_out)) == config.task.held_out


def test_the_promised_recipes_exist() -> None:
    promised = {"tiny", "tiny-moe", "smollm2", "smollm2-moe", "qwen3-0.6b-gsm8k", "qwen3-1.7b-gsm8k", "qwen3-30b-a3b"}
    assert promised <= {path.stem for path in RECIPES}


def test_without_sources_everything_is_a_default() -> None:
    resolved = load([])
    assert dataclasses.replace(resolved.config, task=schema.Task(), reward=schema.Reward()) == schema.Config()
    assert resolved.config.task.options == {
        "operation": "add",
        "left_digits": 2,
        "right_digits": 1,
        "wording": "formula",
        "graded": False,
    }
    assert resolved.algorithm == legato.algorithm("gspo")
    assert set(resolved.provenance.values()) == {"default", "algorithm gspo"}
    assert set(resolved.provenance) == set(resolved.values)


def test_higher_sources_win(tmp_path: Path) -> None:
    low = file(tmp_path, "[training]\nlr = 1e-1\nsteps = 1\nseed = 1\nupdates_per_step = 3\nepsilon = 1e-7\n", "low.toml")
    high = file(tmp_path, "[training]\nlr = 1e-2\nsteps = 2\nseed = 2\n", "high.toml")
    training = load([low, high], ["training.lr=1e-3", "training.steps=3"], {"training.lr": 1e-4}).config.training
    assert (training.lr, training.steps, training.seed, training.updates_per_step, training.epsilon) == (1e-4, 3, 2, 3, 1e-7)


def test_the_settings_of_the_algorithm_lie_between_the_defaults_and_the_files(tmp_path: Path) -> None:
    path = file(tmp_path, 'algorithm = "dapo"\n[training]\nupdates_per_step = 8\n')
    config = load([path]).config
    assert config.task.resampling == "dynamic"
    assert config.reward.overlong == OverlongPunishment(cache_share=0.2)
    assert config.training.updates_per_step == 8
    # The name is taken from the highest source, so that the settings are those of the algorithm that is used.
    assert load([path], ["algorithm=grpo"]).config.task.resampling == "none"


def test_provenance_names_the_source_of_each_value(tmp_path: Path) -> None:
    path = file(
        tmp_path, "# a comment\n[training]\nlr = 1e-5\n\n[policy]\nlora = { rank = 8 }\n[algorithm.objective]\ntrust = []\n"
    )
    words = ["training.steps=7", "algorithm.objective.penalties.kl.beta=0.1", "algorithm.name=dr-grpo"]
    provenance = load([path], words, {"output.name": "x"}).provenance
    assert provenance["training.lr"] == f"{path}:3"
    assert provenance["policy.lora.rank"] == f"{path}:6"
    assert provenance["policy.lora.alpha"] == "default"
    assert provenance["training.steps"] == "word 1: training.steps=7"
    assert provenance["training.updates_per_step"] == "algorithm dr-grpo"
    assert provenance["output.name"] == "override 'output.name'"
    assert provenance["task.left_digits"] == "default"
    assert provenance["algorithm.name"] == "word 3: algorithm.name=dr-grpo"
    assert provenance["algorithm.objective.trust"] == f"{path}:8"
    assert provenance["algorithm.objective.penalties.kl.beta"] == provenance["algorithm.objective.penalties"]
    assert provenance["algorithm.objective.penalties.kl.beta"].startswith("word 2")
    assert provenance["algorithm.objective.penalties.kl.limit"] == "default"
    assert provenance["algorithm.advantage"] == "algorithm dr-grpo"
    assert provenance["algorithm.aggregate.constant"] == "rollouts.max_response_tokens"


def test_setting_a_slot_resets_the_fields_of_its_part(tmp_path: Path) -> None:
    path = file(tmp_path, "[algorithm.objective.trust.clip]\nlow = 0.01\n")
    assert load([path]).provenance["algorithm.objective.trust.clip.low"] == f"{path}:2"
    resolved = load([path], ['algorithm.objective.trust=["clip"]'])
    assert resolved.values["algorithm.objective.trust.clip.low"] == 0.2
    assert resolved.provenance["algorithm.objective.trust.clip.low"] == "default"


def test_an_option_that_is_switched_off_is_dumped_as_false(tmp_path: Path) -> None:
    resolved = load([], ["task.kind=jsonl", "task.path=a.jsonl", "task.answer=false"])
    assert resolved.config.task.options == {"path": "a.jsonl", "prompt": "prompt", "answer": None}
    assert load([file(tmp_path, dump(resolved))]).config == resolved.config

    @dataclasses.dataclass(frozen=True)
    class Limited(Part):
        limit: float | None = 20.0

    assert part_tree("a", Limited(limit=None)) == {"a.limit": False}


@pytest.mark.parametrize(
    ("words", "deviations"),
    [
        (["algorithm.objective.trust.clip.low=0.002"], ["objective.trust.clip.low = 0.002 (gspo: 0.0003)"]),
        (["training.updates_per_step=2"], ["training.updates_per_step = 2 (gspo: 4)"]),
        (["algorithm.objective.trust=[]"], ["objective.trust = none (gspo: clip)"]),
        (["algorithm.objective.trust.clip=false"], ["objective.trust = none (gspo: clip)"]),
        (["algorithm=srpo"], ["task.stages = 1 (srpo: 2): there is no task.second"]),
        (["algorithm=srpo", "task.second.kind=sorting", "task.second_after_steps=9"], []),
        (["algorithm=dapo", "reward.overlong=false"], ["reward.overlong.cache_share = off (dapo: 0.2)"]),
        (["algorithm=dr-grpo"], []),
        (
            ["algorithm=dr-grpo", "algorithm.aggregate.constant=9"],
            ["aggregate.constant = 9 (dr-grpo: the response budget, 64)"],
        ),
        (["algorithm=grpo", "algorithm.objective.ratio.limit=null"], ["objective.ratio.limit = off (grpo: 20)"]),
    ],
)
def test_deviations_from_the_paper_are_listed(tmp_path: Path, words: list[str], deviations: list[str]) -> None:
    resolved = load([], words)
    assert list(resolved.deviations) == deviations
    assert load([file(tmp_path, dump(resolved))]).deviations == resolved.deviations


def test_an_aggregate_without_a_constant_gets_the_response_budget() -> None:
    resolved = load([], ["algorithm=dr-grpo", "rollouts.max_response_tokens=100"])
    assert resolved.values["algorithm.aggregate.constant"] == 100.0


def test_a_part_and_its_fields_can_be_set_in_one_file(tmp_path: Path) -> None:
    text = '[algorithm]\naggregate = "token-mean"\n"objective.trust" = ["dual-clip"]\n"objective.trust.dual-clip.cap" = 4\n'
    algorithm = load([file(tmp_path, text)]).algorithm
    changes = {"aggregate": "token-mean", "objective.trust": ["dual-clip"], "objective.trust.dual-clip.cap": 4}
    assert algorithm == legato.algorithm("gspo", changes)


def test_an_algorithm_made_in_python_is_used_as_it_is(tmp_path: Path) -> None:
    value = legato.algorithm("gspo", {"objective.trust.clip.low": 2e-3, "settings.training.updates_per_step": 2})
    resolved = load([], ["algorithm.objective.trust.clip.high=0.5"], {"algorithm": value})
    assert resolved.algorithm.objective == legato.algorithm(value, {"objective.trust.clip.high": 0.5}).objective
    assert resolved.config.training.updates_per_step == 2
    again = load([file(tmp_path, dump(resolved))])
    assert (again.config, again.algorithm) == (resolved.config, resolved.algorithm)


def test_another_kind_brings_its_own_options(tmp_path: Path) -> None:
    path = file(tmp_path, '[task]\nleft_digits = 3\nheld_out = 9\n[reward]\nkind = "number"\ntolerance = 0.5\n')
    config = load([path], ["task.kind=reversal", "reward.components.a.kind=exact"]).config
    assert (config.task.options, config.task.held_out) == ({"length": 4, "symbols": "digits"}, 9)
    assert config.reward.kind is None
    assert config.reward.components == {"a": schema.Component(kind="exact", options={"ignore_case": False})}
    assert load([path], ["task.kind=arithmetic"]).config.task.options["left_digits"] == 3
    third = file(tmp_path, '[reward]\nkind = "exact"\n', "third.toml")
    both = file(tmp_path, '[reward.components.a]\nkind = "format"\njudges = true\n', "both.toml")
    assert load([path, both, third]).config.reward.components == {}


def test_options_construct_the_part() -> None:
    task = load([], ["task.left_digits=3"]).config.task
    assert kinds.make("task", task.kind, task.options) == lookup("task", "arithmetic")(left_digits=3)
    verdicts = f"{Path(__file__).parents[1]}/proof/verdicts.py"
    assert callable(kinds.make("reward", f"{verdicts}:early", {}))


def test_code_named_in_a_configuration_is_not_imported() -> None:
    config = load([], ["task.kind=no_such_module:Name", "task.size=3", "reward.kind=/no/such file.py:score"]).config
    assert config.task.options == {"size": 3}
    assert config.reward.options == {}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("a=tiny", "tiny"),
        ("a=1e-6 ", 1e-6),
        ("a= 3", 3),
        ("a=true", True),
        ("a=null", None),
        ('a="1"', "1"),
        ("a=[1, 2]", [1, 2]),
        ("a={b = 1}", {"b": 1}),
        ("a=2024-01-02", "2024-01-02"),
        ("a=1\nb = 2", "1\nb = 2"),
        ("a=b=c", "b=c"),
        ("a=", ""),
        ("a=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_word_is_toml_or_a_bare_string(word: str, value: object) -> None:
    assert read_word(word) == ("a", value)


def test_optional_tables_are_switched_on_and_off() -> None:
    on = load([], ["policy.lora=true", "policy.warm_up={}", "evaluation.target=0.5"]).config
    assert (on.policy.lora, on.policy.warm_up, on.evaluation.target) == (Lora(), WarmUp(), 0.5)
    off = load([], ["policy.lora=true", "policy.lora=false", "evaluation.target=false"]).config
    assert (off.policy.lora, off.evaluation.target) == (None, None)


def test_python_values_are_converted_to_toml_types() -> None:
    numpy = pytest.importorskip("numpy")
    given_in_python = {
        "training": {"steps": numpy.int64(5), "betas": (0.5, 0.6)},
        "training.lr": numpy.float32(0.5),
        "output.directory": Path("there"),
        "rollouts.stop": ("a",),
    }
    config = load([], overrides=given_in_python).config
    assert (config.training.steps, config.training.lr, config.training.betas) == (5, 0.5, (0.5, 0.6))
    assert (config.output.directory, config.rollouts.stop) == ("there", ("a",))


def test_every_option_is_documented() -> None:
    page = document()
    for path in load([], ["policy.lora=true", "policy.warm_up=true", "reward.overlong=true"]).values:
        own = ("task.operation", "task.left_digits", "task.right_digits", "task.wording", "task.graded")
        if not path.startswith("algorithm.") and path not in own:
            assert f"| `{path}` |" in page or path in ("reward.which", "reward.tolerance"), path
    assert all(option.kind and option.says.endswith((".", ")")) for option in options())
    assert all(line.count(" | ") == 3 for line in page.splitlines() if line.startswith("| `"))


def test_no_part_has_an_option_of_its_section() -> None:
    kinds.register_all()
    for family, section in (("task", schema.Task), ("reward", schema.Reward), ("reward", schema.Component)):
        taken = {field.name for field in dataclasses.fields(section)} - {"system_prompt"}
        for registry in FAMILIES[family]:
            for name in names(registry):
                assert not taken & set(kinds.option_names(lookup(registry, name))), name


KEYS = st.text(min_size=1, max_size=6)
LEAVES = st.none() | st.text(max_size=8) | st.integers(-5, 5) | st.floats(allow_nan=False) | st.booleans()
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES.filter(lambda leaf: leaf is not None),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=5,
)


@given(tree=TREES)
def test_the_locator_finds_every_key_of_any_file(tree: dict[str, object]) -> None:
    text = tomli_w.dumps(tree, multiline_strings=True)
    lines = locate(text.replace("\r\n", "\n"))

    def walk(table: dict[str, object], path: tuple[str, ...]) -> None:
        for key, value in table.items():
            assert (*path, key) in lines
            if isinstance(value, dict):
                walk(value, (*path, key))

    walk(tree, ())
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())


def test_the_locator_numbers_the_tables_of_arrays() -> None:
    text = "[[a.b]]\nc = 1\n[a.b.d]\ne = 2\n[[a.b]]\nc = 3\n[x]\ny = [{z = 1},\n {z = 2}]\n"
    assert locate_items(text) == {
        ("a", "b", "0"): 1,
        ("a", "b", "0", "c"): 2,
        ("a", "b", "0", "d"): 3,
        ("a", "b", "0", "d", "e"): 4,
        ("a", "b", "1"): 5,
        ("a", "b", "1", "c"): 6,
        ("x", "y", "0"): 8,
        ("x", "y", "0", "z"): 8,
        ("x", "y", "1"): 9,
        ("x", "y", "1", "z"): 9,
    }


def test_the_locator_handles_all_of_toml() -> None:
    text = (
        'a = """\nb = 1\n"""\nc = \'\'\'\n[x]\n\'\'\'  # d = 2\n[ t . "u.v" ]\n'
        "'e' = [1, # f = 3\n  ']', {g = 1, h.i = 2}]\n"
        "j = 1979-05-27 07:32:00\n[[k]]\nl = 1\n[[k]]\nl = 2\nm.n = '#'\n"
    )
    assert locate(text) == {
        ("a",): 1,
        ("c",): 4,
        ("t",): 7,
        ("t", "u.v"): 7,
        ("t", "u.v", "e"): 8,
        ("t", "u.v", "e", "g"): 9,
        ("t", "u.v", "e", "h"): 9,
        ("t", "u.v", "e", "h", "i"): 9,
        ("t", "u.v", "j"): 10,
        ("k",): 11,
        ("k", "l"): 12,
        ("k", "m"): 15,
        ("k", "m", "n"): 15,
    }


def test_adapters_get_ten_times_the_default_learning_rate_unless_one_is_set(tmp_path: Path) -> None:
    resolved = load([], ["policy.lora=true"])
    assert resolved.config.training.lr == 1e-5
    assert resolved.provenance["training.lr"] == lora_lr.ORIGIN
    assert load([], []).config.training.lr == 1e-6
    assert load([], ["policy.lora=true", "training.lr=2e-6"]).config.training.lr == 2e-6
    # A run holds every value, so that one which was started before this rule keeps its learning rate.
    path = tmp_path / "config.toml"
    path.write_text(dump(load([], ["policy.lora=true", "training.lr=1e-6"])))
    assert load([path]).config.training.lr == 1e-6


def test_a_learning_rate_of_all_weights_is_noted_with_adapters() -> None:
    assert any("adapters" in note for note in unusual_values(load([], ["policy.lora=true", "training.lr=1e-6"])))
    assert not any("adapters" in note for note in unusual_values(load([], ["policy.lora=true"])))
