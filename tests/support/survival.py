"""Kill or stop a worker at a random moment, and see that nothing hangs and nothing is lost.

    python -m tests.support.survival --rounds 20

Each round starts a run of two workers, sends SIGKILL or SIGSTOP to one of them, waits until no
process is left, and starts the run again, which goes on from its last checkpoint. In the end it
must have the weights and errors of a run that was left alone, bit for bit.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.processes import hold_port

SCRIPT = Path(__file__).parent / "scripts" / "survivor.py"
# The strategy's timeout is 4 s; a child may take 10 s to end, and the machine may be busy.
PATIENCE = 40.0


def start(folder: Path, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)},
    )


def alive(session: int) -> list[int]:
    """Return the processes of a session that run or are stopped; the dead do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if int(of) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def finish(folder: Path) -> list[str]:
    """Start a run, or go on with one, and leave it alone; return what its workers ended with."""
    with hold_port() as held:
        run = start(folder, held.getsockname()[1])
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    return sorted(line for line in output.splitlines() if " ended with " in line)


def disturb(folder: Path, run: subprocess.Popen[str], draw: random.Random) -> str:
    """Wait until training is under way, then hit one worker; return what was done."""
    files = [folder / "pid0", folder / "pid1"]
    deadline = time.monotonic() + 180
    while not all(file.is_file() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "training does not begin"
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 4))
    worker = draw.randrange(2)
    what = draw.choice([signal.SIGKILL, signal.SIGSTOP])
    pid = int(files[worker].read_text())
    if run.poll() is not None:
        return "over before it was hit"
    os.kill(pid, what)
    if worker == 0 and what == signal.SIGSTOP:  # the parent: somebody must wake it, or wait
        time.sleep(8)
        os.kill(pid, signal.SIGCONT)
    return f"{what.name} to worker {worker}"


def one_round(
    seed: int, expected: list[str], out: Path, finish: Callable[[Path], list[str]] = finish
) -> str:
    """Run, hit, restart, which is what ``finish`` does; return what happened in a line."""
    draw = random.Random(seed)
    folder = Path(tempfile.mkdtemp(dir=out))
    with hold_port() as held:
        run = start(folder, held.getsockname()[1])
        done = disturb(folder, run, draw)
        hit = time.monotonic()
        try:
            output, _ = run.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"seed {seed}, {done}: hangs, {alive(run.pid)}") from None
        while left := alive(run.pid):
            assert time.monotonic() - hit < PATIENCE, f"seed {seed}, {done}: {left} are left behind"
            time.sleep(0.1)
    seconds = time.monotonic() - hit
    if run.returncode != 0:
        assert "rror" in output or "erminat" in output, output
    saved = [path.name for path in folder.glob("*.ckpt")]
    ends = finish(folder)
    assert ends == expected, f"seed {seed}, {done}: the run ended otherwise, from {saved}"
    named = "PeerError" in output
    return (
        f"seed {seed}: {done}, gone after {seconds:.1f} s, peers named: {named}, went on: {saved}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        expected = finish(Path(tempfile.mkdtemp(dir=out)))
        for seed in range(options.seed, options.seed + options.rounds):
            sys.stdout.write(one_round(seed, expected, Path(out)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
