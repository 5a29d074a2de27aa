"""The command line: `python -m ntl_lightning fit|validate|test|predict`, and two to look first.

`inspect-tokenizer` shows which tokens are numbers, `inspect-data` what a run is going to see.
"""

import json
import os
import pickle
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from glob import escape, glob
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
import yaml  # type: ignore[import-untyped, unused-ignore]
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from rich.console import Console

from ntl_lightning.callbacks import (
    AnswerPlots,
    LastCheckpoint,
    MetricsReport,
    MonitorCheck,
    PredictionFile,
)
from ntl_lightning.callbacks.files import is_trial_run, keep_previous, run_folder
from ntl_lightning.data import NumberDataModule
from ntl_lightning.inspection import inspect_data, render_inspection
from ntl_lightning.module import NumberAwareLM
from ntl_lightning.numbers import NumberKind, PretrainedTokenizer
from ntl_lightning.numbers.audit import audit_tokenizer, render_audit
from ntl_lightning.paths import expand_path

__all__ = ["NumberCLI", "RunConfig", "inspect_tokenizer", "main"]

_INSPECT = "inspect-tokenizer"
_INSPECT_DATA = "inspect-data"
_APPEND = re.compile(r"--([\w.]+)\+(?:=|$)")
_LINKED = ("tokenizer", "number_tokens", "largest_number_token")


