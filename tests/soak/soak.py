"""One run that is struck again and again: two hosts, ranks that come and go, and one fault after the other.

Every fault is a cell of phase x victim x kind. It strikes at the phase's first line, in the rank that is there, and
what follows is waited for: who is lost, who leads, who is refused; and the next steps. Then the run is brought to two
hosts with ranks on each again, and the next one strikes. All that the run writes is held against a run that nobody
strikes (:mod:`tests.soak.test_soak`).
"""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from tests.cli import ROOT, environment
from tests.conftest import catches
from tests.dist.trained import SHAPE
from tests.soak.cut import cut
from tests.soak.rank import ARMED, FIRED, PACE

from dynatrain.observe.log import Tail
from dynatrain.observe.requests import Request, new_id, read_answer, submit
from dynatrain.observe.run import RunFolder
from dynatrain.space.hf_config import written_config

PHASES = ("train", "build", "warm", "quiesce", "move", "check", "commit")
"""``train`` of a newcomer is its start."""
VICTIMS = ("old", "new", "agent", "lead")
KINDS = ("kill", "stop", "delay", "cut")
CELLS = tuple(itertools.product(PHASES, VICTIMS, KINDS))
AGENT = str(ROOT / "tests" / "soak" / "agent.py")
SEQUENCE, BATCH, SEED = 32, 4, 3
PATIENCE, DEADLINE, DELAY = 4.0, 3.0, 0.4
"""Seconds: until who is silent is lost; of a phase of a switch; for which a delayed process is halted."""
_STARTING = threading.Lock()
"""Agents that import torch all at once would take each other for lost."""
LIMIT = 60.0
"""Seconds for a run to train again after a fault; nothing takes a third of it, and what hangs takes all."""
CONFIG = f"""
layout = "dp2"
steps = 1000000
seed = {SEED}
[model]
config = "config.json"
dropout = 0.1
[data]
paths = ["text"]
tokenizer = "bytes"
sequence = {SEQUENCE}
[batch]
global_sequences = {BATCH}
micro_sequences = 1
[precision]
compute = "fp64"
[optimizer]
exact_norm = true
decay_steps = 1000000
[switching]
mode = "keep"
deadline_seconds = {DEADLINE}
[world]
sizes = [1, 2, 4]
[loss]
replacements = 1000000
snapshot_steps = 10
[save]
every = 25
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One of the soak.

    Attributes:
        number: in the order of the soak; every cell comes once before any comes again.
        phase: where.
        victim: whom.
        kind: what.
    """

    number: int
    phase: str
    victim: str
    kind: str

    @property
    def again(self) -> int:
        """How often the cell was hit before."""
        return self.number // len(CELLS)

    @property
    def carrier(self) -> str:
        """What is under way when it strikes: the members change, or, every second time, the layout alone."""
        if self.victim == "new":
            return "grow"
        if self.phase == "train":
            return ""
        return "switch" if self.again % 2 else "scale"


