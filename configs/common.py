"""The contenders of the comparisons on real data, and what is the same for all of them.

Every grid has six pairs of learning rate and damping, by two schedules, by two penalties: 24 settings for each method.
The low-rank bounds have a diagonal D that dwarfs any damping, and spend all six on the learning rate, as methods of
first order do. Epochs are what a method's seconds are enough for, about, and 50 at most: schedules have run their
course when the budget ends.
"""

from experiments.experiment import Contender, Experiment
from experiments.methods import Construction, Method

__all__ = ["adult", "images", "small_batches"]

# Examples whose curvature a step has, beside those of its batch: enough for 7,850 parameters, and for small batches.
WINDOW, WINDOW_OF_SMALL = 4000, 1000


def adult(data_set: str) -> Experiment:
    """The comparison on Adult: few parameters, so that a low-rank bound has little to save."""
    usual = {"epochs": 50, "chunk": 8}
    return _experiment(
        data_set,
        1000,
        Contender("SGD", Method("sgd"), (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), **usual),
        Contender("SPFB", Method("spfb"), (0.5, 1.0, 2.0), dampings=(0.0, 1e-2), **usual),
        *(_paper(rank, (0.3, 1.0, 3.0, 10.0, 30.0, 100.0), epochs=20, chunk=4) for rank in (1, 5, 10)),
        _paper(100, (0.3, 1.0, 3.0, 10.0, 30.0, 100.0), epochs=4, chunk=4),
        Contender("SPFB, window", Method("spfb", window=WINDOW), (0.5, 1.0, 2.0), dampings=(0.0, 1e-2), **usual),
        _tight(10, (0.1, 0.25, 0.5, 1.0, 2.0, 4.0), **usual),
        _tight(100, (0.1, 0.25, 0.5, 1.0, 2.0, 4.0), epochs=10, chunk=8),
        Contender("KSPFB", Method("kspfb"), (2.0, 4.0, 8.0), dampings=(1.0, 2.0), **usual),
        Contender("momentum SGD", Method("momentum"), (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), **usual),
        Contender("Adam", Method("adam"), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), **usual),
    )


def images(data_set: str) -> Experiment:
    """The comparison on 60,000 images."""
    usual = {"epochs": 50, "chunk": 10}
    paper_rates = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
    return _experiment(
        data_set,
        1000,
        Contender("SGD", Method("sgd"), (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), **usual),
        Contender("SPFB", Method("spfb"), (1.0, 2.0, 3.0), dampings=(0.0, 1e-2), epochs=10, chunk=6),
        *(_paper(rank, paper_rates, epochs=0.3, chunk=1) for rank in (1, 5, 10)),
        # One step takes longer than all of its tuning may.
        _paper(100, paper_rates, epochs=0.3, chunk=1, tuned_as="LSPFB k=10, paper"),
        Contender(
            "SPFB, window", Method("spfb", window=WINDOW), (1.0, 2.0, 3.0), dampings=(0.0, 1e-2), epochs=2, chunk=5
        ),
        _tight(10, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), epochs=5, chunk=4),
        _tight(100, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0), epochs=0.5, chunk=1),
        Contender("KSPFB", Method("kspfb"), (1.0, 2.0, 4.0), dampings=(1.0, 2.0), epochs=20, chunk=10),
        Contender("momentum SGD", Method("momentum"), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), **usual),
        Contender("Adam", Method("adam"), (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), **usual),
    )


def small_batches(data_set: str, batch: int) -> Experiment:
    """Batches of 10 or 100: where the curvature of the same batch biases SPFB, and a window does not."""
    few = data_set.startswith("adult")
    spfb = {"epochs": 20 if few else 4, "chunk": 500 // batch}
    return _experiment(
        data_set,
        batch,
        Contender(
            "SGD", Method("sgd"), (0.01, 0.03, 0.1, 0.3, 1.0, 3.0) if few else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
            epochs=20, chunk=1000 // batch,
        ),
        Contender("SPFB, paper", Method("spfb"), (0.03, 0.1, 0.3, 1.0, 2.0, 3.0), **spfb),
        Contender("SPFB, damped", Method("spfb"), (0.1, 0.3, 1.0), dampings=(1e-2, 1e-1), **spfb),
        Contender(
            "SPFB, window", Method("spfb", window=WINDOW_OF_SMALL), (0.1, 0.3, 1.0), dampings=(0.0, 1e-2),
            epochs=5 if few else 0.15 if batch == 10 else 1.2, chunk=250 // batch,
        ),
    )  # fmt: skip


def _experiment(data_set: str, batch: int, *contenders: Contender) -> Experiment:
    return Experiment(
        name=data_set if batch == 1000 else f"{data_set}_batch_{batch}",
        data_set=data_set,
        batch=batch,
        contenders=contenders,
        schedules=("inverse", "cosine"),
        l2=(1e-4, 1e-3),
        tuning_share=1 / 6,
        tuning_seconds=36.0,
        seconds=45.0,
        seeds=5,
    )


def _paper(rank: int, rates: tuple[float, ...], **options) -> Contender:
    return Contender(f"LSPFB k={rank}, paper", _low_rank(rank, "paper"), rates, **options)


def _tight(rank: int, rates: tuple[float, ...], **options) -> Contender:
    return Contender(f"LSPFB k={rank}, tight", _low_rank(rank, "frequent_directions"), rates, **options)


def _low_rank(rank: int, construction: Construction) -> Method:
    return Method("lspfb", rank=rank, construction=construction)
