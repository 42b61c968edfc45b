"""The trainer on a GPU: bf16 weights with float32 log-probs and masters, the same engine, the same packs."""

from collections.abc import Sequence
from itertools import chain

import pytest
import torch

from legato.algorithms.catalogue import entry
from legato.core.batch import collate
from legato.core.outcome import Coefficients
from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.core.texts import Texts
from legato.policy.head.head import Head
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape
from legato.policy.policy import Piece, Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.episodes import Runner
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.local.select import local_engine
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.tasks.procedural import Arithmetic
from legato.tasks.source import Generated
from legato.tasks.task import Split
from legato.training.collect import Collector, CollectorSettings
from legato.training.optimizer import Optimizer, OptimizerSettings
from legato.training.probe import probe
from legato.training.step import Trainer, TrainingSettings
from legato.training.tables import Tables
from tests.policy.exact import accumulate, ones
from tests.proof.waits import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
    scores = [float(rollout.text[:1] == str(rollout.problem.answer)[:1]) for rollout in rollouts]
    return [Score(reward=score, accuracy=score) for score in scores]


def collector(policy: Policy) -> Collector:
    return Collector(
        source=Generated(split=Split(task=Arithmetic(), share=0.2), seed=0),
        runner=Runner(
            engine=local_engine(policy, 256, record_routes=True),
            rendering=Rendering(tokenizer=policy.tokenizer),
            limits=Limits(max_response_tokens=8, end_tokens=(1,)),
        ),
        judge=judge,
        sampling=Sampling(),
        settings=CollectorSettings(samples_per_prompt=8, max_prompt_tokens=32),
        seed=0,
    )


def trainer(policy: Policy, name: str = "gspo", **settings: object) -> Trainer:
    return Trainer(
        policy=policy,
        algorithm=entry(name).value,
        source=collector(policy),
        optimizer=Optimizer(policy.parameters(), OptimizerSettings(lr=1e-3), total_updates=100),
        settings=TrainingSettings(prompts_per_step=8, **settings),  # type: ignore[arg-type]
    )


def test_bf16_weights_have_float32_masters_and_log_probs() -> None:
    policy = load_policy("tiny", Loading())
    assert policy.device.type == "cuda"
    assert all(p.dtype == torch.bfloat16 for p in policy.parameters().values())
    run = trainer(policy)
    assert all(master.dtype == torch.float32 for master in run.optimizer.masters.values())
    addresses = {name: p.data_ptr() for name, p in policy.parameters().items()}
    report = run.step()
    assert report.metrics["update/applied"] == 1.0
    assert {name: p.data_ptr() for name, p in policy.parameters().items()} == addresses
    for name, weight in policy.parameters().items():
        assert torch.equal(weight, run.optimizer.masters[name].to(torch.bfloat16))


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_where_nothing_moves_every_ratio_is_exactly_one(model: str) -> None:
    """Old log-probs recomputed without a gradient, new ones with one, in the same packs, over two epochs."""
    settings = {"anchor": "recompute", "updates_per_step": 2, "skip_silent_rows": False, "epochs_per_step": 2}
    run = trainer(load_policy(model, Loading()), **settings)
    for group in run.optimizer.inner.param_groups:
        group["peak"] = 0.0
    report = run.step()
    assert report.metrics["ratio/sequence_max"] == report.metrics["ratio/sequence_min"] == 1.0


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_gpu_computes_what_the_cpu_does(model: str) -> None:
    on_cpu = load_policy(model, Loading(device="cpu", dtype="float32"))
    on_gpu = load_policy(model, Loading(device="cuda", dtype="float32"))
    groups, _ = collector(on_cpu).next(6)
    batch = collate(groups)
    rows = torch.arange(len(batch))
    left = on_cpu.score(Tables.from_batch(batch, on_cpu.device).texts, rows)
    right = on_gpu.score(Tables.from_batch(batch, on_gpu.device).texts, rows)
    assert torch.allclose(left.logprobs, right.logprobs.cpu(), atol=2e-4)
    assert torch.allclose(left.entropy, right.entropy.cpu(), atol=2e-4)


def test_an_update_repeats_to_the_bit() -> None:
    weights = []
    for _ in range(2):
        run = trainer(load_policy("tiny", Loading()), anchor="recompute", update_passes="one")
        for _ in range(2):
            run.step()
        weights.append({name: p.detach().clone() for name, p in run.policy.parameters().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"lora": Lora(rank=4)}, {"packing": False}])
def test_the_ways_to_train_run(options: dict[str, object]) -> None:
    run = trainer(load_policy("tiny", Loading(**options)))  # type: ignore[arg-type]
    assert run.step().metrics["update/applied"] == 1.0