def faults(count: int, seed: int = 1) -> list[Fault]:
    """The first ``count`` faults of the soak with this seed; of each round through all cells the short ones first."""
    found: list[Fault] = []
    for again in range(-(-count // len(CELLS))):
        cells = list(CELLS)
        random.Random(f"{seed}/{again}").shuffle(cells)
        cells.sort(key=lambda cell: cell[1] in {"agent", "lead"} and cell[2] != "delay")
        found += [Fault(number=len(found) + i, phase=p, victim=v, kind=k) for i, (p, v, k) in enumerate(cells)]
    return found[:count]


@dataclass(kw_only=True)
class Hit:
    """What has become of one fault.

    Attributes:
        fault: which.
        outcome: what has followed, in a word: ``unharmed``, ``aborted``, ``done``, ``mended``, ``succeeded`` (another
            agent leads), ``resumed`` (the run had ended, and was started again).
        seconds: from the fault to the end of the next step.
        said: more, for people.
    """

    fault: Fault
    outcome: str = ""
    seconds: float = 0.0
    said: str = ""

    def record(self) -> dict:
        return asdict(self.fault) | {"outcome": self.outcome, "seconds": round(self.seconds, 2), "said": self.said}


@dataclass
class Soak:
    """The run and its agents. ``with`` it; all processes end with it.

    Attributes:
        place: a folder with text.
        env: more environment.
        agents: processes that live, or have not been looked after yet.
    """

    place: Path
    env: dict[str, str] = field(default_factory=dict)
    agents: list[subprocess.Popen] = field(default_factory=list)
    said: dict[int, Path] = field(default_factory=dict)
    events: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)

    def __enter__(self):
        self.run = RunFolder(self.place / "runs" / "one")
        self._events, self._steps = Tail(self.run.events), Tail(self.run.metrics)
        self._places = itertools.count(2)
        prepare(self.place)
        self.start()
        return self

    def __exit__(self, *_):
        for agent in self.agents:
            with suppress(psutil.NoSuchProcess):
                below = psutil.Process(agent.pid).children(recursive=True)
                agent.kill()
                for process in below:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            agent.wait(20)

    # Agents.

    def start(self):
        """Both hosts' agents, of a new run or of one that has ended."""
        with _STARTING, socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
            probe.close()
            for node in range(2):
                told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(node)}
                self._begin(["train", "run.toml", "--run", "one"], told)
            began = time.time()
            self.until(lambda: self.steps and self.steps[-1]["time"] > began, 120, alive=2)
        self.wait_for(self.ask("save"))  # else a run that ends early could not go on

    def _begin(self, words, told):
        number = len(self.said)
        out = self.place / f"agent-{number}.txt"
        with out.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, AGENT, *words],
                cwd=self.place,
                env=environment() | {"SOAK_PATIENCE": str(PATIENCE), PACE: "0.03"} | self.env | told,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        self.said[process.pid] = out
        self.agents.append(process)

    @property
    def lead(self):
        """The agent that leads."""
        mark = self.run.agent()
        return next((one for one in self.agents if mark is not None and one.pid == mark.pid), None)

    @property
    def other(self):
        """The one that does not."""
        return next((one for one in self.agents if one is not self.lead and one.poll() is None), None)

    def host(self, agent):
        """Process numbers of an agent, first, and of all that it has brought about."""
        with suppress(psutil.NoSuchProcess):
            return [agent.pid, *(process.pid for process in psutil.Process(agent.pid).children(recursive=True))]
        return [agent.pid]

    # What is seen.

    def look(self):
        """Read on."""
        self.events += self._events.new()
        self.steps += [line for line in self._steps.new() if line["kind"] == "step"]

    def since(self, kind, time, **like):
        """Events of a kind since then."""
        return [
            event
            for event in self.events
            if event["kind"] == kind and event["time"] > time and all(event[key] == like[key] for key in like)
        ]

    def until(self, look, seconds=LIMIT, alive=0):
        """The first true value of ``look``."""
        end = time.monotonic() + seconds
        while True:
            self.look()
            if found := look():
                return found
            living = sum(agent.poll() is None for agent in self.agents)
            assert living >= alive, f"{living} agents live, not {alive}; {self.last_words()}"
            assert time.monotonic() < end, f"nothing in {seconds:g} s; {self.last_words()}\n{self.stacks()}"
            time.sleep(0.03)

    def stacks(self):
        """What every rank is at, as it prints into its log when it is asked."""
        for agent in self.agents:
            for pid in self.host(agent):
                if catches(pid, signal.SIGUSR1):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        logs = sorted(self.run.logs.glob("rank_*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"{path.name}: {path.read_text()[-6000:]}" for path in logs[-4:])

    def last_words(self):
        texts = [f"{path.name}: {path.read_text()[-1500:]}" for path in self.said.values()][-3:]
        return "\n".join([*texts, *(json.dumps(event) for event in self.events[-8:])])

    def world(self):
        """The node of each rank of the present world."""
        nodes = ()
        for event in self.events:
            if event["kind"] == "agent_started" and event["node"] == 0:
                nodes = event["seats"]
            elif event["kind"] == "crossing" and event["stage"] == "done":
                nodes = event["nodes"]
        return list(nodes)

    @property
    def layout(self):
        return self.steps[-1]["layout"]

    def ask(self, verb, **arguments):
        submit(self.run.requests, request := Request(id=new_id(), verb=verb, arguments=arguments))
        return request.id

    def answer(self, request):
        return read_answer(self.run.requests, request)

    # A fault, and back.

    def strike(self, fault):
        """Plant a fault, wait for what follows and for the next steps, and clear up behind it."""
        self.base(fault)
        hit, request = Hit(fault=fault), ""
        victim = {"agent": self.other, "lead": self.lead}.get(fault.victim)
        ends = (
            self.other if (fault.victim, fault.kind) == ("lead", "cut") else victim
        )  # a lead that lives keeps the run
        armed = asdict(fault) | {"rank": fault.number % len(self.world()), "pids": self.host(victim) if victim else []}
        (self.run.path / FIRED).unlink(missing_ok=True)
        (self.run.path / "armed.new").write_text(json.dumps(armed))
        (self.run.path / "armed.new").rename(self.run.path / ARMED)
        if fault.carrier:
            request = self._carry(fault)
        fired = self.until(lambda: self._fired(request), alive=1)
        with self._disturbed(fault, fired, victim):
            hit.outcome, since = self._follow(fault, fired["time"], request)
            line = self.until(lambda: next((one for one in self.steps if one["time"] > since), None), alive=1)
        hit.seconds = line["time"] - fired["time"]
        self._clear_up(fault, fired, ends)
        answer = self.answer(request) if request else None
        hit.said = f"{answer.outcome}: {answer.message}" if answer else ""
        return hit

    def _fired(self, request):
        """What was done, as told by who did it; None before."""
        answer = self.answer(request) if request else None
        with suppress(OSError):
            return json.loads((self.run.path / FIRED).read_text())
        assert answer is None, f"answered before the fault has struck: {answer}"
        return None

    def _carry(self, fault):
        """Have something under way at which the fault can strike."""
        nodes, layout = self.world(), self.layout
        if fault.carrier == "switch":
            return self.ask("switch", layout=f"{'fsdp' if layout.startswith('dp') else 'dp'}{len(nodes)}")
        if len(nodes) == 2:
            return self.ask("scale", size=4, layout="dp2.fsdp2")
        return self.ask("scale", leave=self._second(), layout="dp2")

    def _second(self):
        """The ranks but for the first of each host."""
        nodes = self.world()
        return [rank for rank, node in enumerate(nodes) if node in nodes[:rank]]

    @contextmanager
    def _disturbed(self, fault, fired, victim):
        """While a fault lasts: a link that is cut stays cut, a process that is late goes on."""
        over = threading.Event()

        def work():
            if fault.kind == "delay":
                time.sleep(DELAY)
                os.kill(fired["pid"], signal.SIGCONT)
            while fault.kind == "cut" and not over.wait(0.2):
                cut(self.host(victim) if victim else [fired["pid"]])

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _follow(self, fault, since, request):
        """``(outcome, when it was there)``, once it is there."""

        def found():
            answer = self.answer(request) if request else None
            told = (self.since("loss", since) or [None])[-1], (self.since("succession", since) or [None])[-1]
            loss, succession = told
            if not any(agent.poll() is None for agent in self.agents):
                return "ended", time.time()
            if succession:
                return "succeeded", succession["time"]
            if loss:
                return "mended", loss["time"]
            if fault.kind == "delay" and (answer or not request):
                return (f"unharmed, {answer.outcome}" if answer else "unharmed"), since + DELAY
            if fault.victim == "new" and answer:
                return answer.outcome, time.time()
            return None

        outcome, when = self.until(found)
        if outcome == "ended":
            self.agents.clear()
            self.start()
            return "resumed", when
        return outcome, when

    def _clear_up(self, fault, fired, ends):
        """Whoever is halted goes on, and the agent that is to end by itself then does."""
        (self.run.path / ARMED).unlink(missing_ok=True)
        if ends is None or fault.kind == "delay":
            return
        if fault.kind == "stop":
            os.kill(fired["pid"], signal.SIGCONT)
        self.until(lambda: ends.poll() is not None)

    def base(self, fault=None):
        """Two hosts with ranks on each, two or four of them, that train and have nothing else to do."""
        self.agents = [agent for agent in self.agents if agent.poll() is None]
        if not self.agents:
            self.start()
        if len(self.agents) == 1:
            time.sleep(0.5)  # the mark of whoever leads now, and where it listens
            self._begin(["join", "one", "--ranks", "1", "--place", f"p{next(self._places)}"], {})
            self.until(lambda: self.since("host_joined", 0) and len(self.agents) == 2, alive=2)
        for _ in range(6):
            self.until(self.at_rest, alive=2)
            if len({*self.world()}) == 2:
                if len(self.world()) == 2 or fault is None or fault.carrier != "grow":
                    return
                self.wait_for(self.ask("scale", leave=self._second(), layout="dp2"))
                continue
            self.wait_for(self.ask("scale", size=4 if len(self.world()) < 4 else 2))
        raise AssertionError(f"both hosts never have ranks: {self.world()}; {self.last_words()}")

    def wait_for(self, request):
        return self.until(lambda: self.answer(request), alive=1)

    def at_rest(self):
        """Whether no members change, whoever is missing has been replaced, and the newest steps are of that world."""
        last = [event for event in self.events if event["kind"] == "crossing"][-1:]
        if last and (
            last[0]["stage"] in {"coming", "asked"} or (last[0]["lost"] and last[0]["attempt"] == self.attempt)
        ):
            return False  # who is lost is replaced at once
        since = max((event["time"] for event in (*last, self.events[-1])), default=0)
        return len(self.world()) > 0 and sum(line["time"] > since for line in self.steps[-8:]) > 2

    @property
    def attempt(self):
        return self.steps[-1]["attempt"]


def prepare(place):
    """What a run needs: a model, text, a configuration."""
    (place / "text").mkdir(parents=True)
    for name in "ab":
        words = (f"{name}{number * number} to be or not to be, " for number in range(900))
        (place / "text" / f"{name}.txt").write_text("".join(words))
    (place / "config.json").write_text(json.dumps(written_config(asdict(SHAPE) | {"vocab_size": 257})))
    (place / "run.toml").write_text(CONFIG)
