"""How the weights and the state of the optimizer are spread over ranks, in numbers held by each rank.

    "none"        every rank holds everything
    "optimizer"   weights and gradients are whole on every rank; masters and moments are divided by the ranks (ZeRO-1)
    "layers"      weights, gradients and moments of the layers are divided (FSDP2); the weights lie in float32, as their own
                  masters, and are gathered in 16 bits. The embedding, the last norm, the head and adapters are as in
                  "optimizer"

With "layers" a rank also holds whole layers: the 16-bit weights of the layer that is computed and of the next one, which is
gathered meanwhile; the gradient of a layer, and the flat copy of it that the ranks add up. Where there is memory it keeps
all layers gathered during the updates of a step, or all layers and their whole gradients (`kept`; `ranks/layers.py`). The
local engine samples from a copy of all layers at fixed addresses, unless sampling runs on servers.
"""

from dataclasses import dataclass

WAYS = ("none", "optimizer", "layers")
KEPT = ("nothing", "weights", "gradients")
"""What a rank holds whole during the updates of a step with "layers"; "gradients": weights and gradients."""


def describe_kept(kept: str, *, adapters: bool) -> str:
    """A note on what is held whole; `adapters`: the layers themselves are not trained."""
    words = {
        "nothing": "a layer is gathered for each pass and given back after it",
        "weights": "layers stay gathered during the updates of a step, and gradients are added up in each pass",
        "gradients": "layers and their gradients stay whole during the updates of a step",
    }[kept]
    if adapters and kept != "nothing":
        words = "layers stay gathered during the updates of a step"
    return f"{words} (training.keep_layers = {kept!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The way of sharding and the number of ranks."""

    way: str = "none"
    ranks: int = 1
    resident: bool = False
    """With "layers": whether each rank holds a whole copy of the layers for its local engine."""
    kept: str = "nothing"

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"expected one of {', '.join(WAYS)}, got {self.way!r} (the way of sharding)")
        if self.ranks < 1:
            raise ValueError(f"expected at least one rank, got {self.ranks}")
        if self.kept not in KEPT:
            raise ValueError(f"expected one of {', '.join(KEPT)}, got {self.kept!r} (what is kept whole)")

    def weights(self, layers: int, rest: int) -> int:
        """How many of the layers' and the other weights a rank holds."""
        return self._part(layers) + rest if self.way == "layers" else layers + rest

    def gradients(self, layers: int, rest: int) -> int:
        """How many gradients of the layers' and the other weights a rank holds."""
        return layers + rest if self.kept == "gradients" else self.weights(layers, rest)

    def state(self, count: int) -> int:
        """For how many of `count` trained weights a rank holds masters and moments."""
        return count if self.way == "none" else self._part(count)

    def gathered(self, layer: int, trained: int, size: int, exact: int, layers: int) -> int:
        """Bytes of whole layers: `layer` weights of `size` bytes twice, `trained` gradients of `exact` bytes twice.

        Where they are kept: the weights of all `layers`, and the gradients of one layer unless those of all are held.
        """
        if self.way != "layers":
            return 0
        gradients = 2 * trained * exact if self.kept != "gradients" else 0
        return (2 * layer if self.kept == "nothing" else layers) * size + gradients

    def copied(self, layers: int) -> int:
        """How many weights the copy of the local engine holds."""
        return layers if self.way == "layers" and self.resident else 0

    def _part(self, count: int) -> int:
        return -(-count // self.ranks)
