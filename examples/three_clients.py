"""Federated averaging by messages: three clients send compressed updates, a server averages them.

    python examples/three_clients.py --rounds 20

Each client is a process with its own data. Messages are bytes: a pipe carries them here, and HTTP
or a queue would do as well. The line to one client is bad: it damages every fourth message.
The server refuses that message and goes on with the others. What was in it is lost: a client's
errors have only what it did not send.
"""

import argparse
import multiprocessing
import sys
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from lightning_gc import Identity, Sender, TopK, pack, unpack

CLIENTS, LOCAL_STEPS, RATE = 3, 8, 0.3
COMPRESSOR = TopK(density=0.05)


def network() -> nn.Module:
    """Return the model of server and clients, with equal weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))


def data(client: int) -> tuple[Tensor, Tensor]:
    """Return a client's rows and their classes: each client has more of some classes."""
    draw = torch.Generator().manual_seed(client)
    rows = torch.randn(600, 32, generator=draw)
    project = torch.randn(32, 4, generator=torch.Generator().manual_seed(99))
    classes = (rows @ project + torch.eye(4)[client]).argmax(1)
    return rows, classes


def be_client(number: int, line: Connection) -> None:
    """Train on the weights that come, and send how they changed; no bytes end it."""
    torch.set_num_threads(1)
    model, (rows, classes) = network(), data(number)
    sender = Sender(COMPRESSOR, seed=number)
    while message := line.recv_bytes():
        weights = unpack(message, Identity())
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for step in range(LOCAL_STEPS):
            part = slice(64 * step, 64 * (step + 1))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[part]), classes[part]).backward()
            optimizer.step()
        change = {name: weights[name] - new.detach() for name, new in model.named_parameters()}
        line.send_bytes(sender.pack(change))


def damaged(message: bytes) -> bytes:
    """Return a message with another byte in the middle."""
    place = len(message) // 2
    return message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]


def loss(model: nn.Module) -> float:
    """Return the mean loss over all clients' rows."""
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in map(data, range(CLIENTS))]
    return float(torch.stack(losses).mean())


def main(rounds: int) -> None:
    """Be the server."""
    model, context, lines = network(), multiprocessing.get_context("spawn"), []
    refused = sent = 0
    for number in range(CLIENTS):
        ours, theirs = context.Pipe()
        context.Process(target=be_client, args=(number, theirs), daemon=True).start()
        lines.append(ours)
    before, shapes = loss(model), {name: p.shape for name, p in model.named_parameters()}
    for each in range(rounds):
        weights = pack(dict(model.named_parameters()), Identity())
        for line in lines:
            line.send_bytes(weights)
        changes = []
        for number, line in enumerate(lines):
            message = line.recv_bytes()
            sent += len(message)
            if number == 2 and each % 4 == 3:
                message = damaged(message)
            try:
                change = unpack(message, COMPRESSOR)
                if {name: tensor.shape for name, tensor in change.items()} != shapes:
                    raise ValueError("The message has other tensors than the model.")
                changes.append(change)
            except ValueError as error:
                refused += 1
                sys.stdout.write(f"client {number}: {error}\n")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.sub_(torch.stack([change[name] for change in changes]).mean(0))
    for line in lines:
        line.send_bytes(b"")
    dense = rounds * CLIENTS * 4 * sum(param.numel() for param in model.parameters())
    sys.stdout.write(
        f"{rounds} rounds, {refused} messages refused; loss {before:.3f} before, {loss(model):.3f} "
        f"after; {sent:,} bytes, {dense / sent:.1f} times fewer than uncompressed\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    main(parser.parse_args().rounds)
