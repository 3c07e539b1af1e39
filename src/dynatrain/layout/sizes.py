"""Which sizes a world may have: the settings ``[world] min, max, sizes, step``, whatever a model allows."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes that a run may have.

    Attributes:
        min: fewest ranks.
        max: most ranks; None for as many as there are places.
        sizes: the only ones; empty for any.
        step: what every size is a multiple of.
    """

    min: int = 1
    max: int | None = None
    sizes: tuple[int, ...] = ()
    step: int = 1

    def allows(self, size: int) -> bool:
        """Whether there may be ``size`` ranks."""
        return not self._broken(size)

    def problem(self, size: int) -> str:
        """Which settings forbid ``size`` ranks, with the nearest sizes that they allow; empty where none does."""
        broken = self._broken(size)
        if not broken:
            return ""
        near = " or ".join(map(str, self.nearest(size))) or "none"
        return f"{size} ranks are not allowed: {', '.join(broken)}; nearest: {near}"

    def nearest(self, size: int) -> tuple[int, ...]:
        """The largest allowed size below ``size`` and the smallest above it, as far as there are any."""
        if self.sizes:
            found = sorted(one for one in self.sizes if self.allows(one) and one != size)
            return (*[one for one in found if one < size][-1:], *[one for one in found if one > size][:1])
        most = size - 1 if self.max is None else min(size - 1, self.max)
        ends = most // self.step * self.step, -(-max(size + 1, self.min) // self.step) * self.step
        return tuple(one for one in ends if one != size and self.allows(one))

    def contradictions(self) -> tuple[str, ...]:
        """What the settings contradict each other in; empty where they do not."""
        if not self.nearest(0):
            given = {"min": self.min, "max": self.max, "sizes": list(self.sizes), "step": self.step}
            said = ", ".join(f"world.{name} = {value}" for name, value in given.items() if value not in (None, []))
            return (f"no size is allowed by all of {said}",)
        return tuple(
            f"world.sizes has {size}, which {' and '.join(broken)} forbids"
            for size in self.sizes
            if (broken := self._broken(size))
        )

    def _broken(self, size: int) -> list[str]:
        rules = (
            (size < self.min, f"world.min = {self.min}"),
            (self.max is not None and size > self.max, f"world.max = {self.max}"),
            (bool(self.sizes) and size not in self.sizes, f"world.sizes = {list(self.sizes)}"),
            (size % self.step != 0, f"world.step = {self.step}"),
        )
        return [said for broken, said in rules if broken]
