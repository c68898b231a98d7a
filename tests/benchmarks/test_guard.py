"""No order of magnitude was lost; in a process of its own, with programs compiled as users have them."""

from experiments.benchmarks import guard
from tests import processes


def test_ours_costs_no_more_than_several_times_what_was_measured():
    done = processes.run("-m", "experiments.benchmarks.guard", JAX_ENABLE_X64="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(guard.LIMITS)


def test_what_exceeds_its_limit_fails_after_all_tries(monkeypatch, capsys):
    calls = []

    def slow(budget):
        calls.append(budget)
        return {name: 0.5 * limit if name != "KSPFB" else 10 * limit for name, limit in guard.LIMITS.items()}

    monkeypatch.setattr(guard, "measured", slow)
    monkeypatch.setattr("sys.argv", ["guard"])
    assert guard.main() == 1
    assert len(calls) == guard.TRIES
    assert "KSPFB: 100.0 (limit 10)  EXCEEDED" in capsys.readouterr().out


def test_one_slow_measurement_does_not_fail(monkeypatch):
    factors = iter([10.0, 0.5])
    monkeypatch.setattr(
        guard, "measured", lambda budget: dict.fromkeys(guard.LIMITS, 5.0) | {"KSPFB": 10.0 * next(factors)}
    )
    monkeypatch.setattr("sys.argv", ["guard"])
    assert guard.main() == 0
