"""Layouts as torchtitan and Megatron-LM spell them: flags and settings read into a :class:`Layout`.

Both write a layout as sizes per axis, leave some to be worked out from the number of ranks, and mix them with
settings of other kinds. Settings that have nothing to do with the layout are passed over; those that do and that are
not understood are refused, because a layout read without them would be another one.
"""

import re
import shlex
from collections.abc import Collection, Mapping

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import AXES, MOST_RANKS, Layout
from dynatrain.layout.text import parse_layout

Settings = dict[str, str]

_MEGATRON_SIZES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_TITAN_SIZES = {
    "data_parallel_replicate_degree": "dp",
    "data_parallel_shard_degree": "fsdp",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
}
_MEGATRON_CHUNKS = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
_LAYERS_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
_SHARDING = {"no_shard": None, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_RESHARD = {"default": None, "always": 3, "never": 2}
_MEGATRON_CP = {"p2p": "ring", "all_gather": "gather", "a2a": "ulysses"}
_TITAN_CP = {"allgather": "gather", "alltoall": "ring"}
_TITAN_SCHEDULES = {
    "1F1B": (1, ""),
    "GPipe": (1, ""),
    "Interleaved1F1B": (2, ""),
    "LoopedBFS": (2, ""),
    "InterleavedZeroBubble": (2, "zb"),
    "ZBVZeroBubble": (2, "zbv"),
}
"""Stages of each pp rank, and our name of the schedule. Two is torchtitan's own number where nothing else is said."""
_CHOICES: Mapping[str, Collection[str]] = {
    "data_parallel_sharding_strategy": _SHARDING,
    "fsdp_reshard_after_forward": _RESHARD,
    "cp_comm_type": _MEGATRON_CP,
    "context_parallel_rotate_method": _TITAN_CP,
    "pipeline_parallel_schedule": _TITAN_SCHEDULES,
}
_COUNTS = {*_MEGATRON_SIZES, *_TITAN_SIZES, *_MEGATRON_CHUNKS, _LAYERS_PER_CHUNK, "world_size"}
_OTHER = {
    "sequence_parallel",
    "use_tp_pp_dp_mapping",
    "use_distributed_optimizer",
    "use_torch_fsdp2",
    "use_megatron_fsdp",
    "enable_sequence_parallel",
}
_NO_CHANGE = {
    "pipeline_parallel_microbatch_size",
    "enable_async_tensor_parallel",
    "enable_loss_parallel",
    "disable_loss_parallel",
}
_TOUCHES_LAYOUT = re.compile("parallel|pipeline|fsdp|virtual|distributed_optimizer|mapping|cp_comm")


def read_layout(text: str) -> Layout:
    """The layout that ``text`` spells: ours (``fsdp2.tp2``), torchtitan's or Megatron's settings.

    Foreign settings may carry ``--world-size N`` (ranks in all), from which sizes that they leave open are worked out.

    Raises:
        LayoutError: with every setting that cannot be read, and what cannot be known without the world size.
    """
    settings, problems = _settings(text)
    megatron = any(key in settings for key in (*_MEGATRON_SIZES, "sequence_parallel", "use_distributed_optimizer"))
    titan = any(key in settings for key in (*_TITAN_SIZES, "enable_sequence_parallel"))
    if not megatron and not titan:
        return parse_layout(text)
    problems += _unread(settings)
    if megatron and titan:
        problems.append("settings of torchtitan and of Megatron are mixed; give those of one")
    if problems:
        raise _refused(*problems)
    return _megatron(settings) if megatron else _titan(settings)


def _settings(text: str) -> tuple[Settings, list[str]]:
    """``--a.b-c=d``, ``--a.b-c d``, ``a.b_c = d`` and bare ``--a`` as ``{"b_c": "d"}``; a bare flag is ``true``.

    With what is wrong with those that bear on the layout: a word too many, or two values. Of others that is no matter.
    """
    try:
        words = shlex.split(re.sub(r"\s*=\s*", "=", text), comments=True)
    except ValueError as error:
        raise LayoutError(f"{text!r} is not a layout", (f"quotes are not closed: {error}",)) from None
    found: Settings = {}
    problems: list[str] = []
    last, is_open = "", False  # the last name, and whether it may still get a value

    def take(value: str) -> None:
        if _bears(last) and found.get(last, value) != value:
            problems.append(f"{last} is {found[last]} and then {value}; give it once")
        found[last] = value

    for word in words:
        key, mark, value = word.partition("=")
        if mark or word.startswith("--"):
            if is_open:
                take("true")
            last, is_open = key.lstrip("-").rsplit(".", 1)[-1].replace("-", "_"), not mark
            if mark:
                take(value)
        elif is_open:
            take(word)
            is_open = False
        elif _bears(last) and not word.startswith("["):  # the header of a TOML table
            problems.append(f"{last} = {found[last]} is followed by {word}, which belongs to nothing; leave it out")
    if is_open:
        take("true")
    return found, problems


def _bears(key: str) -> bool:
    """Whether a setting bears on the layout."""
    return key in _COUNTS or key in _CHOICES or key in _OTHER or bool(_TOUCHES_LAYOUT.search(key))


def _unread(settings: Settings) -> list[str]:
    """What bears on the layout and is not understood."""
    problems = []
    for key, value in settings.items():
        if key in _COUNTS:
            open_size = value == "-1" and key == "data_parallel_shard_degree"
            if not open_size and not (re.fullmatch("[1-9][0-9]{0,8}", value) and int(value) <= MOST_RANKS):
                problems.append(f"{key} = {value}: a size is a whole number from 1 to {MOST_RANKS}")
        elif key in _CHOICES:
            if value not in _CHOICES[key]:
                problems.append(f"{key} = {value}: one of {', '.join(_CHOICES[key])}")
        elif key not in _OTHER | _NO_CHANGE and _TOUCHES_LAYOUT.search(key):
            problems.append(f"{key}: not understood, and it may change the layout; leave it out to read the rest")
    return problems


def _megatron(settings: Settings) -> Layout:
    """Megatron places ranks tp innermost, then cp, data parallel and pp; one flag swaps the outer two.

    Experts take the ranks of tp, cp and data parallel anew, and are cut as tp cuts unless that is said otherwise.
    """
    sizes = {axis: int(settings.get(key, "1")) for key, axis in _MEGATRON_SIZES.items()}
    if "data_parallel_size" not in settings or "world_size" in settings:
        known = sizes["tp"] * sizes["cp"] * sizes["pp"]
        factors = "tp x pp" if sizes["cp"] == 1 else "tp x cp x pp"
        data = _leftover(settings, known, f"{factors} = {known}", "Megatron's data-parallel size")
        if data != sizes["dp"] and "data_parallel_size" in settings:
            raise _refused(f"data_parallel_size is {sizes['dp']}, but {settings['world_size']} ranks leave {data}")
        sizes["dp"] = data
    if "expert_tensor_parallel_size" not in settings and (sizes["ep"] > 1 or "num_experts" in settings):
        sizes["etp"] = sizes["tp"]
    zero = _megatron_zero(settings)
    outer = ("dp", "pp") if _on(settings, "use_tp_pp_dp_mapping") else ("pp", "dp")
    return _layout(
        [(axis if axis != "dp" or zero is None else "fsdp", sizes[axis]) for axis in (*outer, "cp", "tp")],
        zero=zero or 3,
        sp=_on(settings, "sequence_parallel"),
        ep=sizes["ep"],
        etp=sizes["etp"],
        cp_method=_MEGATRON_CP[settings.get("cp_comm_type", "p2p")],
        chunks=_megatron_chunks(settings, sizes["pp"]),
    )


def _megatron_chunks(settings: Settings, pp: int) -> int:
    """Stages of each pp rank: said as a number, or as the layers of each."""
    if _LAYERS_PER_CHUNK not in settings:
        return int(next((settings[key] for key in _MEGATRON_CHUNKS if key in settings), "1"))
    each, layers = int(settings[_LAYERS_PER_CHUNK]), settings.get("num_layers", "")
    if not re.fullmatch("[1-9][0-9]{0,8}", layers):
        raise _refused(
            f"{_LAYERS_PER_CHUNK} gives a number of stages only with the number of layers; add --num-layers N"
        )
    if int(layers) % (pp * each):
        raise _refused(f"num_layers {layers} is no multiple of pp x {_LAYERS_PER_CHUNK} = {pp} x {each}")
    return int(layers) // (pp * each)


def _megatron_zero(settings: Settings) -> int | None:
    """The ZeRO stage of the data-parallel ranks; None where they are plain replicas."""
    if _on(settings, "use_torch_fsdp2"):
        return 3
    if _on(settings, "use_megatron_fsdp"):
        return _SHARDING[settings.get("data_parallel_sharding_strategy", "no_shard")]
    return 1 if _on(settings, "use_distributed_optimizer") else None


def _titan(settings: Settings) -> Layout:
    """The mesh of torchtitan is pp, replicate, shard, cp, tp; the shard degree is what is left over unless set."""
    sizes = {axis: int(settings.get(key, "1")) for key, axis in _TITAN_SIZES.items()}
    known = sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]
    open_size = settings.get("data_parallel_shard_degree", "-1") == "-1"
    if open_size or "world_size" in settings:
        what = "data_parallel_shard_degree (-1, what is left over)"
        left = _leftover(settings, known, f"the other degrees, {known}", what)
        if not open_size and left != sizes["fsdp"]:
            raise _refused(
                f"the degrees multiply to {known * sizes['fsdp']}, but world_size is {settings['world_size']}"
            )
        sizes["fsdp"] = left
    chunks, schedule = _TITAN_SCHEDULES[settings.get("pipeline_parallel_schedule", "1F1B")]
    return _layout(
        [(axis, sizes[axis]) for axis in AXES],
        # torchtitan keeps parameters gathered under a pipeline by default: each micro-batch would gather them anew.
        zero=_RESHARD[settings.get("fsdp_reshard_after_forward", "default")] or (2 if sizes["pp"] > 1 else 3),
        sp=settings.get("enable_sequence_parallel", "true").lower() != "false",
        ep=sizes["ep"],
        etp=sizes["etp"],
        cp_method=_TITAN_CP[settings.get("context_parallel_rotate_method", "allgather")],
        chunks=chunks,
        schedule=schedule,
    )


