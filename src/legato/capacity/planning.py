"""The plan of a setup: memory per GPU, whether it fits, and the time of a step."""

from dataclasses import dataclass

from legato.capacity.measured import Result, measured
from legato.capacity.memory import Need, need_of
from legato.capacity.setup import Setup
from legato.capacity.times import Times, times_of
from legato.training.memory.sharding import describe_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a setup needs. All of it is calculated."""

    setup: Setup
    need: Need
    times: Times

    @property
    def fits(self) -> bool:
        return self.need.fits

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens a second on all GPUs; None if they are sampled elsewhere."""
        return None if self.setup.servers else self.setup.response_total / self.times.step

    def results(self) -> list[Result]:
        """What was measured of this model."""
        return [result for result in measured().results if result.model == self.setup.model.name]

    def remarks(self) -> list[str]:
        """What a reader should know beside the figures."""
        setup, need, lines = self.setup, self.need, list[str]()
        if need.slots < need.wanted_slots:
            lines.append(f"the engine decodes {need.slots} rows at a time instead of {need.wanted_slots}: more do not fit")
        idle = 0 if setup.servers else max(0, setup.gpus - setup.prompts)
        if idle:
            lines.append(f"{idle} of {setup.gpus} GPUs have no group to sample: raise training.prompts_per_step")
        idle = setup.share_of_update(setup.mean_prompt, setup.mean_response).idle_gpus
        if idle:
            lines.append(f"{idle} of {setup.gpus} GPUs have no row in an update: raise training.prompts_per_step")
        if setup.offload:
            held = f"{need.memory.host / 1e9:,.0f} GB of optimizer state for each GPU"
            cores = measured().host_bytes_per_second.cores
            lines.append(f"the host holds {held}; the optimizer's time was measured with {cores} cores for a GPU")
        if setup.servers:
            lines.append("responses are sampled on other machines, whose memory and time are not planned")
        if setup.model.is_mixture:
            lines.append("times of mixtures rest on 6 layers of Qwen3-30B-A3B, decoding on a mixture of 1.3 billion weights")
        if setup.hardware.figures != "measured":
            lines.append(f"{setup.hardware.name} was not measured: its data sheet, times the shares that the H200 reached")
        if setup.shard == "layers":
            lines.append(describe_kept(need.kept, adapters=setup.lora_rank > 0))
            lines.append("sharded layers were not measured on several GPUs; what FSDP2 itself costs is not counted")
        return lines


def plan_setup(setup: Setup) -> Plan:
    """The plan of a setup."""
    need = need_of(setup)
    return Plan(setup=setup, need=need, times=times_of(setup, need))
