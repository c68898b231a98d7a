"""scikit-learn's own checks of an estimator: every one of them is meant to pass."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from qbound.estimator import LogisticRegression


@parametrize_with_checks([LogisticRegression()], expected_failed_checks=lambda estimator: {})
def test_check_of_scikit_learn_passes(estimator, check):
    check(estimator)
