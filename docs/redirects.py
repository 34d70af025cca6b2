"""Leads from old addresses to today's: from pages that are gone, and headings that have moved."""

import json
from typing import Any

from mkdocs.structure.files import File, Files

MOVED = {
    "adam.html": "measurements-training.html#adam-and-adamw",
    "adam.html#what-to-take": "choosing-a-compressor.html#adam-and-adamw",
    "bench.html": "advise.html#benchmark",
    "bench.html#the-result": "advise.html#the-table",
    "bench.html#what-is-compared": "advise.html#what-is-compared",
    "clusters.html#what-has-been-run": "clusters.html#tested",
    "commands.html#requirements": "quickstart.html#requirements",
    "concepts.html#a-simulated-step": "simulated-workers.html#data-and-counts",
    "concepts.html#bucket": "concepts.html#the-path-of-a-bucket",
    "concepts.html#differences-from-real-ddp": "simulated-workers.html#differences-from-real-ddp",
    "concepts.html#engine": "architecture.html#a-flow",
    "concepts.html#flow": "architecture.html#a-flow",
    "concepts.html#seconds-on-a-network": "simulated-workers.html#seconds-on-a-network",
    "concepts.html#simulated-local-steps": "simulated-workers.html",
    "concepts.html#simulated-workers": "simulated-workers.html",
    "concepts.html#sparsereduce-or-twoshot": "architecture.html#sparsereduce-or-twoshot",
    "concepts.html#state-that-belongs-to-a-worker": "simulated-workers.html#state-that-belongs-to-a-worker",
    "concepts.html#synchronizer": "architecture.html#a-flow",
    "concepts.html#transport": "architecture.html#a-message",
    "controllers.html#controllers-and-tensorboard": "controllers.html#controllers",
    "controllers.html#figures-in-the-log": "tensorboard.html#scalars",
    "controllers.html#look": "tensorboard.html#custom-scalars",
    "fabric.html": "plain-torch.html#fabric",
    "from-yaml.html": "kinds-of-training.html#yaml-files",
    "from-yaml.html#a-complete-file": "kinds-of-training.html#a-complete-file",
    "from-yaml.html#completion-in-an-editor": "kinds-of-training.html#completion-in-an-editor",
    "fsdp.html#a-step-of-fsdp": "fsdp.html#a-training-step",
    "fsdp.html#a-step-of-hsdp": "hsdp.html#a-training-step",
    "fsdp.html#checkpoints-of-fsdp": "fsdp.html#checkpoints",
    "fsdp.html#checkpoints-of-hsdp": "hsdp.html#checkpoints",
    "fsdp.html#hsdp": "hsdp.html",
    "fsdp.html#losses": "measurements.html#fsdp-bytes-and-losses",
    "fsdp.html#models-in-shards": "fsdp.html",
    "fsdp.html#on-real-nodes": "hsdp.html#on-real-nodes",
    "fsdp.html#resume-with-four-replicas-then-on-fewer-processes": "hsdp.html#resume-with-four-replicas-then-on-fewer-processes",
    "fsdp.html#seconds": "measurements.html#fsdp-seconds",
    "fsdp.html#the-module": "hsdp.html#tutorial",
    "fsdp.html#train-on-2-2": "hsdp.html#train-on-2-2",
    "fsdp.html#tutorial": "hsdp.html#tutorial",
    "fsdp.html#what-fsdp-equals": "measurements.html#hsdp-and-fsdp-compared-with-torch",
    "fsdp.html#what-fsdp-refuses": "fsdp.html#what-is-refused",
    "fsdp.html#what-hsdp-equals": "measurements.html#hsdp-and-fsdp-compared-with-torch",
    "fsdp.html#what-hsdp-refuses": "hsdp.html#what-is-refused",
    "guarantees.html": "concepts.html#guarantees",
    "guarantees.html#limits": "concepts.html#limits",
    "hsdp.html#what-happens-in-a-step": "hsdp.html#a-training-step",
    "local-steps.html#elastic-runs": "elastic-runs.html",
    "local-steps.html#goodput-under-failures": "measurements-training.html#goodput-under-failures",
    "local-steps.html#limits": "local-steps.html",
    "local-steps.html#whole-nodes-as-workers": "islands.html",
    "methods.html#as-in-the-papers": "papers.html#as-in-the-papers",
    "plain-torch.html#accelerate": "hugging-face.html#accelerate",
    "plain-torch.html#fabric-and-hugging-face": "hugging-face.html#local-steps",
    "plain-torch.html#hugging-face": "hugging-face.html",
    "plain-torch.html#levels-and-bytes-in-fabric": "plain-torch.html#fabric",
    "plain-torch.html#limits-of-fabric": "plain-torch.html#fabric",
    "plain-torch.html#limits-of-hugging-face": "hugging-face.html#limits",
    "plain-torch.html#plain-pytorch-fabric-and-hugging-face": "plain-torch.html#plain-pytorch-and-fabric",
    "plain-torch.html#precision-and-clipping": "plain-torch.html#fabric",
    "plain-torch.html#trainer-of-transformers": "hugging-face.html#trainer-of-transformers",
    "plain-torch.html#what-localsteps-refuses": "plain-torch.html#local-steps-without-a-trainer",
    "quickstart.html#by-name": "by-name.html#names-of-strategies",
    "quickstart.html#commands": "commands.html",
    "quickstart.html#lightning-or-pytorch_lightning": "by-name.html#lightning-or-pytorch_lightning",
    "quickstart.html#try-a-combination-without-lightning": "write-a-compressor.html#try-a-combination-without-lightning",
    "simulate.html": "simulated-workers.html",
    "simulate.html#differences-from-real-ddp": "simulated-workers.html#differences-from-real-ddp",
    "simulate.html#seconds-on-a-network": "simulated-workers.html#seconds-on-a-network",
    "simulate.html#state-that-belongs-to-a-worker": "simulated-workers.html#state-that-belongs-to-a-worker",
    "tune.html#all-keys-of-tune": "tune.html#from-a-file",
    "tune.html#files-from-somebody-else": "security.html",
    "tune.html#from-python": "own-study.html#from-python",
    "tune.html#many-processes-many-machines": "tune.html#stop-resume-and-share",
    "tune.html#simulated-or-real-workers": "tune.html#rules-of-the-comparison",
    "tune.html#the-report": "reports.html",
    "tune.html#the-thesiss-experiment": "thesis.html",
    "tune.html#what-is-fair-about-it": "tune.html#rules-of-the-comparison",
    "tune.html#what-space-names": "tune.html#from-a-file",
    "tune.html#with-real-workers": "own-study.html#with-real-workers",
    "tune.html#your-own-optuna-study": "own-study.html#your-own-optuna-study",
    "tutorials/controller.html": "controllers.html",
    "tutorials/shards.html": "hsdp.html#tutorial",
    "tutorials/two-sites.html": "tutorials/slow-link.html#two-sites",
    "tutorials/which-compressor.html": "tune.html#tutorial",
    "what-survives.html#what-is-checked-before-it-is-loaded": "what-survives.html#checks-before-loading",
    "which-strategy.html": "choosing-a-compressor.html#strategy",
}
"""Old address -> today's address. The entry of a page that is gone also serves its other anchors."""


