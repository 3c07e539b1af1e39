"""``dynatrain plan FROM TO --model M``."""

from typing import Annotated, Literal

import tyro

from dynatrain.app.cli import Rank, Text, call
from dynatrain.app.mistake import MistakeError, all_of
from dynatrain.app.output import emit, say, seconds, size
from dynatrain.app.plan_text import head, moves_of_part, moves_of_plan, numbers, plan_record, rank_table
from dynatrain.app.planned import Change, change_of_model, in_chosen_order, timed
from dynatrain.judge.verdict import Verdict
from dynatrain.layout.foreign import read_layout
from dynatrain.plan.plan import Move, RankPlan
from dynatrain.space.presets import resolve_model

Model = Annotated[str, tyro.conf.arg(metavar="M")]


def run(words: list[str]) -> int:
    """The command."""
    return call(plan, words)


def plan(
    old: Text,
    new: Text,
    /,
    *,
    model: Model,
    rank: Rank = None,
    judge: bool = False,
    mode: Literal["keep", "tight"] = "keep",
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"] = "adamw",
    ranks_per_node: int | None = None,
    choose_order: bool = False,
    json: bool = False,
) -> int:
    """What a change of layout moves: every move, bytes in and out, peak memory and floor. Trains nothing.

    State is in fp32. Every move is printed where there are few, or those of one rank with --rank.
    The floor is in bytes: what the busiest link, or machine, cannot avoid, whoever the sources are.

    Args:
        old: the layout before.
        new: the layout after.
        model: a preset, or a folder with a config.json.
        rank: print the part of this rank alone.
        judge: have the whole plan judged, and say how long that took.
        mode: keep the old state to the commit, or hand it over tensor by tensor.
        optimizer: whose state is moved beside the parameters.
        ranks_per_node: ranks that share a machine; sources are then sought there first. By default, all do.
        choose_order: put the new layout's ranks in the order that moves fewest bytes, unless its text says an order.
        json: print one JSON object.
    """
    shape = resolve_model(model)
    before, after = all_of(lambda: read_layout(old), lambda: read_layout(new))
    layouts = (before, after)
    change = change_of_model(shape, layouts, mode=mode, optimizer=optimizer, ranks_per_node=ranks_per_node)
    if choose_order:
        change = in_chosen_order(change, shape.num_hidden_layers)
    ranks = len(change.storage.old)
    if rank is not None and not 0 <= rank < ranks:
        raise MistakeError(f"--rank {rank}: ranks are 0 .. {ranks - 1}.")
    part, part_took = timed(lambda: change.part(rank)) if rank is not None else (None, 0.0)
    whole, whole_took = timed(change.whole)
    summary = change.summary(whole)
    record = change.record(whole, summary)
    verdict, judge_took = timed(lambda: change.verdict(whole)) if judge else (None, 0.0)
    if json:
        took = {"whole": whole_took} | ({"part": part_took} if part else {}) | ({"judge": judge_took} if judge else {})
        emit({"model": model, **plan_record(record, change), "seconds": took, **_more(change, part, verdict)})
    else:
        say(*head(change, model))
        if part is None:
            rank_table(summary)
            say(*moves_of_plan(change, whole))
        else:
            say(*moves_of_part(change, part))
        say(*numbers(change, summary, record.plan_hash, whole_took, None if part is None else part_took))
        if verdict is not None:
            say(*_judged(verdict, judge_took))
    return 0 if verdict is None or verdict.ok else 1


def _judged(verdict: Verdict, took: float) -> tuple[str, ...]:
    if not verdict.ok:
        return (f"judged in {seconds(took)}: NOT sound", *(f"  - {problem}" for problem in verdict.problems))
    kinds = ", ".join(f"{kind} {size(count.written)}" for kind, count in verdict.coverage.items())
    return (f"judged in {seconds(took)}: sound; every byte is written exactly once ({kinds})",)


def _more(change: Change, part: RankPlan | None, verdict: Verdict | None) -> dict[str, object]:
    """One rank's part and the verdict, where they were asked for."""

    def moves(listed: tuple[Move, ...]) -> list[dict[str, object]]:
        tensors = change.catalogue
        return [
            {
                "tensor": tensors[move.tensor].name,
                "states": [tensors[move.tensor].states[state].name for state in move.states],
                "box": move.box,
                "from": move.src,
                "to": move.dst,
            }
            for move in listed
        ]

    found: dict[str, object] = {}
    if part is not None:
        found["part"] = {
            "rank": part.rank,
            "sends": moves(part.sends),
            "receives": moves(part.receives),
            "relays": moves(part.relays),
            "adopted": [
                [change.catalogue[tensor].name, change.catalogue[tensor].states[state].name]
                for tensor, state in part.adopted
            ],
        }
    if verdict is not None:
        found["verdict"] = {"ok": verdict.ok, "problems": verdict.problems}
    return found
