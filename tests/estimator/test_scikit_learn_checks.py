"""scikit-learn's own checks of an estimator: every one of them is meant to pass."""

import functools

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from qbound.estimator import LogisticRegression

# As a list: parametrize_with_checks of old versions gives pytest a generator, which new ones of pytest refuse.
CHECKS = [check for _, check in estimator_checks_generator(LogisticRegression())]


def name_of(check):
    function = check.func if isinstance(check, functools.partial) else check
    options = getattr(check, "keywords", {})
    return "-".join([function.__name__, *(f"{name}={value}" for name, value in options.items())])


def test_there_are_checks():
    assert len(CHECKS) > 40


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_check_of_scikit_learn_passes(check):
    check(LogisticRegression())
