"""Session: measures link, module, methods and DDP in turn, predicts, and measures the best."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.advice.alpha_beta import LinkByKind
from lightning_gc.advice.costs import Costs, measure_costs
from lightning_gc.advice.link_probe import Probe, at_rate, fit_all, probe
from lightning_gc.advice.module_timing import Busy, ModuleTiming
from lightning_gc.advice.prediction import Row, Situation, pieces_for, shortlist
from lightning_gc.advice.report import plan_of
from lightning_gc.advice.timeline import Module
from lightning_gc.bench.baselines import BF16, FP16, NO_EXCHANGE, NONE, PLAIN, baseline_strategy
from lightning_gc.bench.comparison import Say, take_turns
from lightning_gc.bench.method_run import BenchError, BenchSetup, Measurement, measure, train
from lightning_gc.bench.step_timing import WARMUP_STEPS
from lightning_gc.methods.method import Method
from lightning_gc.transports.distributed import Distributed, gather_text
from lightning_gc.transports.peer_error import PeerError

STEPS = 6
"""Measured steps of the module and of DDP without an exchange, before anything is predicted."""
BEST = 3
"""Compressed rows that are measured."""
ROUNDS, FEWEST, MOST = 3, 4, 20
"""Turns of each row, and steps of a turn."""
SHARE, SHARE_ALONE = 0.3, 0.7
"""Of the budget, for timing what methods compute; where nothing is measured by turns."""
WHOLE = "Identity()"
SIXTEEN = "cast"
"""Our method of 16 bits, which is always measured."""


@dataclass(frozen=True)
class Target:
    """The cluster that is asked about.

    Attributes:
        workers: W; None is that of this run.
        gbps: nominal rate of its links; None is the link found here.
    """

    workers: int | None = None
    gbps: float | None = None


class Session:
    """Measures and predicts on this worker, together with the others.

    Args:
        setup: of the turns.
        methods: candidates.
        device: this worker's.
        say: called with a line of progress.
        deadline: of the whole, ``time.monotonic()``.
        timing: seconds for what methods compute.

    Communication pattern:
        That of the probe, of the turns' training, and small messages of text in between.
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
        self.probes: dict[str, list[Probe]] = {}
        self.missing: dict[str, str] = {}

    def find_link(self) -> LinkByKind:
        """Probe the link between the workers."""
        try:
            self.probes = probe(self.transport, self.device)
        except PeerError as error:
            raise BenchError(self.setup.worker.rank, "the probe of the link", error) from error
        return fit_all(self.probes)

    def situation(self, target: Target, link: LinkByKind) -> Situation:
        """Time module, methods and DDP's wrapper; return what is known of the target."""
        workers = target.workers or self.setup.worker.world_size
        timing, module = self._module_turn()
        order = self._order(timing)
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
        pieces = pieces_for(nbytes)
        costs, self.missing = measure_costs(
            {WHOLE: None, **self.methods},
            gradients,
            names,
            pieces,
            workers,
            self._timing,
            self.transport,
            self.device,
        )
        if WHOLE in self.missing:
            raise ValueError(
                f"What sending everything computes was not measured, and all predictions rest on "
                f"it: {self.missing[WHOLE]}. Free the device's memory, or take a smaller model."
            )
        self.shapes = {name: timing.sizes()[name][0] for name in names}
        here = Situation(
            module,
            names,
            nbytes,
            tuple(order.values()),
            pieces,
            costs,
            WHOLE,
            self.setup.worker.world_size,
            link,
            contention,
        )
        overhead = max(self._wrapped_turn() - module.step, 0.0)
        asked = link if target.gbps is None else at_rate(link, target.gbps)
        return replace(here, workers=workers, link=asked, overhead=overhead)

    def knobs(self, costs: Costs) -> dict[str, frozenset[str]]:
        """Return method -> parameters whose levels its controller can set."""
        from lightning_gc.engine.compatibility import by_default

        found = {}
        for name in costs.keys() & self.methods.keys():
            compressor = by_default(self.methods[name].make_compressor({}))
            if compressor.knob is None or self.methods[name].controller is not None:
                continue
            taken = (n for n, shape in self.shapes.items() if compressor.compresses(shape))
            found[name] = frozenset(taken)
        return found

    def measure(self, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
        """Measure plain DDP, torch's hook, 16 bits and the best rows by turns, while time lasts."""
        best = shortlist(rows, BEST)
        if SIXTEEN not in {row.method for row in best}:
            best += shortlist([row for row in rows if row.method == SIXTEEN], 1)
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
            """Whether a round as long as the last one ends before the deadline, on all workers."""
            nonlocal begun
            now = time.monotonic()
            late = 2 * now - begun > self.deadline
            begun = now
            return not any(self._gather(late))

        return take_turns(runs, counted, rounds, self.device, self.say, in_time)

    def _steps(self, dense: Row, best: Sequence[Row]) -> tuple[int, int]:
        """Return steps per turn and rounds that fit into the time left, alike on all workers."""
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

    def _alone(self, *callbacks: Any) -> None:
        """Train without exchange, as the limit is measured."""
        self.setup.worker.restore_environment()
        name = "the module by itself"
        try:
            strategy = baseline_strategy(
                NONE, self.setup.backend, timeout=self.setup.timeout, **self.setup.ddp
            )
            _, module = train(self.setup, strategy, WARMUP_STEPS + STEPS, name, callbacks)
            if not module.automatic_optimization:
                raise ValueError(
                    "The model optimizes manually: a step may have several exchanges, and their "
                    "timeline is not known; use lightning-gc bench."
                )
            dist.barrier()
        except ValueError:
            raise
        except Exception as error:
            raise BenchError(self.setup.worker.rank, name, error) from error

    def _order(self, timing: ModuleTiming) -> dict[str, float]:
        """Return worker 0's order of readiness, with the latest seconds over workers."""
        found = self._gather(timing.ready())
        return {name: max(each[name] for each in found) for name in found[0]}

    def _contention(self, module: Module, gradients: Mapping[str, Tensor]) -> float:
        """Return what the backward pass loses while a thread computes beside it."""
        largest = max(gradients.values(), key=Tensor.numel).reshape(-1)
        sample = largest[: 1 << 20].clone()
        busy = Busy(lambda: sample.abs().topk(max(sample.numel() // 100, 1)))
        timing = ModuleTiming(WARMUP_STEPS, keep=False)
        try:
            self._alone(timing, busy)
        finally:
            busy.stop()
        slowed = [each["backward"] for each in self._gather(dataclasses.asdict(timing.module()))]
        self.say("timed it beside a busy thread")
        return float(min(max(max(slowed) / module.backward - 1, 0.0), 1.0))

    def _wrapped_turn(self) -> float:
        """Return the seconds of a step in DDP that sends nothing; note what a turn takes besides.

        What DDP adds is not read off a step of plain DDP: there it is as large as what the probe
        of a slow link is off by, which grows with the bytes.
        """
        began = time.monotonic()
        measured = measure(replace(self.setup, steps=STEPS), NO_EXCHANGE, None)
        median = statistics.median(measured.seconds)
        self._turn_seconds = max(time.monotonic() - began - (WARMUP_STEPS + STEPS) * median, 0.0)
        self.say(f"timed DDP without an exchange: {median:.4f} s per step")
        return max(float(each) for each in self._gather(median))

    def _gather(self, value: Any) -> list[Any]:
        texts = gather_text(json.dumps(value), self.transport, self.device)
        return [json.loads(text) for text in texts]
