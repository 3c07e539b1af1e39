"""Agents of some nodes and their ranks in one process, without any, for tests of what the lead and its agents do."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

from torch.distributed import HashStore

from dynatrain.cluster.board import Board
from dynatrain.cluster.context import Report
from dynatrain.cluster.desk import Desk
from dynatrain.cluster.heart import Beat, Pulse, beat_key
from dynatrain.cluster.lead import Lead
from dynatrain.cluster.meeting import Job, Meeting, contexts
from dynatrain.cluster.part import Part
from dynatrain.cluster.peers import Peers, Status
from dynatrain.cluster.place import Place
from dynatrain.cluster.ranks import Ranks
from dynatrain.cluster.summons import Newcomer
from dynatrain.cluster.tenure import Tenure
from dynatrain.cluster.vitals import Vitals
from dynatrain.observe.log import Log
from dynatrain.observe.requests import Answer, Inbox, Request, read_answer, submit
from dynatrain.observe.run import RunFolder

PATIENCE, LEAVE_SECONDS, GRACE = 5.0, 3.0, 30.0


@dataclass
class FakeSpawner:
    """Keeps the orders; ranks do what the test says."""

    forked: list = field(default_factory=list)
    killed: list[int] = field(default_factory=list)

    def fork(self, context) -> None:
        self.forked.append(context)

    def signal(self, member: int, number: int) -> None:
        if number == 9:
            self.killed.append(member)


def resize(present: str, size: int, named: str) -> str:
    if size > 5:
        raise ValueError(f"{size} ranks: at most 5; nearest: 5")
    if present.startswith("even") and size % 2:
        raise ValueError(f"{size} ranks: not even")
    return named or present.rstrip("0123456789") + str(size)


class Node:
    """One agent, as far as members are concerned."""

    def __init__(self, cluster: "Cluster", node: int) -> None:
        self.job = Job(
            run=cluster.run,
            attempt=0,
            place=Place(node=node, nodes=cluster.meeting.world_size, host="h", port=1, nonce="s"),
            world_size=cluster.meeting.world_size,
            layout=f"dp{cluster.meeting.world_size}",
            resize=resize,
            device="cpu",
            liveness_seconds=PATIENCE,
            grace_seconds=0.0,
            leave_seconds=LEAVE_SECONDS,
            drain_seconds=GRACE,
            announce=print,
            tenure=Tenure(cluster.run),
            **cluster.about,
        )
        self.spawner = FakeSpawner()
        self.ranks = Ranks(self.spawner)
        clock = lambda: cluster.now  # noqa: E731
        self.pulse = Pulse(cluster.board, clock)
        self.part = Part(
            cluster.store,
            self.ranks,
            self.pulse,
            lambda newcomers, world, generation: contexts(
                self.job, cluster.meeting, newcomers, world, generation=generation
            ),
            cluster.log,
            patience=PATIENCE,
            leave_seconds=LEAVE_SECONDS,
            world=tuple(range(cluster.meeting.world_size)),
        )
        self.peers = Peers(cluster.board, self.job.place, clock)
        self.state = "running"
        self.vitals = Vitals(
            self.ranks,
            self.pulse,
            self.part,
            self.peers,
            patience=PATIENCE,
            pause=lambda _: None,
            logs=cluster.run.logs,
        )


class _Store(HashStore):
    port = 1


class Cluster:
    """Some nodes with a rank each."""

    def __init__(self, folder, *, devices: int = 0, nodes: int = 2, spares: int = 0, **about: object) -> None:
        self.about = {"spares": spares, **about}
        self.now = 0.0
        self.run = RunFolder.create(folder / "run", config="", environment={})
        self.store = _Store()
        self.board = Board(self.store, nodes)
        self.log = Log(self.run.events, generation=0, attempt=0)
        self.meeting = Meeting(
            store=self.store,
            run=self.store,
            board=self.board,
            world_size=nodes,
            devices=dict.fromkeys(range(nodes), devices),
            device="cuda" if devices else "cpu",
            backend="gloo",
            realtime=False,
            attempt=0,
            note="",
            seats=tuple(Newcomer(member=node, node=node, slot=0) for node in range(nodes)),
        )
        self.nodes = [Node(self, node) for node in range(nodes)]
        self.desk = Desk(Inbox(self.run.requests), self.board, self.log)
        first = self.nodes[0]
        self.lead = Lead(first.job, self.meeting, self.desk, first.peers, self.log, lambda: self.now)
        self.stopping = False
        for member, node in enumerate(self.nodes):
            node.ranks.fork([SimpleNamespace(member=member, local_rank=0)])
            self.alive(member)
            node.pulse.watch([member])
        self.numbers: dict[str, int] = {}

    def node_of(self, member: int) -> Node:
        return next(node for node in self.nodes if member in node.ranks)

    def alive(self, member: int) -> None:
        self.node_of(member).ranks.note(Report(kind="forked", member=member, pid=100 + member))

    def beat(self, *members: int, layout: str = "") -> None:
        for member in members:
            beat = Beat(number=int(self.now * 1000) + 1, layout=layout)
            self.board.post(beat_key(member), json.dumps({"number": beat.number, "layout": layout}))

    def end(self, member: int, code: int = 0, signal: int = 0) -> None:
        report = Report(kind="ended", member=member, pid=100 + member, code=code, signal=signal)
        self.node_of(member).ranks.note(report)

    def tick(self, seconds: float = 0.2, times: int = 4, nodes: int | None = None) -> None:
        """As agents do it: a few times, so that all have heard what follows."""
        for _ in range(times):
            self.now += seconds / times
            for node in self.nodes[:nodes]:
                node.pulse.look()
                node.peers.look()
                living = node.ranks.living
                node.peers.say(Status(state=node.state, living=living, heard=node.part.heard, lost=node.part.lost))
                if node is self.nodes[0]:
                    self.desk.serve()
                    self.lead.look(stopping=self.stopping)
                node.part.look(self.now)

    def ask(self, name: str, verb: str = "scale", **arguments: object) -> None:
        submit(self.run.requests, Request(id=name, verb=verb, arguments=arguments))
        self.tick()

    def asked(self) -> dict:
        """What the ranks are asked last."""
        self.number = self.board.news() - 1
        return json.loads(self.board.read(self.number))

    def reply(self, outcome: str, message: str = "") -> None:
        self.board.answer(self.number, Answer(outcome=outcome, message=message, switch=4).to_json())
        self.tick()

    def answer(self, name: str) -> Answer | None:
        return read_answer(self.run.requests, name)

    def failures(self) -> list[str]:
        return [node.vitals.failure(self.now, stopping=self.stopping) for node in self.nodes]
