"""Layouts as torchtitan and Megatron-LM spell them: flags and settings read into a :class:`Layout`.

Both write a layout as sizes per axis, leave some to be worked out from the number of ranks, and mix them with
settings of other kinds. Settings that have nothing to do with the layout are passed over; those that do and that are
not understood are refused, because a layout read without them would be another one.
"""

import re
import shlex

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import MOST_RANKS, Layout
from dynatrain.layout.text import parse_layout

Settings = dict[str, str]

_MEGATRON_SIZES = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "data_parallel_size": "dp"}
_TITAN_SIZES = {
    "data_parallel_replicate_degree": "dp",
    "data_parallel_shard_degree": "fsdp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
}
_SHARDING = {"no_shard": None, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_RESHARD = {"default": None, "always": 3, "never": 2}
_NOT_BUILT = {
    "context_parallel_size": "context parallel",
    "context_parallel_degree": "context parallel",
    "expert_model_parallel_size": "expert parallel",
    "expert_parallel_degree": "expert parallel",
    "expert_tensor_parallel_size": "expert tensor parallel",
    "expert_tensor_parallel_degree": "expert tensor parallel",
    "virtual_pipeline_model_parallel_size": "interleaved stages",
    "num_virtual_stages_per_pipeline_rank": "interleaved stages",
}
_OTHER = {
    "world_size",
    "sequence_parallel",
    "use_tp_pp_dp_mapping",
    "use_distributed_optimizer",
    "use_torch_fsdp2",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "enable_sequence_parallel",
    "fsdp_reshard_after_forward",
}
_NO_CHANGE = {
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatch_size",
    "enable_async_tensor_parallel",
    "enable_loss_parallel",
    "disable_loss_parallel",
    "context_parallel_rotate_method",
}
_TOUCHES_LAYOUT = re.compile("parallel|pipeline|fsdp|virtual|distributed_optimizer|mapping")


def read_layout(text: str) -> Layout:
    """The layout that ``text`` spells: ours (``fsdp2.tp2``), torchtitan's or Megatron's settings.

    Foreign settings may carry ``--world-size N`` (ranks in all), from which sizes that they leave open are worked out.

    Raises:
        LayoutError: with every setting that cannot be read, and what cannot be known without the world size.
    """
    settings = _settings(text)
    megatron = any(key in settings for key in (*_MEGATRON_SIZES, "sequence_parallel", "use_distributed_optimizer"))
    titan = any(key in settings for key in (*_TITAN_SIZES, "enable_sequence_parallel"))
    if not megatron and not titan:
        return parse_layout(text)
    problems = _unread(settings)
    if megatron and titan:
        problems.append("settings of torchtitan and of Megatron are mixed; give those of one")
    if problems:
        raise LayoutError("the settings do not give a layout", tuple(problems))
    return _megatron(settings) if megatron else _titan(settings)


def _settings(text: str) -> Settings:
    """``--a.b-c=d``, ``--a.b-c d``, ``a.b_c = d`` and bare ``--a`` as ``{"b_c": "d"}``; a bare flag is ``true``."""
    try:
        words = shlex.split(re.sub(r"\s*=\s*", "=", text), comments=True)
    except ValueError as error:
        raise LayoutError(f"{text!r} is not a layout", (f"quotes are not closed: {error}",)) from None
    found: Settings = {}
    open_flag = ""
    for word in words:
        key, mark, value = word.partition("=")
        if open_flag and not mark and not word.startswith("--"):
            found[open_flag], open_flag = word, ""
            continue
        name = key.lstrip("-").rsplit(".", 1)[-1].replace("-", "_")
        if mark or word.startswith("--"):
            found[name] = value if mark else "true"
            open_flag = "" if mark else name
    return found


def _unread(settings: Settings) -> list[str]:
    """What bears on the layout and is not understood, or asks for what is not built."""
    problems = []
    for key, value in settings.items():
        if key in _NOT_BUILT:
            if value != "1":
                problems.append(f"{key} = {value}: {_NOT_BUILT[key]} is not built yet; only 1 is read")
        elif key in {*_MEGATRON_SIZES, *_TITAN_SIZES, "world_size"}:
            open_size = value == "-1" and key == "data_parallel_shard_degree"
            if not open_size and not (re.fullmatch("[1-9][0-9]{0,8}", value) and int(value) <= MOST_RANKS):
                problems.append(f"{key} = {value}: a size is a whole number from 1 to {MOST_RANKS}")
        elif key not in _OTHER | _NO_CHANGE and _TOUCHES_LAYOUT.search(key):
            problems.append(f"{key}: not understood, and it may change the layout; leave it out to read the rest")
    for key, legal in {"data_parallel_sharding_strategy": _SHARDING, "fsdp_reshard_after_forward": _RESHARD}.items():
        if settings.get(key, next(iter(legal))) not in legal:
            problems.append(f"{key} = {settings[key]}: one of {', '.join(legal)}")
    return problems


def _megatron(settings: Settings) -> Layout:
    """Megatron places ranks tp innermost, then data parallel, then pp; one flag swaps the outer two."""
    sizes = {axis: int(settings.get(key, "1")) for key, axis in _MEGATRON_SIZES.items()}
    if "data_parallel_size" not in settings or "world_size" in settings:
        known = sizes["tp"] * sizes["pp"]
        data = _leftover(settings, known, f"tp x pp = {known}", "Megatron's data-parallel size")
        if data != sizes["dp"] and "data_parallel_size" in settings:
            raise LayoutError(
                "the settings do not give a layout",
                (f"data_parallel_size is {sizes['dp']}, but {settings['world_size']} ranks leave {data}",),
            )
        sizes["dp"] = data
    zero = _megatron_zero(settings)
    outer = ("dp", "pp") if _on(settings, "use_tp_pp_dp_mapping") else ("pp", "dp")
    axes = [(axis if axis != "dp" or zero is None else "fsdp", sizes[axis]) for axis in (*outer, "tp")]
    return _layout(axes, zero or 3, sp=_on(settings, "sequence_parallel"))


def _megatron_zero(settings: Settings) -> int | None:
    """The ZeRO stage of the data-parallel ranks; None where they are plain replicas."""
    if _on(settings, "use_torch_fsdp2"):
        return 3
    if _on(settings, "use_megatron_fsdp"):
        return _SHARDING[settings.get("data_parallel_sharding_strategy", "no_shard")]
    return 1 if _on(settings, "use_distributed_optimizer") else None


def _titan(settings: Settings) -> Layout:
    """The mesh of torchtitan is pp, replicate, shard, tp; the shard degree is what is left over unless it is set."""
    sizes = {axis: int(settings.get(key, "1")) for key, axis in _TITAN_SIZES.items()}
    known = sizes["pp"] * sizes["dp"] * sizes["tp"]
    open_size = settings.get("data_parallel_shard_degree", "-1") == "-1"
    if open_size or "world_size" in settings:
        what = "data_parallel_shard_degree (-1, what is left over)"
        left = _leftover(settings, known, f"the other degrees, {known}", what)
        if not open_size and left != sizes["fsdp"]:
            raise LayoutError(
                "the settings do not give a layout",
                (f"the degrees multiply to {known * sizes['fsdp']}, but world_size is {settings['world_size']}",),
            )
        sizes["fsdp"] = left
    # torchtitan's default keeps parameters gathered under a pipeline, where each micro-batch would gather them anew.
    zero = _RESHARD[settings.get("fsdp_reshard_after_forward", "default")] or (2 if sizes["pp"] > 1 else 3)
    sp = settings.get("enable_sequence_parallel", "true").lower() != "false"
    return _layout([(axis, sizes[axis]) for axis in ("pp", "dp", "fsdp", "tp")], zero, sp=sp)


def _leftover(settings: Settings, known: int, factors: str, what: str) -> int:
    if "world_size" not in settings:
        problem = f"{what} cannot be known without the number of ranks; add --world-size N"
        raise LayoutError("the settings do not give a layout", (problem,))
    world = int(settings["world_size"])
    if world % known:
        near = sorted({max(world // known, 1) * known, (world // known + 1) * known})
        problem = f"world_size {world} is no multiple of {factors}; nearest: {', '.join(map(str, near))}"
        raise LayoutError("the settings do not give a layout", (problem,))
    return world // known


def _on(settings: Settings, key: str) -> bool:
    return settings.get(key, "false").lower() not in {"false", "0"}


def _layout(axes: list[tuple[str, int]], zero: int, *, sp: bool) -> Layout:
    """Options that their axis is too small for say nothing there, and are dropped as the others drop them."""
    named = dict(axes)
    layout = Layout(
        axes=tuple((axis, size) for axis, size in axes if size > 1),
        zero=zero if named.get("fsdp", 1) > 1 else 3,
        sp=sp and named["tp"] > 1,
    )
    if problems := form_problems(layout):
        raise LayoutError("the settings do not give a layout", problems)
    return layout
