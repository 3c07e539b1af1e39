"""The text of a layout: one parser, one canonical print.

Parts are joined by dots, axes outermost first: ``pp4_2_3_4_3.fsdp2-z2.tp2-sp.order_...``. Only ``[A-Za-z0-9._-]``
occurs, so that a layout pastes into a shell, a label and a file name. There is one spelling of each layout: what
differs from it is refused, with the spelling that was probably meant.
"""

import difflib
import hashlib
import math
import re

from dynatrain.layout.form import LayoutError, form_problems
from dynatrain.layout.layout import AXES, MOST_RANKS, Layout

ONE_RANK = "dp1"
"""The text of the layout without any axis."""

_LATER = {"cp": "context parallel", "ep": "expert parallel", "etp": "expert tensor parallel"}
_NUMBER = r"[1-9][0-9]*"
_AXIS = re.compile(rf"(?P<axis>[a-z]+)(?P<size>{_NUMBER})(?P<stages>(?:_[0-9]+)*)(?P<options>(?:-[a-z0-9]+)*)")
_ORDER = re.compile(r"order(?:_(?:0|[1-9][0-9]*))+")
_CHUNKS = re.compile(rf"pp{_NUMBER}v[0-9]+.*")
_OPTIONS = {"sp": "tp", "z1": "fsdp", "z2": "fsdp"}
_SHOWN_ORDER = 16


def parse_layout(text: str) -> Layout:
    """The layout that ``text`` spells.

    Raises:
        LayoutError: listing every part that does not parse and every rule of form that is broken, with the spelling
            that was probably meant. Whether a model and a world allow the layout is
            :func:`dynatrain.layout.legality.check`'s question.
    """
    layout, problems = _read(text)
    if problems:
        raise LayoutError(f"{text!r} is not a layout", tuple(problems), (_repaired(text),))
    return layout


def print_layout(layout: Layout) -> str:
    """The canonical text. ``parse_layout`` gives the layout back; an identity order prints as none."""
    parts = [f"{name}{size}{_suffix(layout, name)}" for name, size in layout.axes] or [ONE_RANK]
    if layout.order and layout.order != tuple(range(layout.world_size)):
        parts.append("_".join(map(str, ("order", *layout.order))))
    return ".".join(parts)


def short_layout(layout: Layout) -> str:
    """The text for display: as :func:`print_layout`, but an order of many ranks shows as a hash, refused as input."""
    text = print_layout(layout)
    head, mark, order = text.partition(".order_")
    if not mark or len(layout.order) <= _SHOWN_ORDER:
        return text
    return f"{head}.order-{hashlib.sha256(order.encode()).hexdigest()[:8]}"


def _suffix(layout: Layout, axis: str) -> str:
    if axis == "pp":
        return "".join(f"_{layers}" for layers in layout.stages)
    if axis == "fsdp" and layout.zero != 3:
        return f"-z{layout.zero}"
    return "-sp" if axis == "tp" and layout.sp else ""


def _read(text: str) -> tuple[Layout, list[str]]:
    """The layout as far as it could be read, and every problem met."""
    if text == ONE_RANK:
        return Layout(), []
    if not text:
        return Layout(), ["the text is empty; one rank is dp1"]
    axes: list[tuple[str, int]] = []
    stages: tuple[int, ...] = ()
    options: set[str] = set()
    order: tuple[int, ...] = ()
    problems: list[str] = []
    parts = text.split(".")
    for i, part in enumerate(parts):
        problem = _part_problem(part)
        if problem:
            problems.append(problem)
        elif part.startswith("order"):
            if i < len(parts) - 1:
                problems.append(f"{part!r}: the order comes last")
            order = tuple(map(int, part.split("_")[1:]))
        elif match := _AXIS.fullmatch(part):
            axes.append((match["axis"], int(match["size"])))
            stages = tuple(map(int, match["stages"].split("_")[1:])) or stages
            options |= set(match["options"].split("-")[1:])
    if not axes and not problems:
        problems.append("no axis is named; one rank is dp1")
    layout = Layout(
        axes=tuple(axes),
        stages=stages,
        zero=next((int(option[1]) for option in sorted(options) if option.startswith("z")), 3),
        sp="sp" in options,
        order=() if order == tuple(range(len(order))) and len(order) == math.prod(size for _, size in axes) else order,
    )
    return layout, problems or list(form_problems(layout))