def _leftover(settings: Settings, known: int, factors: str, what: str) -> int:
    if "world_size" not in settings:
        raise _refused(f"{what} cannot be known without the number of ranks; add --world-size N")
    world = int(settings["world_size"])
    if world % known:
        near = sorted({max(world // known, 1) * known, (world // known + 1) * known})
        raise _refused(f"world_size {world} is no multiple of {factors}; nearest: {', '.join(map(str, near))}")
    return world // known


def _refused(*problems: str) -> LayoutError:
    return LayoutError("the settings do not give a layout", problems)


def _on(settings: Settings, key: str) -> bool:
    return settings.get(key, "false").lower() not in {"false", "0"}


def _layout(
    axes: list[tuple[str, int]],
    *,
    zero: int,
    sp: bool,
    ep: int,
    etp: int,
    cp_method: str,
    chunks: int,
    schedule: str = "",
) -> Layout:
    """Options that their axis is too small for say nothing there, and are dropped as the others drop them."""
    named = dict(axes)
    sharded, staged, context = named.get("fsdp", 1) * named["cp"] > 1, named["pp"] > 1, named["cp"] > 1
    layout = Layout(
        axes=tuple((axis, size) for axis, size in axes if size > 1),
        chunks=chunks if staged else 1,
        schedule=schedule if staged else "",
        zero=zero if sharded else 3,
        cp_method=cp_method if context else "gather",
        sp=sp and named["tp"] > 1,
        ep=ep,
        etp=etp,
    )
    if problems := form_problems(layout):
        raise _refused(*problems)
    return layout
