"""The command line: `python -m ntl_lightning fit|validate|test|predict|inspect-tokenizer`."""

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ntl_lightning.callbacks import AnswerPlots, MetricsReport, MonitorCheck, PredictionFile
from ntl_lightning.callbacks.files import keep_previous, run_folder
from ntl_lightning.data import NumberDataModule
from ntl_lightning.module import NumberAwareLM
from ntl_lightning.numbers import NumberKind, PretrainedTokenizer
from ntl_lightning.numbers.audit import audit_tokenizer, render_audit

__all__ = ["NumberCLI", "RunConfig", "inspect_tokenizer", "main"]


class RunConfig(SaveConfigCallback):
    """Keeps the configuration of every command in the run folder, as `config_<command>.yaml`.

    A command that runs again in the same folder renames the earlier file rather than losing it.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file before anything runs."""
        if not self.already_saved and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            command = trainer.state.fn.value if trainer.state.fn else stage
            self.config_filename = f"config_{command}.yaml"
            folder = run_folder(trainer)
            if trainer.is_global_zero:
                keep_previous(folder / self.config_filename)
            super().setup(trainer, pl_module, stage)


class NumberCLI(LightningCLI):
    """LightningCLI for `NumberAwareLM` and `NumberDataModule`.

    What model and data must agree on is set in the model and linked to the data. A configuration
    that contradicts the checkpoint it is given is refused (`fit`) or wins and is named (all else).
    """

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            NumberAwareLM,
            NumberDataModule,
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"default_root_dir": "runs"},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={
                "prog": "python -m ntl_lightning",
                "description": "Train language models that understand numbers.",
                "epilog": "`inspect-tokenizer` shows how a tokenizer cuts numbers and which of "
                "its tokens the number losses see.",
            },
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what model and data share; add the callbacks that always run."""
        for name in ("tokenizer", "number_tokens", "largest_number_token"):
            parser.link_arguments(f"model.{name}", f"data.{name}")
        parser.link_arguments("model.architecture", "data.architecture", apply_on="instantiate")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.filename": "last",
                "checkpoint.enable_version_counter": False,
                "checkpoint.save_on_exception": True,
            }
        )
        parser.add_lightning_class_args(MetricsReport, "report")
        parser.add_lightning_class_args(AnswerPlots, "plots")
        parser.add_lightning_class_args(PredictionFile, "predictions")
        parser.add_lightning_class_args(MonitorCheck, "monitor_check")
        self._command_parsers = [*getattr(self, "_command_parsers", []), parser]

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse; with a checkpoint, its model settings are the defaults.

        LightningCLI itself would let the checkpoint override the command without a word.
        """
        super().parse_arguments(parser, args)
        command = self.config.subcommand
        config = self.config[command]
        self._asked: Namespace | None = None
        if not config.get("ckpt_path"):
            return
        path = _find_checkpoint(config.ckpt_path, Path(config.trainer.default_root_dir))
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        settings = _leaves(saved.get("hyper_parameters", {}))
        for command_parser in self._command_parsers:
            command_parser.set_defaults(settings)
        super().parse_arguments(parser, args)
        self.config[command].ckpt_path = path
        self._asked = self.config.clone()
        self._contradictions = {
            key: (asked, theirs)
            for key, theirs in settings.items()
            if (asked := _as_plain(self.config[command][key])) != theirs
        }

    def before_instantiate_classes(self) -> None:
        """Settle what runs where the checkpoint and the command disagree."""
        command = self.config.subcommand
        if self._asked is not None:
            self.config = self._asked
            listed = "; ".join(
                f"{key} is {_shown(theirs)} in the checkpoint, {_shown(asked)} was asked for"
                for key, (asked, theirs) in self._contradictions.items()
            )
            if listed and command == "fit":
                raise ValueError(
                    f"--ckpt_path {self.config.fit.ckpt_path} goes on with the run it was saved "
                    f"from, but {listed}. Leave these settings as they were, or start a new run "
                    "without --ckpt_path"
                )
            if listed:
                rank_zero_info(f"What was asked for is used: {listed}.")
        elif command != "fit":
            rank_zero_warn(
                f"{command} without --ckpt_path: the weights that model.backbone starts from are "
                "used, nothing trained here. --ckpt_path last takes the newest checkpoint below "
                "trainer.default_root_dir."
            )
        config = self.config[command]
        if command in ("validate", "test"):
            config.verbose = False  # MetricsReport prints the table.
        if command == "predict":
            config.return_predictions = False  # PredictionFile writes them.


def _leaves(settings: dict[str, Any]) -> dict[str, Any]:
    """Model settings of a checkpoint by their configuration keys."""
    leaves: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and "class_path" not in value:
            leaves |= {f"model.{name}.{key}": item for key, item in value.items()}
        elif not name.startswith("_"):
            leaves[f"model.{name}"] = value
    return leaves


def _as_plain(value: object) -> object:
    if isinstance(value, Namespace):
        return {key: _as_plain(item) for key, item in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return value


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


def _find_checkpoint(asked: str, root: Path) -> str:
    """The path of a checkpoint; `last` is the newest `last.ckpt` below the root folder."""
    if asked == "last":
        found = sorted(root.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ValueError(
                f"--ckpt_path last: there is no last.ckpt below {root.resolve()}; run fit first, "
                "or set trainer.default_root_dir to the folder of its runs"
            )
        rank_zero_info(f"--ckpt_path last is {found[-1]}.")
        return str(found[-1])
    if not Path(asked).exists():
        raise ValueError(f"--ckpt_path {asked}: no such checkpoint ({Path(asked).resolve()})")
    return asked


def inspect_tokenizer(args: Sequence[str]) -> None:
    """The subcommand `inspect-tokenizer`: which tokens are numbers, and how numbers are cut."""
    parser = ArgumentParser(
        prog="python -m ntl_lightning inspect-tokenizer",
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
    # lightning 2.6 asks torch for a name that torch 2.13 calls deprecated; users cannot mend it.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    try:
        if given[:1] == ["inspect-tokenizer"]:
            inspect_tokenizer(given[1:])
        else:
            NumberCLI(None if args is None else given)
    except (ValueError, TypeError, OSError) as error:
        if os.environ.get("NTL_DEBUG"):
            raise
        print(f"error: {error}\n(set NTL_DEBUG=1 for the traceback)", file=sys.stderr)
        sys.exit(1)
