"""Fixtures: a workspace for each test file, and its uninterrupted reference run."""

import pytest

from .runs import TrainingRun, Workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def reference(workspace) -> TrainingRun:
    """Return the reference run, which is not started yet."""
    return workspace.new_run("reference")
