"""Source rules: public names, forbidden imports and unsafe calls, doctests.

The layers of imports are checked by ``lint-imports``, in ``make check``.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
from pathlib import Path

import lightning_fabric
import pytest
import pytorch_lightning
import torch

import lightning_gc
from lightning_gc import compressors, memories, schemes, transports
from lightning_gc.compressors import (
    BatchedCollective,
    Codec,
    Collective,
    Compressor,
    SparseCodec,
)
from lightning_gc.lightning.api import PRIVATE
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports import Transport

ROOT = Path(__file__).parents[2]
PACKAGES = [compressors, memories, schemes, transports]
FAMILIES = (Compressor, Memory, Scheme, Transport)

EXPORTED = """
COMPRESSORS MEMORIES SCHEMES
CompressedDDPStrategy CompressedFSDPStrategy CompressedFabricStrategy CompressedHSDPStrategy
CompressionMonitor Elastic GrowingRounds InnerMoments LocalSteps LocalStepsStrategy NetworkModel
OuterSGD Roll SimulatedDDPStrategy SimulatedLocalStepsStrategy Together Unequal
WeightDifferences
Sender advise attach pack unpack
Induced Menu PerParameter Quantised SizeSwitch
CSER DIANA EF21 ErrorFeedback ErrorReset GlobalMomentum LocalMomentum MomentumCorrection
LoCo NarrowResidual NoMemory
SAEF StepAhead WeightedError
AllGather AllGatherOrTwoShot AllReduce Hierarchical SparseReduce TwoHop TwoShot
""".split()  # noqa: SIM905 - a list of thirty lines says no more


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_lines_and_statements_that_raise_get_fewer() -> None:
    """Sentences for users are rows of ``core/combinations.py``, or written by ``refuse``.

    Both ceilings may only fall. A new capability pays with lines elsewhere.
    """
    own = {"lightning_gc", "controllers"}
    texts = [p.read_text() for p in files() if p.relative_to(ROOT).parts[0] in own]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    raising = sum(isinstance(node, ast.Raise) for node in nodes)
    assert sum(text.count("\n") for text in texts) <= 69_250
    assert raising <= 450


SHARED = """
Bucket Counted Door Link Plan Rendezvous Round Row Shards Table TernGrad Tiles Verdict
""".split()  # noqa: SIM905 - names of two classes or more: this list only gets shorter


def test_a_class_has_a_name_of_its_own() -> None:
    """A search for a name finds one class. The modules for either Lightning repeat theirs."""
    own = {"lightning_gc", "controllers"}
    paths = [p for p in files() if p.relative_to(ROOT).parts[0] in own]
    bodies = [ast.parse(p.read_text()).body for p in paths if not p.stem.endswith("_lightning")]
    names = [n.name.strip("_") for body in bodies for n in body if isinstance(n, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} <= set(SHARED)


def test_public_names() -> None:
    """What users may rely on. A new compressor adds its name; nothing leaves without a word."""
    assert lightning_gc.__all__ == sorted(set(lightning_gc.__all__))
    assert set(EXPORTED) <= set(lightning_gc.__all__)
    extra = set(lightning_gc.__all__) - set(EXPORTED)
    assert extra <= {cls.__name__ for cls in lightning_gc.COMPRESSORS.values()}
    for name in lightning_gc.__all__:
        assert getattr(lightning_gc, name).__doc__, name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_every_public_class_is_imported_by_its_package(package) -> None:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        loaded = importlib.import_module(module.name)
        for name, value in vars(loaded).items():
            if not inspect.isclass(value) or inspect.isabstract(value) or name.startswith("_"):
                continue
            if issubclass(value, FAMILIES):
                home = ".".join(value.__module__.split(".")[:2])
                exported = vars(importlib.import_module(home))["__all__"]
                assert value.__name__ in exported, f"add an import line for {name} to {home}"


@pytest.mark.parametrize(
    ("cls", "most"),
    [(Compressor, 15), (Codec, 18), (Collective, 16), (BatchedCollective, 17), (SparseCodec, 22)],
)
def test_a_contract_has_few_members(cls: type, most: int) -> None:
    """The author of a compressor sees few methods, properties and class variables.

    All public names of the class and its bases count, except the names of ``object``. A dataclass
    adds none. These ceilings may only fall.
    """
    members = {name for name in set(dir(cls)) - set(dir(object)) if not name.startswith("_")}
    assert len(members) <= most, sorted(members)


def test_algorithms_do_not_communicate() -> None:
    """Compressors, memories, schemes and what they stand on never import torch.distributed."""
    package = ROOT / "lightning_gc"
    free = [
        p
        for folder in ("core", "compressors", "memories", "schemes", "engine")
        for p in (package / folder).rglob("*.py")
    ]
    for path in free:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.startswith("torch.distributed") for name in names), path


UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_NAMES = {
    *("ForkingPickler", "__import__"),
    *("eval", "exec", "broadcast_object_list", "all_gather_object", "gather_object"),
    *("scatter_object_list", "send_object_list", "recv_object_list"),
}


_OF_TENSORS = {"dist.broadcast", "self._group.broadcast"}


def unsafe(source: str) -> set[str]:
    """Return what would run or rebuild whatever the bytes of a message or a file describe."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & UNSAFE_MODULES
            found |= {alias.name for alias in node.names} & (UNSAFE_NAMES | UNSAFE_MODULES)
        elif isinstance(node, ast.Constant) and node.value in UNSAFE_MODULES | UNSAFE_NAMES:
            found.add(f"{node.value!r}")  # of import_module or getattr
        elif isinstance(node, ast.Attribute | ast.Name):
            found |= {ast.unparse(node).rpartition(".")[2]} & UNSAFE_NAMES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            safe = "weights_only=True" in {ast.unparse(keyword) for keyword in node.keywords}
            if called == "torch.load" and not safe:
                found.add(called)
            if node.func.attr == "broadcast" and called not in _OF_TENSORS:
                found.add(called)  # Lightning's pickles
    return found


