"""A configuration of TRL becomes one of ours: every option is answered, and the recipe means the same."""

import json
import math
import tomllib
from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from legato.config.from_trl import Translation, read_trl, translate
from legato.config.load import load
from legato.config.peers import TRL
from legato.errors import InputError
from legato.run import wire
from legato.run.from_trl import resolve_trl
from tests.proof.command import Command, assert_refused

STORED = json.loads((Path(__file__).parent / "data/trl_fields.json").read_text())
FIELDS: dict[str, Any] = {**STORED["GRPOConfig"], **STORED["trl grpo"]}
"""Every field of TRL 1.16.0 with its default."""
GSPO = {
    "importance_sampling_level": "sequence",
    "loss_type": "grpo",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
    "beta": 0.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 8,
    "max_steps": 400,
}


def options(**settings: Any) -> dict[str, Any]:
    return dict(translate(settings).options)


def notes(**settings: Any) -> str:
    return "\n".join(translate(settings).notes)


def test_every_field_of_trl_has_an_answer_with_trls_default() -> None:
    assert [name for name in FIELDS if name not in TRL] == []
    assert {name: TRL[name].default for name in FIELDS} == FIELDS


# A value other than the default for every option; without one here, the default is changed by its type.
OTHER: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "optim": "adamw_8bit",
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "num_generations": 4,
    "num_generations_eval": 2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_strategy": "no",
    "warmup_ratio": 0.1,
    "warmup_steps": 3,
    "importance_sampling_level": "sequence",
    "loss_type": "bnpo",
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "reward_weights": [1.0, 0.5],
    "reward_funcs": ["my_rewards.right"],
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": 0.5,
    "chat_template_kwargs": {"enable_thinking": False},
    "model_init_kwargs": {"dtype": "bfloat16"},
    "report_to": ["wandb"],
    "dtype": "bfloat16",
    "bf16": False,
    "lora_target_modules": ["q_proj"],
    "output_dir": "outputs/mine",
    "dataset_config": "main",
    "max_prompt_length": 99,
    "min_p": 0.1,
    "vllm_max_model_length": 2048,
}
ALONGSIDE: dict[str, dict[str, Any]] = {
    **{key: {"loss_type": "sapo"} for key in ["sapo_temperature_neg", "sapo_temperature_pos"]},
    **{key: {"loss_type": "vespo"} for key in ["vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"]},
    **{key: {"use_vllm": True} for key in [name for name in TRL if name.startswith("vllm_importance_sampling")]},
    **{key: {"use_peft": True} for key in [name for name in TRL if name.startswith("lora_")]},
    **{key: {"dataset_name": "mine/data"} for key in ["dataset_config", "dataset_train_split"]},
    **{key: {"use_adaptive_entropy": True} for key in ["entropy_coef_max", "entropy_coef_delta", "entropy_target"]},
    "use_bias_correction_kl": {"beta": 0.1},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_min_lr"},
    "warmup_ratio": {"max_steps": 100},
    "eval_steps": {"eval_strategy": "steps"},
    "num_generations_eval": {"eval_strategy": "steps"},
}


def other_value(name: str) -> Any:
    if name in OTHER:
        return OTHER[name]
    default = TRL[name].default
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return 16 if name == "per_device_train_batch_size" else 7 if isinstance(default, int) else default / 2 + 0.125
    return [1] if isinstance(default, list) else 3 if default is None and name in ("delta", "epsilon_high") else "other"


NUMBERS = {"router_aux_loss_coef", "off_policy_mask_threshold", "vllm_importance_sampling_cap", "save_total_limit"}


@pytest.mark.parametrize("name", TRL)
def test_no_option_of_trl_is_silently_ignored(name: str) -> None:
    """Changing an option changes the recipe, or is told by name, or is refused by name."""
    value = 4 if name in NUMBERS else other_value(name)
    base = ALONGSIDE.get(name, {})
    before = translate(base)
    try:
        after = translate({**base, name: value})
    except InputError as error:
        assert TRL[name].answer == "refused" and name in str(error) and TRL[name].says in str(error)
        return
    changed = dict(before.options) != dict(after.options)
    told = set(after.notes) - set(before.notes)
    if TRL[name].answer == "translated":
        assert changed or any(name in note for note in told), (name, value)
    else:
        assert TRL[name].answer in ("no effect", "left out") and any(name in note for note in told)
        assert not changed


