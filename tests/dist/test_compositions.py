"""Every composition of two axes against one process: the loss, every gradient and the global norm, after one backward.

One session of ranks takes all rows of a model, one after the other: each is built, given its initial values and run
over one global batch. Nothing is trained, so that an error of one sum cannot hide in an optimizer's division.
"""

import gc
import itertools
from dataclasses import replace

import pytest
from tests.backward import Backward, alone, groups_of
from tests.jobs import SHAPE, TOKENS, Case, everywhere
from tests.shapes import QWEN3_MOE, experts_shape, latent_shape, small_shape

from dynatrain.layout.form import LayoutError
from dynatrain.layout.legality import problems
from dynatrain.layout.text import parse_layout
from dynatrain.models.experts import MixtureOfExperts
from dynatrain.space.ownership import Ownership
from dynatrain.train import parallel, reduction, trainer

AXES = {
    "pp": ("pp2", "pp2v2", "pp2-zb", "pp2v2-zb", "pp2v2-zbv"),
    "dp": ("dp2",),
    "fsdp": ("fsdp2", "fsdp2-z2", "fsdp2-z1"),
    "cp": ("cp2", "cp2-ring", "cp2-ulysses", "cp2-ring-z2", "cp2-z1"),
    "tp": ("tp2", "tp2-sp"),
}
"""Each axis of ranks, in every form that it has."""

FEW = {axis: forms[: 3 if axis == "pp" else 2] for axis, forms in AXES.items()}
"""Forms that are tried beside experts that are dealt out in all ways."""
ALONE = ("fsdp4", "cp4", "cp4-ring", "tp4", "tp4-sp", "pp4", "pp4-zb", "dp4")
DEALT = ("", ".ep2", ".etp2", ".ep2.etp2")
DEALT_FOUR = (*DEALT, ".ep4", ".etp4")

FOUR = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8}
SHAPES = {
    "dense": SHAPE,
    "tied, one key/value head": small_shape(
        **FOUR, num_key_value_heads=1, tie_word_embeddings=True, qk_norm=True, vocab_size=61
    ),
    "gpt2": small_shape(family="gpt2", **FOUR, num_key_value_heads=8, attention_dropout=0.2),
    "softmax": experts_shape(
        replace(QWEN3_MOE, router_aux_loss_coef=0.1), num_hidden_layers=4, num_key_value_heads=4, qk_norm=True
    ),
    "sigmoid, latent, shared": latent_shape(num_hidden_layers=4, router_aux_loss_coef=0.1),
}
QUICK = {
    "dense": ("pp2v2.cp2-ring", "fsdp2-z1.tp2-sp"),
    "tied, one key/value head": ("pp2-zb.tp2-sp", "pp2v2-zbv.fsdp2-z2"),
    "gpt2": ("dp2.cp2-ulysses",),
    "softmax": ("fsdp2.cp2.ep2.etp2",),
    "sigmoid, latent, shared": ("pp2.fsdp2.etp2", "tp4-sp.ep2"),
}
"""Each form of an axis but a few of ZeRO's at least once, and each axis beside most others."""


def legal(text, shape):
    try:
        layout = parse_layout(text)
    except LayoutError:
        return False
    return not problems(layout, shape.limits(), world_size=4, num_microbatches=4, sequence=TOKENS)


def rows(shape):
    """The compositions of two axes, of four ranks, that a model allows; experts dealt out in each way beside them."""
    axes, dealt, four = (FEW, DEALT, DEALT_FOUR) if shape.experts else (AXES, DEALT[:1], DEALT[:1])
    pairs = [
        f"{one}.{other}"
        for first, second in itertools.combinations(axes, 2)
        for one, other in itertools.product(axes[first], axes[second])
    ]
    texts = [f"{base}{more}" for bases, ways in ((pairs, dealt), (ALONE, four)) for base in bases for more in ways]
    return tuple(text for text in texts if legal(text, shape))


def compared(given, faults=()):
    """``{row: {rank: apart}}`` of each ``(model, layout)`` given, and of each planted fault by its name."""
    every = {row: row for row in given} | {fault: FAULTS[fault][1] for fault in faults}
    cases = {model: Case(tour=(), shape=SHAPES[model]) for model, _ in every.values()}
    expected = {model: alone(case) for model, case in cases.items()}

    def work(world):
        groups, found = groups_of(world), {}
        for key, (model, text) in every.items():
            with pytest.MonkeyPatch.context() as patch:
                if key in FAULTS:
                    FAULTS[key][0](patch)
                found[key] = Backward(groups, cases[model], text).apart(expected[model])
            gc.collect()
        return found

    told = everywhere(4, work, 550)
    return {key: {rank: one[key] for rank, one in enumerate(told)} for key in every}


