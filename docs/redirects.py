"""Pages that lead from old addresses to today's, added to the site in the build."""

import json
from typing import Any

from mkdocs.structure.files import File, Files

MOVED = {
    "adam.html": "measurements-training.html#adam-and-adamw",
    "adam.html#what-to-take": "choosing-a-compressor.html#adam-and-adamw",
    "bench.html": "advise.html#benchmark",
    "bench.html#the-result": "advise.html#the-table",
    "bench.html#what-is-compared": "advise.html#what-is-compared",
    "commands.html": "quickstart.html#commands",
    "commands.html#requirements": "quickstart.html#requirements",
    "commands.html#the-documentation": "quickstart.html#commands",
    "fabric.html": "plain-torch.html#fabric",
    "from-yaml.html": "kinds-of-training.html#yaml-files",
    "from-yaml.html#a-complete-file": "kinds-of-training.html#a-complete-file",
    "from-yaml.html#completion-in-an-editor": "kinds-of-training.html#completion-in-an-editor",
    "guarantees.html": "concepts.html#guarantees",
    "guarantees.html#limits": "concepts.html#limits",
    "hsdp.html": "fsdp.html#hsdp",
    "hsdp.html#checkpoints": "fsdp.html#checkpoints-of-hsdp",
    "hsdp.html#what-happens-in-a-step": "fsdp.html#a-step-of-hsdp",
    "hsdp.html#what-is-refused": "fsdp.html#what-hsdp-refuses",
    "hugging-face.html": "plain-torch.html#hugging-face",
    "hugging-face.html#accelerate": "plain-torch.html#accelerate",
    "hugging-face.html#trainer-of-transformers": "plain-torch.html#trainer-of-transformers",
    "own-study.html": "tune.html#your-own-optuna-study",
    "own-study.html#with-real-workers": "tune.html#with-real-workers",
    "simulate.html": "concepts.html#simulated-workers",
    "simulate.html#differences-from-real-ddp": "concepts.html#differences-from-real-ddp",
    "simulate.html#seconds-on-a-network": "concepts.html#seconds-on-a-network",
    "simulate.html#state-that-belongs-to-a-worker": "concepts.html#state-that-belongs-to-a-worker",
    "tutorials/controller.html": "controllers.html",
    "tutorials/shards.html": "fsdp.html#tutorial",
    "tutorials/two-sites.html": "tutorials/slow-link.html#two-sites",
    "tutorials/which-compressor.html": "tune.html#tutorial",
    "which-strategy.html": "choosing-a-compressor.html#strategy",
}
"""Old address -> today's address. An old address without ``#`` also serves its other anchors."""


def page(old: str) -> str:
    """Return the HTML that sends a reader of the page ``old`` to today's address."""
    up = "../" * old.count("/")
    places = {key[len(old) :]: up + new for key, new in MOVED.items() if key.split("#")[0] == old}
    script = f"const to = {json.dumps(places)}; location.replace(to[location.hash] ?? to['']);"
    return (
        f'<!doctype html><html lang="en"><title>Moved</title><script>{script}</script>'
        f'<meta http-equiv="refresh" content="1; url={places[""]}">'
        f'<p>This page has moved: <a href="{places[""]}">{places[""]}</a></p></html>\n'
    )


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each old address."""
    for old in sorted({key.split("#")[0] for key in MOVED}):
        files.append(File.generated(config, old, content=page(old)))
    return files
