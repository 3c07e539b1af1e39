"""The small engine of ``recipes`` as tests meet it: started, asked, and what it should have."""

import importlib.util
import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from http import HTTPStatus

import numpy as np
import safetensors.torch
import torch
from tests.cli import ROOT

from dynatrain.execute.engine_client import HttpEngine
from dynatrain.space.box import whole, within
from dynatrain.space.decoder import catalogue
from dynatrain.space.engine import Engine


@contextmanager
def engine(folder, shape, *, tp, dtype):
    """An engine in processes of its own; its address."""
    config = folder / "config.json"
    config.write_text(json.dumps(shape.to_config()))
    command = [sys.executable, str(ROOT / "recipes" / "tiny_engine.py"), "--config", str(config)]
    options = ["--tp", str(tp), "--dtype", dtype]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def ask(url, path, **body):
    """The engine's answer to a call."""
    request = urllib.request.Request(f"{url}/{path}", data=json.dumps(body).encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        assert answer.status == HTTPStatus.OK
        return json.loads(answer.read())


class Listening(HttpEngine):
    """The usual client, which remembers what it was told, and has something done before each call."""

    def __init__(self, url, before=lambda _path, _client: None):
        super().__init__(url, 60.0)
        self.before, self.calls, self.nbytes = before, [], 0

    def _call(self, path, body):
        self.before(path, self)
        self.nbytes += len(json.dumps(body))
        self.calls.append((path, body))
        return super()._call(path, body)

    @property
    def digests(self):
        """Those of each version; a version comes with one call that has them."""
        infos = [body["update_info"] for path, body in self.calls if path == "update_weights"]
        return [info["digests"] for info in infos if "digests" in info]


class Folder:
    """An engine of one rank, of another make: it keeps what it is sent, by name, and answers to every call."""

    def __init__(self):
        self.told, self.got, self.tensors = {}, {}, {}

    def init_weight_transfer_engine(self, init_info):
        self.told = init_info
        return {}

    def start_weight_update(self):
        return {}

    def update_weights(self, update_info):
        shapes = self.told["shapes"]["0"]
        for url in update_info["messages"]["0"]:
            with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310
                body = answer.read()
            size = int.from_bytes(body[:8], "little")
            boxes = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["boxes"])
            parts = safetensors.torch.load(body)
            for number, (name, box) in enumerate(boxes):
                part = parts[f"{number}"]
                room = self.got.setdefault(name, torch.full(tuple(shapes[name]), torch.nan, dtype=part.dtype))
                room[tuple(slice(*ends) for ends in box)] = part
        return {}

    def finish_weight_update(self, finish_info):  # noqa: ARG002 - a call's face
        self.tensors, self.got = self.got, {}
        return {}

    def pause_generation(self):
        return {}

    def resume_generation(self):
        return {}


def whole_weights(sw):
    """Every parameter and buffer, whole, on every rank."""
    found = {}
    for name, entry in sw.world.found.items():
        value = entry.value.detach()
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


def right_digests(shape, layout, weights, dtype):
    """What the published script says of the tensors that each rank should have, made out of whole weights."""
    spec = importlib.util.spec_from_file_location("digest", ROOT / "docs" / "digest.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    held = catalogue(shape, optimizer="")
    far = Engine.of(shape, layout, held, dtype=str(dtype).removeprefix("torch."))
    logical = {tensor.name: tensor for tensor in held}
    found = {}
    for rank in far.ranks:
        its = found[str(rank)] = {}
        for tensor in far.tensors:
            parts = []
            for one in tensor.components:
                box = far.ownership.box(logical[one.tensor], rank)
                parts.append(weights[one.tensor][within(box, whole(logical[one.tensor].shape))])
            value = torch.cat(parts, tensor.dim).to(dtype).contiguous()
            words = value.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else value.numpy()
            its[tensor.name] = f"{script.digest(words):016x}"
    return found