def test_gradient_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = load_policy("tiny", Loading(dtype="float32", gradient_checkpointing=checkpointing))
        groups, _ = collector(policy).next(4)
        texts = Tables.from_batch(collate(groups), policy.device).texts
        accumulate(policy, texts, torch.arange(len(texts)), ones)
        gradients.append({name: p.grad for name, p in policy.parameters().items()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-4), name


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"gradient_checkpointing": True}, {"packing": False}])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_same_pack_with_and_without_a_gradient_is_equal_to_the_bit(model: str, options: dict[str, object]) -> None:
    policy = load_policy(model, Loading(**options))  # type: ignore[arg-type]
    groups, _ = collector(policy).next(8)
    floor = probe(policy, entry("gspo").value, Tables.from_batch(collate(groups, policy.dtype), policy.device), 16384)
    assert floor.same_tokens == 0.0 and floor.same.ratio == 0.0 and floor.same.clipped == 0.0


def test_greedy_equals_generate() -> None:
    policy = load_policy("tiny", Loading(dtype="float32"))
    prompts = [Rendering(tokenizer=policy.tokenizer).prompt(Problem(prompt=text)) for text in ("12+3=", "7=", "99+10=")]
    rows = LocalEngine(policy).generate(
        [Request(prompt=prompt, seeds=(0,)) for prompt in prompts],
        Sampling(temperature=0),
        Limits(max_response_tokens=10, end_tokens=(1,)),
    )
    for prompt, row in zip(prompts, rows, strict=True):
        ids = prompt.cuda().unsqueeze(0)
        plain = policy.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert row[0].tokens.tolist() == plain[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *(("tiny", options) for options in ({}, {"graphs": False}, {"fused": False}, {"rows_at_once": 7})),
        # torch's grouped product in float32 copies from the host, which no graph can capture.
        *(("tiny-moe", {"graphs": False, **options}) for options in ({}, {"fused": False}, {"rows_at_once": 7})),
    ],
)
def test_slots_and_graphs_write_what_the_plain_engine_does(model: str, options: dict[str, int]) -> None:
    from legato.rollouts.gpu.engine import GraphedEngine

    policy = load_policy(model, Loading(dtype="float32"))
    rendering = Rendering(tokenizer=policy.tokenizer)
    requests = [
        Request(prompt=rendering.prompt(Problem(prompt=text)), seeds=tuple(range(100 * place, 100 * place + 5)))
        for place, text in enumerate(("37+5=", "1+2=", "99+12=", "5=", "a in banana=", "12*34=", "7", "x y z="))
    ]
    for sampling in (Sampling(), Sampling(temperature=0.7), Sampling(temperature=0), Sampling(top_p=0.8)):
        limits = Limits(max_response_tokens=40, end_tokens=(1,), stop=("+",))
        plain = LocalEngine(policy).generate(requests, sampling, limits)
        rows = GraphedEngine(policy, **options).generate(requests, sampling, limits)  # type: ignore[arg-type]
        for left, right in zip(chain(*plain), chain(*rows), strict=True):
            assert left.tokens.tolist() == right.tokens.tolist()
            assert (left.text, left.stop) == (right.text, right.stop)
            assert torch.allclose(left.logprobs, right.logprobs, atol=1e-5)


def test_graphs_see_the_weights_of_the_next_update() -> None:
    run = trainer(load_policy("tiny", Loading(dtype="float32")))
    for _ in range(3):
        run.step()
    groups, _ = run.source.next(4)
    batch = collate(groups)
    scored = run.policy.score(Tables.from_batch(batch, run.policy.device).texts, torch.arange(len(batch))).logprobs.cpu()
    assert torch.allclose(scored[batch.texts.mask], batch.sampler_logprobs[batch.texts.mask], atol=1e-4)


