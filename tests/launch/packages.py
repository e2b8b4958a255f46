"""The settings that released packages accept: argparse flags, Hydra keys, dataclass fields, accelerate's and
DeepSpeed's keys, each with its legal values. Everything is read as text but statements that only add arguments.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import functools
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from frameworks.released import LOADER, Release, Unreachable, read

# what is launched, and what reads the files beside; Transformers and DeepSpeed are those that TRL states
VERSIONS = {
    "openrlhf": ("0.11.0", "0.11.2"),
    "verl": ("0.9.0", "0.9.1"),
    "trl": ("0.19.0", "0.24.0", "1.0.0", "1.16.0"),
    "transformers": ("5.23.0",),
    "accelerate": ("1.15.0",),
    "llamafactory": ("0.9.5",),
    "axolotl": ("0.19.0",),
    "ms_swift": ("4.6.0",),
    "torchtune": ("0.6.1",),
    "torchtitan": ("0.3.0",),
    "unsloth": ("2026.10.9",),
}
DEEPSPEED = "0.19.8"


class Packages:
    """The released packages, fetched where they are first asked for; raises Unreachable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019  (a handful of releases, kept as long as the tests run)
    def release(self, package: str, version: str = "") -> Release:
        versions = VERSIONS[package]
        return read(self.folder, package, version or versions[-1], versions)

    @functools.cache  # noqa: B019
    def deepspeed(self, path: str) -> str:
        """A file of DeepSpeed, which is released as source alone."""
        name = f"deepspeed-{DEEPSPEED}"
        archive = self.folder / f"{name}.tar.gz"
        with (self.folder / "deepspeed.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not archive.exists():
                pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=deepspeed", "--retries=1"]
                pip += ["--timeout=10", "--disable-pip-version-check", "--quiet", "--dest", str(self.folder)]
                done = subprocess.run([*pip, f"deepspeed=={DEEPSPEED}"], capture_output=True, text=True)
                if not archive.exists():
                    raise Unreachable(done.stderr[-200:])
        with tarfile.open(archive) as members:
            found = members.extractfile(f"{name}/{path}")
            assert found, f"{name} has no file {path}"
            return found.read().decode("utf-8")


class Unknown(tuple[()]):
    """A name of a module that is not looked up."""

    def __call__(self, text: str) -> str:
        return text


class Parser(argparse.ArgumentParser):
    """Takes whole names alone, and raises what is wrong."""

    def __init__(self) -> None:
        super().__init__(allow_abbrev=False, add_help=False)

    def error(self, message: str) -> Any:
        raise AssertionError(message)


def only_adds(node: ast.stmt) -> bool:
    """True if a statement does nothing but add flags, or does so in a loop over literals."""
    if isinstance(node, ast.For):
        return isinstance(node.iter, ast.Tuple) and all(only_adds(inner) for inner in node.body)
    call = node.value if isinstance(node, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"):
        return False
    return not isinstance(call.args[0], ast.Constant) or str(call.args[0].value).startswith("-")


def arguments(body: list[ast.stmt], names: dict[str, Any], *groups: str) -> Parser:
    """The parser that the statements of `body` fill which only add arguments to `parser` or to one of `groups`.

    A name that neither Python nor `names` gives a meaning is a type that takes all, or no choices.
    """
    parser = Parser()
    module = ast.Module([node for node in body if only_adds(node)], [])
    known = {"__builtins__": {"int": int, "float": float, "str": str}, **dict.fromkeys(("parser", *groups), parser)}
    read = {
        node.id for node in ast.walk(module) if isinstance(node, ast.Name) and node.id not in ("int", "float", "str")
    }
    exec(compile(module, "<released>", "exec"), dict.fromkeys(read, Unknown()) | known | names)
    return parser


@functools.cache
def openrlhf(release: Release, script: str) -> Parser:
    """The command line of `openrlhf/cli/<script>.py`."""
    tree = release.tree(f"openrlhf/cli/{script}.py")
    [main] = [node for node in tree.body if isinstance(node, ast.If)]
    clock = SimpleNamespace(now=lambda: SimpleNamespace(strftime=str))
    return arguments(main.body, {"datetime": clock})


@functools.cache
def deepspeed_launcher(packages: Packages) -> Parser:
    """`deepspeed` up to the script that it starts."""
    text = packages.deepspeed("deepspeed/launcher/runner.py")
    [function] = [
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "parse_args"
    ]
    return arguments(function.body, {"argparse": argparse, "DLTS_HOSTFILE": ""})


# ---- verl ----------------------------------------------------------------------------------------------------------


class Hydra:
    """verl's configuration, as a command line overrides it."""

    MAIN = "verl/trainer/config/ppo_trainer.yaml"
    WHOLE = "verl/trainer/config/_generated_ppo_trainer.yaml"  # the same, composed by verl itself
    MEGATRON = "verl/trainer/config/_generated_ppo_megatron_trainer.yaml"  # composed for model_engine=megatron
    SFT = "verl/trainer/config/sft_trainer_engine.yaml"  # which verl does not compose itself
    # a mapping with some keys, of which each and any other is handed on to Megatron-core's TransformerConfig
    OPEN = "override_transformer_config"

    def __init__(self, release: Release, main: str = MAIN, **chosen: str) -> None:
        self.release = release
        self.keys = release.configuration(main, **chosen)
        self.whole = yaml.load(release.text(self.WHOLE), Loader=LOADER) if main == self.MAIN else None

    def node(self, name: str) -> Any:
        """The value at a dotted key of the whole configuration."""
        if self.whole is None:  # dotted keys leave out a mapping that is empty
            return self.keys.get(name, {key: self.keys[key] for key in self.keys if key.startswith(f"{name}.")})
        return functools.reduce(lambda at, part: at[part], name.split("."), self.whole)

    @functools.cache  # noqa: B019
    def check(self, override: str) -> tuple[str, Any]:
        """One override: its key and value; raises where the key is not there, or the value has another type."""
        name, _, text = override.partition("=")
        value = yaml.load(text.replace(":", ": ") if text.startswith("{") else text, Loader=LOADER)
        if name.startswith("+"):
            parent, _, _leaf = name[1:].rpartition(".")
            free = parent.endswith(self.OPEN) and name not in self.keys
            assert free or self.node(parent) == {}, f"{name}: {parent} is not an empty mapping"
            return name[1:], value
        assert name in self.keys, f"{self.release.name}: no key {name}"
        default = self.keys[name]
        self.node(name)  # verl's own composition has it, too
        pointed = isinstance(default, str) and default.startswith("${")
        if default is not None and not pointed and type(value) is not type(default):
            numbers = isinstance(default, float) and isinstance(value, int)
            numbers |= isinstance(value, float) and name.endswith("entropy_coeff")  # 0, and a float in config/actor.py
            lists = isinstance(value, list) and name.endswith("target_modules")  # a name, or several
            assert numbers or lists, f"{name}: {value!r} is no {type(default).__name__}, as {default!r}"
        return name, value

    @functools.cache  # noqa: B019
    def words(self, path: str) -> set[str]:
        """Every text that stands in a module."""
        return {
            node.value
            for node in ast.walk(self.release.tree(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }


# ---- TRL -----------------------------------------------------------------------------------------------------------


def truth(text: str) -> bool:
    """A truth value as HfArgumentParser reads it."""
    found = {"true": True, "false": False}.get(text.lower())
    if found is None:
        raise ValueError(text)
    return found


TYPES: dict[str, Callable[[str], Any]] = {"bool": truth, "int": int, "float": float, "str": str}


def fields(release: Release, path: str, *names: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The fields of dataclasses: name, annotation, and what of `field(...)` is literal, its metadata among it."""
    classes = {node.name: node for node in release.tree(path).body if isinstance(node, ast.ClassDef)}
    for name in names:
        assert name in classes, f"{release.name}, {path}: no class {name}"
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                told: dict[str, Any] = {}
                for keyword in node.value.keywords if isinstance(node.value, ast.Call) else []:
                    if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
                        for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant | ast.List):
                                told[str(key.value)] = ast.literal_eval(value)
                    elif isinstance(keyword.value, ast.Constant):
                        told[str(keyword.arg)] = keyword.value.value
                yield node.target.id, ast.unparse(node.annotation), told


def members(release: Release, path: str, name: str) -> set[str]:
    """The values of an enumeration."""
    [found] = [node for node in release.tree(path).body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.value.value for node in found.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }


def add(parser: Parser, of: Iterator[tuple[str, str, dict[str, Any]]], choices: dict[str, set[str]]) -> None:
    """Adds dataclass fields to a parser as HfArgumentParser does: by type, choices, and several for a list."""
    for name, annotation, told in of:
        plain = re.sub(r"^Optional\[(.*)\]$", r"\1", annotation).removesuffix(" | None")  # earlier releases' way
        kind = TYPES.get(plain.removeprefix("list[").removesuffix("]"), str)
        allowed = told.get("choices") or choices.get(name)
        more: dict[str, Any] = {"nargs": "+"} if plain.startswith("list[") else {}
        existing = [action for action in parser._actions if f"--{name}" in action.option_strings]
        for action in existing:  # a subclass says it anew
            parser._handle_conflict_resolve(None, [(f"--{name}", action)])
        parser.add_argument(f"--{name}", type=kind, choices=allowed, default=argparse.SUPPRESS, **more)


@functools.cache
def trl(packages: Packages, command: str, version: str = "") -> Parser:
    """The command line of `trl <command>`."""
    release, transformers = packages.release("trl", version), packages.release("transformers")
    if (cli := "trl/cli/commands/__init__.py") in release.members:
        calls = [node for node in ast.walk(release.tree(cli)) if isinstance(node, ast.Call) and node.args]
        named = {node.args[0].value for node in calls if isinstance(node.args[0], ast.Constant)}
    else:  # before 0.29: `make_sft_parser(subparsers)`, which names a script of trl/scripts
        text = release.text("trl/cli.py")
        named = {name for name in re.findall(r"make_(\w+)_parser\(subparsers\)", text)}
    assert command in named, f"{release.name}: no command {command}"
    [config] = [name for name in ("SFT", "Reward", "DPO", "KTO", "GRPO") if name.lower() == command]
    training = "transformers/training_args.py"
    choices = {"optim": members(transformers, training, "OptimizerNames"), "vllm_mode": {"server", "colocate"}}
    parser = Parser()
    add(parser, fields(transformers, training, "TrainingArguments"), choices)
    if (base := "trl/trainer/base_config.py") in release.members:  # since 0.29
        add(parser, fields(release, base, "_BaseConfig"), choices)
    # from 0.26 to 1.7 KTO's is experimental, and trl.trainer hands it on
    folders = (f"experimental/{command}", "trainer")
    own = next(p for f in folders if (p := f"trl/{f}/{command}_config.py") in release.members)
    add(parser, fields(release, own, f"{config}Config"), choices)
    add(parser, fields(release, "trl/trainer/model_config.py", "ModelConfig"), choices)
    add(parser, fields(release, "trl/scripts/utils.py", "ScriptArguments"), choices)
    if command == "grpo":
        add(parser, fields(release, "trl/scripts/grpo.py", "GRPOScriptArguments"), choices)
        [told] = [
            told for name, _, told in fields(release, "trl/trainer/grpo_config.py", "GRPOConfig") if name == "vllm_mode"
        ]
        assert all(f"'{mode}'" in told["help"] for mode in choices["vllm_mode"])
    return parser


@functools.cache
def vllm_serve(packages: Packages, version: str = "") -> Parser:
    """The command line of `trl vllm-serve`."""
    release = packages.release("trl", version)
    cli = next(path for path in ("trl/cli/commands/vllm_serve.py", "trl/cli.py") if path in release.members)
    assert '"vllm-serve"' in release.text(cli)
    parser = Parser()
    add(parser, fields(release, "trl/scripts/vllm_serve.py", "ScriptArguments"), {})
    return parser


# ---- accelerate and DeepSpeed --------------------------------------------------------------------------------------


@functools.cache
def accelerate(packages: Packages) -> Parser:
    """`accelerate launch`, whose flags are the keys of `deepspeed_config` and `fsdp_config`, too."""
    release = packages.release("accelerate")
    function = next(
        node
        for node in release.tree("accelerate/commands/launch.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "launch_command_parser"
    )
    groups = [
        node.targets[0].id
        for node in function.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "argument_group" in ast.dump(node)
    ]
    return arguments(function.body, {"argparse": argparse}, *groups)


@functools.cache
def lists(packages: Packages) -> dict[str, Any]:
    """The lists of `accelerate/utils/constants.py`, by name."""
    found: dict[str, Any] = {}
    for node in packages.release("accelerate").tree("accelerate/utils/constants.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            assert isinstance(node.targets[0], ast.Name)
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def check_accelerate(packages: Packages, settings: dict[str, Any]) -> None:
    """An accelerate file: every key a field of its configuration or a flag, with a legal value."""
    release, constants = packages.release("accelerate"), lists(packages)
    types = dict(
        (name, annotation)
        for name, annotation, _ in fields(
            release, "accelerate/commands/config/config_args.py", "BaseConfig", "ClusterConfig"
        )
    )
    for name, value in settings.items():
        assert name in types, f"{release.name}: no setting {name}"
        plain = types[name].removeprefix("Optional[").removesuffix("]")
        if plain in ("int", "bool", "str", "dict"):
            assert type(value).__name__ == plain, f"{name}: {value!r} is no {plain}"
    words = "accelerate/utils/dataclasses.py"
    assert settings["distributed_type"] in members(release, words, "DistributedType")
    assert settings.get("mixed_precision", "no") in members(release, words, "PrecisionType")
    legal = {
        "deepspeed_multinode_launcher": constants["DEEPSPEED_MULTINODE_LAUNCHERS"],
        "fsdp_auto_wrap_policy": constants["FSDP_AUTO_WRAP_POLICY"],
        "fsdp_backward_prefetch": constants["FSDP_BACKWARD_PREFETCH"],
        "fsdp_state_dict_type": constants["FSDP_STATE_DICT_TYPE"],
        "fsdp_reshard_after_forward": [*constants["FSDP_SHARDING_STRATEGY"], True],
        "zero_stage": [0, 1, 2, 3],
        "offload_optimizer_device": ["none", "cpu", "nvme"],  # commands/config/cluster.py, deepspeed_devices
        "offload_param_device": ["none", "cpu", "nvme"],
    }
    flags = {option for action in accelerate(packages)._actions for option in action.option_strings}
    plugin = settings.get("deepspeed_config", {}) | settings.get("fsdp_config", {})
    for name, value in plugin.items():
        assert f"--{name}" in flags, f"{release.name}: no flag --{name} for that key"
        if name in legal:
            assert value in legal[name], f"{name}: {value!r}"
        elif name != "deepspeed_config_file":
            text = str(value).lower() if isinstance(value, bool) else str(value)
            accelerate(packages).parse_known_args([f"--{name}", text])
    assert '["none", "cpu", "nvme"]' in release.text("accelerate/commands/config/cluster.py")


def check_deepspeed(packages: Packages, settings: dict[str, Any]) -> None:
    """A DeepSpeed file: every key one that DeepSpeed reads."""
    constants = {
        node.value.value
        for path in ("deepspeed/runtime/constants.py", "deepspeed/runtime/precision_config.py")
        for node in ast.walk(ast.parse(packages.deepspeed(path)))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    zero = ast.parse(packages.deepspeed("deepspeed/runtime/zero/config.py"))
    offload = ast.parse(packages.deepspeed("deepspeed/runtime/zero/offload_config.py"))
    for name, value in settings.items():
        if name == "zero_optimization":
            known = named(zero)
            for key, inner in value.items():
                assert key in known, f"DeepSpeed: no zero_optimization.{key}"
                if isinstance(inner, dict):
                    assert set(inner) <= named(offload)
            assert value["stage"] in (1, 2, 3)
            continue
        assert name in constants, f"DeepSpeed: no key {name}"
        for key in value if isinstance(value, dict) else ():
            assert key in constants or key == "enabled", f"DeepSpeed: no key {name}.{key}"
    assert settings["data_types"]["grad_accum_dtype"] in grad_dtypes(packages)


def named(tree: ast.Module) -> set[str]:
    """Fields of the models in a module, and their aliases."""
    found = {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "alias"]
    return found | {node.value.value for node in calls if isinstance(node.value, ast.Constant)}


@functools.cache
def grad_dtypes(packages: Packages) -> set[str]:
    """The words for `data_types.grad_accum_dtype`: every name of a type in `DtypeEnum`."""
    [found] = [
        node
        for node in ast.walk(ast.parse(packages.deepspeed("deepspeed/runtime/config.py")))
        if isinstance(node, ast.ClassDef) and node.name == "DtypeEnum"
    ]
    return {node.value for node in ast.walk(found) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
