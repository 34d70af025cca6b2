"""CommonWeights: a module's weights and buffers after the last exchange, and the worker's own."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

import torch
from torch import Tensor, nn

from lightning_gc.core import Flow, Gather, Mean, Reply, Request
from lightning_gc.core.digest import digest
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange.workers import local_part, reshard
from lightning_gc.local_steps.round_plan import OuterSGD


class Fragment:
    """Keeps the weights from which all workers went on together, and the outer momentum.

    Both are float32 or wider for parameters of any dtype, so small steps of half-precision weights
    add up. Of parameters in shards it keeps and moves this process's parts.

    Args:
        params: parameter name -> parameter, which must hold the common weights now.
        outer: the step that is made with the mean.

    Attributes:
        anchor: the common weights, flat, ``(numel,)``, in the order of ``params``.
        velocity: the outer momentum, ``(numel,)``; None without.
        shapes: parameter name -> shape of this process's part.
    """

    def __init__(self, params: Mapping[str, Tensor], outer: OuterSGD) -> None:
        self.params = dict(params)
        self.outer = outer
        self.shapes = {n: tuple(p.shape) for n, p in zip(self.params, self._parts, strict=True)}
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        dtypes = (param.dtype for param in self.params.values())
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self._made = [(part.dtype, part.device) for part in self._parts]
        self.anchor = self.weights()
        self.velocity = torch.zeros_like(self.anchor) if outer.momentum else None

    @property
    def _parts(self) -> list[Tensor]:
        """This process's parts of the parameters; FSDP2 may move them to other memory."""
        return [local_part(param).data for param in self.params.values()]

    def weights(self) -> Tensor:
        """Return a flat copy of this worker's weights, ``(numel,)``."""
        return torch.cat([part.reshape(-1).to(self.dtype) for part in self._parts])

    def start(self) -> Tensor:
        """Return the weights with which training goes on: the anchor, as parameters can hold it."""
        return torch.cat(self._starts())

    def _starts(self) -> list[Tensor]:
        held = zip(self.anchor.split(self._sizes), self.params.values(), strict=True)
        return [piece.to(param.dtype).to(self.dtype) for piece, param in held]

    def differing(self) -> dict[str, Tensor]:
        """Return parameter name -> whether this worker's is not the common one, ``()``."""
        self._refuse_cast()
        pairs = zip(self.params, self._parts, self._starts(), strict=True)
        return {n: ~_same(part.reshape(-1), start).all() for n, part, start in pairs}

    def _refuse_cast(self) -> None:
        """Raise RuntimeError for a parameter that has been given another dtype or device."""
        for name, part, made in zip(self.params, self._parts, self._made, strict=True):
            if (now := (part.dtype, part.device)) != made:
                old, new = (f"{dtype} on {device}" for dtype, device in (made, now))
                raise RuntimeError(
                    f"{name} is {new} now, but was {old} when its rounds began, in which weights "
                    f"are exchanged. Call model.to(...) before you begin local steps, and use "
                    f"torch.autocast for passes in half precision."
                )

    def distance(self) -> Tensor:
        """Return Δ, the common weights minus this worker's, ``(numel,)``: what is exchanged.

        From the weights with which it has gone on, so that where it has not moved Δ is exactly 0,
        and what the anchor has beyond the parameters' precision is kept.

        Raises:
            RuntimeError: a parameter has been given another dtype or device.
        """
        self._refuse_cast()
        apart = torch.empty_like(self.anchor)
        own = (part.reshape(-1).to(self.dtype) for part in self._parts)
        for piece, start, now in zip(apart.split(self._sizes), self._starts(), own, strict=True):
            torch.sub(start, now, out=piece)
        return apart

    def step(self, mean: Tensor) -> None:
        """Make the outer step with the mean of the distances, ``(numel,)``."""
        self.outer.step(self.anchor, self.velocity, mean)

    def put(self, flat: Tensor) -> None:
        """Set this worker's weights, ``(numel,)``."""
        for part, piece in zip(self._parts, flat.split(self._sizes), strict=True):
            part.copy_(piece.view(part.shape))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return copies of a flat tensor's pieces, by name, in the parameters' shapes."""
        pieces = zip(self.shapes.items(), flat.split(self._sizes), strict=True)
        return {name: piece.reshape(shape).clone() for (name, shape), piece in pieces}

    def flat(self, named: Mapping[str, Tensor], otherwise: Tensor) -> Tensor:
        """Return the flat tensor of ``named``; what it lacks is as in ``otherwise``."""
        pieces = zip(self.shapes.items(), otherwise.split(self._sizes), strict=True)
        found = [
            named[name] if name in named and tuple(named[name].shape) == shape else piece
            for (name, shape), piece in pieces
        ]
        return torch.cat([each.reshape(-1).to(self.anchor) for each in found])


def in_fragments(params: Mapping[str, Tensor], number: int, outer: OuterSGD) -> list[Fragment]:
    """Share parameters out, in their order, in so many fragments of about equal size.

    Raises:
        ValueError: fewer parameters than fragments.
    """
    if not params:
        refuse(
            "No parameter of the model is trained, so there is nothing to exchange. Set "
            "requires_grad=True for some, or use one device"
        )
    if number > len(params):
        refuse(
            f"LocalStepsStrategy(fragments={number}): the model has {len(params)} trained "
            f"parameters; use fragments={len(params)} or fewer"
        )
    parts: list[dict[str, Tensor]] = [{} for _ in range(number)]
    total, seen, index = sum(p.numel() for p in params.values()), 0, 0
    for left, (name, param) in zip(range(len(params), 0, -1), params.items(), strict=True):
        # On to the next one when its share begins, or when each of the rest must get the next.
        begins = seen * number >= total * (index + 1) or left <= number - 1 - index
        if parts[index] and begins and index < number - 1:
            index += 1
        parts[index][name] = param
        seen += param.numel()
    return [Fragment(part, outer) for part in parts]


class CommonWeights:
    """Keeps the weights that all workers share beside those that this one trains.

    Args:
        module: holds the common weights now.
        params: name -> trained parameter.
        buffers: returns name -> buffer.
        untrained: returns name -> parameter that is not trained.
        number: of fragments.
        outer: the step of the common weights.
        own: returns which of these buffers stay each worker's own.

    Attributes:
        fragments: of the parameters.
        buffers: with floating point.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
        untrained: Callable[[], Mapping[str, Tensor]],
        number: int,
        outer: OuterSGD,
        own: Callable[[Collection[str]], Collection[str]] = lambda names: (),
    ) -> None:
        self._module = module
        self.fragments = in_fragments(params, number, outer)
        self.buffers = CommonBuffers(buffers, untrained, own)
        # This worker's own, while the module holds the common ones.
        self._aside: tuple[list[Tensor], dict[str, Tensor]] | None = None

    @property
    def shown(self) -> bool:
        """Whether the module holds the common weights for a while."""
        return self._aside is not None

    def show(self) -> None:
        """Put the common weights and buffers into the module, and this worker's own aside."""
        if self._aside is None:
            self._aside = self.held()
            self.go_back()

    def hide(self) -> None:
        """Put this worker's own weights back, and buffers that have not changed in the meantime."""
        if self._aside is not None:
            weights, buffers = self._aside
            self._aside = None
            self._put(weights)
            self.buffers.put_back(buffers)

    @contextlib.contextmanager
    def presented(self) -> Iterator[None]:
        """Show the common weights within it; where they are shown already, they stay so."""
        if self.shown:
            yield
            return
        self.show()
        try:
            yield
        finally:
            self.hide()

    def forget(self) -> None:
        """Give up this worker's own weights and buffers that are aside."""
        self._aside = None

    @property
    def replaced(self) -> list[str]:
        """The parameters with other values in the module than the common ones; NaN equals NaN."""
        flags = {name: flag for each in self.fragments for name, flag in each.differing().items()}
        return _set(flags)

    @property
    def moved(self) -> bool:
        """Whether the module's weights or buffers are not the common ones."""
        return bool(self.replaced) or self.buffers.moved

    def refuse_not_finite(self, owner: str) -> None:
        """Raise ValueError for common weights that are not finite: every round would be lost."""
        poisoned = [each for each in self.fragments if not bool(each.anchor.isfinite().all())]
        anchors = (item for each in poisoned for item in each.named(each.anchor).items())
        odd = [name for name, anchor in anchors if not bool(anchor.isfinite().all())]
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            refuse(
                f"{owner}: the weights that all workers begin with are not finite: {odd[0]}{more}. "
                f"Every round would be lost; load or initialise them before"
            )

    def begin(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Take weights, ``(numel,)`` for each fragment, and buffers for the common ones."""
        for each, flat in zip(self.fragments, weights, strict=True):
            each.anchor = flat.clone()
        self.buffers.begin(buffers)
        self.go_back()

    def go_back(self) -> None:
        """Let this worker go on from the common weights and buffers."""
        self._put([each.anchor for each in self.fragments])
        self.buffers.put(self.buffers.common)

    def own(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of this worker's weights and saved buffers by name, shown or not."""
        weights, buffers = self._aside or self.held()
        return self.named(weights), self._saved(buffers)

    def kept(self) -> dict[str, Tensor]:
        """Return copies of saved buffers that stay this worker's own, by name."""
        return self._saved({n: b.detach().clone() for n, b in self.buffers.kept.items()})

    def _saved(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved = {name.replace("_orig_mod.", "") for name in self._module.state_dict()}
        return {name: buffer for name, buffer in buffers.items() if name in saved}

    def load_own(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set this worker's weights and buffers; those that are not named stay."""
        self._put([each.flat(weights, each.weights()) for each in self.fragments])
        self.buffers.put(buffers)

    def drift(self) -> dict[str, Tensor]:
        """Return this worker's weights minus the common ones, by name."""
        weights, _ = self._aside or self.held()
        pairs = zip(weights, self.fragments, strict=True)
        return self.named([own - each.start() for own, each in pairs])

    def load_drift(self, drift: Mapping[str, Tensor]) -> None:
        """Set this worker's weights to the common ones plus ``drift``."""
        zeros = [torch.zeros_like(each.anchor) for each in self.fragments]
        pairs = zip(self.fragments, zeros, strict=True)
        self._put([each.start() + each.flat(drift, zero) for each, zero in pairs])

    def named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return copies of pieces of flat tensors, one per fragment, by parameter name."""
        pairs = zip(self.fragments, flats, strict=True)
        return {name: piece for each, flat in pairs for name, piece in each.named(flat).items()}

    def held(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return copies of the module's weights, one per fragment, and buffers."""
        return [each.weights() for each in self.fragments], self.buffers.own()

    def _put(self, flats: Sequence[Tensor]) -> None:
        for each, flat in zip(self.fragments, flats, strict=True):
            self.put(each, flat)

    def put(self, fragment: Fragment, flat: Tensor) -> None:
        """Set this worker's weights of a fragment, ``(numel,)``."""
        reshard(self._module)  # else a pass could use weights that FSDP2 has gathered before
        fragment.put(flat)


class CommonBuffers:
    """Keeps the floating-point buffers that all workers had after the last exchange.

    Exchanged is the difference to them, exactly 0 where nothing has changed: constants, such as
    position tables, masks of −∞ and NaN for what is missing, keep every bit. Where the mean of the
    differences is not finite, as of a minimum that begins at ∞, all take the mean of the values
    that are finite, or worker 0's value if none is. Integers and booleans are left alone: they are
    constants or count steps, and so are equal on all workers. So are buffers that stay own.

    Parameters that are not trained are like buffers from the exchange on before which they have
    first changed on some worker: a mean teacher's are averaged, a frozen backbone's are neither
    kept nor sent. One number for each of these is sent: whether it has changed.

    A buffer that a worker lacks, or has in another shape than at the beginning, counts as unchanged
    there and is left alone; so is a new one.

    Args:
        find: returns buffer name -> buffer, equal on all workers now. Called each time: a module
            may assign a new tensor to a name.
        untrained: returns parameter name -> parameter that is not trained; called each time too.
        own: returns which of the buffers of these names stay each worker's own.

    Attributes:
        common: name -> value after the last exchange.
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, Tensor]],
        untrained: Callable[[], Mapping[str, Tensor]] = dict,
        own: Callable[[Collection[str]], Collection[str]] = lambda names: (),
    ) -> None:
        self._find, self._untrained = find, untrained
        self._own = own(list(find()))
        frozen = {n: p for n, p in untrained().items() if p.is_floating_point() and _is_plain(p)}
        self._frozen = {n: torch.zeros_like(p, device="meta") for n, p in frozen.items()}
        self._layout = {name: torch.zeros_like(b, device="meta") for name, b in find().items()}
        shared = {name: b for name, b in find().items() if name not in self._own}
        floats = {name: b for name, b in shared.items() if b.is_floating_point()}
        self.common = {name: b.detach().clone() for name, b in floats.items()}
        self._seen: dict[str, int] = {}
        self._look()

    def _look(self) -> None:
        """Note the bits of parameters that are not trained, which are equal on all workers now."""
        self._seen = _digests(self._still)

    @property
    def _still(self) -> dict[str, Tensor]:
        """Parameters that are not trained, and were unchanged at the last exchange."""
        now, names = self._untrained(), (n for n in self._frozen if n not in self.common)
        return {n: now[n] for n in names if n in now and now[n].shape == self._frozen[n].shape}

    def _changed(self) -> list[str]:
        """Return the names of tensors in ``_still`` with changed bits."""
        return [
            name for name, bits in _digests(self._still).items() if bits != self._seen.get(name)
        ]

    @property
    def live(self) -> dict[str, Tensor]:
        """This worker's buffers; without those that have another shape than the common ones."""
        now = {**self._untrained(), **self._find()}
        found = {name: now[name] for name in self.common if name in now}
        return {n: tensor for n, tensor in found.items() if tensor.shape == self.common[n].shape}

    @property
    def moved(self) -> bool:
        """Whether this worker's buffers, or parameters that are not trained, are not the common."""
        differ = (not bool(_same(live, self.common[n]).all()) for n, live in self.live.items())
        return any(differ) or bool(self._changed())

    def alike(self, device: torch.device) -> list[Tensor]:
        """Return tensors to broadcast, as many and of the same shapes on all workers.

        This worker's buffers, integers too; in the place of one that it lacks, or that has another
        shape by now, a copy of the common one.
        """
        now = self._find()
        return [
            now[name]
            if name in now and now[name].shape == each.shape
            else self.common.get(name, torch.zeros_like(each, device=device)).clone()
            for name, each in self._layout.items()
        ]

    def exchange(self, arriving: dict[str, Tensor], late: bool = False) -> tuple[Flow, Tensor]:
        """Return the flow that puts the buffers that are to be common into ``arriving``, by name.

        ``late``: this worker keeps its differences for the next exchange, and sends 0 for them.

        And what it sends, float32 or the widest type of any buffer, which it may change: ``common −
        live`` of all buffers, exactly 0 where these are equal, then 1 for each parameter that is
        not trained and has changed, else 0. It is empty on all workers if the model has neither.

        Communication pattern:
            One mean. After it, only if that is not finite somewhere, a gather of these elements;
            and only if parameters have changed for the first time, a mean of these.
        """
        live, still, changed = self.live, self._still, self._changed()
        names = [name for name in self._frozen if name not in self.common]
        own = [live.get(name, common).detach() for name, common in self.common.items()]
        wide = _widest(self.common.values())
        gaps = [
            torch.where(_same(mine, common), 0.0, common.to(wide) - mine.to(wide)).reshape(-1)
            for mine, common in zip(own, self.common.values(), strict=True)
        ]
        device = next(iter([*own, *still.values()]), torch.empty(0, device="cpu")).device
        flags = [float(name in changed) for name in names]
        sent = torch.cat([*gaps, torch.tensor(flags, dtype=wide, device=device)])
        sent = torch.zeros_like(sent) if late else sent
        # Those that have not changed here are needed only if they have elsewhere: not copied.
        values = {
            name: still[name].data
            if name in still
            else torch.zeros_like(self._frozen[name], device=device)
            for name in names
        } | {name: still[name].detach().clone() for name in changed}
        flat = torch.cat([sent[:0], *(each.to(wide).reshape(-1) for each in own)])
        return self._flow(sent, flat, values, arriving), sent

    def _flow(
        self, sent: Tensor, own: Tensor, values: Mapping[str, Tensor], arriving: dict[str, Tensor]
    ) -> Flow:
        (mean,) = yield Mean((sent,))
        gaps, flags = mean.split([own.numel(), len(values)])
        odd, instead = yield from _where_not_finite(gaps, own)
        start = 0
        for name, common in self.common.items():
            piece = slice(start, start := start + common.numel())
            before, gap = common.reshape(-1), gaps[piece]
            after = torch.where(gap == 0, before, (before.to(gap.dtype) - gap).to(common.dtype))
            if instead is not None:
                after = torch.where(odd[piece], instead[piece].to(common.dtype), after)
            arriving[name] = after.view(common.shape)
        new = [name for name, flag in zip(values, flags.tolist(), strict=True) if flag]
        if new:
            wide = _widest(values[name] for name in new)
            flat = torch.cat([values[name].to(wide).reshape(-1) for name in new])
            (mean,) = yield Mean((flat.clone(),))
            odd, instead = yield from _where_not_finite(mean, flat)
            mean = mean if instead is None else torch.where(odd, instead, mean)
            for name, piece in zip(new, mean.split([values[n].numel() for n in new]), strict=True):
                arriving[name] = piece.view(values[name].shape).to(values[name].dtype).clone()

    def step(self, arrived: Mapping[str, Tensor], *, rebase: bool = False) -> None:
        """Take what has arrived for the common buffers, and let this worker go on with them.

        ``rebase``: it keeps its difference to the common ones.
        """
        before = {name: self.common[name] for name in self.live}
        own = {name: live.clone() for name, live in self.live.items()} if rebase else {}
        self.common.update(arrived)
        self.put(self.common)
        self.put({n: self.common[n] + (each - before[n]) for n, each in own.items()})

    def begin(self, buffers: Mapping[str, Tensor]) -> None:
        """Take copies of these for the common buffers; all workers are equal now."""
        self.common.update({name: buffer.clone() for name, buffer in buffers.items()})
        self._look()

    def put(self, named: Mapping[str, Tensor]) -> None:
        """Set this worker's buffers, those that are named."""
        now = {**self._still, **self.live, **self.kept}
        for name, value in named.items():
            if name in now and now[name].shape == value.shape:
                now[name].data.copy_(value)

    def put_back(self, named: Mapping[str, Tensor]) -> None:
        """Set this worker's buffers again, while the common ones are in their place.

        Those that somebody has changed there, as in validation, stay as they are now.
        """
        live = self.live
        changed = {n for n, now in live.items() if not bool(_same(now, self.common[n]).all())}
        self.put({name: value for name, value in named.items() if name not in changed})

    @property
    def taken(self) -> list[str]:
        """Names of parameters that are not trained, but have changed, and so are exchanged."""
        return [name for name in self.common if name in self._frozen]

    @property
    def kept(self) -> dict[str, Tensor]:
        """This worker's buffers that stay its own."""
        return {name: each for name, each in self._find().items() if name in self._own}

    @property
    def constants(self) -> dict[str, Tensor]:
        """This worker's buffers that no exchange changes: integers, booleans and its own."""
        return {n: each.detach() for n, each in self._find().items() if n not in self.common}

    def put_constants(self, named: Mapping[str, Tensor]) -> None:
        """Set this worker's buffers that no exchange changes."""
        for name, own in self.constants.items():
            if name in named and named[name].shape == own.shape:
                own.copy_(named[name])

    def take(self, names: Iterable[str]) -> None:
        """Exchange these parameters from now on; they are equal on all workers now."""
        still = self._still
        self.common.update({n: still[n].detach().clone() for n in names if n in still})

    def own(self) -> dict[str, Tensor]:
        """Return copies of this worker's buffers, and of what has changed since the exchange."""
        still = self._still
        here = {**self.live, **{name: still[name] for name in self._changed()}}
        return {name: tensor.detach().clone() for name, tensor in here.items()}


def _set(flags: Mapping[str, Tensor]) -> list[str]:
    """Return the names with a set flag; a device is waited for once."""
    found = torch.stack(list(flags.values())).tolist() if flags else []
    return [name for name, is_set in zip(flags, found, strict=True) if is_set]


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Return where two are equal, or both are NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def _widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the type in which all of them are exchanged: float32 or wider."""
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def _is_plain(param: Tensor) -> bool:
    """Return whether a parameter's bits lie in memory as they are; 4-bit ones are wrapped."""
    return type(param) in (Tensor, nn.Parameter) and param.layout == torch.strided


def _digests(named: Mapping[str, Tensor]) -> dict[str, int]:
    bits = {name: digest(tensor) for name, tensor in named.items() if tensor.numel()}
    return dict(zip(bits, torch.cat(list(bits.values())).tolist(), strict=True)) if bits else {}


def _where_not_finite(
    mean: Tensor, own: Tensor
) -> Generator[Request, Reply, tuple[Tensor, Tensor | None]]:
    """Return where a mean is not finite, and a tensor with what is taken there instead.

    That is the mean of the workers' own values that are finite; worker 0's value if none is. The
    second is None if the mean is finite everywhere, which all workers see in the same mean.
    """
    odd = ~mean.isfinite()
    if not bool(odd.any()):
        return odd, None
    gathered = yield Gather((own[odd],))
    values = torch.stack([payload[0] for payload in gathered])  # (W, number)
    finite = values.isfinite()
    number = finite.sum(0)
    instead = torch.where(finite, values, 0).sum(0) / number
    found = torch.zeros_like(own)
    found[odd] = torch.where(number > 0, instead, values[0])
    return odd, found


def mean_of(flat: Tensor) -> Flow:
    """Replace a flat tensor by its mean over workers."""
    (mean,) = yield Mean((flat,))
    if mean is not flat:
        flat.copy_(mean)
