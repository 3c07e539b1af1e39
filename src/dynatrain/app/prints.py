"""What must be alike for all agents of a run, as fingerprints."""

from dynatrain.observe.prints import code_print, print_of
from dynatrain.observe.versions import versions
from dynatrain.space.decoder import DecoderShape


def prints_of(model: DecoderShape) -> dict[str, str]:
    """Of code, versions and model; the configuration of a run is in its folder."""
    found = versions()
    alike = {"python": found["python"], "torch": found["torch"]}
    return {"code": code_print(), **alike, "model": print_of([repr(model).encode()])}
