"""The text of a layout: one parser, one canonical print.

Parts are joined by dots, axes outermost first: ``pp4_2_3_4_3.fsdp2-z2.tp2-sp.order_...``. Only ``[A-Za-z0-9._-]``
occurs, so that a layout pastes into a shell, a label and a file name. There is one spelling of each layout: what
differs from it is refused, with the spelling that was probably meant.
"""

import difflib
import hashlib
import math
import re
from collections.abc import Sequence

from dynatrain.layout.form import CP_METHODS, LayoutError, form_problems
from dynatrain.layout.layout import AXES, EXPERT_AXES, MOST_RANKS, Axes, Layout

ONE_RANK = "dp1"
"""The text of the layout without any axis."""

_NAMES = (*AXES, *EXPERT_AXES)
_NUMBER = r"[1-9][0-9]*"
_AXIS = re.compile(
    rf"(?P<axis>[a-z]+?)(?P<size>{_NUMBER})(?:v(?P<chunks>{_NUMBER}))?"
    r"(?P<stages>(?:_[0-9]+)*)(?P<options>(?:-[a-z0-9]+)*)"
)
_ORDER = re.compile(r"order(?:_(?:0|[1-9][0-9]*))+")
_OPTIONS = {
    "sp": ("tp",),
    "z1": ("fsdp", "cp"),
    "z2": ("fsdp", "cp"),
    "ring": ("cp",),
    "ulysses": ("cp",),
    "zb": ("pp",),
    "zbv": ("pp",),
}
"""Options, and the axes that each may stand behind. Where both are named, ZeRO's stage stands behind fsdp."""
_KINDS = _SP, _ZERO, _METHOD, _SCHEDULE = {"sp"}, {"z1", "z2"}, {"ring", "ulysses"}, {"zb", "zbv"}
_SHOWN_ORDER = 16
_MOST_PARTS = len(_NAMES) + 1
"""Every axis once, and the order."""
_SHOWN = 200
"""Letters of a text that are shown where it is wrong; an order may have many thousands."""


def parse_layout(text: str) -> Layout:
    """The layout that ``text`` spells.

    Raises:
        LayoutError: listing every part that does not parse and every rule of form that is broken, with the spelling
            that was probably meant. Whether a model and a world allow the layout is
            :func:`dynatrain.layout.legality.check`'s question.
    """
    layout, problems = _read(text)
    if problems:
        raise LayoutError(f"{_quoted(text)} is not a layout", tuple(problems), (_repaired(text),))
    return layout


def print_layout(layout: Layout) -> str:
    """The canonical text. ``parse_layout`` gives the layout back; an identity order prints as none."""
    parts = [f"{name}{size}{_suffix(layout, name)}" for name, size in layout.axes] or [ONE_RANK]
    parts += [f"{axis}{layout.size(axis)}" for axis in EXPERT_AXES if layout.size(axis) > 1]
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
    zero = f"-z{layout.zero}" if layout.zero != 3 and axis == _zero_axis(layout.axes) else ""
    if axis == "pp":
        chunks = f"v{layout.chunks}" if layout.chunks != 1 else ""
        return chunks + "".join(f"_{layers}" for layers in layout.stages) + _option(layout.schedule)
    if axis == "cp":
        return _option("" if layout.cp_method == CP_METHODS[0] else layout.cp_method) + zero
    return "-sp" if axis == "tp" and layout.sp else zero


def _option(name: str) -> str:
    return f"-{name}" if name else ""


def _zero_axis(axes: Axes) -> str:
    """Behind which axis ZeRO's stage stands."""
    return "fsdp" if any(name == "fsdp" for name, _ in axes) else "cp"


def _read(text: str) -> tuple[Layout, list[str]]:
    """The layout as far as it could be read, and every problem met."""
    if text == ONE_RANK:
        return Layout(), []
    if not text:
        return Layout(), ["the text is empty; one rank is dp1"]
    matches: list[re.Match[str]] = []
    order: tuple[int, ...] = ()
    problems: list[str] = []
    parts = text.split(".")
    if len(parts) > _MOST_PARTS:
        return Layout(), [f"it has {len(parts)} parts; at most {_MOST_PARTS}, since each axis appears once"]
    for i, part in enumerate(parts):
        if problem := _part_problem(part):
            problems.append(problem)
        elif part.startswith("order"):
            if i < len(parts) - 1:
                problems.append(f"{_quoted(part)}: the order comes last")
            order = tuple(map(int, part.split("_")[1:]))
        elif match := _AXIS.fullmatch(part):
            matches.append(match)
    if not matches and not problems:
        problems.append("no axis is named; one rank is dp1")
    problems += _place_problems(matches)
    layout = _made(matches, order)
    return layout, problems or list(form_problems(layout))


