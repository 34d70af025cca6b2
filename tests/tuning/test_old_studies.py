"""Studies that were made by earlier versions are read, or refused in a sentence."""

from pathlib import Path

import pytest

from lightning_gc.tuning.studies import RULES
from tests.support.tuning import compare


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.log"


def test_a_study_that_names_the_file_of_its_compressor_is_resumed(journal: Path) -> None:
    """As those did that were made before files moved: lightning_gc/compressors/topk.py."""
    study = compare(journal, "topk", trials=1)["topk"]
    assert study.user_attrs[RULES]["compressor"] == "lightning_gc.compressors.TopK"
    for stored in ("lightning_gc.compressors.topk.TopK", "lightning_gc.compressors.sparse.x.TopK"):
        study.set_user_attr(RULES, {**study.user_attrs[RULES], "compressor": stored})
        again = compare(journal, "topk", trials=len(study.trials) + 1)["topk"]
        assert len(again.trials) == len(study.trials)
    study.set_user_attr(RULES, {**study.user_attrs[RULES], "compressor": "mine.TopK"})
    with pytest.raises(ValueError, match=r"exists with compressor='mine\.TopK'"):
        compare(journal, "topk")
