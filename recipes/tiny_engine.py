"""A small inference engine that takes weights while it serves: plain torch, in processes of its own.

``python recipes/tiny_engine.py --config MODEL/config.json --tp 2 --port 8000`` serves a model of Llama's or
Qwen3's form, with experts or without. It knows Hugging Face's names, and fuses ``qkv_proj``, ``gate_up_proj`` and the
experts of a layer as vLLM does. It cannot import dynatrain: what it speaks are the calls of vLLM's weight updates, over
HTTP::

    POST /init_weight_transfer_engine  {"init_info": {"dtype", "shapes": {rank: {name: shape}}}}
    POST /start_weight_update          {}
    POST /update_weights               {"update_info": {"weight_version", "base_version", "messages": {rank: [url]}}}
                                       the last one also with "digests": {rank: {name: digest}}
    POST /finish_weight_update         {"weight_version": "7"}
    POST /pause?mode=keep, /resume, /sleep, /wake_up, /generate; GET /status

Each rank fetches its messages by itself (GET, safetensors) into a second copy of its weights, while the first serves.
``finish_weight_update`` has every rank digest what it got; if all agree, all change over. Whatever fails before, the
version that serves goes on serving. Weights lie in files in memory, so that a rank that is killed comes back with them.
``sleep`` gives up all weights (vLLM's level 2) and their memory; ``wake_up`` lets others come.
"""

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.modules["dynatrain"] = None  # an import of it fails

SECONDS = 30.0
"""Longest that a rank may take for one call."""


def begin(*given):
    """A rank's process; the front itself needs no torch."""
    import tiny_engine_rank  # noqa: PLC0415

    tiny_engine_rank.work(*given)


class RankError(RuntimeError):
    """A rank could not do what was asked."""


class Front:
    """The engine as its clients see it: passes calls on to all ranks, and keeps them alive."""

    def __init__(self, folder, config, tp, dtype):
        self.folder, self.config, self.tp, self.dtype = folder, config, tp, dtype
        self.state = {"copy": 0, "version": None}  # changed at one place, when all ranks have agreed
        self.open, self.epoch, self.active, self.asleep = threading.Event(), 0, False, False
        self.open.set()
        self.locks = {"serving": threading.Lock(), "updating": threading.Lock()}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed"])
        self.ranks = [self.begin(rank) for rank in range(tp)]

    def begin(self, rank):
        (serving, theirs), (updating, other) = self.context.Pipe(), self.context.Pipe()
        given = (rank, self.folder, self.config, self.tp, self.dtype, self.state, theirs, other)
        process = self.context.Process(target=begin, args=given, daemon=True)
        process.start()
        theirs.close()
        other.close()
        return {"process": process, "serving": serving, "updating": updating}

    def ask(self, way, verb, asked):
        """What all ranks answer; a rank that has died is begun anew, with the version that serves."""
        with self.locks[way]:
            wrong, told = [], []
            for rank, one in enumerate(self.ranks):
                try:
                    one[way].send((verb, asked))
                except OSError:
                    wrong.append(f"rank {rank} has ended")
            deadline = time.monotonic() + SECONDS
            for rank, one in enumerate(self.ranks):
                try:
                    late = not one[way].poll(max(0.0, deadline - time.monotonic()))
                    good, said = (False, "late") if late else one[way].recv()
                except (EOFError, OSError):
                    late, good, said = True, False, "has ended"
                if late:
                    one["process"].kill()
                    self.ranks[rank], self.epoch = self.begin(rank), self.epoch + 1
                told.append(said)
                wrong += [] if good else [f"rank {rank}: {said}"]
            if wrong:
                raise RankError("; ".join(dict.fromkeys(wrong)))
            return told

    # The calls of vLLM's weight updates.

    def init_weight_transfer_engine(self, body):
        self.ask("updating", "init", body["init_info"])

    def start_weight_update(self, _body):
        if self.asleep:
            raise RankError("the engine sleeps; wake_up comes first")
        self.ask("updating", "start", {})  # what an earlier one has left is dropped
        self.active = True
        return {"weight_version": self.state["version"]}

    def update_weights(self, body):
        self.within("update", body["update_info"])

    def finish_weight_update(self, body):
        self.within("finish", body)
        self.state = {"copy": 1 - self.state["copy"], "version": int(body["weight_version"])}
        self.active = False
        self.ask("updating", "swap", self.state)

    def within(self, verb, info):
        """A call of the update under way, which ends with the first that fails."""
        if not self.active:
            raise RankError(f"{verb}: no weight update is under way; start_weight_update comes first")
        try:
            self.ask("updating", verb, info)
        except RankError:
            self.active = False
            raise

    def pause(self, _body):
        self.open.clear()

    def resume(self, _body):
        self.open.set()

    def sleep(self, _body):
        self.asleep, self.active = True, False
        self.state = {"copy": 0, "version": None}
        for way in ("serving", "updating"):  # whatever is under way there has ended then
            self.ask(way, "drop", self.state)

    def wake_up(self, _body):
        self.asleep = False

    # What it serves.

    def generate(self, body):
        return self.served("generate", body)

    def score(self, body):
        return self.served("score", body)

    def served(self, verb, body):
        self.open.wait()
        if self.asleep:
            raise RankError("the engine sleeps; wake_up comes first")
        try:
            return self.ask("serving", verb, body | {"epoch": self.epoch})[0]
        except RankError:  # a rank had died, and was begun anew: once more
            return self.ask("serving", verb, body | {"epoch": self.epoch})[0]

    def status(self, _body):
        ranks = self.ask("serving", "status", {})
        return {
            "weight_version": self.state["version"],
            "paused": not self.open.is_set(),
            "asleep": self.asleep,
            "held_bytes": sum(path.stat().st_blocks * 512 for path in self.folder.glob("*.[ab]")),
            "pids": [one["process"].pid for one in self.ranks],
            "ranks": ranks,
        }


def handler(front):
    """HTTP for a front: JSON in, JSON out."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            verb = self.path.split("?")[0].strip("/")
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            try:
                told, code = getattr(front, verb)(body) or {}, 200
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                told, code = {"error": f"{type(error).__name__}: {error}"}, 500
            text = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_):
            pass

    return Handler


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # and the files are gone
    config = json.loads(arguments.config.read_text())
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - files in memory
    with tempfile.TemporaryDirectory(prefix="tiny-engine-", dir=memory) as folder:
        front = Front(Path(folder), config, arguments.tp, arguments.dtype)
        server = ThreadingHTTPServer(("127.0.0.1", arguments.port), handler(front))
        front.ask("serving", "status", {})
        sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
