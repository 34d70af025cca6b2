"""A trial that is interrupted before it has an owner is not left running."""

from typing import Any

import optuna
import pytest

from lightning_gc.tuning import failure_detector


def test_a_trial_without_an_owner_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    study = optuna.create_study()
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "set_user_attr", interrupted)
        with pytest.raises(KeyboardInterrupt):
            failure_detector.begin_trial(study, 1)
    assert failure_detector.running(study) == []
    assert failure_detector.begin_trial(study, 1) is not None