class RunConfig(SaveConfigCallback):
    """Keeps the configuration of every command in the run folder, as `config_<command>.yaml`.

    A command that runs again in the same folder renames the earlier file rather than losing it.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the run folder, on all ranks; then rank 0 saves."""
        if not is_trial_run(trainer):
            self._folder = run_folder(trainer)
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file before anything runs."""
        command = trainer.state.fn.value if trainer.state.fn else stage
        path = self._folder / f"config_{command}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_previous(path)
        self.parser.save(self.config, str(path), skip_none=False, multifile=False)


class NumberCLI(LightningCLI):
    """LightningCLI for `NumberAwareLM` and `NumberDataModule`.

    What model and data must agree on is set in the model and linked to the data. A configuration
    that contradicts the checkpoint it is given is refused (`fit`) or wins and is named (all else).

    Args:
        args: The command and its options; None takes those of the command line.

    Raises:
        ArgumentError: If an option is unknown or its value has the wrong type.
        ValueError: If an option's value makes no sense, or the checkpoint does not fit.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        self._command_parsers: list[LightningArgumentParser] = []
        self._checkpoint: str | None = None
        self._contradictions: list[str] = []
        try:
            super().__init__(
                NumberAwareLM,
                NumberDataModule,
                save_config_callback=RunConfig,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults={"default_root_dir": "runs"},
                seed_everything_default=0,
                auto_configure_optimizers=False,
                parser_kwargs={
                    "prog": "python -m ntl_lightning",
                    "description": "Train language models that understand numbers.",
                    "epilog": f"`{_INSPECT}` shows how a tokenizer cuts numbers and which of its "
                    f"tokens the number losses see: python -m ntl_lightning {_INSPECT} --help. "
                    f"`{_INSPECT_DATA}` takes what fit takes and shows the data instead.",
                    "exit_on_error": False,  # main reports errors, in one line.
                },
                args=None if args is None else list(args),
            )
        except RuntimeError as error:
            if self._contradictions and "loading state_dict" in str(error):
                raise ValueError(
                    f"the weights of --ckpt_path {self._checkpoint} do not fit the model: "
                    f"{'; '.join(self._contradictions)}"
                ) from error
            raise

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what model and data share; add the callbacks that always run."""
        _write_out_lists(parser)
        for name in _LINKED:
            parser.link_arguments(f"model.{name}", f"data.{name}")
        parser.link_arguments("model.architecture", "data.architecture", apply_on="instantiate")
        parser.add_lightning_class_args(LastCheckpoint, "checkpoint")
        parser.add_lightning_class_args(MetricsReport, "report")
        parser.add_lightning_class_args(AnswerPlots, "plots")
        parser.add_lightning_class_args(PredictionFile, "predictions")
        parser.add_lightning_class_args(MonitorCheck, "monitor_check")
        self._command_parsers.append(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse; with a checkpoint, its model settings are the defaults.

        LightningCLI itself would let the checkpoint override the command without a word. And
        jsonargparse alone would hand arguments of a default class on to the class asked for:
        Adafactor would get the weight decay that AdamW has by default.

        Raises:
            ArgumentError: If an option is unknown or its value has the wrong type.
            ValueError: If there is no such checkpoint, its settings cannot be read, or a
                configuration file sets a key twice, sets in `data` what is linked from `model`,
                or leaves a section to another file.
        """
        given = sys.argv[1:] if args is None else list(args)
        # Which options exist depends on the classes in the checkpoint: look for that first.
        with suppress(ArgumentError):
            early = parser.parse_args(_without(("--model", "--print_config"), given))
            self._read_checkpoint(early[early.subcommand])
        early = parser.parse_args(_without(("--print_config",), given))
        command = early.subcommand
        if self._checkpoint is None and early[command].ckpt_path:
            # The model was complete only with its options.
            self._read_checkpoint(early[command])
            early = parser.parse_args(_without(("--print_config",), given))
        saved = self._command_parsers[0].get_defaults()
        _refuse_section_files(early[command])
        for name, value in vars(early[command].model).items():
            class_path = value.get("class_path") if isinstance(value, Namespace) else None
            if class_path is not None and not _same_class(class_path, saved.model[name].class_path):
                self._set_defaults({f"model.{name}": {"class_path": class_path}})
        appended = {match[1] for arg in given if (match := _APPEND.match(arg))}
        for file in [*(early.get("config") or []), *(early[command].get("config") or [])]:
            content = _read_yaml(file.get_content(), str(file)) if file is not None else None
            if isinstance(content, dict):
                content = content.get(command, content)
                _refuse_linked_keys(content, str(file))
                appended.update(_appended_keys(content))
        for key in appended:
            if isinstance(saved.get(key), tuple):
                self._set_defaults({key: list(saved[key])})
        super().parse_arguments(parser, args)
        config = self.config[command]
        if self._checkpoint is not None:
            config.ckpt_path = None  # So that LightningCLI leaves the model settings alone.
            pair = [_dumped(parser, self.config, model) for model in (saved.model, config.model)]
            self._contradictions = list(_differences("model", *pair))

    def _set_defaults(self, defaults: dict[str, Any]) -> None:
        for parser in self._command_parsers:
            parser.set_defaults(defaults)

    def _read_checkpoint(self, config: Namespace) -> None:
        if not config.ckpt_path:
            return
        self._checkpoint = _find_checkpoint(config.ckpt_path, _run_folders(config))
        try:
            self._set_defaults(_saved_settings(self._checkpoint))
        except KeyError as error:
            raise ValueError(
                f"--ckpt_path {self._checkpoint} holds model settings that this version does not "
                f"know: {error}"
            ) from error

    def before_instantiate_classes(self) -> None:
        """Settle what runs where the checkpoint and the command disagree, and what is kept.

        Raises:
            ValueError: If `fit` is to go on with a checkpoint, but with other model settings.
        """
        command = self.config.subcommand
        config = self.config[command]
        config.ckpt_path = self._checkpoint
        listed = "; ".join(self._contradictions)
        if listed and command == "fit":
            raise ValueError(
                f"--ckpt_path {self._checkpoint} goes on with the run it was saved from, but "
                f"{listed}. Leave these settings as they were, or start a new run without "
                "--ckpt_path"
            )
        if listed:
            rank_zero_info(f"What was asked for is used: {listed}.")
        if self._checkpoint is None and command != "fit":
            rank_zero_warn(
                f"{command} without --ckpt_path: the weights that model.backbone starts from are "
                "used, nothing trained here. --ckpt_path last takes the newest checkpoint of the "
                "runs in trainer.default_root_dir."
            )
        if command in ("validate", "test"):
            config.verbose = False  # MetricsReport prints the table.
        if command == "predict":
            config.return_predictions = False  # PredictionFile writes them.


