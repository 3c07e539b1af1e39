"""What an agent writes down of its ranks."""

from collections.abc import Callable
from contextlib import suppress

from torch.distributed import DistError

from dynatrain.cluster.context import Report
from dynatrain.cluster.heart import Pulse
from dynatrain.cluster.kernel import signal_name
from dynatrain.cluster.part import Part
from dynatrain.observe.log import Log


def write_down(
    report: Report, log: Log, part: Part, pulse: Pulse, announce: Callable[[str], None], *, by_agent: bool
) -> None:
    """Write down what the fork server says of a rank.

    Args:
        report: what it says.
        log: of events.
        part: who is in the world.
        pulse: the ranks' beats.
        announce: takes lines for people.
        by_agent: whether ranks end by the agent's hand.
    """
    rank = part.world.index(report.member) if report.member in part.world else -1
    about = {"rank": rank, "member": report.member, "pid": report.pid}
    if report.kind == "forked" and rank < 0:
        log.write("newcomer", **about)
    elif report.kind == "stopped":
        log.write("rank_stopped", signal=signal_name(report.signal), **about)
        announce(f"{signal_name(report.signal)}: {part.name(report.member)}.")
    elif report.kind == "continued":
        log.write("rank_continued", **about)
    elif report.kind == "ended":
        with suppress(DistError):
            pulse.look()
        beat = pulse.last(report.member)
        how = {
            "code": report.code,
            "signal": signal_name(report.signal) if report.signal else "",
            "by_agent": by_agent,
        }
        at = {"step": beat.step, "phase": beat.phase, "switch": beat.switch}
        log.write("rank_ended", **about, **how, error=report.words, **at)
