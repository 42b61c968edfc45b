"""The public names and signatures. A change here is a change for every user: it belongs in the changelog."""

import inspect
import subprocess
import sys

import legato

SIGNATURES = {
    "loss": (
        "algorithm",
        "*",
        "logprobs",
        "advantages",
        "mask",
        "old_logprobs=None",
        "group=None",
        "counts=None",
        "sampler_logprobs=None",
        "kept_logmass=None",
        "ref_logprobs=None",
        "entropy=None",
        "values=None",
        "old_values=None",
        "returns=None",
        "turn=None",
        "rollout=None",
        "router_shift=None",
        "keep=None",
        "uniform=None",
        "state=None",
        "metrics=True",
    ),
    "counts": (
        "algorithm",
        "*",
        "mask",
        "group=None",
        "old_logprobs=None",
        "sampler_logprobs=None",
        "kept_logmass=None",
        "turn=None",
        "rollout=None",
        "router_shift=None",
        "keep=None",
    ),
    "algorithm": ("name", "overrides=None"),
    "train": (
        "model=None",
        "problems=None",
        "reward=None",
        "algorithm=None",
        "*",
        "recipe=()",
        "trl=None",
        "tokenizer=None",
        "callback=None",
        "watcher=None",
        "resume_if_exists=False",
        "allow_changes=False",
        "progress=True",
        "options",
    ),
    "advantages": (
        "algorithm",
        "*",
        "rewards",
        "group=None",
        "mask=None",
        "values=None",
        "turn=None",
        "turn_rewards=None",
        "turn_states=None",
        "components=None",
        "old_logprobs=None",
        "ref_logprobs=None",
    ),
}
MEMBERS = {
    "Algorithm": {
        *("name", "advantage", "filters", "objective", "aggregate", "settings"),
        *("scope", "count", "evaluate", "estimate", "keep", "own_parts", "initial", "advance", "calibrated"),
    },
    "Outcome": {"loss", "field", "trace", "sums", "coefficients", "entropy_coefficients", "value_coefficients", "metrics"},
    "Counts": {"all", "kept", "tables", "tally", "equals", "fits"},
    "Advantages": {"advantages", "returns"},
    "Problem": {"prompt", "answer", "fields", "key"},
    "Rollout": {
        *("problem", "rollout_id", "prompt_tokens", "tokens", "sampler_logprobs", "version", "text", "stop", "temperature"),
        *("mask", "turn", "author", "kept_logmass", "routes", "turn_rewards", "turn_states", "dialogue", "server", "fault"),
        *("earlier", "rows", "length", "sampled"),
    },
    "Run": {"directory", "accuracy", "accuracy_greedy", "model_folder", "reason", "exit_code", "rank"},
    "TurnScores": {"scores"},
    "Unscorable": {"reason"},
}  # fmt: skip


def test_the_exported_names_are_pinned() -> None:
    assert sorted(legato.__all__) == sorted([*SIGNATURES, *MEMBERS, "__version__"])
    assert dir(legato) == sorted(legato.__all__)


def test_the_signatures_are_pinned() -> None:
    for name, expected in SIGNATURES.items():
        parameters, starred = [], False
        for parameter in inspect.signature(getattr(legato, name)).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
                parameters.append("*")
                starred = True
            default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"
            parameters.append(parameter.name + default)
        assert tuple(parameters) == expected, name


def test_the_members_of_public_types_are_pinned() -> None:
    for name, expected in MEMBERS.items():
        members = {member for member in dir(getattr(legato, name)) if not member.startswith("_")}
        assert members == expected, name


def test_legato_advantages_is_the_function_not_the_package() -> None:
    from legato.advantages.group import GroupCentre

    assert inspect.isfunction(legato.advantages)
    assert GroupCentre().name == "group-centre"
    program = "from legato.advantages import group; import legato; assert callable(legato.advantages)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_torch_is_not_loaded_before_it_is_needed() -> None:
    program = "import sys, legato, legato.cli.main; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(legato, "lose")
