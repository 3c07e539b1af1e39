"""Agents that come later: who is taken in, who is not and why, as both sides hear it; and what becomes of lost ones."""

import json
import stat
from dataclasses import replace

import pytest
from tests.clusters import PATIENCE, Cluster
from tests.unit.test_parting import events
from torch.distributed import PrefixStore

from dynatrain.cluster.claim import Admission, Claim, opened, refusal, sealed
from dynatrain.cluster.door import knock, knock_in_vain
from dynatrain.cluster.place import PlaceError, address_of, place_from
from dynatrain.cluster.store import host_store
from dynatrain.cluster.summons import Summons
from dynatrain.observe.address import Address
from dynatrain.observe.prints import code_print, print_of
from dynatrain.observe.requests import Request, submit

RUN_KEY = "of the run"
PRINTS = {"code": "c0", "model": "m0"}
CLAIM = Claim(place="pod-7", host="gpu-7", pid=70, devices=0, ranks=0, prints=PRINTS)


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    return Cluster(tmp_path, secret=RUN_KEY, prints=PRINTS)


def come(cluster: Cluster, claim: Claim = CLAIM, secret: str = RUN_KEY) -> Admission:
    """Knock; the run goes on while it is waited for."""
    config = {"config": print_of([cluster.run.config.read_bytes()])}
    claim = replace(claim, prints={**config, **claim.prints})
    return knock(cluster.store, secret, claim, 5.0, lambda _: cluster.tick())


def says(cluster: Cluster, node: int, **status: object) -> None:
    """What an agent says that is in no process here."""
    cluster.board.post(f"agent/{node}", json.dumps({"living": [], "number": 1, **status}))


def test_who_has_other_code_config_or_model_or_claims_a_taken_place_hears_all_of_it() -> None:
    taken = {"pod-7": "process 5 on gpu-1"}
    assert refusal(CLAIM, prints=PRINTS, taken={}, device="cpu") == ""
    other = replace(CLAIM, prints={"code": "c1"})
    assert refusal(other, prints=PRINTS, taken=taken, device="cuda") == (
        "the place 'pod-7' is taken by process 5 on gpu-1; nearest: --place pod-7-2; another code: c1, the run has c0; "
        "another model: none, the run has m0; it has 0 CUDA devices, the run needs one for each rank"
    )


def test_a_seal_holds_for_one_secret_one_number_and_one_kind() -> None:
    text = sealed(RUN_KEY, 3, "claim", "{}")
    assert opened(RUN_KEY, 3, "claim", text) == "{}"
    for secret, number, kind, said in (
        ("other", 3, "claim", text),
        (RUN_KEY, 4, "claim", text),  # a claim that was read in the store is of no use
        (RUN_KEY, 3, "answer", text),
        (RUN_KEY, 3, "claim", text.replace("{}", "{ }")),
        (RUN_KEY, 3, "claim", "nothing"),
        (RUN_KEY, 3, "claim", "[]"),
    ):
        assert opened(secret, number, kind, said) is None


def test_an_agent_comes_in_and_newcomers_come_to_it(cluster) -> None:
    found = come(cluster)
    assert (found.node, found.nodes, found.world, found.generation, found.summons) == (2, 2, (0, 1), 0, "")
    assert (found.nonce, found.world_size) == ("s", 2)
    assert cluster.nodes[1].peers.nodes == (0, 1, 2)
    (joined,) = events(cluster, "host_joined")
    assert (joined["node"], joined["place"], joined["host"]) == (2, "pod-7", "gpu-7")
    cluster.ask("a", size=3)
    says(cluster, 2, heard="1 coming")
    cluster.beat(2)
    cluster.tick()
    summons = Summons.from_json(cluster.board.peek("summons"))
    assert [(one.member, one.node, one.slot) for one in summons.newcomers] == [(2, 2, 0)]


def test_an_agent_that_brings_ranks_makes_the_run_grow_as_far_as_layouts_allow(cluster) -> None:
    come(cluster, replace(CLAIM, ranks=9))
    summons = Summons.from_json(cluster.board.peek("summons"))
    assert (len(summons.new), summons.layout) == (5, "dp5")
    assert events(cluster, "request")[0]["by"] == "join"


def test_who_knocks_while_members_change_waits_until_that_is_over(cluster) -> None:
    submit(cluster.run.requests, Request(id="a", verb="scale", arguments={"size": 1}))
    turns = 0

    def meanwhile(_: float) -> None:
        nonlocal turns
        turns += 1
        cluster.tick()
        if turns == 3:
            assert not events(cluster, "host_joined")
            cluster.asked()
            cluster.end(1)
            cluster.reply("done")

    config = {"config": print_of([cluster.run.config.read_bytes()])}
    found = knock(cluster.store, RUN_KEY, replace(CLAIM, prints={**PRINTS, **config}), 5.0, meanwhile)
    assert (found.world, found.generation, Summons.from_json(found.summons).stage) == ((0,), 1, "done")