def _part_problem(part: str) -> str:
    """What is wrong with one part, taken alone; empty where nothing is."""
    match = _AXIS.fullmatch(part)
    rule = ""
    if number := re.search(r"[0-9]{10,}", part):
        rule = f"a number of {len(number[0])} digits; a layout has at most {MOST_RANKS} ranks"
    elif part.startswith("order"):
        if not _ORDER.fullmatch(part):
            rule = "an order is written in full (order_0_2_1_3), not as a hash"
    elif _CHUNKS.fullmatch(part):
        rule = "interleaved stages (v) are not built yet; write ppN for plain stages"
    elif match and match["axis"] in _LATER:
        rule = f"{_LATER[match['axis']]} ({match['axis']}) is not built yet; axes are {', '.join(AXES)}"
    elif not match or match["axis"] not in AXES:
        rule = "a part is an axis and its size, as in dp2, fsdp4-z2, tp2-sp, pp4 or pp4_2_3_4_3"
    elif match["stages"] and match["axis"] != "pp":
        rule = f"layers per stage belong to pp, not to {match['axis']}"
    else:
        rule = _option_problem(match["axis"], match["options"].split("-")[1:])
    return f"{part!r}: {rule}" if rule else ""


def _option_problem(axis: str, options: list[str]) -> str:
    if "z3" in options:
        return "fsdp without an option is ZeRO-3; leave -z3 out"
    for option in options:
        if option not in _OPTIONS:
            return f"-{option} is not an option; options are {', '.join('-' + name for name in _OPTIONS)}"
        if _OPTIONS[option] != axis:
            return f"-{option} belongs to {_OPTIONS[option]}, not to {axis}"
    return "one option of a kind" if len(options) > 1 else ""


def _repaired(text: str) -> str:
    """The legal spelling that ``text`` probably meant; where there is no good guess, the axes that can be made out."""
    lower = re.sub(r"(?<=[a-z])[=:_\- ]+(?=[0-9])", "", text.strip().lower().replace("order_", "order~"))
    parts = [part for part in re.split(r"[^a-z0-9_~\-]+", lower.replace("-z3", "")) if part]
    guess = ".".join(filter(None, map(_repaired_part, parts))) or ONE_RANK
    layout, problems = _read(guess)
    return _axes_of(lower) if problems or guess == text else print_layout(layout)


def _axes_of(text: str) -> str:
    """The axes in ``text`` that can stand together, each once and without options; one rank where there are none."""
    sizes: dict[str, int] = {}
    for axis, digits in re.findall(rf"(?<![a-z])({'|'.join(AXES)})({_NUMBER})", text):
        size = min(int(digits[:9]), MOST_RANKS)
        if axis not in sizes and 1 < size <= MOST_RANKS // math.prod(sizes.values()):
            sizes[axis] = size
    return print_layout(Layout(axes=tuple(sizes.items())))


def _repaired_part(part: str) -> str:
    if part.startswith("order~"):
        return part.replace("~", "_")
    match = re.fullmatch(r"([a-z]+)0*([1-9][0-9]*)(?:v[0-9]+)?((?:_[0-9]+)*)-?([a-z0-9]*)", part)
    words = difflib.get_close_matches(match[1], AXES, n=1) if match and match[1] not in _LATER else []
    if not match or not words:
        return part
    axis, size, stages, said = words[0], match[2], match[3], match[4]
    meant = difflib.get_close_matches(said, [name for name in _OPTIONS if _OPTIONS[name] == axis], n=1, cutoff=0.5)
    if said and not meant and said not in _OPTIONS:
        return part
    return "" if size == "1" else f"{axis}{size}{stages}{'-' + meant[0] if meant else ''}"
