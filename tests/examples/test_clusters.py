"""Cluster scripts: as SLURM, torchrun on two machines and Ray start them, all on this machine."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import hold_port

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTER = str(EXAMPLES / "cluster.py")
TORCHRUN = ("-m", "torch.distributed.run")
pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(1200)]

Variables = dict[str, str]


def machines(*commands: tuple[tuple[str, ...], Variables]) -> list[str]:
    """Run one command for each machine at once; return what each prints."""
    running: list[Any] = []
    for command, variables in commands:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        running.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [process.communicate(timeout=500)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(printed)
    return printed


def trained(printed: list[str], step: int) -> None:
    """Worker 0 alone says how it went."""
    (line,) = re.findall(r"2 workers; ratio ([\d.]+); step (\d+)", "".join(printed))
    assert float(line[0]) > 10
    assert int(line[1]) == step


def slurm(task: int, port: int) -> Variables:
    """What srun sets: two machines with a task each."""
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "compressed",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(task),
        "MASTER_PORT": str(port),
    }


def test_slurm(tmp_path: Path) -> None:
    """By the variables of two machines; started again, as after a requeue, it goes on."""
    for epochs, step in ((1, 32), (2, 64)):
        options = ("--nodes=2", "--devices=1", f"--epochs={epochs}", f"--folder={tmp_path}")
        with hold_port() as held:
            port = held.getsockname()[1]
            tasks = [((CLUSTER, *options), slurm(task, port)) for task in range(2)]
            trained(machines(*tasks), step)
    files = {p.name.split("-")[-1] for p in (tmp_path / "lightning_gc_state").iterdir()}
    assert files == {"worker0of2.pt", "worker1of2.pt"}


def kubernetes(port: int) -> Variables:
    """What Kubeflow's operator sets in each pod of ``kubernetes.yaml``, of one process each."""
    return {
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": "3",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_ID": "compressed",
    }


def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    options = ("--nodes=2", "--devices=1", "--epochs=1", f"--folder={tmp_path}")
    with hold_port() as held:
        port = held.getsockname()[1]
        pods = [((*TORCHRUN, CLUSTER, *options), kubernetes(port)) for _ in range(2)]
        trained(machines(*pods), 32)


def test_ray(tmp_path: Path) -> None:
    if not importlib.util.find_spec("ray"):
        pytest.skip("Ray is not installed: pip install 'ray[train]'")
    script = (str(EXAMPLES / "ray_train.py"), "--epochs=1", f"--folder={tmp_path}")
    (printed,) = machines((script, {"RAY_USAGE_STATS_ENABLED": "0"}))
    (ratio,) = re.findall(r"'compression/total_ratio': ([\d.]+)", printed.splitlines()[-1])
    assert float(ratio) > 10


FAILS_ONCE = """
import pathlib, sys
sys.path.insert(0, {examples!r})
import ray_train

def train(settings):
    import ray_train
    original = ray_train.train

    class Fails(ray_train.Model):
        def on_train_epoch_start(self):
            mark = pathlib.Path({folder!r}) / "failed"
            errors = self.trainer.strategy.engine.errors()
            if self.current_epoch == 1 and self.global_rank == 1 and not mark.exists():
                mark.touch()
                raise RuntimeError("as planned")
            if self.current_epoch == 1 and self.global_rank == 0 and mark.exists():
                norm = sum(float(error.norm()) for error in errors.values())
                (pathlib.Path({folder!r}) / "resumed").write_text(str(norm))

    ray_train.Model = Fails
    original(settings)

ray_train.train = train
print(ray_train.main(2, 2, pathlib.Path({folder!r})).metrics)
"""


def test_ray_goes_on_after_a_failure(tmp_path: Path) -> None:
    """A worker fails once in the second epoch: the first is not trained again, errors are kept."""
    if not importlib.util.find_spec("ray"):
        pytest.skip("Ray is not installed: pip install 'ray[train]'")
    code = FAILS_ONCE.format(examples=str(EXAMPLES), folder=str(tmp_path))
    file = tmp_path / "fails_once.py"
    file.write_text(code)
    paths = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    machines(((str(file),), {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths}))
    assert (tmp_path / "failed").exists()
    assert float((tmp_path / "resumed").read_text()) > 0


def test_the_scripts_are_what_their_shells_read() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True)
    manifest = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ]
    replicas = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert f"--nodes={replicas}" in container["command"]
    assert f"--devices={manifest['spec']['nprocPerNode']}" in container["command"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
