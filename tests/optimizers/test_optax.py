"""What a user of optax expects of a transform."""

import functools
import inspect
import logging
import pickle
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from tests.optimizers import problems
from tests.optimizers.problems import flat

# Under which options every expectation has to hold.
VARIANTS = {
    "the paper": (qbound.spfb, {}),
    "window": (qbound.spfb, {"window": 30, "inputs_like": jax.ShapeDtypeStruct((4,), jnp.float32)}),
    "cg, warm, adaptive": (qbound.spfb, {"solver": "cg", "warm_start": True, "adaptive_damping": 0.1}),
    "low rank, carried": (qbound.lspfb, {"rank": 4, "decay": 0.8}),
    "kronecker": (qbound.kspfb, {"update_every": 4}),
    "layerwise": (qbound.layerwise_spfb, {"probe_examples": 5}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
STATIC = ("logits_fn", "max_steps", "window", "inputs_like", "inputs_axes", "precondition", "microbatch_size")
STATICS = {
    qbound.spfb: STATIC,
    qbound.lspfb: ("logits_fn", "rank", "inputs_axes", "block_size"),
    qbound.kspfb: (
        "logits_fn",
        "features_fn",
        "update_every",
        "input_rank",
        "label_every",
        "label_examples",
        "output_axis",
    ),  # fmt: skip
    qbound.layerwise_spfb: (
        "logits_fn",
        "weight_decay_mask",
        "probe_examples",
        "update_every",
        "solve_every",
        "longest_axis",
        "axes",
        "inputs_axes",
        "seed",
    ),
}
INFO = {
    qbound.spfb: qbound.SpfbInfo,
    qbound.lspfb: qbound.SpfbInfo,
    qbound.kspfb: qbound.KspfbInfo,
    qbound.layerwise_spfb: qbound.LayerwiseInfo,
}
# With what the names of the fields of the other two begin.
PREFIX = {"kronecker": "kspfb", "layerwise": "layerwise"}


@functools.cache
def optimizer(variant, learning_rate=0.5):
    make, options = VARIANTS[variant]
    return make(learning_rate, problems.affine, l2=1e-2, **options)


@functools.cache
def data():
    p = problems.linear(b=60, dtype=jnp.float32)
    return p.params, p.inputs.reshape(6, 10, 4), p.labels.reshape(6, 10)


def step_function(tx, **jit_options):
    """One training step, as anyone would write it."""

    @functools.partial(jax.jit, **jit_options)
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(problems.loss, argnums=1)(problems.affine, params, x, y)
        updates, state = tx.update(grads, state, params, inputs=x, value=value)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def trained(variant):
    """Six steps by a Python loop: what the others are compared with."""
    params, inputs, labels = data()
    tx = optimizer(variant)
    state, step = tx.init(params), step_function(tx)
    for x, y in zip(inputs, labels, strict=True):
        params, state = step(params, state, x, y)
    return params, state


@every_variant
def test_is_a_transform_that_takes_extra_arguments_and_trains(variant):
    assert isinstance(optimizer(variant), optax.GradientTransformationExtraArgs)
    params, inputs, labels = data()
    after, state = trained(variant)
    whole = inputs.reshape(60, 4), labels.reshape(60)
    assert problems.loss(problems.affine, after, *whole) < problems.loss(problems.affine, params, *whole)
    assert not optax.tree.get(state, f"{PREFIX.get(variant, 'spfb')}_nonfinite")


@every_variant
def test_second_call_does_not_compile_again(variant):
    params, inputs, labels = data()
    tx = optimizer(variant)
    step, state = step_function(tx), tx.init(params)
    for _ in range(3):
        params, state = step(params, state, inputs[0], labels[0])
    assert step._cache_size() == 1


@every_variant
def test_state_keeps_its_structure_shapes_and_dtypes(variant):
    params, inputs, labels = data()
    tx = optimizer(variant)
    state = tx.init(params)
    _, after = jax.eval_shape(step_function(tx), params, state, inputs[0], labels[0])
    assert jax.tree.structure(state) == jax.tree.structure(after)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert not a.weak_type


@every_variant
def test_scan_over_steps_equals_the_loop(variant):
    params, inputs, labels = data()
    iterates, _ = problems.train(optimizer(variant), problems.affine, params, inputs, labels)
    np.testing.assert_allclose(
        flat(jax.tree.map(lambda leaf: leaf[-1], iterates)), flat(trained(variant)[0]), rtol=1e-3
    )


@every_variant
def test_vmap_over_seeds_equals_one_at_a_time(variant):
    params, inputs, labels = data()
    tx = optimizer(variant)
    scales = jnp.array([0.0, 1.0, 2.0], jnp.float32)

    def final(scale):
        start = jax.tree.map(lambda leaf: scale * leaf, params)
        iterates, _ = problems.train(tx, problems.affine, start, inputs, labels)
        return jax.tree.map(lambda leaf: leaf[-1], iterates)

    together = jax.vmap(final)(scales)
    one = jax.tree.map(lambda leaf: leaf[1], together)
    np.testing.assert_allclose(flat(one), flat(trained(variant)[0]), rtol=1e-3, atol=1e-3)
    assert np.isfinite(flat(together)).all()


@every_variant
def test_donated_buffers_are_used(variant, recwarn):
    params, inputs, labels = data()
    tx = optimizer(variant)
    step = step_function(tx, donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, params), tx.init(params)
    for x, y in zip(inputs, labels, strict=True):
        old = params, state
        params, state = step(params, state, x, y)
        # The numbers that only inform are not read, and so not donated.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old) if leaf.ndim > 0)
    np.testing.assert_allclose(flat(params), flat(trained(variant)[0]), rtol=1e-3)
    assert not recwarn.list


@every_variant
def test_no_two_arrays_of_the_first_state_are_one(variant):
    """Else the state cannot be donated to a loop that reads all of it."""
    params, *_ = data()
    leaves = jax.tree.leaves(optimizer(variant).init(params))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@every_variant
def test_state_survives_a_checkpoint(variant):
    params, inputs, labels = data()
    _, state = trained(variant)
    tx = optimizer(variant)
    empty = tx.init(params)
    copies = {
        "pickle": pickle.loads(pickle.dumps(jax.device_get(state))),
        "flax": flax.serialization.from_bytes(empty, flax.serialization.to_bytes(state)),
    }
    for copy in copies.values():
        assert jax.tree.structure(copy) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, copy, state)
    step = step_function(tx)
    expected, _ = step(params, state, inputs[0], labels[0])
    resumed, _ = step(params, copies["flax"], inputs[0], labels[0])
    np.testing.assert_array_equal(flat(resumed), flat(expected))


@every_variant
def test_unknown_arguments_are_ignored(variant):
    params, inputs, _ = data()
    tx = optimizer(variant)
    state = tx.init(params)
    update = jax.jit(tx.update)
    plain, _ = update(params, state, params, inputs=inputs[0], value=1.0)
    other, _ = update(params, state, params, inputs=inputs[0], value=1.0, loss_scale=2.0, step=3)
    np.testing.assert_array_equal(flat(plain), flat(other))


@every_variant
def test_diagnostics_are_found_by_name_in_a_chain(variant):
    params, inputs, labels = data()
    tx = optax.chain(
        optax.clip_by_global_norm(10.0),
        optimizer(variant, optax.constant_schedule(0.5)),
        optax.scale_by_adam(),
        optax.ema(0.9),
    )
    with jax.numpy_dtype_promotion("standard"):
        state = step_function(tx)(params, tx.init(params), inputs[0], labels[0])[1]
    for name in INFO[VARIANTS[variant][0]]._fields:
        assert optax.tree.get(state, name).shape == ()
    if variant not in PREFIX:
        assert optax.tree.get(state, "spfb_residual") < 1e-2
    if "adaptive" in variant:
        assert optax.tree.get(state, "spfb_adaptive_damping") == np.float32(0.1)


def test_chain_clips_the_step():
    params, inputs, labels = data()
    tx = optax.chain(
        qbound.scale_by_spfb(problems.affine, damping=1e-2), optax.clip_by_global_norm(0.1), optax.scale(-1.0)
    )
    moved, _ = step_function(tx)(params, tx.init(params), inputs[0], labels[0])
    np.testing.assert_allclose(np.linalg.norm(flat(moved) - flat(params)), 0.1, rtol=1e-4)


def test_chain_with_a_line_search():
    """Optax's line searches reject arguments that the function they evaluate does not take: let it take `inputs`."""
    params, inputs, labels = data()
    x, y = inputs[0], labels[0]
    tx = optax.chain(
        qbound.scale_by_spfb(problems.affine, damping=1e-2),
        optax.scale(-1.0),
        optax.scale_by_backtracking_linesearch(max_backtracking_steps=10),
    )

    def value_fn(params, inputs):
        return problems.loss(problems.affine, params, inputs, y)

    with jax.numpy_dtype_promotion("standard"):
        value, grads = jax.jit(jax.value_and_grad(value_fn))(params, x)
        update = jax.jit(functools.partial(tx.update, value_fn=value_fn))
        updates, _ = update(grads, tx.init(params), params, value=value, grad=grads, inputs=x)
    assert value_fn(optax.apply_updates(params, updates), x) < value


@pytest.mark.parametrize("schedule", [problems.paper_schedule(0.9), optax.cosine_decay_schedule(1.0, 10)])
def test_schedules_set_the_learning_rate(schedule):
    params, inputs, labels = data()
    direction = qbound.spfb(1.0, problems.affine, l2=1e-2)
    tx = qbound.spfb(schedule, problems.affine, l2=1e-2)
    with jax.numpy_dtype_promotion("standard"):
        state = tx.init(params)
        step = step_function(tx)
        for count in range(3):
            before = params
            params, state = step(before, state, inputs[0], labels[0])
            full, _ = step_function(direction)(before, direction.init(before), inputs[0], labels[0])
            rate = float(schedule(jnp.asarray(count)))
            np.testing.assert_allclose(
                flat(params) - flat(before), rate * (flat(full) - flat(before)), rtol=1e-3, atol=1e-6
            )


@every_variant
def test_hyperparameters_can_be_injected_and_changed(variant):
    params, inputs, labels = data()
    make, options = VARIANTS[variant]
    injected = optax.inject_hyperparams(make, static_args=STATICS[make])
    tx = injected(learning_rate=0.5, logits_fn=problems.affine, l2=1e-2, **options)
    state, step = tx.init(params), step_function(tx)
    changeable = {
        qbound.spfb: "tolerance",
        qbound.lspfb: "decay",
        qbound.kspfb: "relative_damping",
        qbound.layerwise_spfb: "decay",
    }[make]
    assert {"learning_rate", "l2", "damping", changeable} <= set(state.hyperparams)
    moved, after = step(params, state, inputs[0], labels[0])
    plain = optimizer(variant)
    expected, _ = step_function(plain)(params, plain.init(params), inputs[0], labels[0])
    np.testing.assert_allclose(flat(moved), flat(expected), rtol=1e-4, atol=1e-6)
    after.hyperparams["learning_rate"] = jnp.zeros_like(after.hyperparams["learning_rate"])
    still, _ = step(moved, after, inputs[1], labels[1])
    np.testing.assert_array_equal(flat(still), flat(moved))
    assert step._cache_size() == 1


def test_line_for_injecting_hyperparameters_is_in_the_documentation():
    names = ", ".join(f'"{name}"' for name in STATIC)
    text = " ".join(qbound.spfb.__doc__.split())
    assert f"optax.inject_hyperparams(qbound.spfb, static_args=({names}))" in text
    for make in (qbound.lspfb, qbound.kspfb, qbound.layerwise_spfb):
        names = ", ".join(f'"{name}"' for name in STATICS[make])
        assert f"`optax.inject_hyperparams`: `static_args=({names})`" in " ".join(make.__doc__.split())


@pytest.mark.usefixtures("without_type_checks")
def test_injecting_without_static_arguments_says_what_is_missing():
    params, *_ = data()
    tx = optax.inject_hyperparams(qbound.spfb, static_args="logits_fn")(1.0, problems.affine, l2=1e-2)
    with pytest.raises(TypeError, match=r"max_steps: expected an integer > 0; .*static_args"):
        tx.init(params)


def test_damping_can_follow_a_schedule():
    params, inputs, labels = data()
    injected = optax.inject_hyperparams(qbound.spfb, static_args=STATIC)
    tx = injected(0.5, problems.affine, l2=1e-2, damping=optax.linear_schedule(1.0, 0.0, 4))
    with jax.numpy_dtype_promotion("standard"):
        state, step = tx.init(params), step_function(tx)
        dampings = []
        for x, y in zip(inputs, labels, strict=True):
            params, state = step(params, state, x, y)
            dampings.append(float(state.hyperparams["damping"]))
    np.testing.assert_allclose(dampings, [1, 0.75, 0.5, 0.25, 0, 0])
    assert np.isfinite(flat(params)).all()


@pytest.mark.parametrize("variant", ["the paper", "window"])
def test_multi_steps_take_the_mean_gradient_and_the_last_curvature(variant):
    params, inputs, labels = data()
    tx = optax.MultiSteps(optimizer(variant), every_k_schedule=2)
    with jax.numpy_dtype_promotion("standard"):
        state, step = tx.init(params), step_function(tx)
        once, state = step(params, state, inputs[0], labels[0])
        np.testing.assert_array_equal(flat(once), flat(params))
        twice, state = step(once, state, inputs[1], labels[1])
    both = inputs[:2].reshape(20, 4), labels[:2].reshape(20)
    grads = problems.gradient(problems.affine, params, *both)
    plain = optimizer(variant)
    updates, _ = jax.jit(plain.update)(grads, plain.init(params), params, inputs=inputs[1])
    np.testing.assert_allclose(flat(twice) - flat(params), flat(updates), rtol=1e-3, atol=1e-6)


def test_apply_if_finite_rejects_gradients_and_the_transform_logits():
    params, inputs, labels = data()
    tx = optax.apply_if_finite(optimizer("the paper"), max_consecutive_errors=2)
    poisoned = inputs[0].at[0, 0].set(jnp.nan)
    with jax.numpy_dtype_promotion("standard"):
        state, step = tx.init(params), step_function(tx)
        same, state = step(params, state, poisoned, labels[0])
        np.testing.assert_array_equal(flat(same), flat(params))
        assert (state.total_notfinite, optax.tree.get(state, "spfb_nonfinite_total")) == (1, 0)
        # A finite gradient, but logits that are not.
        updates, state = jax.jit(tx.update)(params, state, params, inputs=poisoned)
        np.testing.assert_array_equal(flat(updates), 0 * flat(params))
        assert (state.total_notfinite, optax.tree.get(state, "spfb_nonfinite_total")) == (1, 1)
        moved, state = step(params, state, inputs[0], labels[0])
    assert np.abs(flat(moved) - flat(params)).max() > 0


def test_part_of_the_parameters_with_the_rest_inside_the_inputs():
    params, inputs, labels = data()

    def model(trainable, inputs):
        frozen, x = inputs
        return problems.affine({**frozen, **trainable}, x)

    weights, bias = {"weights": params["weights"]}, {"bias": params["bias"]}
    tx = qbound.spfb(1.0, model, l2=1e-2, microbatch_size=4, inputs_axes=(None, 0))
    grads = problems.gradient(model, weights, (bias, inputs[0]), labels[0])
    updates, _ = jax.jit(tx.update)(grads, tx.init(weights), weights, inputs=(bias, inputs[0]))
    closed = qbound.spfb(1.0, lambda p, x: problems.affine({**bias, **p}, x), l2=1e-2)
    expected, _ = jax.jit(closed.update)(grads, closed.init(weights), weights, inputs=inputs[0])
    np.testing.assert_allclose(flat(updates), flat(expected), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("wrap", ["masked", "partition"])
def test_hidden_parameters_are_explained(wrap):
    params, *_ = data()
    labels = {"weights": "train", "bias": "freeze"}
    tx = optimizer("the paper")
    if wrap == "masked":
        tx = optax.masked(tx, jax.tree.map(lambda label: label == "train", labels))
    else:
        tx = optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)
    with pytest.raises(ValueError, match=r"params: expected every array .* optax.masked or optax.partition.*inputs"):
        tx.init(params)


@every_variant
def test_state_can_be_mapped_like_parameters(variant):
    """As for placing the state of an optimizer on devices like the parameters."""
    params, *_ = data()
    tx = optimizer(variant)
    marked = optax.tree.map_params(tx, lambda leaf: "like a parameter", tx.init(params))
    count = jax.tree.leaves(marked).count("like a parameter")
    assert count == {"cg, warm, adaptive": 6, "kronecker": 2, "layerwise": 4}.get(variant, 0)


def test_weights_per_example_pass_through_a_chain():
    params, inputs, labels = data()
    tx = optimizer("the paper")
    weights = jnp.asarray([1.0, 2, 0, 1, 1, 0, 3, 1, 1, 1], jnp.float32)
    grads = problems.gradient(problems.affine, params, inputs[0], labels[0], weights)
    update = jax.jit(tx.update)
    weighted, _ = update(grads, tx.init(params), params, inputs=inputs[0], example_weights=weights)
    rows = np.repeat(np.arange(10), np.asarray(weights).astype(int))
    repeated, _ = update(grads, tx.init(params), params, inputs=inputs[0][rows])
    np.testing.assert_allclose(flat(weighted), flat(repeated), rtol=1e-3, atol=1e-6)


def test_step_compiles_without_a_warning_and_without_constants(caplog):
    """What is passed as an argument must not become a constant of the program."""
    params, inputs, labels = data()
    tx = optimizer("the paper")
    big = jnp.zeros((2000, 4), jnp.float32)
    with caplog.at_level(logging.WARNING):
        text = step_function(tx).lower(params, tx.init(params), big, jnp.zeros(2000, int)).as_text()
    assert not caplog.records
    assert len(text) < 400_000


@pytest.mark.parametrize("name", ["spfb", "lspfb", "layerwise_spfb"])
def test_optimiser_and_its_direction_have_the_same_defaults(name):
    whole, direction = (inspect.signature(getattr(qbound, prefix + name)).parameters for prefix in ("", "scale_by_"))
    shared = [key for key in direction if key in whole and direction[key].default is not inspect.Parameter.empty]
    assert len(shared) > 3
    assert {key: direction[key].default for key in shared} == {key: whole[key].default for key in shared}


def test_optimizers_are_built_under_a_debugger():
    """One that reads the variables of a function as it runs, which refreshes what `locals()` has returned."""

    def trace(frame, event, arg):
        del event, arg
        frame.f_locals  # noqa: B018
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for build, more in (
            (qbound.spfb, {}),
            (qbound.lspfb, {"rank": 2}),
            (qbound.kspfb, {}),
            (qbound.layerwise_spfb, {}),
        ):
            build(1.0, qbound.linear_logits, l2=0.1, **more)
        for build, more in (
            (qbound.scale_by_spfb, {}),
            (qbound.scale_by_lspfb, {"rank": 2}),
            (qbound.scale_by_kspfb, {}),
            (qbound.scale_by_layerwise_spfb, {}),
        ):
            build(qbound.linear_logits, damping=0.1, **more)
    finally:
        sys.settrace(before)
