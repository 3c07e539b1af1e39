"""One agent after the other in this process: the next one where the agents have lost the one that led."""

from torch.distributed import DistError

from dynatrain.cluster.agent import FAILED, Agent
from dynatrain.cluster.interrupts import Interrupted, Interrupts
from dynatrain.cluster.meeting import Job, Meeting, RunFailedError, come_later, meet
from dynatrain.cluster.spawner import Spawner
from dynatrain.cluster.succession import succeed
from dynatrain.observe.log import Log


def drive(job: Job, spawner: Spawner, interrupts: Interrupts) -> int:
    """Run a job on this node to its end.

    Args:
        job: what to run.
        spawner: a fork server that was just started; closed on return.
        interrupts: the signals that end the agent.

    Returns:
        The exit code.

    Raises:
        PlaceError: the user asked for what the machines, or this launch, cannot give.
    """
    try:
        if job.claim is None:
            meeting = meet(job, interrupts)
        else:
            job, meeting = come_later(job, interrupts)
        job.run.logs.mkdir(parents=True, exist_ok=True)  # a node with a disk of its own has none yet
        ready = False
        while True:
            found = _run_once(job, meeting, spawner, interrupts, ready=ready)
            if isinstance(found, int):
                job.tenure.close(found)  # while the store is there: others that find it gone look here for the end
                return found
            (job, meeting), ready = found, True
    except Interrupted:
        return interrupts.exit_code
    except (RunFailedError, DistError) as error:
        job.announce(f"The run failed: {error}")
        return FAILED


def _run_once(
    job: Job, meeting: Meeting, spawner: Spawner, interrupts: Interrupts, *, ready: bool
) -> tuple[Job, Meeting] | int:
    """Run a job to its end, or to that of the agent that leads; then find out what follows."""
    generation = meeting.admission.generation if meeting.admission else 0
    with Log(job.run.events, generation=generation, attempt=meeting.attempt) as log:
        agent = Agent(job, meeting, spawner, interrupts, log, ready=ready)
        code = agent.run()
        if code is not None:
            return code
        try:
            return succeed(job, agent.heir, interrupts)
        except RunFailedError as failure:
            log.write("run_failed", reason=str(failure))
            raise
