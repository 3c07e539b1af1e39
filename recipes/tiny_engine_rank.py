"""A rank of the small engine: its part of a model of Llama's or Qwen3's form, and how it takes weights. Plain torch."""

import json
import math
import mmap
import sys
import threading
import urllib.request
import zlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.modules["dynatrain"] = None  # an import of it fails

SECONDS = 30.0
"""Longest that a message may take."""


class Shape:
    """Sizes out of a ``config.json`` of Llama's or Qwen3's form, and what each tp rank has of every tensor."""

    def __init__(self, config, tp):
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
        self.head = config.get("head_dim") or self.hidden // self.heads
        self.inner, self.vocab = config["intermediate_size"], config["vocab_size"]
        self.eps, self.tied = config["rms_norm_eps"], config["tie_word_embeddings"]
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.norms_heads = config["model_type"].startswith("qwen3")
        self.experts, self.chosen = config.get("num_experts", 0), config.get("num_experts_per_tok")
        self.expert, self.shares = config.get("moe_intermediate_size"), config.get("norm_topk_prob")
        self.tp = tp

    def rows(self, rank):
        """The rows of the vocabulary that a rank has."""
        size = -(-self.vocab // self.tp)
        return min(rank * size, self.vocab), min((rank + 1) * size, self.vocab)

    def tensors(self, rank):
        """``{name: shape}`` of what a rank has."""
        first, last = self.rows(rank)
        fused = (self.heads + 2 * self.kv_heads) // self.tp * self.head
        found = {"model.embed_tokens.weight": (last - first, self.hidden), "model.norm.weight": (self.hidden,)}
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            found[f"{name}.input_layernorm.weight"] = found[f"{name}.post_attention_layernorm.weight"] = (self.hidden,)
            found[f"{name}.self_attn.qkv_proj.weight"] = (fused, self.hidden)
            found[f"{name}.self_attn.o_proj.weight"] = (self.hidden, self.heads // self.tp * self.head)
            if self.norms_heads:
                found[f"{name}.self_attn.q_norm.weight"] = found[f"{name}.self_attn.k_norm.weight"] = (self.head,)
            if self.experts:
                found[f"{name}.mlp.gate.weight"] = (self.experts, self.hidden)
                found[f"{name}.mlp.experts.w13_weight"] = (self.experts, 2 * self.expert // self.tp, self.hidden)
                found[f"{name}.mlp.experts.w2_weight"] = (self.experts, self.hidden, self.expert // self.tp)
            else:
                found[f"{name}.mlp.gate_up_proj.weight"] = (2 * self.inner // self.tp, self.hidden)
                found[f"{name}.mlp.down_proj.weight"] = (self.hidden, self.inner // self.tp)
        if not self.tied:
            found["lm_head.weight"] = (last - first, self.hidden)
        return found


class Copy:
    """One of the two copies of a rank's weights: tensors in a file that outlives the rank."""

    def __init__(self, path, shapes, dtype):

        size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        with path.open("a+b") as file:
            file.truncate(size)
            self.pages = mmap.mmap(file.fileno(), size)
        self.flat = torch.frombuffer(self.pages, dtype=dtype)
        parts = self.flat.split([math.prod(shape) for shape in shapes.values()])
        self.tensors = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    def drop(self):
        self.pages.madvise(mmap.MADV_REMOVE)  # the file has no memory then, and zeros where it is read


class Receiver:
    """A rank's side of weight updates: all in its second copy, until ``swap``."""

    def __init__(self, rank, folder, shapes, dtype, state):
        self.rank, self.shapes, self.dtype = rank, shapes, dtype
        self.copies = [Copy(folder / f"{rank}.{one}", shapes, dtype) for one in "ab"]
        self.current, self.version = state["copy"], state["version"]
        self.received = self.peak = 0

    @property
    def weights(self):
        return self.copies[self.current].tensors

    def init(self, info):
        theirs = {name: tuple(shape) for name, shape in info["shapes"].get(str(self.rank), {}).items()}
        wrong = [f"{name}: {theirs.get(name)} for {self.shapes.get(name)}" for name in {*theirs, *self.shapes}
                 if theirs.get(name) != self.shapes.get(name)]  # fmt: skip
        if info["dtype"] != str(self.dtype).removeprefix("torch."):
            wrong.append(f"{info['dtype']} for {self.dtype}")
        if wrong:
            raise ValueError(f"not the layout of rank {self.rank}: {'; '.join(sorted(wrong))}")

    def start(self, _info):
        self.base, self.digests, self.received, self.peak = "nothing yet", {}, 0, 0

    def update(self, info):
        if self.base != info["base_version"]:
            self.base, to = info["base_version"], self.copies[1 - self.current].flat
            if self.base is None:
                to.fill_(math.nan)
            elif self.base != self.version:
                raise ValueError(f"changes since version {self.base}, and version {self.version} serves")
            else:
                to.copy_(self.copies[self.current].flat)
        self.digests = info.get("digests", {}).get(str(self.rank), {})
        for url in info["messages"].get(str(self.rank), ()):
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:  # noqa: S310
                body = bytearray(answer.read())
                if len(body) != int(answer.headers["Content-Length"]):
                    raise ValueError(f"{url} ends early")
            self.received += len(body)
            self.peak = max(self.peak, len(body))
            self.put(body)

    def put(self, body):
        """Copy one message to where it says; its boxes are those of this rank's tensors."""

        start = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(body[8:start])
        marks = header.pop("__metadata__")
        if zlib.crc32(memoryview(body)[start:]) != int(marks["crc32"]):
            raise ValueError("a message does not have the checksum that it came with")
        parts = {}
        for name, entry in header.items():
            low, high = entry["data_offsets"]
            kind = torch.int32 if entry["dtype"] == "I32" else self.dtype
            parts[name] = torch.frombuffer(body, dtype=kind, count=(high - low) // kind.itemsize, offset=start + low)
        tensors = self.copies[1 - self.current].tensors
        for number, (name, box) in enumerate(json.loads(marks["boxes"])):
            room = tensors[name][tuple(slice(*ends) for ends in box)]
            if f"{number}" in parts:
                room.copy_(parts[f"{number}"].view(room.shape))
            else:
                flat = room.reshape(-1)  # a copy where the box is strided
                flat[parts[f"{number}.indices"].long()] = parts[f"{number}.values"]
                room.copy_(flat.view(room.shape))

    def finish(self, info):
        tensors = self.copies[1 - self.current].tensors
        if wrong := [name for name in tensors if f"{digest(tensors[name]):016x}" != self.digests.get(name)]:
            raise ValueError(f"not what version {info['weight_version']} is: {', '.join(wrong)}")

    def swap(self, state):
        self.current, self.version = state["copy"], state["version"]

    def drop(self, state):
        self.swap(state)
        for copy in self.copies:
            copy.drop()


def digest(tensor):
    """Sum over all elements of (bits + 1) times one multiplier power per dim, mod 2^64 (dynatrain's docs/digest.py)."""

    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    terms = tensor.view(words).numpy().astype(np.int64).astype(np.uint64) + np.uint64(1)
    for dim, size in enumerate(terms.shape):
        base = (0x9E3779B97F4A7C15 * (dim + 1)) % 2**64 & ~7 | 5
        powers = np.array([pow(base, index, 2**64) for index in range(size)], dtype=np.uint64)
        terms *= powers.reshape([-1 if other == dim else 1 for other in range(terms.ndim)])
    return int(terms.sum(dtype=np.uint64))


class Model:
    """The forward of one tp rank: tokens to log-probabilities, summed over the ranks where they have parts."""

    def __init__(self, shape, rank):
        self.shape, self.rank = shape, rank

    def sum(self, x):

        if self.shape.tp > 1:
            dist.all_reduce(x)
        return x

    def norm(self, x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.shape.eps).rsqrt() * weight

    def turned(self, x):

        half = self.shape.head // 2
        rates = self.shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * rates
        one, other = x[..., :half], x[..., half:]
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

    def mlp(self, take, name, x):
        gate, up = (x @ take[f"{name}.gate_up_proj.weight"].T).chunk(2, -1)
        return (F.silu(gate) * up) @ take[f"{name}.down_proj.weight"].T

    def mixed(self, take, name, x):
        """All experts for every token, weighed by the router's choice: a few tokens are no work."""

        shares, numbers = (x @ take[f"{name}.gate.weight"].T).softmax(-1).topk(self.shape.chosen, -1)
        shares = shares / shares.sum(-1, keepdim=True) if self.shape.shares else shares
        weights = torch.zeros(*x.shape[:2], self.shape.experts).scatter(-1, numbers, shares)
        gate, up = torch.einsum("btd,efd->btef", x, take[f"{name}.experts.w13_weight"]).chunk(2, -1)
        each = torch.einsum("btef,edf->bted", F.silu(gate) * up, take[f"{name}.experts.w2_weight"])
        return torch.einsum("bted,bte->btd", each, weights)

    def log_probabilities(self, weights, tokens):
        """[B, T] -> float32 [B, T, V]."""
        shape, (first, last) = self.shape, self.shape.rows(self.rank)
        take = {name: value.float() for name, value in weights.items()}
        mine = (tokens >= first) & (tokens < last)
        embedded = take["model.embed_tokens.weight"][(tokens - first).clamp(0, max(last - first - 1, 0))]
        x = self.sum(embedded * mine[..., None])
        heads, groups = shape.heads // shape.tp, shape.kv_heads // shape.tp
        for layer in range(shape.layers):
            name = f"model.layers.{layer}"
            normed = self.norm(x, take[f"{name}.input_layernorm.weight"])
            fused = (normed @ take[f"{name}.self_attn.qkv_proj.weight"].T).unflatten(-1, (-1, shape.head))
            q, k, v = fused.transpose(1, 2).split((heads, groups, groups), dim=1)
            if shape.norms_heads:
                q, k = (self.norm(of, take[f"{name}.self_attn.{n}_norm.weight"]) for of, n in ((q, "q"), (k, "k")))
            mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
            x = x + self.sum(mixed.transpose(1, 2).flatten(2) @ take[f"{name}.self_attn.o_proj.weight"].T)
            normed = self.norm(x, take[f"{name}.post_attention_layernorm.weight"])
            x = x + self.sum((self.mixed if shape.experts else self.mlp)(take, f"{name}.mlp", normed))
        head = take["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
        logits = torch.zeros(*tokens.shape, shape.vocab)
        logits[..., first:last] = self.norm(x, take["model.norm.weight"]) @ head.T
        return self.sum(logits).log_softmax(-1)

    def generate(self, weights, asked):
        """Continue prompts of one length; each new token with its log-probability, drawn alike on every rank."""

        tokens = torch.tensor(asked["prompts"])
        generator = torch.Generator().manual_seed(asked.get("seed", 0))
        told = []
        for _ in range(asked["max_tokens"]):
            last = self.log_probabilities(weights, tokens)[:, -1]
            drawn = torch.multinomial(last.exp(), 1, generator=generator)
            told.append(last.gather(1, drawn))
            tokens = torch.cat((tokens, drawn), 1)
        scores = torch.cat(told, 1) if told else torch.empty(len(tokens), 0)
        return {"tokens": tokens.tolist(), "log_probabilities": scores.tolist()}

    def score(self, weights, asked):
        """The log-probability of each token behind the first."""

        tokens = torch.tensor(asked["tokens"])
        found = self.log_probabilities(weights, tokens)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
        return {"log_probabilities": found.tolist()}


def work(rank, folder, config, tp, dtype, state, serving, updating):
    """A rank: one thread serves, one takes weights."""

    torch.set_num_threads(1)
    shape = Shape(config, tp)
    receiver = Receiver(rank, folder, shape.tensors(rank), getattr(torch, dtype), state)
    model, group = Model(shape, rank), []

    def serve(verb, asked):
        if verb == "status":
            held = sum(copy.flat.nbytes for copy in receiver.copies) + receiver.peak
            return {"version": receiver.version, "received": receiver.received, "peak_bytes": held}
        if verb == "drop":
            return receiver.drop(asked)
        if tp > 1 and group != [asked["epoch"]]:  # another rank has come anew
            if group:
                dist.destroy_process_group()
            path = f"file://{folder}/group.{asked['epoch']}"
            dist.init_process_group("gloo", init_method=path, rank=rank, world_size=tp)
            group[:] = [asked["epoch"]]
        return getattr(model, verb)(receiver.weights, asked)

    threading.Thread(target=answer, args=(updating, lambda verb, info: getattr(receiver, verb)(info))).start()
    answer(serving, serve)


def answer(end, do):
    """Answer calls on a pipe until it closes."""
    while True:
        try:
            verb, asked = end.recv()
        except EOFError:
            return
        try:
            told = [True, do(verb, asked)]
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            told = [False, f"{type(error).__name__}: {error}"]
        end.send(told)
