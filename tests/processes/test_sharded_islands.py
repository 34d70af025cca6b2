"""Islands of FSDP2 ranks: against complete weights, conserved shard by shard, resumed, refused."""

import copy
import io
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from lightning_gc import (
    QSGD,
    Elastic,
    ErrorFeedback,
    Identity,
    InnerMoments,
    LocalSteps,
    OuterSGD,
    PerParameter,
    TopK,
    Unequal,
)
from lightning_gc.controllers import Accordion
from lightning_gc.core.saved_state import CHECKSUM, with_checksum
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor, LocalStepsStrategy
from tests.support.accelerator import BACKEND, DEVICE, needs_four
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.hsdp import RANKS, Sharded, batches, batches_of, whole
from tests.support.processes import run_in_processes, said

pytestmark = [pytest.mark.processes, needs_four]
ISLAND, STEPS, EVERY = 2, 8, 3
ISLANDS = RANKS // ISLAND
RATE, MOMENTUM = 0.0625, 0.5  # powers of 2: products are exact, so fusing them changes no bit
SPARSE = PerParameter(TopK(0.1))


def optimizer_of(net: Any, adam: bool = False) -> Any:
    trained = [param for param in net.parameters() if param.requires_grad]
    if adam:
        return torch.optim.AdamW(trained, lr=0.01)
    return torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)


def loss_of(net: Any, batch: Tensor) -> Tensor:
    loss: Tensor = (net(batch) - batch[:, :3] * 2).square().mean()
    return loss