def places_of(old: str) -> dict[str, str]:
    """Return ``{anchor that the page had: today's address}``, relative to the page."""
    up = "../" * old.count("/")
    return {key[len(old) :]: up + new for key, new in MOVED.items() if key.split("#")[0] == old}


def page(old: str) -> str:
    """Return the HTML that sends a reader of a page that is gone to today's address."""
    places = places_of(old)
    script = f"const to = {json.dumps(places)}; location.replace(to[location.hash] ?? to['']);"
    return (
        f'<!doctype html><html lang="en"><title>Moved</title><script>{script}</script>'
        f'<meta http-equiv="refresh" content="1; url={places[""]}">'
        f'<p>This page has moved: <a href="{places[""]}">{places[""]}</a></p></html>\n'
    )


def script(url: str) -> str:
    """Return what a page that is there adds: it sends a reader of a moved heading after it."""
    places = places_of(url)
    if not places:
        return ""
    return (
        f"<script>const moved = {json.dumps(places)}; const go = () => moved[location.hash] && "
        f"location.replace(moved[location.hash]); go(); addEventListener('hashchange', go);</script>"
    )


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each address that is gone."""
    for old in sorted(key for key in MOVED if "#" not in key):
        files.append(File.generated(config, old, content=page(old)))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Add the script to pages that are there."""
    return output.replace("</body>", f"{script(page.url)}</body>")
