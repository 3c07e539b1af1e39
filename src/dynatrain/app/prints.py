"""What must be alike for all agents of a run, as fingerprints."""

from dynatrain.observe.paths import user_path
from dynatrain.observe.prints import code_print, print_of
from dynatrain.observe.versions import versions
from dynatrain.space.run_check import CheckedRun


def prints_of(run: CheckedRun) -> dict[str, str]:
    """Of code, versions, model, and the file of the user's own loop; the configuration of a run is in its folder."""
    found = versions()
    alike = {"python": found["python"], "torch": found["torch"], "model": print_of([repr(run.shape).encode()])}
    path, _, _ = run.config.loop.rpartition(":")
    own = {"loop": print_of([user_path(path).read_bytes()])} if path else {}
    return {"code": code_print(), **alike, **own}
