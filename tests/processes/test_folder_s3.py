"""Elastic workers that meet in a bucket: the protocol of S3, with a simulated server."""

import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_gc.elastic.objects import Objects
from tests.soak.elastic import Run

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")
pytestmark = [pytest.mark.processes, pytest.mark.nightly]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Yield the URL of a bucket. Workers find it by their environment."""
    from werkzeug.serving import make_server

    app, one = server.DomainDispatcherApplication(server.create_backend_app), threading.Lock()

    def in_turn(environ: Any, start: Any) -> list[bytes]:
        with one:  # moto looks before it writes, which S3 does in one step
            return list(app(environ, start))

    made = make_server("127.0.0.1", 0, in_turn, threaded=True)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    own = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server_port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setitem(os.environ, name, value)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    made.shutdown()
    thread.join()
    made.server_close()


def test_who_creates_a_name_first_has_it(bucket: str) -> None:
    one, other = (Objects(f"{bucket}/laws", "secret") for _ in range(2))
    for each in (one, other):
        each.enter()
    assert one.create("log/0", b"one")
    assert not other.create("log/0", b"other")
    before = one.names("log")
    assert other.get_all(["log/0", "log/1"]) == [b"one", None]
    one.put("log/0", b"new")
    assert one.names("log") != before
    one.remove(["log/0", "log/1"])
    assert other.names("log") == {}
    with pytest.raises(ValueError, match="another secret"):
        Objects(f"{bucket}/laws", "another").enter()


@pytest.mark.timeout(600)
def test_random_faults(bucket: str) -> None:
    seen = Run(0, rounds=30, workers=3, within=f"{bucket}{{}}").play(faults=3)
    assert seen.problems == []
