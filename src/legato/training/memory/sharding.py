"""How the weights and the state of the optimizer are spread over ranks, in numbers held by each rank.

    "none"        every rank holds everything
    "optimizer"   weights and gradients are whole on every rank; masters and moments are divided by the ranks (ZeRO-1)
    "layers"      weights, gradients and moments of the layers are divided (FSDP2); the weights lie in float32, as their own
                  masters, and are gathered in 16 bits. The embedding, the last norm, the head and adapters are as in
                  "optimizer"

With "layers" a rank also holds whole layers: the 16-bit weights of the layer that is computed and of the next one, which is
gathered meanwhile; the gradient of a layer, and the flat copy of it that the ranks add up. The local engine samples from a
copy of all layers at fixed addresses, unless sampling runs on servers.
"""

from dataclasses import dataclass

WAYS = ("none", "optimizer", "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The way of sharding and the number of ranks."""

    way: str = "none"
    ranks: int = 1
    resident: bool = False
    """With "layers": whether each rank holds a whole copy of the layers for its local engine."""

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"expected one of {', '.join(WAYS)}, got {self.way!r} (the way of sharding)")
        if self.ranks < 1:
            raise ValueError(f"expected at least one rank, got {self.ranks}")

    def weights(self, layers: int, rest: int) -> int:
        """How many of the layers' and the other weights a rank holds; gradients are held alike."""
        return self._part(layers) + rest if self.way == "layers" else layers + rest

    def state(self, count: int) -> int:
        """For how many of `count` trained weights a rank holds masters and moments."""
        return count if self.way == "none" else self._part(count)

    def gathered(self, layer: int, trained: int, size: int, exact: int) -> int:
        """Bytes of whole layers: `layer` weights of `size` bytes twice, `trained` gradients of `exact` bytes twice."""
        return 2 * layer * size + 2 * trained * exact if self.way == "layers" else 0

    def copied(self, layers: int) -> int:
        """How many weights the copy of the local engine holds."""
        return layers if self.way == "layers" and self.resident else 0

    def _part(self, count: int) -> int:
        return -(-count // self.ranks)
