"""`docs/losses.md` lists every term, and its configuration runs."""

import re
from inspect import isabstract

import ntl_lightning.losses as losses
from ntl_lightning.cli import main
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")


def test_every_term_has_its_row_with_what_it_is_averaged_over():
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)\|$", TEXT, re.MULTILINE))
    terms = {
        name: kind
        for name in losses.__all__
        if isinstance(kind := getattr(losses, name), type)
        and issubclass(kind, losses.LossTerm)
        and not isabstract(kind)
    }
    assert rows.keys() == terms.keys()
    for name, row in rows.items():
        averaged_over = row.split("|")[1].strip().replace(" ", "_")
        assert averaged_over == terms[name].__dataclass_fields__["averaged_over"].default, name


def test_the_configuration_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "page.yaml").write_text(block, encoding="utf-8")
    main(["fit", "--config", "page.yaml", "--trainer.logger=false"])
    assert (tmp_path / "checkpoints").exists() or list(tmp_path.rglob("last.ckpt"))
