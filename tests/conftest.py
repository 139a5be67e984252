"""Fixtures that tests of several files share."""

from __future__ import annotations

import pytest

from run_samples import Trained, train_sample


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One whole run of 2 stages x 2 replicas, which many tests read and none changes."""
    return train_sample(tmp_path_factory.mktemp("trained"))
