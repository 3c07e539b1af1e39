"""The links that a transfer takes, and how long each is busy with what it carries.

Every rank has a port in and a port out inside its node, and one of each to other nodes; every node has its network
cards, one way and the other, by rail; what changes rails, or all of it where there is one rail, crosses the core.
"""

from dataclasses import dataclass

import numpy as np

from dynatrain.plan.table import Ints
from dynatrain.simulate.machines import Machines

_NONE = "nothing"


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Links of one kind: numbers ``first`` to ``first + count`` of all links, each of ``rate`` bytes per second."""

    name: str
    first: int
    count: int
    rate: float


class Links:
    """All links of ``ranks`` ranks, by number.

    Attributes:
        machines: what they are made of.
        rate: bytes per second of each link.
    """

    def __init__(self, machines: Machines, ranks: int) -> None:
        self.machines = machines
        nodes, rails = -(-ranks // machines.ranks_per_node), machines.rails
        core = nodes * machines.rail / machines.oversubscription
        fabric = 1e9 * machines.fabric_gb_s or float("inf")
        given = [
            ("rank {} sends within its node", ranks, machines.near),
            ("rank {} receives within its node", ranks, machines.near),
            ("rank {} sends to other nodes", ranks, machines.far),
            ("rank {} receives from other nodes", ranks, machines.far),
            ("node {node} sends on rail {rail}", nodes * rails, machines.rail),
            ("node {node} receives on rail {rail}", nodes * rails, machines.rail),
            ("rail {} into the core", rails, core),
            ("rail {} out of the core", rails, core),
            ("inside of node {}", nodes, fabric),
            (_NONE, 1, float("inf")),
        ]
        self._kinds: list[_Kind] = []
        first = 0
        for name, count, rate in given:
            self._kinds.append(_Kind(name, first, count, rate))
            first += count
        self.rate = np.repeat([kind.rate for kind in self._kinds], [kind.count for kind in self._kinds])

    def of(self, src: Ints, dst: Ints) -> Ints:
        """The links of each transfer, (7, transfers); where one has fewer, that of no rate at all."""
        rpn, rails = self.machines.ranks_per_node, self.machines.rails
        none, (out, into) = self._kinds[-1].first, (src // rpn, dst // rpn)
        here = out == into
        (up, down) = src % rpn % rails, dst % rpn % rails
        crosses = ~here & ((up != down) | (rails == 1))
        near_out, near_in, far_out, far_in, cards_out, cards_in, core_in, core_out, fabric = (
            kind.first for kind in self._kinds[:-1]
        )
        return np.stack(
            [
                np.where(here, near_out, far_out) + src,
                np.where(here, near_in, far_in) + dst,
                np.where(here, none, cards_out + out * rails + up),
                np.where(here, none, cards_in + into * rails + down),
                np.where(crosses, core_in + up, none),
                np.where(crosses, core_out + down, none),
                np.where(here, fabric + out, none),
            ]
        )

    def name(self, link: int) -> str:
        """What a link is, for people."""
        kind = next(kind for kind in self._kinds if kind.first <= link < kind.first + kind.count)
        node, rail = divmod(link - kind.first, self.machines.rails)
        return kind.name.format(link - kind.first, node=node, rail=rail)
