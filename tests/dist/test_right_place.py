"""Address stamps and poison over every ordered pair of ten layouts: each element lands where it belongs."""

import pytest
import torch
from tests.addresses import arriving
from tests.jobs import TEN, circuit, everywhere, late
from tests.walks import BUNDLE, FEW, LAYERS, SMALLEST, TENSORS, Walker

from dynatrain.execute.memory import Nearest
from dynatrain.execute.transport import GroupTransport

nearest = Nearest()

pytestmark = pytest.mark.timeout(900)  # the first test of a run waits for the whole run


def walk(world, layouts, modes, transport):
    walker = Walker(world, layouts[0], transport=transport)
    wrong = [(layouts[0], walker.misplaced(layouts[0]))]
    for number, text in enumerate(layouts[1:]):
        walker.go(text, modes[number % len(modes)])
        assert walker.scaler.state_dict() == {"scale": torch.tensor(65536.0), "growth": {"streak": 3}}
        wrong.append((text, walker.misplaced(text)))
    return {"wrong": wrong, "books": walker.books}


RUNS = {
    "gloo": (circuit(TEN, 1), ("keep", "tight"), GroupTransport),
    "memory, ten pairs": ((*TEN, TEN[0]), ("keep", "tight"), nearest),
    "late, ten pairs": ((*TEN, TEN[0]), ("tight", "keep"), late),
    "gloo, other modes": (circuit(TEN, 1), ("tight", "keep"), GroupTransport),
    "late": (circuit(TEN, 2), ("keep", "tight"), late),
    "memory": (circuit(TEN, 3), ("tight", "keep"), nearest),
}
LONG = ("gloo, other modes", "late", "memory")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.sweep if name in LONG else ()) for name in RUNS]
)
def run(request):
    layouts, modes, transport = RUNS[request.param]
    return RUNS[request.param], everywhere(4, lambda world: walk(world, layouts, modes, transport), 600)


def test_every_element_of_every_state_lands_at_its_address(run):
    (layouts, modes, _), found = run

    for rank in found:
        assert rank["wrong"] == [(text, []) for text in layouts]
        outcomes = [(book["outcome"], book["reason"], book["equal"], book["mode"]) for book in rank["books"]]
        assert outcomes == [("committed", "", True, modes[n % len(modes)]) for n in range(len(layouts) - 1)]


def test_the_bytes_on_the_wire_of_every_pair_of_ranks_are_the_plans(run):
    (layouts, _, _), found = run

    for number, books in enumerate(zip(*(rank["books"] for rank in found), strict=True)):
        planned = books[0]["planned"]
        for rank, book in enumerate(books):
            mine = {pair: size for pair, size in planned.items() if rank in pair}
            assert book["moves"] == mine
            assert book["ledger"] == mine
            assert {(rank, peer): size for peer, size in book["sent"].items()} | {
                (peer, rank): size for peer, size in book["received"].items()
            } == mine
            assert book["relaid"] == books[0]["planned_relaid"][rank]
            arrived = sum(book["received"].values())
            assert arrived == arriving(*layouts[number : number + 2], TENSORS, rank, LAYERS)


def test_no_rank_ever_holds_more_than_its_pieces_and_what_is_under_way(run):
    """And nothing gathers a whole matrix: what is no piece is no longer than one bundle of messages."""
    (_, _, transport), found = run
    told = transport is nearest  # who reads has to know where
    copies = 2 if transport is late else 1  # the double holds what is under way a second time

    assert SMALLEST > BUNDLE
    for rank in found:
        for book in rank["books"]:
            most = book["pieces"] + copies * book["staging"] + book["checksums"] + told * book["addresses"] + FEW
            assert 0 < book["pieces"] <= book["peak"] <= most
            assert book["largest"] <= BUNDLE


def test_a_whole_matrix_that_is_gathered_on_the_way_is_noticed():
    def gathering(world):
        held = []

        def gather(event, _round, _switch):
            if event == "received":
                held.append(torch.zeros(TENSORS["layers.0.up.weight"], dtype=torch.float64))

        walker = Walker(world, "fsdp2", hook=gather)
        return walker.go("tp2")

    for book in everywhere(2, gathering, 60):
        assert book["largest"] >= SMALLEST
