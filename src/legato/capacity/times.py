"""The time of a step by phase, calculated for the busiest GPU.

    sampling       prefill at the speed of scoring; decoding: roofline / measured share + steps x layers x measured seconds
    old log-probs  FLOPs of a forward at the measured share of the speed of products
    updates        FLOPs of forward and backward at their measured share
    optimizer      bytes of gradients, masters, moments and weights at the bandwidth of the GPU; offloaded: bytes over PCIe,
                   then bytes of host memory at their measured speed, or at the GPU's share of the host if that is less
    communication  `links.py`: what computing does not hide

A pack takes at least the time in which the host launches its layers. Every row has a gradient and is computed in one pass
unless two are configured. Rewards, evaluations and checkpoints are not counted.
"""

from dataclasses import dataclass

from legato.capacity.links import Traffic, traffic_of
from legato.capacity.measured import measured
from legato.capacity.memory import Need
from legato.capacity.setup import Setup
from legato.capacity.work import Pass, decode_floor, packs_of, pass_over_groups, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a step."""

    name: str
    seconds: float
    how: str
    """What the seconds are calculated from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The phases of a step."""

    phases: tuple[Phase, ...]
    sampled_elsewhere: bool
    """Whether sampling runs on other machines and is not part of the times."""
    traffic: Traffic

    @property
    def step(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    def seconds(self, name: str) -> float:
        """The seconds of a phase; 0 if there is none of this name."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def times_of(setup: Setup, need: Need) -> Times:
    """The time of a step of a setup whose memory is `need`."""
    scoring, training = _scoring(setup), _training(setup, need)
    traffic = traffic_of(setup, scoring_packs=scoring.packs, training_packs=training.packs, kept=need.kept)
    hidden = min(traffic.overlapping, scoring.seconds + training.seconds)
    exposed = traffic.seconds - hidden
    phases = [
        *([] if setup.servers else [_sampling(setup, need)]),
        *(
            [scoring.phase("old log-probs" if not setup.reference else "old and reference log-probs")]
            if scoring.flops
            else []
        ),
        training.phase("updates"),
        _optimizer(setup),
        *([Phase(name="communication", seconds=exposed, how=traffic.describe(hidden))] if setup.gpus > 1 else []),
    ]
    return Times(phases=tuple(phases), sampled_elsewhere=setup.servers, traffic=traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Passes over packs."""

    flops: float
    packs: int
    seconds: float
    share: float
    matmul: float
    launched: float
    """Seconds that the host needs for the launches."""

    def phase(self, name: str) -> Phase:
        how = f"{self.flops / 1e12:,.0f} TFLOP at {self.share:.0%} of {self.matmul / 1e12:,.0f} TFLOP/s"
        if self.launched > self.flops / (self.share * self.matmul):
            how = f"launching {self.packs} packs; {how} would take less"
        return Phase(name=name, seconds=self.seconds, how=how)


def _passes(setup: Setup, flops: float, packs: int, share: float, launches: int) -> _Passes:
    launched = packs * launches * setup.model.shape.layers * measured().host_seconds_per_layer.value
    return _Passes(
        flops=flops,
        packs=packs,
        seconds=max(launched, flops / (share * setup.hardware.matmul)),
        share=share,
        matmul=setup.hardware.matmul,
        launched=launched,
    )


def _update_packs(setup: Setup) -> int:
    share = setup.share_of_update(setup.mean_prompt, setup.mean_response)
    return packs_of(share.pieces, setup.mean_prompt, share.rows, setup.mean_response, setup.tokens_per_pack)


def _step_pass(setup: Setup) -> Pass:
    """One forward over all rows of a step, on the busiest GPU."""
    share = setup.share_of_update(setup.mean_prompt, setup.mean_response)
    pieces = share.pieces * pieces_of(setup.mean_prompt, share.rows, setup.mean_response, setup.tokens_per_pack)
    load = (setup.mean_prompt, share.responses, setup.mean_response)
    return pass_over_groups(setup.model.shape, setup.updates, *load, pieces=pieces)


def _scoring(setup: Setup) -> _Passes:
    share = setup.scored_share + (1.0 if setup.reference else 0.0)
    packs = round(share * setup.updates * _update_packs(setup))
    return _passes(setup, share * _step_pass(setup).forward, packs, measured().scoring_share(setup), 1)


def _training(setup: Setup, need: Need) -> _Passes:
    forward = _step_pass(setup)
    flops = forward.training(frozen=setup.lora_rank > 0, recomputed=need.checkpointing)
    if setup.passes == 2:
        flops += forward.forward
    # A backward takes about as long to launch as two forwards.
    launches = 3 + (1 if need.checkpointing else 0) + (setup.passes - 1)
    packs = setup.epochs * setup.updates * _update_packs(setup)
    return _passes(setup, setup.epochs * flops, packs, measured().training_share(setup), launches)


def _sampling(setup: Setup, need: Need) -> Phase:
    """Prefill and decoding of the rows of one GPU, `need.slots` rows at a time."""
    shape, hardware, factors = setup.model.shape, setup.hardware, measured()
    rows, at_once = setup.groups * setup.samples, max(1, need.slots)
    prefill = pass_over_groups(shape, setup.groups, setup.mean_prompt, 0, setup.mean_response).forward
    share, extra = factors.decoding_share(setup), factors.decoding_seconds_per_step(setup)

    def decode(together: int) -> float:
        floor = decode_floor(
            shape,
            setup.size,
            rows=together,
            samples=setup.samples,
            prompt=setup.mean_prompt,
            response=setup.mean_response,
            matmul=hardware.matmul,
            bandwidth=hardware.bandwidth,
        )
        return floor / share + setup.mean_response * extra

    whole, rest = divmod(rows, at_once)
    seconds = prefill / (factors.scoring_share(setup) * hardware.matmul)
    seconds += whole * decode(at_once) + (decode(rest) if rest else 0.0)
    together = f"{rows} rows" if rows <= at_once else f"{rows} rows, {at_once} at a time"
    how = (
        f"{together}, {setup.mean_response} tokens each; {share:.0%} of the roofline, {1e3 * extra:.1f} ms a token beside it"
    )
    return Phase(name="sampling", seconds=seconds, how=how)


def offloaded_bytes(size: int, *, eight_bit: bool = False) -> tuple[int, int]:
    """(bytes over PCIe, bytes read and written on the host) of a weight of `size` bytes, in a step of an offloaded AdamW."""
    moments = 2 if eight_bit else 8
    # The gradient comes, the weight goes back.
    link = 4 + size
    # Gradient read, master and moments read and written; then the master read and the weight written. The norm is the GPU's.
    return link, 4 + 2 * (4 + moments) + 4 + size


def _optimizer(setup: Setup) -> Phase:
    """Steps of AdamW: norm, update of masters and moments, copy of the masters into the weights."""
    shape, hardware = setup.model.shape, setup.hardware
    full = setup.model.parameters if setup.trained is None else setup.trained
    trained = shape.adapters(setup.lora_rank) if setup.lora_rank else full
    mine = trained / (setup.gpus if setup.shard != "none" else 1)
    steps = setup.updates * setup.epochs
    copied = 4 + setup.size if setup.size < 4 and not setup.lora_rank else 0
    moments = 2 if setup.eight_bit else 8
    # Read: gradient twice (norm, step), master, moments; written: master, moments.
    device = 4 + 4 + 2 * 4 + 2 * moments + copied
    if not setup.offload:
        seconds, how = (
            mine * device / hardware.bandwidth,
            f"{mine * device / 1e9:,.1f} GB at {hardware.bandwidth / 1e12:.2f} TB/s",
        )
    else:
        size = max(setup.size, 4) if setup.lora_rank else setup.size
        link, on_host = (mine * each for each in offloaded_bytes(size, eight_bit=setup.eight_bit))
        # The GPUs of a machine step at the same time and share its memory.
        share = hardware.host * hardware.gpus_per_node / min(setup.gpus, hardware.gpus_per_node)
        speed = min(measured().host_bytes_per_second.value, share)
        seconds = link / hardware.pcie + on_host / speed
        how = (
            f"{link / 1e9:,.0f} GB over PCIe at {hardware.pcie / 1e9:.0f} GB/s, then {on_host / 1e9:,.0f} GB"
            f" in host memory at {speed / 1e9:.0f} GB/s"
        )
    return Phase(name="optimizer", seconds=steps * seconds, how=f"{steps} x {how}" if steps > 1 else how)
