"""A trial that is interrupted before it has an owner is not left running."""

from typing import Any

import optuna
import pytest

from lightning_gc.tuning import trial_leases


def test_a_trial_without_an_owner_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    study = optuna.create_study()
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "set_user_attr", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trial_leases.begin_trial(study, 1)
    assert trial_leases.running(study) == []
    assert trial_leases.begin_trial(study, 1) is not None