def test_trls_defaults_are_written_out_where_ours_differ() -> None:
    found = options(max_steps=100)
    assert found["training.betas"] == [0.9, 0.999] and found["training.schedule"] == "linear"
    assert (found["training.seed"], found["rollouts.max_response_tokens"]) == (42, 512)
    assert (found["training.prompts_per_step"], found["training.updates_per_step"], found["training.steps"]) == (1, 1, 100)
    assert (found["algorithm.name"], found["algorithm.aggregate"]) == ("grpo", "token-mean")
    assert found["algorithm.objective.trust.clip.low"] == found["algorithm.objective.trust.clip.high"] == 0.2
    assert (found["algorithm.advantage.ddof"], found["algorithm.advantage.epsilon"]) == (1, 1e-4)


def test_the_usual_gspo_block_becomes_gspo_with_the_papers_clip() -> None:
    translation = translate(GSPO)
    resolved = load([], [], lowest=translation.layer())
    assert resolved.algorithm.name == "gspo"
    assert resolved.values["algorithm.objective.trust.clip.low"] == 3e-4
    assert (resolved.config.training.prompts_per_step, resolved.config.training.updates_per_step) == (8, 4)
    assert resolved.config.training.steps == 100
    assert resolved.provenance["algorithm.objective.trust.clip.low"] == "TRL: epsilon"
    assert {line.partition(" ")[0] for line in resolved.deviations} == {"advantage.ddof", "advantage.epsilon"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"importance_sampling_level": "sequence"}, "epsilon = 0.2 is the clip of a token ratio"),
        ({"importance_sampling_level": "sequence"}, "loss_type = 'dapo', the default of TRL, divides by tokens"),
        ({}, "one update per step"),
        ({"loss_type": "cispo"}, "caps every weight below 1"),
        ({"use_peft": True}, "learning_rate = 1e-06 with adapters"),
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, "by the ratio of the response"),
        ({"reward_weights": [1.0, 2.0]}, "reward.components.NAME.weight"),
        ({"num_train_epochs": 2}, "num_train_epochs = 2: training.steps is epochs x problems / 1"),
        (GSPO, "shuffles the responses of a step"),
    ],
)
def test_differences_of_meaning_are_told(settings: dict[str, Any], sentence: str) -> None:
    assert sentence in notes(**settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gradient_accumulation_steps": 4}, (4, 1, 1)),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, (4, 1, 1)),
        ({"steps_per_generation": 4}, (4, 4, 1)),
        ({"generation_batch_size": 32}, (4, 4, 1)),
        ({"generation_batch_size": 64, "steps_per_generation": 4}, (8, 4, 1)),
        ({"per_device_train_batch_size": 16, "num_iterations": 3}, (2, 1, 3)),
    ],
)
def test_batches_of_trl_become_prompts_and_updates(settings: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = options(**settings)
    assert tuple(found[f"training.{name}_per_step"] for name in ("prompts", "updates", "epochs")) == expected


def test_epochs_become_steps_and_plain_text_gets_no_template_once_the_data_is_known() -> None:
    translation = translate({"num_train_epochs": 2, "warmup_ratio": 0.1, "per_device_train_batch_size": 32})
    assert "training.steps" not in translation.options
    fitted = translation.for_data(100, plain_text=True)
    assert fitted.options["training.steps"] == math.ceil(2 * 100 / 4)
    assert fitted.options["training.warm_up_updates"] == 5
    assert fitted.options["policy.chat"] == "never"
    assert "policy.chat" not in translation.for_data(100, plain_text=False).options


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_loss_of_trl_loads(loss: str, level: str) -> None:
    settings = {
        **GSPO,
        "loss_type": loss,
        "importance_sampling_level": level,
        "use_vllm": True,
        "mask_truncated_completions": True,
        "beta": 0.01,
        "entropy_coef": 0.01,
    }
    resolved = load([], [], lowest=translate(settings).layer())
    assert resolved.config.rollouts.samples_per_prompt == 8


def test_rewards_of_the_file_become_components_with_weights() -> None:
    found = options(reward_funcs=["accuracy_reward", "my.rewards.short"], reward_weights=[1.0, 0.25])
    assert found["reward.components.accuracy_reward.kind"] == "math-verify"
    assert (found["reward.components.short.kind"], found["reward.components.short.weight"]) == ("my.rewards:short", 0.25)
    assert options(reward_funcs=["my.rewards.short"])["reward.kind"] == "my.rewards:short"


def gdpo_weights(translation: Translation) -> object:
    return translation.options["algorithm.advantage.weights"]


def test_weights_of_decoupled_rewards_are_sorted_by_component_name_as_in_a_batch() -> None:
    settings = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.1, 1.0]}
    assert gdpo_weights(translate({**settings, "reward_funcs": ["think_format_reward", "accuracy_reward"]})) == [1.0, 0.1]
    functions = ["my.a", "get_soft_overlong_punishment", "my.z", "my.b"]
    four = translate({**settings, "reward_weights": [1.0, 2.0, 3.0, 4.0], "reward_funcs": functions})
    assert gdpo_weights(four) == [1.0, 4.0, 2.0, 3.0]  # a, b, overlong, z
    unnamed = translate(settings)
    assert "reward_weights stand there in their own order" in "\n".join(unnamed.notes)
    given = unnamed.for_rewards(["short", "right"]).for_data(100, plain_text=False)
    assert gdpo_weights(given) == [1.0, 0.1] and given.reward_weights == [0.1, 1.0]
    assert "own order" not in "\n".join(given.notes)


