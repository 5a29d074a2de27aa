"""The command line: `python -m ntl_lightning fit|validate|test|predict|inspect-tokenizer`."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

_MISSING = object()


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

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse; remember what was asked for rather than left at its default."""
        super().parse_arguments(parser, args)
        self._asked = parser.parse_args(args, defaults=False)
        config = self.config[self.config.subcommand]
        if config.get("ckpt_path"):
            config.ckpt_path = _find_checkpoint(
                config.ckpt_path, Path(config.trainer.default_root_dir)
            )

    def before_instantiate_classes(self) -> None:
        """Settle what runs where the checkpoint and the command disagree."""
        command = self.config.subcommand
        config = self.config[command]
        if command in ("validate", "test"):
            config.verbose = False  # MetricsReport prints the table.
        if command == "predict":
            config.return_predictions = False  # PredictionFile writes them.
        if not config.get("ckpt_path"):
            if command != "fit":
                rank_zero_warn(
                    f"{command} without --ckpt_path: the weights that model.backbone starts from "
                    "are used, nothing trained here. --ckpt_path last takes the newest checkpoint "
                    "below trainer.default_root_dir."
                )
            return
        contradictions = _contradictions(self._asked[command], config)
        if contradictions and command == "fit":
            listed = "; ".join(
                f"{key} is {theirs} in the checkpoint, {asked} was asked for"
                for key, (asked, theirs) in contradictions.items()
            )
            raise ValueError(
                f"--ckpt_path {config.ckpt_path} goes on with the run it was saved from, but "
                f"{listed}. Leave these settings as they were, or start a new run without "
                "--ckpt_path"
            )
        for key, (asked, theirs) in contradictions.items():
            config[key] = self._asked[command][key]
            rank_zero_info(f"{key}: {asked} as asked for, {theirs} in the checkpoint.")
        if contradictions:
            # Linked settings follow the model's.
            for name in ("tokenizer", "number_tokens", "largest_number_token"):
                config.data[name] = config.model[name]


def _flat(value: object, prefix: str) -> dict[str, object]:
    if isinstance(value, Namespace):
        return {
            name: item
            for key, inner in vars(value).items()
            for name, item in _flat(inner, f"{prefix}.{key}").items()
        }
    return {prefix: value}


def _as_plain(value: object) -> object:
    if isinstance(value, Namespace):
        return {key: _as_plain(item) for key, item in vars(value).items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return value


def _contradictions(asked: Namespace, config: Namespace) -> dict[str, tuple[object, object]]:
    """Model settings that were asked for and differ from the checkpoint's, by key."""
    different: dict[str, tuple[object, object]] = {}
    for key, value in _flat(asked.get("model", Namespace()), "model").items():
        theirs = config.get(key, _MISSING)
        if _as_plain(theirs) != _as_plain(value):
            different[key] = (_as_plain(value), "absent" if theirs is _MISSING else theirs)
    return different


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
    """Run a command; a mistake of the user ends with one line, not with a traceback."""
    args = list(sys.argv[1:] if args is None else args)
    try:
        if args and args[0] == "inspect-tokenizer":
            inspect_tokenizer(args[1:])
        else:
            NumberCLI(args)
    except (ValueError, TypeError, OSError) as error:
        if os.environ.get("NTL_DEBUG"):
            raise
        print(f"error: {error}\n(set NTL_DEBUG=1 for the traceback)", file=sys.stderr)
        sys.exit(1)