def test_no_bytes_become_code() -> None:
    """No pickle on any path; the contracts alone make one, of their own."""
    folders = (ROOT / "lightning_gc", ROOT / "controllers")
    sources = {p for p in files() for folder in folders if p.is_relative_to(folder)}
    sources = {p for p in sources if "testing" not in p.parts}
    assert len(sources) > 40
    assert {p.name: u for p in sources if (u := unsafe(p.read_text()))} == {}


def test_examples_unpickle_no_file() -> None:
    sources = [path for path in files() if path.is_relative_to(ROOT / "examples")]
    assert any("torch.load" in path.read_text() for path in sources)
    assert not any("torch.load" in unsafe(path.read_text()) for path in sources)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from torch.distributed import all_gather_object",
        "dist.broadcast_object_list([x])",
        "from torch.serialization import pickle",
        "importlib.import_module('pickle')",
        "getattr(dist, 'recv_object_list')([])",
        "multiprocessing.reduction.ForkingPickler.loads(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "strategy.broadcast(text)",
        "eval(text)",
    ],
)
def test_what_counts_as_code(line: str) -> None:
    assert unsafe(line)
    assert not unsafe("dist.broadcast(t, src=0); torch.load(f, weights_only=True); m.eval_steps()")


LOADERS = {"load", "loads", "safe_load", "safe_load_all", "load_all", "unsafe_load", "full_load"}
LOADERS |= {"load_checkpoint", "load_file", "safe_open", "genops", "read_pickle", "open_dataset"}
LOADERS |= {"RDBStorage", "JournalStorage", "CmaEsSampler", "from_pretrained", "get_storage"}
LOADERS |= {"load_state_dict_from_url", "dcp_to_torch_save", "PackageImporter", "run_path"}
LOADER_KINDS = ("Reader", "LoadPlanner", "Unpickler", "StorageProxy", "load_all")
"""Ends of names, as of torch's readers of distributed checkpoints."""

NO_LOADERS = {"super.load_checkpoint", "self.buffers.load"}
NO_LOADERS |= {"memory_store.load", "engine.buffers.load", "self._store.load", "tl.load"}
"""Calls that copy tensors, or that hand on to what the table has."""

READ_BY = {
    "advice/costs.py": {"json.loads"},  # messages between workers, as in the next ones
    "advice/session.py": {"json.loads"},
    "advice/what_if.py": {"json.loads"},  # a file of this package
    "bench/benchmark.py": {"json.loads"},
    "checkpoint/distributed_files.py": {"json.loads", "pickletools.genops", "torch.load"},
    "checkpoint/shard_store.py": {"json.loads", "torch.load"},
    "checkpoint/side_files.py": {
        "checkpoint_io.load_checkpoint",
        "inner.load_checkpoint",
        "self.checkpoint_io.load_checkpoint",
        "torch.load",
    },
    "control/control_loop.py": {"json.loads"},
    "controllers/trace.py": {"json.loads"},
    "exchange/peers.py": {"json.loads"},
    "huggingface.py": {"torch.load"},
    "elastic/folder.py": {"json.loads"},
    "elastic/rendezvous.py": {"json.loads"},
    "elastic/roll.py": {"json.loads"},
    "elastic/snapshot.py": {"json.loads", "safetensors.torch.load"},
    "elastic/sockets.py": {"json.loads"},
    "methods/method.py": {"yaml.safe_load"},  # values of fields that the user types
    "methods/sections.py": {"yaml.safe_load"},
    "methods/yaml_config.py": {"json.loads"},
    "packing.py": {"json.loads"},
    "tuning/journal.py": {
        *("JournalStorage", "RDBStorage", "json.loads"),
        *("optuna.storages.JournalStorage", "optuna.storages.RDBStorage"),
    },
    "tuning/studies.py": {"json.loads"},
    "tuning/trial.py": {"json.loads"},
}
"""Every place where bytes of a file or a message become objects. SECURITY.md has their files."""


