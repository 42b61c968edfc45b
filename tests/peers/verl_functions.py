"""verl's loss and advantage functions, imported without verl.

`verl/trainer/ppo/core_algos.py` is arithmetic on tensors, but importing it the usual way pulls in ray, tensordict and
hydra. Here the packages around it are replaced by empty ones that only know where their files are, so that the module
itself, and the arithmetic it calls (`verl.utils.torch_functional`, `verl.utils.groupwise`), are verl's own files as
installed. Stood in for: the package initialisers, the config classes, and `tensordict` and `omegaconf` where they
are not installed (only named in signatures). `sys.modules` is left as it was found.
"""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from tests.peers.sides import Batch, Side


class ActorConfig(SimpleNamespace):
    """The fields the loss functions read, with the defaults of verl's actor.yaml."""

    def __init__(self, **fields: object) -> None:
        defaults = {
            "clip_ratio": 0.2,
            "clip_ratio_low": None,
            "clip_ratio_high": None,
            "clip_ratio_c": 3.0,
            "tau_pos": 1.0,
            "tau_neg": 1.05,
            "global_batch_info": {},
            "policy_loss": SimpleNamespace(
                clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=2e-4, ppo_kl_coef=0.1
            ),
        }
        super().__init__(**(defaults | fields))

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def installed_folder() -> Path:
    """Where verl's files are, or ImportError. Looking the package up does not run it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no package of that name")
    return Path(spec.submodule_search_locations[0])


def package(name: str, folder: Path | None = None, **members: object) -> ModuleType:
    """An empty package of that name whose submodules are found in `folder`."""
    module = ModuleType(name)
    module.__path__ = [] if folder is None else [str(folder)]
    vars(module).update(members)
    sys.modules[name] = module
    return module


def load() -> ModuleType:
    """verl's `core_algos`, or ImportError."""
    folder = installed_folder()
    before = dict(sys.modules)
    try:
        for absent, name in (("tensordict", "TensorDict"), ("omegaconf", "DictConfig")):
            if importlib.util.find_spec(absent) is None:
                package(absent, **{name: type(name, (), {})})
        package("verl", folder)
        utils = package("verl.utils", folder / "utils")
        package("verl.trainer", folder / "trainer")
        package("verl.trainer.ppo", folder / "trainer" / "ppo")
        package("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
        package("verl.workers")
        package("verl.workers.config", ActorConfig=ActorConfig)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            groupwise = importlib.import_module("verl.utils.groupwise")
            utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std
            return importlib.import_module("verl.trainer.ppo.core_algos")
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("verl", "tensordict", "omegaconf"):
                del sys.modules[name]


def verl_side(core: ModuleType, batch: Batch, loss: str, aggregation: str, **config: object) -> Side:
    """A registered policy loss of verl on the batch; `config` are fields of its actor config."""
    logprobs = batch.logprobs.clone().requires_grad_()
    value, metrics = core.get_policy_loss_fn(loss)(
        old_log_prob=batch.old_logprobs,
        log_prob=logprobs,
        advantages=batch.advantages[:, None].expand_as(logprobs),
        response_mask=batch.mask.to(logprobs.dtype),
        loss_agg_mode=aggregation,
        config=ActorConfig(**config),
    )
    value.backward()
    return Side(loss=value.item(), gradient=logprobs.grad, metrics=metrics)


def verl_advantages(
    core: ModuleType, estimator: str, rewards: Tensor, mask: Tensor, group: Tensor, **more: object
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B, T] of an outcome reward placed on the last token that counts."""
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    token_rewards = torch.zeros(mask.shape, dtype=rewards.dtype)
    token_rewards[torch.arange(len(rewards)), last] = rewards
    function = core.get_adv_estimator_fn(estimator)
    weights = mask.to(rewards.dtype)
    if "values" in more:
        return function(token_level_rewards=token_rewards, response_mask=weights, **more)
    return function(token_level_rewards=token_rewards, response_mask=weights, index=group.numpy(), **more)
