"""Random models on random walks over layouts of 4 to 8 ranks, for real training: drawn so that few reach every kind."""

import itertools
import random
from dataclasses import dataclass, replace

from tests import oracle_experts, toys
from tests.histogram import ALL
from tests.jobs import Case

from dynatrain.layout.legality import problems
from dynatrain.layout.resolve import resolve
from dynatrain.layout.text import print_layout
from dynatrain.space.blocks import Experts
from dynatrain.space.decoder import DecoderShape
from dynatrain.space.optimizers import OPTIMIZERS

SEEDS = range(40)
MICRO_BATCHES = 8
TOKENS = {4: 16, 5: 20, 6: 12, 7: 14, 8: 16}
"""Tokens of a sample, by number of ranks: as few as every cp cuts in two chunks a rank."""
SIZES = tuple(TOKENS)
CHANGES = tuple(itertools.permutations(ALL, 2))
"""Each axis that shrinks with each that grows. Forty walks are too few for chance: each is asked for two of them."""

NEAR = 1e-11
"""Scores that lie nearer than that may change places in another order of summing."""
DISCRETE = {
    "8-bit codes": "a moment between two codes, or a scale between two numbers of fp32, may go to either",
    "bf16 Newton-Schulz": "a gradient between two numbers of bf16 may go to either",
    "top-k": f"two experts whose scores are nearer than {NEAR:g} may change places",
}
"""All that may flip by a difference of 1e-16, where a reduction has not the oracle's bits. The list is closed: of these
walks alone the state right after each switch is compared, and not what training makes of it later.
(``test_optimizer_switches`` compares what these optimizers make of gradients with equal bits.)"""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A random model on four layouts, the third perhaps the first again, and back to the first.

    Attributes:
        toy: sizes, as the histogram counts them.
        stops: the layouts, the first again as the last.
        case: what runs.
    """

    toy: toys.Toy
    stops: tuple
    case: Case

    @property
    def switches(self):
        return [(self.toy, before, after) for before, after in itertools.pairwise(self.stops)]


def walk(seed):
    """The one of a seed; size, optimizer and two changes of axes follow from its number, the rest is random."""
    pick, size = random.Random(seed).choice, SIZES[seed % 5]
    name = tuple(OPTIMIZERS)[(seed + seed // 5) % 5]
    wanted = [CHANGES[(2 * seed + n) % len(CHANGES)] for n in range(2)]
    while True:
        of = toys.toy(pick, size if size in (5, 7) else 1)
        of = replace(of, optimizer=name, rest="adamw" if name == "muon" else name)
        shape = shape_of(pick, of)
        pairs = [pair(pick, of, shape, size, *change) for change in wanted]
        if not all(pairs):
            continue
        stops = (*pairs[0], *pairs[1], pairs[0][0])
        if all(before != after for before, after in itertools.pairwise(stops)):
            break
    case = Case(
        tour=tuple(map(print_layout, stops)),
        size=size,
        modes=pick((("keep", "tight"), ("tight", "keep"))),
        seed=seed,
        shape=shape,
        micro_batches=MICRO_BATCHES,
        tokens=TOKENS[size],
        optimizer=name,
        bf16=name == "muon" and pick((False, False, True)),
        moved=True,
    )
    return Walk(toy=of, stops=stops, case=case)


def pair(pick, of, shape, size, shrinks, grows):
    """Two legal layouts, resolved, between which one axis shrinks and another grows; None where chance finds none."""
    for _ in range(150):
        before, after = (resolve(toys.layout(pick, of, size), of.layers) for _ in range(2))
        less = after.size(shrinks) < before.size(shrinks)
        if less and after.size(grows) > before.size(grows) and all(legal(one, shape, size) for one in (before, after)):
            return before, after
    return None


def legal(layout, shape, size):
    return not problems(layout, shape.limits(), num_microbatches=MICRO_BATCHES, sequence=TOKENS[size])


def shape_of(pick, of):
    """A decoder with the sizes of a toy."""
    chosen = pick([n for n in (1, 2, 3) if n <= of.experts] or [0])
    experts = of.experts and Experts(
        num_experts=of.experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=of.expert_inner,
        gate=pick(("softmax", "sigmoid")),
        # The weight of a single expert, divided by itself, has no gradient but what rounding leaves.
        norm_topk_prob=chosen > 1 and pick((False, True)),
        n_shared_experts=pick((0, 1)),
        first_k_dense_replace=min(of.dense, of.layers - 1),
        router_aux_loss_coef=pick((0.0, 0.1)),
    )
    return DecoderShape(
        hidden_size=of.width,
        intermediate_size=of.inner,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        head_dim=2 * of.head,
        vocab_size=of.vocabulary,
        tie_word_embeddings=of.tied,
        qk_norm=pick((False, True)),
        dropout=0.1,
        attention_dropout=pick((0.0, 0.1)),
        max_position_embeddings=64,
        experts=experts or None,
    )


def flips(case, nearest=float("inf")):
    """Which of :data:`DISCRETE` may happen in a run; ``nearest`` is the least distance of two scores in it."""
    may = {
        "8-bit codes": case.optimizer == "adamw8bit",
        "bf16 Newton-Schulz": case.bf16,
        "top-k": nearest < NEAR,
    }
    assert may.keys() == DISCRETE.keys()
    return [name for name, there in may.items() if there]


class Nearest:
    """The oracle's choice of experts, which notes how near the last chosen score and the first other one come."""

    def __init__(self):
        self.choice, self.least = oracle_experts.choice, float("inf")

    def __call__(self, sizes, scores):
        ranked, last = sorted(scores, reverse=True), sizes.num_experts_per_tok
        if last < len(ranked):
            self.least = min(self.least, ranked[last - 1] - ranked[last])
        return self.choice(sizes, scores)