def loaders(source: str) -> set[str]:
    """Return what reads objects from bytes, where it is imported, mentioned, or named in a text."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {n.arg for n in nodes if isinstance(n, ast.arg)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    found = set()
    for node in nodes:
        match node:
            case ast.ImportFrom(module, names):
                found |= {f"{module}.{alias.name}" for alias in names if _loads(alias.name)}
            case ast.Attribute(attr=name) if _loads(name):
                found.add(ast.unparse(node).replace("super()", "super"))
            case ast.Name(name) if _loads(name) and name not in own:
                found.add(name)
            case ast.Constant(str(name)) if _loads(name):  # of getattr, say
                found.add(repr(name))
    return found - NO_LOADERS


def _loads(name: str) -> bool:
    return name in LOADERS or (name.isidentifier() and name.endswith(LOADER_KINDS))


def test_bytes_become_objects_at_known_places_only() -> None:
    """A new place needs a row in SECURITY.md, a test with a prepared file, and a line here."""
    found = {}
    for folder in (ROOT / "lightning_gc", ROOT / "controllers"):
        for path in folder.rglob("*.py"):
            inside = folder if folder.name == "lightning_gc" else ROOT
            name = path.relative_to(inside).as_posix()
            read = loaders(path.read_text())
            if read and not name.startswith("testing/"):
                found[name] = read
    assert found == READ_BY


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(f)",
        "from torch import load as read",
        "read = torch.load; read(f)",
        "getattr(torch, 'load')(f)",
        "[*map(torch.load, files)]",
        "importlib.import_module(name).loads(text)",
        "FileSystemReader(folder)",
        "dcp.HuggingFaceStorageReader(folder)",
        "from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader as R",
        "yaml.full_load_all(text)",
        "import torch as t; t.jit.load(f)",
    ],
)
def test_what_counts_as_a_loader(line: str) -> None:
    assert loaders(line)
    assert not loaders("model.load_state_dict(state); workload(3); f = 'To load a Reader'")
    assert not loaders("def load(path): ...\nload(path)")


def test_every_row_about_security_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    tests = {path.name for path in files()}
    for row in rows:
        named = re.findall(r"\b(test_\w+\.py)", row.split("|")[-2])
        assert named, row
        assert set(named) <= tests, row
    assert set(re.findall(r"\b(test_\w+\.py)", text)) <= tests


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
OF_DEFAULT_DTYPE = {"eye", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros"}


def left_to_defaults(source: str) -> list[str]:
    """Return the tensors whose device or dtype a program's ``torch.set_default_*`` would choose."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), name), keywords=given):
                needed = {"device"} if name in FACTORIES else set()
                needed |= {"dtype"} if name in OF_DEFAULT_DTYPE else set()
                if needed - {keyword.arg for keyword in given}:
                    found.append(ast.unparse(node))
    return found


def test_every_new_tensor_names_its_device_and_dtype() -> None:
    """A default device sends a tensor of the exchange elsewhere; the contracts may leave it so."""
    sources = [p for p in (ROOT / "lightning_gc").rglob("*.py") if "testing" not in p.parts]
    assert len(sources) > 40
    assert {p.name: u for p in sources if (u := left_to_defaults(p.read_text()))} == {}


def test_private_names_of_lightning_are_declared_and_exist() -> None:
    """Names of a Trainer, its loops and connectors, a module and its logged values."""
    owners = r"(?:trainer|loop|fit|connector|lightning_module|logged)"
    paths = [*(ROOT / "lightning_gc").rglob("*.py")]
    # The Trainer of huggingface.py is another library's.
    sources = "".join(p.read_text() for p in paths if p.name != "huggingface.py")
    known = {name for names in PRIVATE.values() for name in names}
    assert set(re.findall(rf"{owners}\.(_[a-z]\w*)", sources)) <= known
    folders = [Path(str(each.__file__)).parent for each in (pytorch_lightning, lightning_fabric)]
    theirs = "".join(p.read_text() for folder in folders for p in folder.rglob("*.py"))
    since = {"_broadcast_sigterm_tensor", "_pl_static_graph_delay_done"}  # 2.6
    missing = {name for name in known if not re.search(rf"\b{name}\b", theirs)}
    assert missing <= since