class _DataCLI(NumberCLI):
    """Takes the configuration of a fit, and shows its data in the place of training."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The one whose options there are."""
        return {"fit": LightningCLI.subcommands()["fit"]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the inspection."""
        super().add_arguments_to_parser(parser)
        parser.add_argument("--examples", type=int, default=5, help="how many examples to show")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """None that needs the devices of the run, or leaves anything behind."""
        return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)

    def fit(self, model: LightningModule, datamodule: NumberDataModule, **kwargs: Any) -> None:
        """Print the inspection."""
        options = self.config.fit
        inspection = inspect_data(datamodule, options.examples)
        if options.json:
            print(json.dumps(inspection, ensure_ascii=False))
        else:
            console = Console()
            # What is no terminal has no width of its own.
            Console(width=None if console.is_terminal else 100).print(render_inspection(inspection))


def _write_out_lists(parser: LightningArgumentParser) -> None:
    """Defaults that are lists of objects become class paths and arguments.

    jsonargparse does so for single objects, but dumps those in a list as a text that it cannot
    read back, into configuration files and checkpoints.
    """
    for key, default in parser.get_defaults().items():
        if isinstance(default, list | tuple) and any(is_dataclass(item) for item in default):
            singles = ArgumentParser()
            for index, item in enumerate(default):
                singles.add_argument(f"--item{index}", type=type(item), default=item)
            # As a tuple, it lends no arguments to the items of a list that is asked for; where
            # that list is to be added to it, `parse_arguments` makes it a list.
            parser.set_defaults({key: tuple(singles.get_defaults().as_dict().values())})


def _same_class(one: str, other: str) -> bool:
    """Whether two paths lead to one class, such as that of a package and that of its file."""
    return locate(one) is locate(other)


def _refuse_section_files(config: Namespace) -> None:
    """Sections in files of their own, such as `--data data.yaml`: nothing looks into these."""
    for name, section in vars(config).items():
        if isinstance(section, Namespace) and "__path__" in section:
            raise ValueError(
                f"{name} is the file {section['__path__']}; write its content below `{name}:` in "
                "a file for --config (several are merged: --config a.yaml --config b.yaml)"
            )


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """Refuses a key that a mapping holds twice, of which YAML silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                line = key.start_mark.line + 1
                raise ValueError(f"{self.name}, line {line}: {key.value} is set a second time")
            seen.add(str(key.value))
        return node


def _read_yaml(text: str, file: str) -> object:
    loader = _YamlLoader(text)
    loader.name = file
    return loader.get_single_data()


def _refuse_linked_keys(content: dict[str, Any], file: str) -> None:
    """The linked keys that jsonargparse refuses among the options, but overlooks in files."""
    data = content.get("data")
    for name in (*_LINKED, "architecture"):
        if isinstance(data, dict) and name in data:
            source = "is known from model.backbone; leave it out"
            if name in _LINKED:
                source = f"is set through model.{name}; write it there"
            raise ValueError(f"{file}: data.{name} {source}")


def _appended_keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The lists that a file adds to rather than replaces: `loss_terms+: [...]`."""
    for key, value in content.items():
        if str(key).endswith("+"):
            yield f"{prefix}{key}"[:-1]
        elif isinstance(value, dict):
            yield from _appended_keys(value, f"{prefix}{key}.")


def _without(options: tuple[str, ...], args: Sequence[str]) -> list[str]:
    """The arguments but for options that begin like this, and their values."""
    kept, is_kept = [], True
    for arg in args:
        if arg.startswith(("--", "-c")):
            is_kept = not arg.startswith(options)
        if is_kept:
            kept.append(arg)
    return kept


def _run_folders(config: Namespace) -> list[str]:
    """Patterns of the folders in which fits with these settings keep their checkpoints.

    No more than that: below a folder there may be those of other experiments.
    """
    root = escape(os.path.abspath(Path(config.trainer.default_root_dir or ".").expanduser()))
    folders = [f"{root}/checkpoints", f"{root}/lightning_logs/*/checkpoints"]
    loggers = config.trainer.logger
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, Namespace) and (save_dir := logger.get("init_args.save_dir")):
            save_dir = os.path.abspath(Path(save_dir).expanduser())
            # Loggers that know projects name folders after these.
            name = "*"
            if "init_args.name" in logger and "init_args.project" not in logger:
                name = escape(logger["init_args.name"] or "")
            folders.append(os.path.join(escape(save_dir), name, "*/checkpoints"))
    return folders


def _find_checkpoint(asked: str, folders: Sequence[str]) -> str:
    """The path of a checkpoint; `last` is the newest of that name in the folders (patterns)."""
    if asked == "last":
        found = {Path(path) for folder in folders for path in glob(f"{folder}/last*.ckpt")}
        if not found:
            places = ", ".join(folders)
            raise ValueError(
                f"--ckpt_path last: there is no last.ckpt in {places}; run fit first, or set "
                "trainer.default_root_dir to the folder of its runs"
            )
        newest = max(found, key=lambda path: path.stat().st_mtime)
        rank_zero_info(f"--ckpt_path last is {newest}.")
        return str(newest)
    path = Path(expand_path(asked, "--ckpt_path"))
    if not path.exists():
        raise ValueError(f"--ckpt_path {asked}: there is no checkpoint {path.resolve()}")
    return str(path)


def _saved_settings(path: str) -> dict[str, object]:
    """The model settings of a checkpoint (of sharded ones: a folder) by their keys."""
    file = Path(path, "meta.pt") if Path(path).is_dir() else Path(path)
    try:
        saved = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
        settings = saved["hyper_parameters"]
    except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"--ckpt_path {path}: no checkpoint of NumberAwareLM could be read from {file}: {error}"
        ) from error
    return {
        f"model.{key}": tuple(value) if isinstance(value, list) else value
        for key, value in settings.items()
        if not key.startswith("_")
    }


def _dumped(parser: LightningArgumentParser, config: Namespace, model: Namespace) -> object:
    """Model settings as plain values, the way configuration files and checkpoints hold them."""
    config = config.clone()
    config[config.subcommand].model = model
    dumped = yaml.safe_load(parser.dump(config, skip_none=False, format="yaml"))
    return dumped[config.subcommand]["model"]


def _differences(key: str, saved: object, asked: object) -> Iterator[str]:
    """The innermost settings that differ, with both values."""
    if isinstance(saved, dict) and isinstance(asked, dict):
        names = [name for name in {**saved, **asked} if name != "class_path"]
        if not _same_class(saved.get("class_path", ""), asked.get("class_path", "")):
            names = ["class_path"]  # Another class has other arguments.
        for name in names:
            without: object = {} if name == "init_args" else None
            yield from _differences(
                f"{key}.{name}", saved.get(name, without), asked.get(name, without)
            )
    elif isinstance(saved, list) and isinstance(asked, list) and len(saved) == len(asked):
        for index, pair in enumerate(zip(saved, asked, strict=True)):
            yield from _differences(f"{key}[{index}]", *pair)
    elif saved != asked:
        shown = json.dumps(saved), json.dumps(asked)
        yield f"{key} is {shown[0]} in the checkpoint, {shown[1]} was asked for"


def inspect_tokenizer(args: Sequence[str]) -> None:
    """The subcommand `inspect-tokenizer`: which tokens are numbers, and how numbers are cut."""
    parser = ArgumentParser(
        prog=f"python -m ntl_lightning {_INSPECT}",
        exit_on_error=False,
        description="Show how a tokenizer cuts numbers and which tokens the number losses see.",
    )
    parser.add_argument("--tokenizer", type=str, required=True, help="hub name or local folder")
    parser.add_argument(
        "--digit_level", type=bool, default=False, help="split every number into single digits"
    )
    parser.add_argument(
        "--kind", type=NumberKind, default="digits", help="which tokens count as numbers"
    )
    parser.add_argument(
        "--largest", type=float | None, default=999, help="largest value of a number token"
    )
    parser.add_argument(
        "--width", type=int | None, default=None, help="width of the model's logits"
    )
    parser.add_argument(
        "--text", type=str | None, default=None, help="text file whose numbers are looked at"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    tokenizer = PretrainedTokenizer(options.tokenizer, digit_level=options.digit_level).load()
    audit = audit_tokenizer(
        tokenizer,
        kind=options.kind,
        largest=options.largest,
        width=options.width,
        text=options.text,
    )
    print(json.dumps(audit, ensure_ascii=False) if options.json else render_audit(audit))


def main(args: Sequence[str] | None = None) -> None:
    """Run a command; a mistake of the user ends with one line, not with a traceback.

    Args:
        args: The command and its options; None takes those of the command line.
    """
    given = sys.argv[1:] if args is None else list(args)
    # The help shows what is written below each field; reading that takes seconds.
    wants_help = any(arg == "-h" or arg.partition("=")[0].endswith("help") for arg in given)
    set_parsing_settings(docstring_parse_attribute_docstrings=wants_help)
    # lightning 2.6 asks torch for a name that torch 2.13 calls deprecated; users cannot mend it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    try:
        if given[:1] == [_INSPECT]:
            inspect_tokenizer(given[1:])
        elif given[:1] == [_INSPECT_DATA]:
            # Lightning warns where arguments are given beside those of the command line.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter.*")
            _DataCLI(["fit", *given[1:]])
        else:
            _check_command(given)
            NumberCLI(None if args is None else given)
    except (ArgumentError, MisconfigurationException, ValueError, TypeError, OSError) as error:
        if os.environ.get("NTL_DEBUG"):
            raise
        print(f"error: {_in_one_line(error)}\n(set NTL_DEBUG=1 for the traceback)", file=sys.stderr)
        sys.exit(1)


def _check_command(given: Sequence[str]) -> None:
    commands = [*LightningCLI.subcommands(), _INSPECT, _INSPECT_DATA]
    if not given or (not given[0].startswith("-") and given[0] not in commands):
        found = f"{given[0]!r} is no command" if given else "there is no command"
        raise ValueError(f"{found}; choose one of {', '.join(commands)}")


def _in_one_line(error: Exception) -> str:
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    if any(line.startswith("- Problem with") for line in lines):
        # The other way to give a value, by the path of a file, was not meant.
        lines = [line for line in lines if not line.startswith("- Expected a path but")]
    if any("Expected a <class 'str'>" in line for line in lines):
        lines.append(
            "(YAML reads 123, 1e5, 2024-01-01 and no as other things: put them in quotes.)"
        )
    return " ".join(filter(None, lines))