def _kept_by_its_rank(patch):
    def keep(_self, output_tensor, input_tensor, group, **_how):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

    patch.setattr(reduction.TreeReduceScatter, "__call__", keep)


def _divided_by_ep(patch):
    reduce_in_tree = parallel._reduce_in_tree

    def reduce(part, layout, group):
        reduce_in_tree(part, layout, group)
        for module in part.modules():
            if isinstance(module, MixtureOfExperts):
                module.experts.set_gradient_divide_factor(float(layout.ep))

    patch.setattr(parallel, "_reduce_in_tree", reduce)


def _over_the_ranks_own_tokens(patch):
    micro_batches = trainer.Sharing.micro_batches

    def made(sharing, data, ids, layout, *more):
        batches, tokens = micro_batches(sharing, data, ids, layout, *more)
        return batches, tokens // layout.size("cp")

    patch.setattr(trainer.Sharing, "micro_batches", made)


FAULTS = {
    "gradients are not reduced over cp": (
        _kept_by_its_rank,
        ("dense", "dp2.cp2-ring"),
        {"loss": False, "norm": True, "layers.0.mlp.up_proj.weight": True},
    ),
    "experts' gradients are divided by ep": (
        _divided_by_ep,
        ("softmax", "dp2.fsdp2.ep2"),
        {"loss": False, "norm": True, "layers.0.mlp.gate.weight": False, "layers.0.mlp.experts.up_proj": True},
    ),
    "the loss is over a cp rank's tokens": (
        _over_the_ranks_own_tokens,
        ("dense", "dp2.cp2"),
        {"loss": True, "norm": True},
    ),
    "copies count twice in the norm": (
        lambda patch: patch.setattr(Ownership, "copy_index", lambda *_: 0),
        ("dense", "dp2.tp2"),
        {"loss": False, "norm": True, "layers.0.mlp.up_proj.weight": False},
    ),
    "two holders' gradients are not added": (
        lambda patch: patch.setattr(trainer._Bound, "_reduce_tied", lambda _: None),
        ("tied, one key/value head", "pp2.tp2"),
        {"loss": False, "norm": True, "embed_tokens.weight": True, "layers.0.mlp.up_proj.weight": False},
    ),
}
"""What is planted, where, and of which quantities it shows in, or does not."""
PLANTED = tuple(FAULTS)[:2]


def wrong(found):
    """Of each row that is not the oracle's: the rank and the quantity that is furthest off, and how far."""
    worst = {
        row: max(((far, rank, what) for rank, of in ranks.items() for what, far in of.items())) for row, ranks in found
    }
    return {row: it for row, it in worst.items() if not it[0] <= 1e-12}


def check_shown(found, faults):
    for fault in faults:
        for what, shows in FAULTS[fault][2].items():
            far = max(of[what] for of in found[fault].values() if what in of)
            assert far > 1e-6 if shows else far <= 1e-12, (fault, what, far)


def test_compositions_of_every_axis_are_one_process_and_planted_faults_are_not():
    given = [(model, text) for model, texts in QUICK.items() for text in texts]

    found = compared(given, PLANTED)

    assert wrong((row, found[row]) for row in given) == {}
    check_shown(found, PLANTED)


@pytest.mark.sweep
def test_each_planted_fault_shows_where_it_must_and_nowhere_else():
    check_shown(compared((), FAULTS), FAULTS)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", SHAPES)
def test_every_composition_of_two_axes_is_one_process(model):
    given = [(model, text) for text in rows(SHAPES[model])]

    assert wrong(compared(given).items()) == {}


def test_the_table_has_every_two_axes_in_every_form():
    """What is not there is refused: zero bubble under ZeRO-3, and a stage of ZeRO of cp behind that of fsdp."""
    table = set(rows(SHAPES["dense"]))
    for first, second in itertools.combinations(AXES, 2):
        for one, other in itertools.product(AXES[first], AXES[second]):
            refused = "-zb" in one and second in {"fsdp", "cp"} and "-z" not in other
            refused = refused or (first == "fsdp" and "-z" in other)
            assert (f"{one}.{other}" in table) == (not refused), (one, other)
    for dealt, axis in itertools.product(("ep2", "etp2"), AXES):
        for form in FEW[axis]:
            assert any({form, dealt} <= set(text.split(".")) for text in rows(SHAPES["softmax"])), (form, dealt)
    for model, texts in QUICK.items():
        assert set(texts) <= set(rows(SHAPES[model]))
