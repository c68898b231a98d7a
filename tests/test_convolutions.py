"""Convolutions in the loop of CG: in the order of axes that is fast there, and with the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import qbound
from qbound import compiler
from qbound.curvature.model import mean_curvature
from qbound.linalg import cg
from qbound.linalg.convolutions import fast_in_loops, in_order

LETTERS = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC"), 5: ("NDHWC", "DHWIO", "NDHWC")}
FAST = {axes: jax.lax.conv_dimension_numbers((1,) * axes, (1,) * axes, letters) for axes, letters in LETTERS.items()}
IN_LOOPS = ("while", "scan", "cond")


def convolutions(function, *arguments):
    """Whether each convolution in the program of a function is in a loop or a conditional, and in the fast order."""

    def found(jaxpr, in_loop):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "conv_general_dilated":
                order = equation.params["dimension_numbers"]
                yield in_loop, order == FAST[len(order.lhs_spec)]
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                if hasattr(inner, "eqns"):
                    inner = getattr(inner, "jaxpr", inner)
                    yield from found(inner, in_loop or equation.primitive.name in IN_LOOPS)

    return list(found(jax.make_jaxpr(function)(*arguments).jaxpr, False))


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def layer(order, image, kernel, **options):
    """A model of one convolution, not linear in its parameters, and parameters: the kernel, and a scale of inputs."""
    images = array(*image, seed=1)
    options = {"window_strides": (1,) * (len(image) - 2), "padding": "SAME", "dimension_numbers": order, **options}

    def model(params):
        kernel, scale = params
        return jnp.tanh(jax.lax.conv_general_dilated(scale * images, kernel, **options))

    return model, (array(*kernel), array(*image, seed=2))


image, kernel = (2, 6, 7, 4), (3, 2, 4, 5)
plane = LETTERS[4]
LAYERS = {
    "channels last": layer(plane, image, kernel),
    "channels first": layer(("NCHW", "OIHW", "NCHW"), (2, 4, 6, 7), (5, 4, 3, 2)),
    "examples last": layer(("HWCN", "HWOI", "CNHW"), (6, 7, 4, 2), (3, 2, 5, 4)),
    "a stride": layer(plane, image, kernel, window_strides=(2, 3)),
    "transposed": layer(plane, image, kernel, lhs_dilation=(2, 2), padding=((1, 2), (0, 1))),
    "dilated": layer(plane, image, kernel, rhs_dilation=(2, 1)),
    "depthwise": layer(plane, image, (3, 2, 1, 8), feature_group_count=4),
    "in groups": layer(plane, image, (3, 2, 2, 6), feature_group_count=2),
    "in groups of examples": layer(plane, (4, 6, 7, 4), (3, 2, 4, 6), batch_group_count=2),
    "on a line": layer(LETTERS[3], (2, 9, 4), (3, 4, 5)),
    "in space": layer(LETTERS[5], (2, 4, 5, 3, 2), (2, 3, 2, 2, 3)),
    "on a point": layer(("NC", "IO", "NC"), (2, 4), (4, 5)),
}  # fmt: skip


def gauss_newton(model, params):
    """The product v -> J'Jv + v, and a vector."""
    _, forward = jax.linearize(model, params)
    _, transpose = jax.vjp(model, params)

    def product(v):
        return jax.tree.map(jnp.add, transpose(forward(v))[0], v)

    return product, jax.tree.map(jnp.sin, params)


def assert_close(one, other, rtol=1e-10):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_the_same_and_in_the_fast_order(name):
    model, params = LAYERS[name]
    product, v = gauss_newton(model, params)
    fast = fast_in_loops(product, v)
    assert jax.tree.structure(fast(v)) == jax.tree.structure(v)
    assert_close(fast(v), product(v))
    assert_close(jax.jit(fast)(v), product(v))
    if name != "on a point":
        assert len(convolutions(fast, v)) >= 3
        assert all(ordered for _, ordered in convolutions(fast, v))
        assert not all(ordered for _, ordered in convolutions(product, v))


def repeated(params):
    """Layers in a loop, computed twice to save memory, and one in a conditional."""
    kernels, scale = params

    @jax.checkpoint
    def one(h, kernel):
        return jnp.tanh(jax.lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=plane)), None

    h, _ = jax.lax.scan(one, scale, kernels)
    return jax.lax.cond(jnp.sum(h) > 0, lambda h: one(h, kernels[0])[0], lambda h: one(h, kernels[1])[0], h)


def test_programs_inside_of_programs_are_put_in_order():
    params = (array(3, 3, 3, 2, 2), array(2, 5, 5, 2))
    product, v = gauss_newton(repeated, params)
    fast = fast_in_loops(product, v)
    assert_close(fast(v), product(v))
    assert len(convolutions(fast, v)) > 4
    assert all(ordered for _, ordered in convolutions(fast, v))


def test_batches_of_products_are_the_same():
    model, params = LAYERS["channels first"]

    def of_scale(scale, v):
        product, _ = gauss_newton(model, (params[0], scale * params[1]))
        return product(v), fast_in_loops(product, v)(v)

    scales, vectors = jnp.arange(1.0, 4.0), jax.tree.map(lambda leaf: array(3, *leaf.shape), params)
    plain, fast = jax.vmap(of_scale)(scales, vectors)
    assert_close(fast, plain)