def test_two_rewards_with_one_name_are_both_kept() -> None:
    settings = {"reward_funcs": ["a.fmt", "b.fmt"], "reward_weights": [1.0, 0.5]}
    components = load([], [], lowest=translate(settings).layer()).config.reward.components
    assert {name: (each.kind, each.weight) for name, each in components.items()} == {
        "fmt": ("a:fmt", 1.0),
        "fmt-2": ("b:fmt", 0.5),
    }


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        (["accuracy_reward"], "solution"),
        (["accuracy_reward", "think_format_reward"], "solution"),
        (["think_format_reward", "accuracy_reward", "get_soft_overlong_punishment"], "solution"),
        (["think_format_reward"], False),
        (["accuracy_reward", "my.short"], False),
    ],
)
def test_trls_own_rewards_read_answers_from_the_column_solution(functions: list[str], answer: object) -> None:
    assert options(reward_funcs=functions, dataset_name="mine/data")["task.answer"] == answer


def test_the_first_reward_of_a_file_judges_and_the_others_shape() -> None:
    settings = {"reward_funcs": ["get_soft_overlong_punishment", "my.right", "my.short"]}
    components = load([], [], lowest=translate(settings).layer()).config.reward.components
    assert {name: each.judges for name, each in components.items()} == {"right": True, "short": False}
    assert "the first reward, right, decides whether an answer is right" in notes(**settings)
    assert "the first reward" not in notes(reward_funcs=["my.right"])


def test_the_punishment_of_long_responses_is_told() -> None:
    settings = {"reward_funcs": ["my.right", "get_soft_overlong_punishment"], "reward_weights": [1.0, 0.5]}
    text = notes(**settings)
    assert "the last 20 % of max_completion_length, up to reward.overlong.factor = 0.5; in TRL its own arguments" in text