def test_a_model_the_slots_cannot_serve_gets_a_plainer_engine_and_a_note() -> None:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    tokenizer = load_policy("tiny", Loading(dtype="float32")).tokenizer
    config = DeepseekV3Config(
        vocab_size=len(tokenizer), intermediate_size=32, first_k_dense_replace=1, **shape, **latent, **experts
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = load_policy(model, Loading(dtype="float32"), tokenizer=tokenizer)
    engine = local_engine(policy, 16)
    assert isinstance(engine, LocalEngine)
    assert sum("engine" in note and "plain" in note for note in policy.notes) == 1
    requests = [Request(prompt=torch.tensor([5, 6, 7]), seeds=(1, 2))]
    (row,) = engine.generate(requests, Sampling(), Limits(max_response_tokens=4, end_tokens=()))
    assert all(len(response.tokens) == 4 for response in row)


def make_policy(layers: int = 2, **changes: object) -> Policy:
    """A small Qwen3 in bf16 with the head size of the published models."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {
        "vocab_size": 4099,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16).cuda()
    return Policy(model=model, tokenizer=None, name="shaped", **changes)  # type: ignore[arg-type]


def ragged_texts() -> Texts:
    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (12,), generator=source)
    return Texts(
        prompts=torch.randint(0, 4099, (3, 90), generator=source),
        prompt_lengths=torch.tensor([90, 1, 40]),
        tokens=torch.randint(0, 4099, (12, 200), generator=source),
        lengths=lengths,
        mask=torch.arange(200) < lengths[:, None],
        group=torch.arange(12) // 4,
        temperature=torch.linspace(0.6, 1.2, 12),
    )


def logprobs_and_gradient(policy: Policy, texts: Texts) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs as an update computes them, and the gradient of a fixed weighted sum of them."""
    weight = torch.randn(texts.tokens.shape, generator=torch.Generator().manual_seed(1)).to(policy.device)

    def respond(piece: Piece) -> Coefficients:
        logprobs = piece.channels.logprobs
        return Coefficients(logprobs=weight[piece.rows, : logprobs.shape[1]] * (logprobs != 0))

    policy.model.zero_grad()
    for parameter in policy.model.parameters():
        parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
    channels, _ = accumulate(policy, texts, torch.arange(len(texts)), respond)
    return channels.logprobs, {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


WAYS: dict[str, dict[str, object]] = {
    "fused": {},
    "prompts unshared": {"shared_prompts": False},
    "own layers": {"fused": False},
    "padded rows": {"packing": False},
    "logits computed again": {"logits_at_once": 4099 * 64},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_in_16_bits_is_near_float32(way: str) -> None:
    texts = ragged_texts()
    exact = make_policy()
    exact.model.float()
    right, slopes = logprobs_and_gradient(exact, texts)
    policy = make_policy(**WAYS[way])
    logprobs, mine = logprobs_and_gradient(policy, texts)
    assert float((logprobs - right).abs().max()) < 0.06
    for name, slope in slopes.items():
        likeness = torch.nn.functional.cosine_similarity(mine[name].flatten().double(), slope.flatten().double(), 0)
        assert float(likeness) > 0.999, name
    # the same pack scored without a gradient, and the same gradient again: equal to the bit
    assert torch.equal(policy.score(texts, torch.arange(12)).logprobs, logprobs)
    assert all(torch.equal(slope, mine[name]) for name, slope in logprobs_and_gradient(policy, texts)[1].items())


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (30.0, 0.5)])
def test_the_head_is_ten_times_nearer_to_float64_than_16_bit_logits(softcap: float | None, scale: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    linear = torch.nn.Linear(256, 4099, bias=False, device="cuda", dtype=torch.bfloat16)
    targets, temperature = torch.randint(0, 4099, (512,), device="cuda"), torch.full((512,), 0.8, device="cuda")
    logits = hidden.double() @ linear.weight.detach().double().t() * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    right = (logits / 0.8).log_softmax(1).gather(1, targets[:, None])[:, 0]
    logprobs, _ = Head(linear=linear, scale=scale, softcap=softcap).score(hidden, targets, temperature)
    rounded = (logits.bfloat16().double() / 0.8).log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert float((logprobs.detach() - right).abs().max()) * 10 < float((rounded - right).abs().max())


ROUTED: dict[str, dict[str, object]] = {"rspo": {}, "grpo": {"routing_replay": "R2"}, "gspo": {"routing_replay": "R3"}}


@pytest.mark.parametrize("name", ROUTED)
def test_the_first_update_of_a_mixture_has_a_ratio_of_exactly_one_under_replay_too(name: str) -> None:
    policy = load_policy("tiny-moe", Loading(tiny=TinyShape(experts=8)))
    settings: dict[str, object] = {"anchor": "recompute", "updates_per_step": 1, "skip_silent_rows": False}
    settings |= ROUTED[name]
    report = trainer(policy, name, **settings).step()
    assert report.metrics["ratio/sequence_min"] == report.metrics["ratio/sequence_max"] == 1.0
    assert report.metrics["router/flip_mean"] == 0.0 and report.metrics["router/shift_mean"] == 1.0
    assert report.metrics.get("router/replay_missing", 0.0) == 0.0


@pytest.mark.parametrize("name", ["gspo", "grpo", "gspo-token"])
def test_an_update_does_not_wait_for_the_device(name: str) -> None:
    run = trainer(load_policy("tiny", Loading()), name, anchor="recompute", updates_per_step=1)
    run.step()
    groups, _ = run.source.next(8)
    batch = collate(groups, run.policy.dtype)
    tables = Tables.from_batch(batch, run.policy.device)
    updates = run._plan(tables)
    tables = run._score_old_policy(tables.with_advantages(run.algorithm), updates)
    silent = run._silent_rows(tables)
    torch.cuda.synchronize()
    with no_waiting():
        run._update(tables, updates[0], silent, marked=False)


def test_lora_on_the_head_scores_as_peft_does_but_from_float32_accumulators() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, tie_word_embeddings=False), dtype=torch.bfloat16).cuda()
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["lm_head"], init_lora_weights=False))
    layer = model.get_base_model().lm_head
    hidden = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    targets, temperature = torch.randint(0, 512, (100,), device="cuda"), torch.ones(100, device="cuda")
    head = Head(linear=layer, scale=1.0, softcap=None)
    logprobs, _ = head.score(hidden, targets, temperature)
    right = layer(hidden).double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert float((logprobs - right).detach().abs().max()) < 0.1
    assert torch.allclose(head.exact(hidden).log_softmax(1).gather(1, targets[:, None])[:, 0], logprobs, atol=1e-3)
    logprobs.sum().backward()
    assert layer.lora_B["default"].weight.grad is not None and layer.base_layer.weight.grad is None
