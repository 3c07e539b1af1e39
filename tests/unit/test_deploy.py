"""The launch templates: parsed, and what in them has to agree."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dynatrain.app.main import COMMANDS
from dynatrain.config.load import load_config

pytestmark = pytest.mark.clock

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def jobs(manifest: Path) -> dict[str, dict]:
    """The specifications of all Jobs, by what they are for."""
    found = {}
    for one in yaml.safe_load_all(manifest.read_text()):
        if one["kind"] == "Job":
            found[one["metadata"]["name"].removeprefix("dynatrain-")] = one["spec"]
        elif one["kind"] == "JobSet":
            found |= {job["name"]: job["template"]["spec"] for job in one["spec"]["replicatedJobs"]}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_executable_and_listed(script):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert script.stat().st_mode & 0o111
    assert f"({script.relative_to(DEPLOY)})" in (DEPLOY / "README.md").read_text()


def test_slurm_lets_drained_agents_end_and_queues_again_what_stopped_saved():
    text = (DEPLOY / "slurm.sh").read_text()
    for needed in (
        "--kill-on-bad-exit=0",
        "#SBATCH --requeue",
        "exec dynatrain train",
        "-eq 75",
        "--ntasks-per-node=1",
    ):
        assert needed in text
    notice = int(re.search(r"--signal=TERM@(\d+)", text)[1])
    grace = int(re.search(r"grace_seconds = (\d+)", text)[1])
    assert grace < notice


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_pods_have_one_agent_each_that_gets_the_signals_and_more_time_than_it_takes(manifest):
    assert f"({manifest.relative_to(DEPLOY)})" in (DEPLOY / "README.md").read_text()
    found = jobs(manifest)
    assert found.keys() == {"leader", "workers"}
    defaults = load_config(None, []).config
    for spec in found.values():
        pod = spec["template"]["spec"]
        (agent,) = pod["containers"]
        assert agent["command"][0] == "dynatrain"  # no shell between the kubelet and the agent
        assert agent["command"][1] in COMMANDS
        assert pod["terminationGracePeriodSeconds"] > max(defaults.save.grace_seconds, defaults.world.grace)
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in agent["volumeMounts"]} == volumes
        policy = {rule["action"] for rule in spec.get("podFailurePolicy", {}).get("rules", ())}
        assert not policy or pod["restartPolicy"] == "Never"  # Kubernetes takes the one with the other only
    leader, workers = (found[name]["template"]["spec"]["containers"][0] for name in ("leader", "workers"))
    assert found["leader"].get("parallelism", 1) == 1
    assert "lifecycle" not in leader  # it cannot be drained: it leads
    assert leader["command"][1] == "train"
    assert workers["command"][1:3] == ["join", leader["command"][leader["command"].index("--run") + 1]]
    shell, flag, drain = workers["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert drain.split()[:4] == ["dynatrain", "drain", workers["command"][2], "--host"]
    deadline = int(re.search(r"--deadline (\d+)s", drain)[1])
    assert deadline < found["workers"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert subprocess.run(["sh", "-n", "-c", drain], check=False).returncode == 0


def test_a_drained_pod_does_not_end_the_workers_job_and_exit_75_is_no_failure():
    found = jobs(DEPLOY / "kubernetes" / "pods.yaml")
    assert found["workers"]["completions"] > found["workers"]["parallelism"]
    for spec in found.values():
        ignored = [
            rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"
        ]
        assert any(75 in values for values in ignored)


def test_the_leaders_settings_are_settings_of_a_run():
    for manifest in MANIFESTS:
        command = jobs(manifest)["leader"]["template"]["spec"]["containers"][0]["command"]
        settings = command[command.index("/shared/runs/one") + 1 :]
        assert load_config(None, settings).config.world.interface == "eth0"
