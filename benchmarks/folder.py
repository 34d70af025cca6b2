"""Seconds, requests and bytes of elastic rounds through a bucket, beside sockets on the same link.

    python benchmarks/folder.py --workers 2 8 --mbit 100
    python benchmarks/folder.py --goodput 3

Workers are processes in network namespaces, whose ways out and in are shaped. The bucket is a
server of S3's protocol in a namespace of its own, whose link is not shaped. The slow folder lies on
this machine. Each of its requests takes 0.1 s longer, and its rate is 10 MB/s. Needs Linux,
root, iproute2, s3fs and moto[server].

With ``--goodput`` jobs of this machine die and join as in ``papers/goodput.py``, with a folder in
place of the rendezvous.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dated_page import say
from namespaces import INTERFACE, SUBNET, Link, check_privileges, launch, network, tc
from torch import nn

from lightning_gc import Elastic, LocalSteps, TopK
from lightning_gc.elastic import objects
from lightning_gc.methods.text_table import markdown

PORT = 5000
LATENCY, RATE = 0.1, 1e7  # of the slow folder
KINDS = ("sockets", "bucket", "slow folder")
WARM = 3  # rounds that are not counted


class Store:
    """A store that counts requests and bytes, and may be slow."""

    def __init__(self, inner: Any, slow: bool) -> None:
        self._inner, self._slow = inner, slow
        self.requests = self.moved = 0

    def __getattr__(self, name: str) -> Any:
        def asked(*arguments: Any) -> Any:
            self.requests += 1
            began, found = time.monotonic(), None
            try:
                found = getattr(self._inner, name)(*arguments)
            finally:
                nbytes = sum(len(each) for each in (*arguments, found) if isinstance(each, bytes))
                self.moved += nbytes
                if self._slow:
                    time.sleep(max(0.0, began + LATENCY + nbytes / RATE - time.monotonic()))
            return found

        return asked


def work(options: argparse.Namespace) -> None:
    """Be a worker: train, and note when each round has ended, and what it has asked for."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    opened: list[Store] = []
    open_store = objects.store_at

    def counted(url: str) -> Any:
        opened.append(Store(open_store(url), options.slow))
        return opened[-1]

    objects.store_at = counted
    module = nn.Linear(1000, options.numel // 1000, bias=False)
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    workers = options.workers[0]
    elastic = Elastic(options.meet, min_workers=workers, secret="benchmark", timeout=60.0)
    known: list[tuple[float, int, int]] = []
    parts: dict[str, Any] = {"compressor": TopK(0.03), "every": options.every, "min_numel": 0}
    steps = options.every * (WARM + options.rounds)
    with LocalSteps(module, sgd, **parts, elastic=elastic) as local:
        for step in local.until(steps):
            if step % options.every == 0:
                asked = (opened[0].requests, opened[0].moved) if opened else (0, 0)
                known.append((time.monotonic(), *asked))
            sgd.zero_grad()
            module(torch.randn(2, 1000)).square().mean().backward()
            sgd.step()
            time.sleep(options.seconds)
        number = local.number
    options.out.write_text(json.dumps({"number": number, "known": known[WARM:]}))


def serve() -> None:
    """Serve a bucket, one request after the other: the server looks before it writes."""
    from moto import server  # type: ignore[import-not-found]
    from werkzeug.serving import make_server

    app, one = server.DomainDispatcherApplication(server.create_backend_app), threading.Lock()

    def in_turn(environ: Any, start: Any) -> list[bytes]:
        with one:
            return list(app(environ, start))

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = make_server("0.0.0.0", PORT, in_turn, threaded=True)
    say("ready")
    made.serve_forever()


def measure(workers: int, link: Link, options: argparse.Namespace, kind: str) -> list[str]:
    """Return a row of the table."""
    bucket, slow = kind == "bucket", kind == "slow folder"
    with tempfile.TemporaryDirectory() as folder, network(workers + 1, link) as (*spaces, store):
        tc(f"-n {store} qdisc del dev {INTERFACE} root")
        meet, server = folder if slow else f"{SUBNET}1:29400", None
        if bucket:
            hub = f"{store.rpartition('-')[0]}-{workers + 1}"
            tc(f"-n {hub} qdisc del dev port{workers} root")
            place = f"http://{SUBNET}{workers + 1}:{PORT}"
            meet = "s3://bucket/run"
            os.environ |= {
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": place,
            }
            words = f"ip netns exec {store} {sys.executable} {__file__} --serve".split()
            server = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert server.stdout is not None
            server.stdout.readline()
            script = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
            into = f"ip netns exec {spaces[0]} {sys.executable} -c".split()
            subprocess.run([*into, script], check=True, timeout=120)
        arguments = [f"--meet={meet}", f"--workers={workers}", f"--rounds={options.rounds}"]
        arguments += ["--slow"] if slow else []
        same = ("numel", "every", "seconds")
        arguments += [f"--{name}={getattr(options, name)}" for name in same]
        limit = 300 + 4 * options.rounds * options.every * options.seconds
        answers = launch(__file__, arguments, spaces, timeout=limit)
        if server is not None:
            server.kill()
    took, asked, moved = [], [], []
    for each in answers:
        rounds = list(zip(each["known"], each["known"][1:], strict=False))
        took += [b[0] - a[0] - options.every * options.seconds for a, b in rounds]
        asked.append(statistics.fmean(b[1] - a[1] for a, b in rounds))
        moved += [b[2] - a[2] for a, b in rounds]
    others = [f"{min(asked):.1f}", f"{max(asked):.1f}", f"{statistics.median(moved) / 1e6:.2f}"]
    return [
        kind,
        str(workers),
        f"{statistics.median(took):.2f}",
        *(others if max(asked) else ["–"] * 3),
    ]


def goodput(seeds: int) -> None:
    """Print how much of the undisturbed rate is left when jobs die and join."""
    sys.path.insert(0, str(Path(__file__).with_name("papers")))
    from goodput import DEATHS, JOINS, LENGTH, REAL, SECONDS
    from goodput_jobs import Task, run
    from goodput_rounds import faults

    task = Task("SparseLoCo", 0, 8 * LENGTH, seconds=SECONDS, small=True, folder=True)
    undisturbed = run(task, REAL, [])
    say(f"undisturbed: a round of {undisturbed['round']:.2f} s")
    for seed in range(seeds):
        planned = faults(LENGTH, DEATHS, JOINS, random.Random(seed))
        found = run(task, REAL, planned)
        deaths = [f"{each:.1f}" for each in found["deaths"]]
        say(
            f"seed {seed}: goodput {found['rate'] / undisturbed['rate']:.1%}, round of "
            f"{found['round']:.2f} s, seconds from a kill to the next commit: {', '.join(deaths)}"
        )


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 8])
    add("--kinds", nargs="+", choices=KINDS, default=KINDS)
    add("--mbit", type=float, default=100)
    add("--rounds", type=int, default=12)
    add("--every", type=int, default=8, help="steps of a round")
    add("--seconds", type=float, default=1.0, help="of a step")
    add("--numel", type=int, default=4_000_000, help="parameters, of which 3 %% are sent")
    add("--goodput", type=int, default=0, metavar="SEEDS", help="only this")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--slow", action="store_true", help=argparse.SUPPRESS)
    add("--meet", help=argparse.SUPPRESS)  # of a worker
    add("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.serve:
        serve()
    elif options.out:
        work(options)
    elif options.goodput:
        goodput(options.goodput)
    else:
        check_privileges("The benchmark of folders")
        link = Link(options.mbit, down_mbit=options.mbit)
        rows = [
            measure(workers, link, options, kind)
            for workers in options.workers
            for kind in options.kinds
        ]
        heads = ["", "W", "seconds of an exchange", "requests, least", "most", "MB of a worker"]
        say(markdown(heads, rows))


if __name__ == "__main__":
    main()