@pytest.mark.parametrize("folder", [".", "/", "..", "./"])
def test_an_output_directory_without_a_name_names_no_run(folder: str) -> None:
    found = options(output_dir=folder, run_name="mine")
    assert found["output.directory"] == str(Path(folder)) and found["output.name"] == "mine"
    assert "output.name" not in options(output_dir=folder)
    named = options(output_dir="outputs/sums")
    assert (named["output.directory"], named["output.name"]) == ("outputs", "sums")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rte": 1}, "got 'learning_rte'; did you mean 'learning_rate'?"),
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1 cannot be translated"),
        ({"num_generations": 3}, "expected a multiple of num_generations = 3, got 8 responses"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "do not fit"),
        ({"steps_per_generation": 4, "per_device_train_batch_size": 4}, "4 updates a step need at least 4 prompts, got 2"),
        ({"loss_type": "ppo"}, "expected one of grpo"),
        ({"optim": "lion_8bit"}, "(optim)"),
        ({"lr_scheduler_type": "polynomial"}, "(lr_scheduler_type)"),
        ({"learning_rate": "fast"}, "got 'fast' (learning_rate)"),
        ({"max_steps": "many"}, "got 'many' (max_steps)"),
        ({"num_generations": 0}, "expected a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_translated_is_refused_with_its_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        translate(settings)
    assert message in str(raised.value)


class Interval(Enum):
    NO = "no"


def test_a_config_object_is_read_by_its_fields() -> None:
    """As a GRPOConfig is after its __post_init__: enums, both sizes of the batch, fields of other versions."""
    fields = [("learning_rate", float, 1e-6), ("eval_strategy", Interval, Interval.NO), ("newer_field", int, 3)]
    fields += [("steps_per_generation", int, 2), ("generation_batch_size", int, 32), ("per_device_train_batch_size", int, 8)]
    config = make_dataclass("GRPOConfig", fields)()
    translation = read_trl(config)
    assert translation.source == "GRPOConfig"
    assert translation.options["training.prompts_per_step"] == 4  # two processes of 8 responses, twice
    config.newer_field = 4
    with pytest.raises(InputError, match="got 'newer_field'"):
        read_trl(config)


def test_a_whole_config_of_a_newer_version_is_read_and_its_new_fields_are_told(tmp_path: Path) -> None:
    """Nobody can take a field out of a GRPOConfig: transformers 5.23 has one more that its __post_init__ sets."""
    fields = [(name, Any, None) for name in [*STORED["GRPOConfig"], "newer_field"]]
    config = make_dataclass("GRPOConfig", fields)(**STORED["GRPOConfig"], newer_field="a value")
    dumped = tmp_path / "trl.json"
    dumped.write_text(json.dumps({**STORED["GRPOConfig"], "newer_field": "a value"}))
    for translation in (read_trl(config), read_trl(dumped)):
        (note,) = [note for note in translation.notes if "newer_field = 'a value'" in note]
        assert note.startswith("left out, since TRL 1.16.0 does not have them")
        assert translation.options["training.lr"] == 1e-6
        assert translation.for_data(64, plain_text=True).notes.count(note) == 1
    assert "activation_checkpointing" in TRL  # of transformers 5.23


def test_each_thing_that_trls_script_passes_is_asked_for(tmp_path: Path) -> None:
    """A reward in tables must not hide that data and model are missing: the defaults are sums and the tiny model."""
    translation = translate(GSPO)
    with pytest.raises(InputError, match="expected data and model beside the configuration of TRL"):
        resolve_trl(translation, [], ["reward.components.right.kind=exact"], None, wire.PythonObjects())


def test_the_placeholder_of_a_secret_is_not_told() -> None:
    assert "hub_token" not in notes(hub_token="<HUB_TOKEN>") and "hub_token" in notes(hub_token="hf_x")


def test_yaml_and_json_are_read_and_other_files_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("learning_rate: 2e-6\nreport_to: [wandb]\n")
    (tmp_path / "a.json").write_text('{"learning_rate": 2e-6, "report_to": ["wandb"]}')
    pages = [read_trl(tmp_path / name) for name in ("a.yaml", "a.json")]
    assert pages[0].options == pages[1].options and pages[0].options["training.lr"] == 2e-6
    for name, text, message in (
        ("b.json", "{", "is not JSON"),
        ("c.json", "[]", "expected an object"),
        ("d.yaml", "a: [", "YAML"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=message):
            read_trl(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_trl(tmp_path / "missing.json")
    with pytest.raises(InputError, match="expected a GRPOConfig"):
        read_trl(3)


def test_the_printed_recipe_loads_to_the_same_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legato = Command(monkeypatch, capsys)
    settings = {**GSPO, "use_peft": True, "model_name_or_path": "tiny", "mask_truncated_completions": True, "beta": 0.1}
    path = tmp_path / "trl.json"
    path.write_text(json.dumps(settings))
    code, text, error = legato("train", "--from-trl", str(path), "--print-recipe", "training.seed=5")
    assert code == 0, error
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    assert load([recipe]).values == load([], ["training.seed=5"], lowest=translate(settings).layer()).values
    assert tomllib.loads(text)["training"]["seed"] == 5
    assert "# - a step samples 64 responses = 8 prompts x 8, for 4 updates" in text
    assert_refused(legato("train", "--print-recipe"), "expected --from-trl FILE")
    assert_refused(legato("train", "--from-trl", str(path), "policy.model=tiny"), "expected data and reward beside")


def test_names_of_older_versions_are_read_under_their_new_names() -> None:
    old = {"evaluation_strategy": "steps", "eval_steps": 10, "vllm_max_model_len": 1000, "max_completion_length": 200}
    translation = translate({**old, "use_liger_loss": True, "vllm_device": "cuda:0", "max_steps": 100})
    assert (translation.options["evaluation.every_steps"], translation.options["policy.max_prompt_tokens"]) == (10, 800)
    told = "\n".join(translation.notes)
    assert "evaluation_strategy is called eval_strategy" in told and "vllm_device" in told and "use_liger_kernel" in told
    with pytest.raises(InputError, match="vllm_structured_outputs_regex"):
        translate({"vllm_guided_decoding_regex": "[0-9]+"})


def test_options_of_older_versions_that_are_off_are_left_out_and_told() -> None:
    translation = translate({"no_cuda": False, "push_to_hub_token": None, "past_index": -1, "learning_rate": 1e-5})
    assert translation.options["training.lr"] == 1e-5
    assert any("no_cuda, push_to_hub_token, past_index" in note for note in translation.notes)
    with pytest.raises(InputError, match="no_cuda"):
        translate({"no_cuda": True})
