"""The bytes that ranks exchange in a step, and how long that takes at the stated link speeds.

With N ranks each rank receives (N - 1) / N of a buffer that all gather or reduce together.

    "optimizer"   each update: float32 gradients are reduced, 16-bit weights are gathered, once all packs are done
    "layers"      each pack: the layers' weights are gathered for the forward and again for the backward, their float32
                  gradients are reduced, while other layers are computed; a scoring pack gathers the weights once. The
                  embedding, the head and adapters are exchanged as in "optimizer", and a local engine gathers the layers
                  once a step
      weights kept      the layers' weights are gathered once a step and after each update, which nothing hides; gradients
                        are reduced in each pack
      gradients kept    the same, and gradients are reduced once an update, as in "optimizer"

Only the trained weights have gradients: with adapters, these are few.
"""

from dataclasses import dataclass

from legato.capacity.setup import Setup
from legato.training.memory.sharding import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes and seconds of a step's exchanges."""

    bytes: float
    """Received by each rank."""
    bus: float
    """Bytes per second."""
    overlapping: float
    """Seconds of exchanges that run while layers are computed."""

    @property
    def seconds(self) -> float:
        """Seconds of all exchanges, hidden or not."""
        return self.bytes / self.bus

    def describe(self, hidden: float) -> str:
        """What the seconds are calculated from; `hidden` seconds are covered by computing."""
        covered = f", {hidden:.2g} s of it while computing" if hidden else ""
        return f"{self.bytes / 1e9:,.1f} GB at {self.bus / 1e9:.0f} GB/s{covered}"


def traffic_of(setup: Setup, *, scoring_packs: int, training_packs: int, kept: str = KEPT[0]) -> Traffic:
    """The exchanges of a step with so many packs on each rank; `kept`: what is held whole of divided layers."""
    bus = setup.hardware.bus(setup.gpus)
    if setup.gpus == 1 or setup.shard == "none":
        return Traffic(bytes=0.0, bus=bus, overlapping=0.0)
    shape, received = setup.model.shape, (setup.gpus - 1) / setup.gpus
    steps = setup.updates * setup.epochs
    outside = shape.parameters_outside
    inside = setup.model.parameters - outside
    adapters = shape.adapters(setup.lora_rank) if setup.lora_rank else 0
    # Trained weights in layers, trained weights that every rank has whole, and the bytes in which they are gathered.
    in_layers, rest, written = (0, adapters, 4) if adapters else (inside, outside, setup.size)
    if setup.shard == "optimizer":
        return Traffic(bytes=received * steps * (in_layers + rest) * (4 + written), bus=bus, overlapping=0.0)
    after = steps * rest * (4 + written) + (0 if setup.servers else setup.size * inside)
    if kept == "nothing":
        by_pack = training_packs * (2 * setup.size * inside + 4 * in_layers) + scoring_packs * setup.size * inside
    else:
        by_pack = training_packs * 4 * in_layers if kept == "weights" else 0
        after += setup.size * inside + steps * in_layers * (setup.size + (4 if kept == "gradients" else 0))
    return Traffic(bytes=received * (by_pack + after), bus=bus, overlapping=received * by_pack / bus)