def by_complete_weights(outer: OuterSGD, size: int = ISLAND) -> list[dict[str, Any]]:
    """Return the common weights after each exchange of the same training in one plain process."""
    common = Sharded()
    islands = [copy.deepcopy(common) for _ in range(RANKS // size)]
    optimizers = [optimizer_of(net) for net in islands]
    velocity = {n: torch.zeros_like(p) for n, p in common.named_parameters()}
    data = [batches_of(rank, STEPS) for rank in range(RANKS)]
    found = []
    for step in range(STEPS):
        for number, (net, optimizer) in enumerate(zip(islands, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(number * size, (number + 1) * size):
                (loss_of(net, data[rank][step]) / size).backward()
            optimizer.step()
        if (step + 1) % EVERY and step + 1 < STEPS:
            continue
        for name, weight in common.named_parameters():
            own = [dict(net.named_parameters())[name] for net in islands]
            with torch.no_grad():
                mean = torch.stack([weight - each for each in own]).sum(0) / len(own)
                velocity[name] = velocity[name] * outer.momentum + mean
                weight.sub_(outer.lr * velocity[name])
                for each in own:
                    each.copy_(weight)
        found.append({n: p.detach().numpy().copy() for n, p in common.named_parameters()})
    return found


def shard(net: Sharded, mesh: Any) -> None:
    """Shard all layers, one of them along its second dimension."""
    other: Any = net.body[2].weight

    def cut(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param is other else None

    for layer in (*net.body, net.frozen, net.head, net):
        fully_shard(layer, mesh=mesh, shard_placement_fn=cut)


class Loop:
    """A training loop of one rank of an island; it notes its shards around each exchange."""

    def __init__(self, rank: int, *method: Any, adam: bool = False, **options: Any) -> None:
        self.net = Sharded(
            seed=rank // options.get("island", ISLAND)
        )  # all begin with the first island's
        size = options.setdefault("island", ISLAND)
        islands = dist.get_world_size() // size
        mesh = init_device_mesh(DEVICE, (islands, size), mesh_dim_names=("island", "shard"))
        shard(self.net, mesh["shard"])
        self.optimizer = optimizer_of(self.net, adam)
        self.sent: list[dict[str, Any]] = []  # own weights before each exchange
        self.optimizer.register_step_post_hook(lambda *_: self.note())
        options = {"every": EVERY} | options
        self.local = LocalSteps(self.net, self.optimizer, *method, **options)
        self.after = [self.shards()]  # common weights, at first and after each exchange
        self.data, self.rank = batches_of(rank, STEPS), rank
        self.losses: list[float] = []

    def note(self) -> None:
        if self.local.rounds.is_due:
            self.sent.append(self.shards())

    def shards(self) -> dict[str, Any]:
        named = self.net.named_parameters()
        parts: Any = {name: param for name, param in named if param.requires_grad}
        return arrays({name: param.to_local() for name, param in parts.items()})

    def run(self, start: int, stop: int, validates: int = -1, breaks: int = -1) -> None:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            loss_of(self.net, self.data[step]).backward()
            if step == breaks and self.rank == ISLAND:  # one shard of one island
                self.net.head.weight.grad.to_local().fill_(math.inf)  # type: ignore[union-attr, operator]
            self.optimizer.step()
            if not self.local.rounds.apart:
                self.after.append(self.shards())
            if step == validates:
                self.validate()

    def validate(self) -> None:
        """Note the loss of own and of common weights; FSDP2 keeps what it has gathered for each."""
        with torch.no_grad():
            self.losses.append(float(loss_of(self.net, self.data[0])))
            with self.local.common_weights():
                self.losses.append(float(loss_of(self.net, self.data[0])))
            self.losses.append(float(loss_of(self.net, self.data[0])))

    def errors(self) -> dict[str, Any]:
        memory = self.local._workers.first.state_dict()["memory"]
        return arrays({name: kept["error"] for name, kept in memory.items()})

    def end(self) -> dict[str, Any]:
        """Finish; return what was noted, whole parameters, and this rank's errors."""
        if self.local.rounds.apart:
            self.sent.append(self.shards())
        self.local.finish()
        self.after.append(self.shards())
        complete = {n: whole(p).numpy() for n, p in self.net.named_parameters()}
        noted = {name: getattr(self, name) for name in ("after", "sent", "losses")}
        return noted | {"whole": complete, "errors": self.errors()}

    def saved(self) -> Any:
        """Return a copy of what a file would have."""
        file = io.BytesIO()
        torch.save(self.local.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)


def arrays(named: dict[str, Tensor]) -> dict[str, Any]:
    return {name: each.detach().cpu().numpy().copy() for name, each in named.items()}


DENSE = {"mean": OuterSGD(), "momentum": OuterSGD(0.5, 0.5)}
CONSERVED: dict[str, tuple[Any, ...]] = {
    "topk": (SPARSE, ErrorFeedback()),
    "qsgd": (PerParameter(QSGD(4)), ErrorFeedback()),
}


class Trained(Sharded):
    """The same with a Trainer, also after a resume within an epoch."""

    def __init__(self, rank: int, sharded: bool = True) -> None:
        super().__init__(seed=rank // ISLAND)
        self.data, self.sharded = batches_of(rank, STEPS), sharded

    def configure_model(self) -> None:
        if self.sharded and not isinstance(self, FSDPModule):
            shard(self, self.mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self, self.data[self.global_step])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(loss_of(self, self.data[0])))

    def configure_optimizers(self) -> Any:
        return optimizer_of(self, adam=True)


class Saves(Callback):
    """Saves within a round."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.file)


def trainer_of(*callbacks: Any, **options: Any) -> Any:
    made: dict[str, Any] = {"compressor": SPARSE, "every": EVERY, "outer": OuterSGD.diloco()}
    made |= {"island": ISLAND, "process_group_backend": BACKEND}
    return quiet_trainer(
        LocalStepsStrategy(**made | options),
        devices=RANKS,
        use_distributed_sampler=False,
        val_check_interval=5,
        callbacks=[*callbacks, CompressionMonitor()],
    )


def by_a_trainer(rank: int, file: Path, resume: Path | None = None, **options: Any) -> Any:
    trainer, model = trainer_of(Saves(file), **options), Trained(rank)
    strategy = trainer.strategy
    trainer.fit(model, batches(rank, STEPS), batches(rank, 1), ckpt_path=resume)
    assert strategy.engine is not None
    memory = strategy.engine.state_dict()["memory"]
    states = trainer.optimizers[0].state.values()
    return {
        "whole": {n: whole(p).numpy() for n, p in model.named_parameters()},
        "errors": arrays({name: kept["error"] for name, kept in memory.items()}),
        "losses": model.losses,
        "moments": arrays(
            {str(number): state["exp_avg"].to_local() for number, state in enumerate(states)}
        ),
        "place": (strategy.number, strategy.island_rank),
        "bytes": float(trainer.callback_metrics["compression/total_wire_bytes"]),
    }


def everything(rank: int, folder: str) -> dict[str, Any]:
    """In one set of processes, for starting them takes long."""
    dist.init_process_group(BACKEND)
    found: dict[str, Any] = {}
    for name, outer in DENSE.items():
        loop = Loop(rank, Identity(), outer=outer)
        loop.run(0, STEPS, validates=4)
        found[name] = loop.end()
        if rank == 0:
            found[f"{name} complete"] = by_complete_weights(outer)
    for name, method in CONSERVED.items():
        loop = Loop(rank, *method)
        loop.run(0, STEPS)
        found[name] = loop.end() | {"bytes": loop.local.account().wire_bytes}
        found[name]["place"] = (loop.local.number, loop.local.island_rank)
    for name, options in RESUMED.items():
        found[name] = resumed(rank, {"outer": OuterSGD.diloco(), "adam": True, **options})
    found["broken"] = broken(rank)
    watched = Loop(rank, SPARSE, controller=Accordion(0.2, 0.1, interval=1))
    found["levels"] = []
    for epoch in range(2):
        watched.local.begin_epoch(epoch, max_epochs=2)
        watched.run(epoch * EVERY, (epoch + 1) * EVERY)
        found["levels"].append(watched.local.levels)
    with torch.no_grad():
        for part in watched.net.parameters():
            part.add_(watched.local.number)
        watched.net(watched.data[0])  # and FSDP2 keeps what it has gathered
    watched.local.reset()
    found["reset"] = watched.shards()
    watched.local.close()
    first, again = Path(folder, "first.ckpt"), Path(folder, "again.ckpt")
    with unwarned():
        found["trainer"] = by_a_trainer(rank, first)
        found["trainer resumed"] = by_a_trainer(rank, again, first)
        found["other islands"] = said(by_a_trainer, rank, again, first, island=RANKS)
        gone = next(Path(folder, "lightning_gc_state").glob("first*worker3of4.pt"))
        dist.barrier()
        gone.unlink(missing_ok=True)
        dist.barrier()
        found["no file"] = said(by_a_trainer, rank, again, first)
    saved = torch.load(first, weights_only=True)
    found["saved"] = arrays(saved["state_dict"])
    bare = Path(folder, f"bare{rank}.ckpt")
    torch.save({n: part for n, part in saved.items() if n != "lightning_gc"}, bare)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left = by_a_trainer(rank, again, bare, every=STEPS, moments=InnerMoments({"exp_avg": 1}))
        found["moments"] = left["moments"]
    found["bare"] = [str(each.message) for each in caught if "no shards" in str(each.message)]
    return found


RESUMED: dict[str, dict[str, Any]] = {
    "at once": {"verify": 2},
    "delayed": {"every": 4, "fragments": 2, "delay": 1},
}


def resumed(rank: int, made: dict[str, Any]) -> dict[str, Any]:
    """Stop within a round, and go on from each rank's own state."""
    straight = Loop(rank, SPARSE, **made)
    straight.run(0, 5)
    state, mean = straight.saved(), straight.local.state_dict("mean")
    straight.run(5, STEPS)
    found: dict[str, Any] = {"straight": straight.end()}
    again = Loop(rank, SPARSE, **made)
    other = {name: part for name, part in state.items() if name != CHECKSUM}
    other["shard"] = 1 - other["shard"]
    found["other shard"] = said(again.local.load_state_dict, with_checksum(other))
    again.local.load_state_dict(state)
    again.run(5, STEPS)
    found["resumed"] = again.end()
    third = Loop(rank, SPARSE, **made)
    third.local.load_state_dict(mean)
    found["from the mean"] = third.shards()
    third.local.close()
    return found


def broken(rank: int) -> dict[str, Any]:
    """Let one shard of one island become infinite in a round."""
    loop = Loop(rank, SPARSE)
    loop.run(0, 3)
    errors = loop.errors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.run(3, 6, breaks=5)  # no forward pass of the round spreads it
    found: dict[str, Any] = {}
    found["lost"] = [str(each.message) for each in caught if "lost" in str(each.message)]
    found["kept errors"] = equal(errors, loop.errors())
    found["kept weights"] = equal(loop.after[-1], loop.after[-2])
    found["kept momentum"] = bool(loop.optimizer.state)
    loop.run(6, STEPS)
    return found | loop.end()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("islands"))
    results: list[dict[str, Any]] = run_in_processes(everything, RANKS, folder, timeout=200)
    return results


@pytest.mark.parametrize("name", DENSE)
def test_uncompressed_it_is_the_training_of_complete_weights(found: Any, name: str) -> None:
    """Bit for bit, as each sum has two terms; what is looked at in between changes nothing."""
    complete = found[0][f"{name} complete"]
    for rank in found:
        for parameter, weight in rank[name]["whole"].items():
            np.testing.assert_array_equal(weight, complete[-1][parameter], parameter)


@pytest.mark.parametrize("name", DENSE)
def test_common_weights_are_seen_by_a_forward_pass(found: Any, name: str) -> None:
    net = Sharded()
    common = found[0][f"{name} complete"][0]
    net.load_state_dict({parameter: torch.from_numpy(each) for parameter, each in common.items()})
    for rank, left in enumerate(found):
        own, seen, back = left[name]["losses"]
        assert own == back != seen
        assert seen == float(loss_of(net, batches_of(rank, 1)[0]).detach())


@pytest.mark.parametrize("name", [*DENSE, *CONSERVED, *RESUMED, "broken"])
def test_islands_have_the_same_weights_after_each_exchange(found: Any, name: str) -> None:
    for rank in range(ISLAND):
        both = [found[each][name] for each in (rank, rank + ISLAND)]
        one, other = (each.get("straight", each)["after"] for each in both)
        assert len(one) == len(other) >= (2 if name == "delayed" else 4)
        assert all(map(equal, one, other))


@pytest.mark.parametrize("name", CONSERVED)
def test_every_shard_is_conserved(found: Any, name: str) -> None:
    """The sum of what was sent and kept is the distance that the islands had come."""
    for rank in range(ISLAND):
        both = [found[each][name] for each in (rank, rank + ISLAND)]
        after = both[0]["after"]
        for parameter, first in after[0].items():
            moved = ISLANDS * (first - after[-1][parameter])
            kept = sum(each["errors"][parameter] for each in both)
            pairs = [zip(after, each["sent"], strict=False) for each in both]
            came = sum(start[parameter] - end[parameter] for p in pairs for start, end in p)
            np.testing.assert_allclose(moved + kept, came, rtol=0, atol=2e-6, err_msg=parameter)
            assert "weight" not in parameter or np.abs(kept).max() > 0


def test_each_rank_has_its_place_and_sends_its_shards(found: Any) -> None:
    assert [rank["topk"]["place"] for rank in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in found:
        elements = sum(each.size for each in rank["topk"]["after"][0].values())
        rounds = len(rank["topk"]["sent"])
        assert rounds == 3
        assert 0 < rank["topk"]["bytes"] < rounds * 4 * elements / 2


@pytest.mark.parametrize("name", RESUMED)
def test_it_resumes_bit_for_bit(found: Any, name: str) -> None:
    for rank in found:
        straight, again = rank[name]["straight"], rank[name]["resumed"]
        for what in ("whole", "errors"):
            assert equal(straight[what], again[what])
        assert "has a state with shard=" in rank[name]["other shard"]


@pytest.mark.parametrize("name", RESUMED)
def test_the_mean_state_is_of_each_shard(found: Any, name: str) -> None:
    for rank in range(ISLAND):
        one, other = (found[each][name]["from the mean"] for each in (rank, rank + ISLAND))
        assert equal(one, other)


def test_a_controller_decides_the_same_on_all_ranks(found: Any) -> None:
    levels = [rank["levels"] for rank in found]
    assert levels[0][0]
    assert all(each == levels[0] for each in levels)


def test_a_round_that_is_not_finite_in_one_shard_is_lost_as_a_whole(found: Any) -> None:
    for rank, left in enumerate(found):
        one = left["broken"]
        assert [one["kept errors"], one["kept weights"]] == [True, True], rank
        assert one["kept momentum"] == (rank < ISLAND), "both ranks of the island begin again"
        assert len(one["lost"]) == (rank < ISLAND)
        assert all(np.isfinite(each).all() for each in one["whole"].values())
        assert not equal(one["after"][-1], one["after"][-2])


def test_a_reset_begins_at_the_shards_of_island_0(found: Any) -> None:
    for rank in range(ISLAND):
        assert equal(found[rank]["reset"], found[rank + ISLAND]["reset"])


@pytest.mark.parametrize("name", ["trainer", "trainer resumed"])
def test_a_trainer_is_the_loop_bit_for_bit(found: Any, name: str) -> None:
    """Also after a resume within a round, from a checkpoint with complete common weights."""
    for rank in found:
        for what in ("whole", "errors"):
            assert equal(rank[name][what], rank["at once"]["straight"][what])
        assert rank[name]["place"] == rank["topk"]["place"]
        assert rank[name]["bytes"] > 0


def test_a_checkpoint_has_complete_common_weights(found: Any) -> None:
    net = Sharded()
    for rank, left in enumerate(found):
        parts = [found[each]["at once"]["straight"]["after"][1] for each in range(ISLAND)]
        for name in ("body.0.weight", "head.bias", "gain"):
            together = np.concatenate([each[name] for each in parts])
            np.testing.assert_array_equal(left["saved"][name], together)
        net.load_state_dict({name: torch.from_numpy(each) for name, each in left["saved"].items()})
        seen = float(loss_of(net, batches_of(rank, 1)[0]).detach())
        assert left["trainer"]["losses"][0] == seen, "validation sees them, after 5 steps"


def test_what_cannot_be_resumed_is_refused_on_all_ranks(found: Any) -> None:
    for rank in found:
        assert "by 4 ranks, which had 2 shards of each worker" in rank["other islands"]
        assert "is missing, which has shards of the optimizers" in rank["no file"]


def test_moments_of_shards_are_averaged(found: Any) -> None:
    for rank in range(ISLAND):
        one, other = (found[each]["moments"] for each in (rank, rank + ISLAND))
        assert one
        assert equal(one, other)
        assert not equal(
            found[rank]["trainer"]["moments"], found[rank + ISLAND]["trainer"]["moments"]
        )


def test_a_checkpoint_without_shards_of_optimizers_says_so(found: Any) -> None:
    assert [len(rank["bare"]) for rank in found] == [1, 0, 0, 0]


@pytest.mark.nightly
def test_an_island_of_four_is_the_training_of_complete_weights_to_rounding() -> None:
    """Sums of four gradients have another order here; one rank has no part of some parameters."""
    found = run_in_processes(of_four, RANKS, timeout=100)
    complete = by_complete_weights(DENSE["momentum"], RANKS)[-1]
    for rank in found:
        for name, weight in rank["whole"].items():
            np.testing.assert_allclose(weight, complete[name], rtol=0, atol=1e-6, err_msg=name)


def of_four(rank: int) -> dict[str, Any]:
    dist.init_process_group(BACKEND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one worker
        loop = Loop(rank, Identity(), island=RANKS, outer=DENSE["momentum"])
    loop.run(0, STEPS)
    return loop.end()


# ------------------------------------------------------------------------------------- refused


def within_a_round(rank: int) -> Any:
    """Return what a file would have, errors and shards of one of two islands."""
    dist.init_process_group(BACKEND)
    loop = Loop(rank, SPARSE, adam=True)
    loop.run(0, 5)
    file = io.BytesIO()
    torch.save(loop.local.state_dict(), file)
    return file.getvalue(), loop.errors(), loop.shards()


def from_a_list(rank: int, saved: Any) -> Any:
    """Begin as one island at the states of both."""
    dist.init_process_group(BACKEND)
    loop = Loop(rank, SPARSE, adam=True)
    files = (saved[place][0] for place in (rank, rank + ISLAND))
    loop.local.load_state_dict([torch.load(io.BytesIO(f), weights_only=True) for f in files])
    found = loop.errors(), loop.shards()
    loop.run(5, STEPS)
    return found


@pytest.mark.nightly
def test_one_island_begins_at_the_mean_of_two() -> None:
    saved = run_in_processes(within_a_round, RANKS)
    for rank, found in enumerate(run_in_processes(from_a_list, ISLAND, saved)):
        for kind, ours in enumerate(found, 1):
            one, other = (saved[place][kind] for place in (rank, rank + ISLAND))
            assert any((one[name] != other[name]).any() for name in ours)
            for name, each in ours.items():
                np.testing.assert_array_equal(each, (one[name] + other[name]) / 2)


def refused(rank: int) -> dict[str, str]:
    dist.init_process_group(BACKEND)
    both = init_device_mesh(DEVICE, (ISLANDS, ISLAND), mesh_dim_names=("island", "shard"))
    flat, near = init_device_mesh(DEVICE, (RANKS,)), both["shard"]

    def net(*meshes: Any, **options: Any) -> Any:
        """Return two layers, and the whole, each on a mesh or none."""
        made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer, mesh in zip((*made, made), meshes, strict=True):
            if mesh is not None:
                fully_shard(layer, mesh=mesh, **options)
        return made

    def given(model: Any, **options: Any) -> str:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"compressor": "topk", "island": ISLAND} | options
        return said(LocalSteps, model, sgd, **options)

    last = rank == RANKS - 1
    second = rank >= ISLAND
    right = net(near, near, near)
    columns: Any = {"shard_placement_fn": lambda _: Shard(1)} if second else {}
    scaler = torch.amp.GradScaler("cpu")
    found = {
        "not in shards": given(net(None, None, None)),
        "one not in shards": given(net(*[None if last else near] * 3)),
        "on all ranks": given(net(flat, flat, flat)),
        "replicas": given(net(both, both, both)),
        "one layer outside": given(net(near, None, None)),
        "two meshes": given(net(near, flat, near)),
        "other dimension": given(net(near, near, near, **columns)),
        "offloaded": given(
            net(near, near, near, offload_policy=CPUOffloadPolicy(pin_memory=False))
        ),
        "other islands": given(right, island=RANKS if second else ISLAND),
        "uneven": given(right, island=3),
        "other settings": given(right, every=4 if last else 2),
        "no island": given(right, island=1),
        "zero": given(right, island=0),
        "elastic": given(right, elastic=Elastic("127.0.0.1:1")),
        "scaler": given(right, scaler=scaler),
        "unequal": given(right, unequal=Unequal(pace="equal", weigh="equal")),
    }

    def fits(sharded: bool = True, **options: Any) -> str:
        with unwarned():
            return said(trainer_of(**options).fit, Trained(rank, sharded), batches(rank, 1))

    found |= {
        "one trains complete weights": fits(sharded=not last),
        "means": fits(state="mean"),
        "validated": said(trainer_of().validate, Trained(rank), batches(rank, 1)),
    }
    sgd = torch.optim.SGD(right.parameters(), lr=0.1)
    with LocalSteps(right, sgd, "topk", every=1, island=ISLAND) as local:
        right(torch.ones(2, 4)).sum().backward()  # what was refused has left nothing behind
        sgd.step()
        found["made"] = str(local._workers.first.step)
    return found


WORDS = {
    "not in shards": "has a model without FSDP2; give fully_shard the mesh of the island",
    "one not in shards": "Worker 3 of 4 has a model without FSDP2",
    "on all ranks": "sharded over the ranks [0, 1, 2, 3], but its island has",
    "replicas": "averages gradients over replicas in every step",
    "one layer outside": "trains 1.weight outside of all",
    "two meshes": "has 1 sharded over the ranks [0, 1, 2, 3]",
    "other dimension": "(Shard(dim=1),) (parameter, trained), but worker 0 has ",
    "offloaded": "never been tried with local steps",
    "other islands": "has island=4 of a model in shards, but worker 0 has island=2 of a model",
    "uneven": "4 processes are not islands of 3",
    "other settings": "Worker 3 has every=",
    "no island": "give island=N",
    "zero": "give the number of processes",
    "elastic": "Leave elastic out",
    "scaler": "need no loss scaling",
    "unequal": "unlike speeds",
    "one trains complete weights": "Worker 3 has island=2, but worker 0 has island=2 of a model",
    "means": "use state='full'",
    "validated": "only trained here",
    "made": "1",
}


def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    for found in run_in_processes(refused, RANKS, timeout=100):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in found[name], (name, found[name])
