"""Measure link, module, methods and DDP for an advice, predict, and measure the best methods."""

import contextlib
import dataclasses
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.advice import prediction
from lightning_gc.advice.costs import Costs, measure_costs
from lightning_gc.advice.link_probe import directions, probe
from lightning_gc.advice.report import keeps_settings, plan_of
from lightning_gc.bench.baselines import BF16, FP16, NO_EXCHANGE, NONE, PLAIN, baseline_strategy
from lightning_gc.bench.benchmark import Say, take_turns
from lightning_gc.bench.method_run import WARMUP_STEPS, Measurement, measure, train
from lightning_gc.bench.preparation import BenchError, BenchSetup
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange.timeline import Module
from lightning_gc.exchange.workers import plain_name
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method
from lightning_gc.transports.accounting import Mark, mark, seconds_between
from lightning_gc.transports.distributed import Distributed, gather_text
from lightning_gc.transports.link import Link, Links, at_rate, fit_with_knee, with_directions
from lightning_gc.transports.peer_error import PeerError, awaiting_peers


class ModuleTiming(pl.Callback):
    """Callback that times each step: forward, gradient readiness, backward, optimizer.

    The module trains without exchange. With accumulated gradients only the last backward pass
    counts. CUDA is timed by events.

    Args:
        warmup: steps that are not counted.
        keep: keep a copy of the last step's gradients.

    Attributes:
        gradients: parameter name -> gradient of the last step, if kept.
    """

    def __init__(self, warmup: int, keep: bool = True) -> None:
        self.warmup, self.keep = warmup, keep
        self.gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._steps: list[tuple[float, float, float, dict[str, float]]] = []
        self._before = 0.0  # seconds of the step's batches before the last one
        self._step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Register a hook on every trained parameter."""
        self._device = trainer.strategy.root_device
        self._ready: dict[str, Mark] = {}
        self._named = {plain_name(n): p for n, p in module.named_parameters() if p.requires_grad}
        for name, param in self._named.items():

            def note(_: Tensor, name: str = name) -> None:
                self._ready[name] = mark(self._device)

            self._handles.append(param.register_post_accumulate_grad_hook(note))

    def on_train_batch_start(self, *_: Any) -> None:
        """Mark the beginning of a batch."""
        self._started = mark(self._device)

    def on_before_backward(self, *_: Any) -> None:
        """Mark the end of the forward pass."""
        self._ready = {}
        self._forward = mark(self._device)

    def on_after_backward(self, *_: Any) -> None:
        """Mark the end of the backward pass."""
        self._backward = mark(self._device)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Mark the end of a batch; at the end of a step, record it."""
        ended = mark(self._device)
        if isinstance(ended, torch.cuda.Event):
            torch.cuda.synchronize()
        if trainer.global_step == self._step:
            self._before += seconds_between(self._started, ended)
            return
        ready = {name: seconds_between(self._forward, at) for name, at in self._ready.items()}
        forward = self._before + seconds_between(self._started, self._forward)
        backward = seconds_between(self._forward, self._backward)
        optimizer = seconds_between(self._backward, ended)
        self._steps.append((forward, backward, optimizer, ready))
        self._step, self._before = trainer.global_step, 0.0
        if self.keep:
            self.gradients = {
                name: param.grad.detach().clone()
                for name, param in self._named.items()
                if param.grad is not None
            }

    def on_train_end(self, *_: Any) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def module(self) -> Module:
        """Return the median seconds of the parts."""
        counted = self._steps[self.warmup :]
        forward, backward, optimizer = (
            statistics.median(each)
            for each in zip(*((f, b, o) for f, b, o, _ in counted), strict=True)
        )
        return Module(forward, backward, optimizer)

    def ready(self) -> dict[str, float]:
        """Return parameter name -> median seconds until its gradient is ready.

        A parameter that has had no gradient is ready when the backward pass has ended.
        """
        counted, end = self._steps[self.warmup :], self.module().backward
        found = {}
        for name in reversed(list(self._named)):
            seconds = [step[3][name] for step in counted if name in step[3]]
            found[name] = min(statistics.median(seconds), end) if seconds else end
        return dict(sorted(found.items(), key=lambda pair: pair[1]))

    def sizes(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return parameter name -> shape and bytes of its gradient."""
        return {
            name: (tuple(param.shape), param.numel() * param.element_size())
            for name, param in self._named.items()
        }


@contextlib.contextmanager
def busy(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` again and again in a thread within the body, as compression would be."""
    over = threading.Event()

    def run() -> None:
        with torch.no_grad():
            while not over.is_set():
                work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


STEPS = 6
"""Measured steps of the module, and of DDP without an exchange, for the prediction."""
BEST = 3
"""Number of compressed rows to measure."""
ROUNDS, FEWEST, MOST = 3, 4, 20
"""Turns of each row; minimum and maximum steps of a turn."""
SHARE, SHARE_ALONE = 0.3, 0.7
"""Shares of the budget for the methods' computation: if methods are measured, and if not."""


class Session:
    """Measures and predicts, in the same calls on all workers.

    Args:
        setup: settings of the measurements.
        methods: candidates.
        device: this worker's.
        say: called with a line of progress.
        deadline: ``time.monotonic()`` at which everything must be done.
        timing: seconds for timing the methods' computation.

    Communication pattern:
        The probe, the training of each turn, and small text messages between them.
    """

    def __init__(
        self,
        setup: BenchSetup,
        methods: Mapping[str, Method],
        device: torch.device,
        say: Say,
        deadline: float,
        timing: float,
    ) -> None:
        self.setup, self.methods, self.device, self.say = setup, methods, device, say
        self.deadline, self._timing = deadline, timing
        self.transport = Distributed(purpose="a measurement for an advice")
        # Torch has no bf16 hook for Gloo.
        self.hook = BF16 if setup.backend == "nccl" else FP16
        self.missing: dict[str, str] = {}

    def find_link(self) -> Links:
        """Probe the link between the workers."""
        try:
            probes = probe(self.transport, self.device)
            links = {kind: fit_with_knee(found) for kind, found in probes.items()}
            ways = directions(self.transport, self.device, links["Exchange"].gbps)
        except PeerError as error:
            raise BenchError(self.setup.worker.rank, "the probe of the link", error) from error
        return with_directions(links, *(min(each) for each in zip(*ways, strict=True)))

    def situation(
        self, links: Links, workers: int | None, nominal: Link | None
    ) -> prediction.Situation:
        """Time module, methods and DDP's wrapper; return the situation of the target.

        Args:
            links: as measured.
            workers: W of the target; None is this run's W.
            nominal: rates of its links, whose latency is the measured one; None: the measured
                links.
        """
        workers = workers or self.setup.worker.world_size
        timing, module = self._module_turn()
        ready = self._gather(timing.ready())  # in worker 0's order, as late as on any worker
        order = {name: max(each[name] for each in ready) for name in ready[0]}
        names = tuple(order)
        nbytes = tuple(timing.sizes()[name][1] for name in names)
        gradients = {
            name: timing.gradients.get(
                name, torch.zeros(timing.sizes()[name][0], dtype=torch.float32, device="cpu")
            ).to(self.device)
            for name in names
        }
        timing.gradients = {}
        contention = self._contention(module, gradients)
        pieces = prediction.pieces_for(nbytes)
        costs, self.missing = measure_costs(
            {prediction.WHOLE: None, **self.methods},
            gradients,
            names,
            pieces,
            workers,
            self._timing,
            self.transport,
            self.device,
        )
        if prediction.WHOLE in self.missing:
            refuse(
                f"The uncompressed exchange could not be timed: {self.missing[prediction.WHOLE]}. "
                f"All predictions need it. Free the device's memory, or use a smaller model"
            )
        self.shapes = {name: timing.sizes()[name][0] for name in names}
        numel = sum(math.prod(self.shapes[name]) for name in names)
        here = prediction.Situation(
            module,
            names,
            nbytes,
            tuple(order.values()),
            pieces,
            costs,
            prediction.WHOLE,
            self.setup.worker.world_size,
            links,
            contention,
            hook=self.hook,
            sixteen=2 * numel / sum(nbytes),
        )
        overhead = max(self._wrapped_turn() - module.step, 0.0)
        asked = links if nominal is None else at_rate(links, nominal)
        return replace(here, workers=workers, links=asked, overhead=overhead)

    def knobs(self, costs: Costs) -> dict[str, frozenset[str]]:
        """Return for each method the parameters with a level that a controller can set."""
        from lightning_gc.compressors.wrappers.per_parameter import by_default

        found = {}
        for name in costs.keys() & self.methods.keys():
            compressor = by_default(self.methods[name].make_compressor({}))
            if compressor.knob is None or self.methods[name].controller is not None:
                continue
            taken = (n for n, shape in self.shapes.items() if compressor.compresses(shape))
            found[name] = frozenset(taken)
        return found

    def measure(self, rows: Sequence[prediction.Prediction]) -> dict[str, dict[str, Any]]:
        """Measure plain DDP, torch's hook and the best rows in turn, while time lasts.

        16 bits are among these rows, and the best method that needs no tuning.
        """
        ranked = prediction.shortlist(rows, len(rows))
        kept = [row for row in ranked if keeps_settings(self.methods, row)]
        wanted = [row for row in kept if row.method != prediction.SIXTEEN][:1]
        wanted += [row for row in kept if row.method == prediction.SIXTEEN]
        best = ranked[:BEST] + [row for row in wanted if row not in ranked[:BEST]]
        dense = next(row for row in rows if row.name == PLAIN)
        steps, rounds = self._steps(dense, best)
        setup = replace(self.setup, steps=steps)
        runs: dict[str, Callable[[], Measurement]] = {
            PLAIN: partial(measure, setup, PLAIN, None),
            self.hook: partial(measure, setup, self.hook, None),
        }
        for row in best:
            assert row.method is not None
            method = self.methods[row.method]
            if row.whole:
                method = replace(method, controller=plan_of(row, method))
            more = {} if row.bucket_cap_mb is None else {"bucket_cap_mb": row.bucket_cap_mb}
            own = replace(setup, ddp={**setup.ddp, **more})
            runs[row.name] = partial(measure, own, row.name, method)
        counted = [row.name for row in best]
        begun = time.monotonic()

        def in_time() -> bool:
            """Return whether another round ends before the deadline, on all workers."""
            nonlocal begun
            now = time.monotonic()
            late = 2 * now - begun > self.deadline
            begun = now
            return not any(self._gather(late))

        return take_turns(runs, counted, rounds, self.device, self.say, in_time)

    def _steps(
        self, dense: prediction.Prediction, best: Sequence[prediction.Prediction]
    ) -> tuple[int, int]:
        """Return steps per turn and rounds that fit into the time left, equal on all workers."""
        step = sum(row.seconds for row in best) + 2 * dense.seconds
        turns = (2 + len(best)) * self._turn_seconds
        left = (self.deadline - time.monotonic()) * 0.9
        for rounds in range(ROUNDS, 0, -1):
            steps = int(((left / rounds) - turns) / step) - WARMUP_STEPS
            if steps >= FEWEST:
                break
        else:
            rounds = 1
        found = self._gather({"steps": max(FEWEST, min(steps, MOST)), "rounds": rounds})
        return min(each["steps"] for each in found), min(each["rounds"] for each in found)

    def _module_turn(self) -> tuple[ModuleTiming, Module]:
        timing = ModuleTiming(WARMUP_STEPS)
        self._alone(timing)
        self.say("timed the module by itself")
        found = [Module(**each) for each in self._gather(dataclasses.asdict(timing.module()))]
        return timing, max(found, key=lambda each: each.step)

    def _alone(self, timing: ModuleTiming) -> None:
        """Train without an exchange."""
        self.setup.worker.restore_environment()
        name = "the module by itself"
        try:
            strategy = baseline_strategy(
                NONE, self.setup.backend, timeout=self.setup.timeout, **self.setup.ddp
            )
            _, module = train(self.setup, strategy, WARMUP_STEPS + STEPS, name, [timing])
            if not module.automatic_optimization:
                refuse(
                    "The model optimizes manually, so a step may have several exchanges. advise "
                    "cannot predict their timeline. Use lightning-gc bench"
                )
            rank, ranks = self.setup.worker.rank, self.setup.worker.world_size
            with awaiting_peers(f"finish {name}", rank, ranks):
                dist.barrier()
        except ValueError:
            raise
        except Exception as error:
            raise BenchError(self.setup.worker.rank, name, error) from error

    def _contention(self, module: Module, gradients: Mapping[str, Tensor]) -> float:
        """Return the share by which a computing thread slows the backward pass down."""
        largest = max(gradients.values(), key=Tensor.numel).reshape(-1)
        sample = largest[: 1 << 20].clone()
        timing = ModuleTiming(WARMUP_STEPS, keep=False)
        with busy(lambda: sample.abs().topk(max(sample.numel() // 100, 1))):
            self._alone(timing)
        slowed = [each["backward"] for each in self._gather(dataclasses.asdict(timing.module()))]
        self.say("timed it with a busy thread")
        return float(min(max(max(slowed) / module.backward - 1, 0.0), 1.0))

    def _wrapped_turn(self) -> float:
        """Return the seconds of a step in DDP without an exchange; record a turn's fixed seconds.

        A step of plain DDP would not show DDP's overhead: on a slow link the probe's error, which
        grows with the bytes, is as large.
        """
        began = time.monotonic()
        measured = measure(replace(self.setup, steps=STEPS), NO_EXCHANGE, None)
        median = statistics.median(measured.seconds)
        self._turn_seconds = max(time.monotonic() - began - (WARMUP_STEPS + STEPS) * median, 0.0)
        self.say(f"timed DDP without an exchange: {median:.4f} s per step")
        return max(float(each) for each in self._gather(median))

    def _gather(self, value: Any) -> list[Any]:
        texts = gather_text(json.dumps(value), self.transport, self.device, "finish a measurement")
        return [json.loads(text) for text in texts]