def test_other_programs_and_other_devices_are_left_alone(monkeypatch):
    def other(v):
        return jax.lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v @ v), jax.jit(jnp.sin)(v))

    program = jax.make_jaxpr(other)(jnp.ones((2, 2)))
    assert in_order(program) is program
    assert in_order(program.jaxpr) is program.jaxpr
    in_fast_order = jax.make_jaxpr(lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", None, None, plane))
    program = in_fast_order(jnp.ones(image), jnp.ones(kernel))
    assert in_order(program) is program
    monkeypatch.setattr(compiler, "default_platform", lambda: "gpu")
    product, v = gauss_newton(*LAYERS["channels first"])
    assert fast_in_loops(product, v) is product


# In the loop of CG.


def network(params, images):
    """Two convolutions, with pooling."""
    h = images
    for name in ("first", "second"):
        h = jax.nn.relu(jax.lax.conv_general_dilated(h, params[name], (1, 1), "SAME", dimension_numbers=plane))
        b, size, _, channels = h.shape
        h = jnp.max(h.reshape(b, size // 2, 2, size // 2, 2, channels), axis=(2, 4))
    return h.reshape(len(h), -1) @ params["last"]


def network_params():
    shapes = {"first": (3, 3, 1, 4), "second": (3, 3, 4, 5), "last": (20, 3)}
    return {name: array(*shape, seed=k) / 2 for k, (name, shape) in enumerate(shapes.items())}


@pytest.fixture
def plain(monkeypatch):
    """A switch to the loop as JAX has it."""
    return lambda: monkeypatch.setattr(cg, "fast_in_loops", lambda product, _: product)


def solve(g, images, damping, sign, max_steps=10, tolerance=1e-3, start=None):
    """With the curvature of the network, on which CG may break down for a `sign` of -1."""
    bound = functools.partial(qbound.log_partition_bound, order="max_first")
    curvature = mean_curvature(network, network_params(), images, jnp.ones(len(images)), bound=bound)

    def product(v):
        return jax.tree.map(lambda a, b: sign * (a + damping * b), curvature.mv(v), v)

    return cg.conjugate_gradients(product, g, max_steps=max_steps, tolerance=tolerance, start=start)


SITUATIONS = {
    "at its limit": ({"damping": 1e-3, "max_steps": 4}, 4),
    "converged": ({"damping": 10.0}, None),
    "breakdown": ({"damping": 1e-3, "sign": -1.0}, 1),
    "not a number": ({"damping": np.nan}, 1),
    "from a start": ({"damping": 1e-3, "start": network_params()}, 10),
}


@pytest.mark.parametrize("how", ["jit", "vmap", "eager"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_cg_finds_the_same(plain, situation, how):
    options, steps = SITUATIONS[situation]
    options = {"sign": 1.0, **options}
    images = array(6, 8, 8, 1)
    g = jax.tree.map(jnp.cos, network_params())
    if how == "vmap":
        images, g = (jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), a) for a in (images, g))
    # A function anew for each, because JAX remembers what a function was traced to.
    wrap = {"jit": jax.jit, "vmap": lambda f: jax.jit(jax.vmap(f)), "eager": lambda f: f}[how]
    ours = wrap(lambda g, images: solve(g, images, **options))(g, images)
    plain()
    theirs = wrap(lambda g, images: solve(g, images, **options))(g, images)
    assert_close(ours, theirs, rtol=1e-6)
    np.testing.assert_array_equal(ours.steps, theirs.steps)
    assert (ours.steps == steps).all() if steps else ((0 < ours.steps) & (ours.steps < 10)).all()
    if situation in ("breakdown", "not a number"):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(ours.vector))


def first_update(tx):
    """As a function anew, and its arguments: parameters, which will do as the gradient, and images."""

    def update(params, images):
        return tx.update(params, tx.init(params), params, inputs=images)

    return update, (network_params(), array(64, 8, 8, 1))


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 4}, {"warm_start": True}], ids=str)
def test_spfb_has_all_convolutions_of_its_loop_in_the_fast_order(plain, options):
    # Of few steps: later ones make much of a rounding error.
    tx = qbound.scale_by_spfb(network, damping=1e-2, solver="cg", max_steps=4, **options)
    update, arguments = first_update(tx)
    ours = convolutions(update, *arguments)
    our_step, our_state = jax.jit(update)(*arguments)
    plain()
    update, _ = first_update(tx)
    theirs = convolutions(update, *arguments)
    their_step, their_state = jax.jit(update)(*arguments)
    assert len(ours) == len(theirs)
    assert sum(in_loop for in_loop, _ in ours) >= 5
    assert all(ordered for in_loop, ordered in ours if in_loop)
    assert not all(ordered for in_loop, ordered in theirs if in_loop)
    assert_close(our_step, their_step, rtol=1e-7)
    for name in ("spfb_steps", "spfb_converged", "spfb_nonfinite"):
        assert optax.tree.get(our_state, name) == optax.tree.get(their_state, name)


def test_order_takes_no_more_than_a_little_memory(plain):
    tx = qbound.scale_by_spfb(network, damping=1e-2, solver="cg")

    def memory():
        update, arguments = first_update(tx)
        return jax.jit(update).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    ours = memory()
    plain()
    assert ours < 1.2 * memory()