_SHARDS = "torch.distributed.fsdp._fully_shard._fsdp"
READ_WITH_DEFAULTS = {
    "_abort_process_group": ("torch.distributed.distributed_c10d", "2.6"),
    "_all_gather_comm": (f"{_SHARDS}_param_group", "2.9"),
    "_checkpoint_io": ("pytorch_lightning.plugins.io.wrapper", "2.6"),
    "_default_hp_metric": ("lightning_fabric.loggers.tensorboard", "2.6"),
    "_fsdp_param_groups": (f"{_SHARDS}_state", "2.12"),
    "_in_backward_optimizers": ("torch.nn.parallel.distributed", "2.6"),
    "_lazy_init_ran": ("torch.nn.parallel.distributed", "2.6"),
    "_orig_mod": ("torch._dynamo.eval_frame", "2.6"),
    "_prefix": ("lightning_fabric.loggers.tensorboard", "2.6"),
    "_reduce_scatter_comm": (f"{_SHARDS}_param_group", "2.9"),
    "_schedulers": ("torch.optim.lr_scheduler", "2.6"),
    "_sharded_post_forward_param": (f"{_SHARDS}_param", "2.6"),
    "_trial": ("transformers.trainer", "2.6"),
    "_unsharded_param": (f"{_SHARDS}_param", "2.6"),
    "force_sum_reduction_for_comms": (f"{_SHARDS}_param_group", "2.13"),
    "gradient_divide_factor": (f"{_SHARDS}_param_group", "2.13"),
    "reduce_scatter_unused_params": (f"{_SHARDS}_param_group", "2.13"),
}
"""Others' names that are read with a default -> where they are, and from which torch on."""


@pytest.mark.parametrize("name", READ_WITH_DEFAULTS)
def test_what_is_read_with_a_default_still_exists(name: str) -> None:
    """Where others rename it, the default would be used in silence."""
    module, since = READ_WITH_DEFAULTS[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, since.split("."))):
        pytest.skip(f"since torch {since}")
    found = importlib.util.find_spec(module)
    assert found is not None
    assert re.search(rf"\b{name}\b", Path(str(found.origin)).read_text())


def test_all_private_names_that_are_read_with_a_default_are_known() -> None:
    read = set[str]()
    for path in (ROOT / "lightning_gc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[owner, ast.Constant(value=str(name)), *_],
                ) if name.startswith("_") and not name.startswith("__"):
                    if ast.unparse(owner) != "self":
                        read.add(name)
    of_lightning = {name for names in PRIVATE.values() for name in names}
    assert len(read) > 10
    assert read <= READ_WITH_DEFAULTS.keys() | of_lightning


OF_A_TRAINER = {
    *("trainer", "lightning_module", "fit_loop", "callbacks", "callback_metrics", "datamodule"),
    *("current_epoch", "global_step", "automatic_optimization", "num_training_batches"),
}
ROOMS_WITH_A_TRAINER = {"lightning", "methods", "tuning", "bench", "advice"}


def test_a_trainer_is_read_where_lightning_is_known() -> None:
    """A room that reads it by its attributes' names knows Lightning, though it imports nothing."""
    read, library = {}, ROOT / "lightning_gc"
    for path in [*library.rglob("*.py"), *(ROOT / "controllers").glob("*.py")]:
        rooms = set(path.parent.relative_to(ROOT).parts)
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & OF_A_TRAINER
        others = library / "cli.py", library / "huggingface.py"  # another library's Trainer
        if names and not rooms & ROOMS_WITH_A_TRAINER and path not in others:
            read[str(path.relative_to(ROOT))] = names
    assert read == {}


def test_controllers_are_imported_under_one_name() -> None:
    import lightning_gc.controllers as ours

    assert Path(ours.__file__).resolve() == ROOT / "controllers" / "__init__.py"
    with pytest.raises(ImportError, match=r"lightning_gc\.controllers"):
        importlib.import_module("controllers")


def modules() -> list[str]:
    walk = pkgutil.walk_packages(lightning_gc.__path__, "lightning_gc.")
    names = [m.name for m in walk if not m.name.endswith("for_lightning")]
    if not importlib.util.find_spec("ray"):
        names = [name for name in names if not name.endswith("for_ray")]
    if importlib.util.find_spec("triton"):
        return names
    return [name for name in names if ".kernels.gpu." not in name]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_every_compressor_documents_itself() -> None:
    """Wire format, from ``wire``, and an example that runs."""
    for cls in lightning_gc.COMPRESSORS.values():
        assert "Example:" in (cls.__doc__ or ""), cls
        for field in cls.examples()[0].wire(1_000_000):
            assert field.name, cls
            assert 0 <= field.nbytes <= 32_000_000, (cls, field)