@pytest.mark.parametrize(
    ("change", "secret", "said"),
    [
        ({"prints": {**PRINTS, "code": "c1"}}, RUN_KEY, "another code: c1, the run has c0"),
        ({"prints": {**PRINTS, "model": "m1"}}, RUN_KEY, "another model: m1, the run has m0"),
        ({"prints": {**PRINTS, "config": "x"}}, RUN_KEY, "another config: x"),
        ({}, "guessed", "does not have the run's token"),
    ],
)
def test_who_is_not_taken_in_hears_why_and_so_does_the_run_which_goes_on(cluster, change, secret, said) -> None:
    with pytest.raises(PlaceError, match="Not admitted to the run") as refused:
        come(cluster, replace(CLAIM, **change), secret)
    assert said in str(refused.value)
    (event,) = events(cluster, "join_refused")
    assert said in event["reason"]
    assert (cluster.nodes[1].peers.nodes, cluster.failures(), cluster.board.news()) == ((0, 1), ["", ""], 0)
    assert come(cluster).node == 2  # and the next one is heard


def test_of_two_that_claim_one_place_one_is_taken_in(cluster) -> None:
    assert come(cluster).node == 2
    with pytest.raises(PlaceError, match="'pod-7' is taken by process 70 on gpu-7; nearest: --place pod-7-2"):
        come(cluster, replace(CLAIM, pid=71))
    says(cluster, 2, state="left")
    cluster.tick()
    assert [event["node"] for event in events(cluster, "host_left")] == [2]
    assert come(cluster, replace(CLAIM, pid=71)).node == 3  # a number is never given again


def test_who_was_refused_by_the_first_agents_is_told_of_in_the_run(cluster) -> None:
    knock_in_vain(cluster.store, "the place of node 1 is taken", {"pid": 9, "host": "gpu-9"})
    cluster.tick()
    assert events(cluster, "join_refused")[0]["reason"] == "process 9 on gpu-9: the place of node 1 is taken"


def test_who_is_killed_before_it_has_said_anything_does_not_block_the_door(cluster) -> None:
    PrefixStore("dynatrain/door", cluster.store).add("claims", 1)
    assert come(cluster).node == 2


def test_what_is_no_claim_at_all_is_refused_and_stops_nothing(cluster) -> None:
    door = PrefixStore("dynatrain/door", cluster.store)
    for text in ("", "{", '{"body": 1}', sealed(RUN_KEY, 3, "claim", '{"place": "x"}')):
        door.set(f"claim/{int(door.add('claims', 1)) - 1}", text)
    for _ in range(4):
        cluster.tick()
    assert len(events(cluster, "join_refused")) == 4
    assert "another version" in events(cluster, "join_refused")[-1]["reason"]
    assert come(cluster).node == 2


def test_an_agent_without_ranks_that_is_lost_is_struck_off_and_one_with_ranks_ends_the_run(cluster) -> None:
    come(cluster)
    for _ in range(8):
        cluster.beat(0, 1)
        cluster.tick(PATIENCE / 4)
    assert [event["node"] for event in events(cluster, "host_left")] == [2]
    assert cluster.failures() == ["", ""]
    for _ in range(8):
        cluster.now += PATIENCE / 4
        cluster.beat(0)
        first = cluster.nodes[0]
        first.peers.look()
        first.pulse.look()
        cluster.lead.look(stopping=False)
    assert "the agent of node 1 is silent" in first.vitals.failure(cluster.now, stopping=False)


def test_several_agents_may_start_each_by_itself_and_the_first_hosts_the_store() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "3"}
    first, last = place_from(environment), place_from({**environment, "RANK": "2"})
    assert (first.hosts_store, last.hosts_store, first.nonce == last.nonce) == (True, False, True)
    assert (last.node, last.nodes, last.host, last.port, last.killed_after) == (2, 3, "127.0.0.1", 29555, None)
    assert place_from({**environment, "WORLD_SIZE": "1"}).port == 0
    for wrong, said in (({"RANK": "3"}, "from 0 to 2"), ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is no number")):
        with pytest.raises(PlaceError, match=said):
            place_from({**environment, **wrong})


def test_the_store_listens_on_the_named_interface_alone() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert place_from({}, "lo").host == "127.0.0.1"
    with pytest.raises(PlaceError, match=r"'nic9' has no IPv4 address.*Nearest: one of .*lo"):
        place_from({}, "nic9")
    store = host_store("127.0.0.1")
    with pytest.raises(PlaceError, match=rf"cannot listen at 127.0.0.1:{store.port}.*Nearest"):
        host_store("127.0.0.1", store.port)


def test_the_address_of_a_run_is_for_its_owners_eyes(tmp_path) -> None:
    assert Address.read(tmp_path) is None
    address = Address(host="10.0.0.1", port=29400, secret=RUN_KEY)
    address.write(tmp_path)
    address.write(tmp_path)
    assert Address.read(tmp_path) == address
    assert stat.S_IMODE((tmp_path / "join.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["join.json"]
    (tmp_path / "join.json").write_text('{"host": 3}')
    assert Address.read(tmp_path) is None
    Address.forget(tmp_path)
    assert not list(tmp_path.iterdir())


def test_prints_are_short_and_differ_with_their_parts() -> None:
    assert len(code_print()) == 12
    assert print_of([b"ab", b"c"]) != print_of([b"a", b"bc"])