def _made(matches: list[re.Match[str]], order: tuple[int, ...]) -> Layout:
    """The layout of parts that are right, each taken alone."""
    axes = tuple((match["axis"], int(match["size"])) for match in matches if match["axis"] in AXES)
    experts = {match["axis"]: int(match["size"]) for match in matches if match["axis"] in EXPERT_AXES}
    pp = next((match for match in matches if match["axis"] == "pp"), None)
    options = {option for match in matches for option in match["options"].split("-")[1:]}

    def said(among: set[str], otherwise: str) -> str:
        return next(iter(sorted(options & among)), otherwise)

    return Layout(
        axes=axes,
        chunks=int(pp["chunks"] or 1) if pp else 1,
        stages=tuple(map(int, pp["stages"].split("_")[1:])) if pp else (),
        schedule=said(_SCHEDULE, ""),
        zero=int(said(_ZERO, "z3")[1]),
        cp_method=said(_METHOD, CP_METHODS[0]),
        sp=bool(_SP & options),
        ep=experts.get("ep", 1),
        etp=experts.get("etp", 1),
        order=() if order == tuple(range(len(order))) and len(order) == math.prod(size for _, size in axes) else order,
    )


def _place_problems(matches: list[re.Match[str]]) -> list[str]:
    """What is wrong with parts that are right, each taken alone: where they stand, and beside which others."""
    names = [match["axis"] for match in matches]
    problems = [f"{axis} appears {names.count(axis)} times; each axis appears once" for axis in _twice(names)]
    usual = sorted(names, key=lambda name: (name in EXPERT_AXES, EXPERT_AXES.index(name) if name in EXPERT_AXES else 0))
    if names != usual and not problems:
        problems.append("ep and etp stand, in this order, behind the axes whose ranks they factor anew")
    if "fsdp" in names:
        late = [match for match in matches if match["axis"] == "cp" and _ZERO & set(match["options"].split("-"))]
        problems += [f"{match[0]!r}: ZeRO's stage stands behind fsdp where there is one" for match in late]
    problems += [f"{match[0]!r}: an axis of size 1 is left out" for match in matches if _is_one(match)]
    return problems


def _is_one(match: re.Match[str]) -> bool:
    return match["axis"] in EXPERT_AXES and match["size"] == "1"


def _twice(names: Sequence[str]) -> list[str]:
    return [axis for axis in EXPERT_AXES if names.count(axis) > 1]


def _part_problem(part: str) -> str:
    """What is wrong with one part, taken alone; empty where nothing is."""
    match = _AXIS.fullmatch(part)
    rule = ""
    if number := re.search(r"[0-9]{10,}", part):
        rule = f"a number of {len(number[0])} digits; a layout has at most {MOST_RANKS} ranks"
    elif part.startswith("order"):
        if not _ORDER.fullmatch(part):
            rule = "an order is written in full (order_0_2_1_3), not as a hash"
    elif not match or match["axis"] not in _NAMES:
        rule = "a part is an axis and its size, as in dp2, fsdp4-z2, cp2-ring, tp2-sp, pp4_2_3_4_3, pp2v2, ep4, etp2"
    elif match["stages"] and match["axis"] != "pp":
        rule = f"layers per stage belong to pp, not to {match['axis']}"
    elif match["chunks"] and match["axis"] != "pp":
        rule = f"interleaved stages (v) belong to pp, not to {match['axis']}"
    elif match["chunks"] == "1":
        rule = "v1 goes without saying; leave it out"
    else:
        rule = _option_problem(match["axis"], match["options"].split("-")[1:])
    return f"{_quoted(part)}: {rule}" if rule else ""


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _option_problem(axis: str, options: list[str]) -> str:
    if "z3" in options:
        return "fsdp without an option is ZeRO-3; leave -z3 out"
    for option in options:
        if option not in _OPTIONS:
            return f"-{option} is not an option; options are {', '.join('-' + name for name in _OPTIONS)}"
        if axis not in _OPTIONS[option]:
            return f"-{option} belongs to {_OPTIONS[option][0]}, not to {axis}"
    if any(len([option for option in options if option in kind]) > 1 for kind in _KINDS):
        return "one option of a kind"
    return "ZeRO's stage comes last" if len(options) == 2 and options[0].startswith("z") else ""


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
    match = re.fullmatch(r"([a-z]+?)0*([1-9][0-9]*)(v[1-9][0-9]*)?((?:_[0-9]+)*)((?:-?[a-z][a-z0-9]*)*)", part)
    words = difflib.get_close_matches(match[1], _NAMES, n=1) if match else []
    if not match or not words:
        return part
    axis, size, chunks, stages = words[0], match[2], match[3] or "", match[4]
    own = [name for name, axes in _OPTIONS.items() if axis in axes]
    options: list[str] = []
    for said in re.findall(r"[a-z][a-z0-9]*", match[5]):
        meant = [said] if said in own else difflib.get_close_matches(said, own, n=1, cutoff=0.5)
        if not meant and said not in _OPTIONS:
            return part
        options += [f"-{name}" for name in meant if f"-{name}" not in options]
    return "" if size == "1" else f"{axis}{size}{'' if chunks == 'v1' else chunks}{stages}{''.join(sorted(options))}"
