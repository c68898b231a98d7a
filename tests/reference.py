"""The paper in NumPy: slow, with its loops and its letters, and nothing from the package.

[WC20] Wang and Choromanska, "SGB: Stochastic Gradient Bound Method for Optimizing Partition Functions".
"""

import math

import numpy as np


def log_sum_exp(logits):
    largest = np.max(logits)
    if largest == -np.inf:
        return -np.inf
    return largest + np.log(np.sum(np.exp(logits - largest)))


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / np.sum(weights)


def beta_of(rho):
    """tanh(rho/2)/(2 rho), by its series near 0."""
    if math.isinf(rho):
        return 0.0
    if abs(rho) < 1e-4:
        return 0.25 - rho**2 / 48
    return math.tanh(rho / 2) / (2 * rho)


def algorithm_1(theta, features, log_prior=None):
    """Algorithm 1 of [WC20] on logarithms: log z, mu, Sigma, labels as given."""
    n, d = features.shape
    log_prior = np.zeros(n) if log_prior is None else log_prior
    log_z, mu, sigma = -np.inf, np.zeros(d), np.zeros((d, d))
    for y in range(n):
        log_alpha = theta @ features[y] + log_prior[y]
        if log_alpha == -np.inf:
            continue
        l = features[y] - mu
        rho = log_alpha - log_z
        kappa = 1.0 if log_z == -np.inf else math.exp(log_alpha - np.logaddexp(log_z, log_alpha))
        sigma = sigma + beta_of(rho) * np.outer(l, l)
        mu = mu + kappa * l
        log_z = np.logaddexp(log_z, log_alpha)
    return log_z, mu, sigma


# The paper's z -> 0+.
START = 1e-200


def algorithm_1_as_printed(theta, features):
    """Algorithm 1 of [WC20] to the letter, exponentials and z -> 0+ included: z, mu, Sigma."""
    n, d = features.shape
    z, mu, sigma = START, np.zeros(d), START * np.eye(d)
    for y in range(n):
        alpha = np.exp(theta @ features[y])
        l = features[y] - mu
        log_ratio = np.log(alpha / z)
        beta = 0.25 if log_ratio == 0 else np.tanh(log_ratio / 2) / (2 * log_ratio)
        kappa = alpha / (z + alpha)
        sigma = sigma + beta * np.outer(l, l)
        mu = mu + kappa * l
        z = z + alpha
    return z, mu, sigma


def logit_bound(logits, permutation=None):
    """Algorithm 1 with the labels for features, taken in the order of `permutation`: log z, p, M in the given axes."""
    n = len(logits)
    permutation = np.arange(n) if permutation is None else np.asarray(permutation)
    features = np.eye(n)[permutation]
    # Labels enter through log_prior, so that -inf is allowed.
    return algorithm_1(np.zeros(n), features, log_prior=np.asarray(logits, dtype=float)[permutation])


def probe(logits, signs, permutation=None):
    """sum_i signs_i sqrt(beta_i) l_i, with the labels taken in the order of `permutation`, one after the other."""
    logits = np.asarray(logits, dtype=float)
    permutation = np.arange(len(logits)) if permutation is None else permutation
    log_z, mean, total = -np.inf, np.zeros(len(logits)), np.zeros(len(logits))
    for y in permutation:
        if logits[y] == -np.inf:
            continue
        l = np.eye(len(logits))[y] - mean
        if log_z > -np.inf:
            total = total + signs[y] * math.sqrt(beta_of(logits[y] - log_z)) * l
        log_z = np.logaddexp(log_z, logits[y])
        mean = mean + math.exp(logits[y] - log_z) * l
    return total


def descending(logits):
    return np.argsort(-np.asarray(logits, dtype=float), kind="stable")


def max_first(logits):
    lead = int(np.argmax(logits))
    return np.array([lead, *(y for y in range(len(logits)) if y != lead)])


PERMUTATIONS = {
    "descending": descending,
    "max_first": max_first,
    "given": lambda logits: np.arange(len(logits)),
}


def hessian(logits):
    p = softmax(logits)
    return np.diag(p) - np.outer(p, p)


def bohning(n):
    return 0.5 * (np.eye(n) - np.ones((n, n)) / n)


def batch_bound(theta, features, order="given", weights=None):
    """The weighted mean over examples of Algorithm 1: mu and Sigma. Features are (b, n, d)."""
    weights = np.ones(len(features)) if weights is None else np.asarray(weights, dtype=float)
    mu, sigma = np.zeros(len(theta)), np.zeros((len(theta), len(theta)))
    for w, f in zip(weights / np.sum(weights), features, strict=True):
        if w > 0:
            _, mu_j, sigma_j = algorithm_1(theta, f[PERMUTATIONS[order](f @ theta)])
            mu, sigma = mu + w * mu_j, sigma + w * sigma_j
    return mu, sigma


def algorithm_2(theta, batches, learning_rates, l2, order="given"):
    """Algorithm 2 of [WC20], SPFB, with batches in place of single points: every iterate.

    A batch is its features (b, n, d) and the labels (b,) that were observed.
    """
    iterates = [theta]
    for (features, labels), eta in zip(batches, learning_rates, strict=True):
        mu, sigma = batch_bound(theta, features, order)
        observed = np.mean([f[y] for f, y in zip(features, labels, strict=True)], axis=0)
        theta = theta - eta * np.linalg.solve(sigma + l2 * np.eye(len(theta)), mu - observed + l2 * theta)
        iterates.append(theta)
    return np.array(iterates)


def linear_features(inputs, n):
    """Logistic regression with weights (d, n), laid out as one vector, in the paper's form: features (b, n, d n)."""
    return np.stack([np.stack([np.outer(x, row).ravel() for row in np.eye(n)]) for x in inputs])


def mean_objective(theta, features, targets, l2, weights=None):
    """The weighted mean of log Z_j - t_j.h_j, and l2/2 |theta|^2; features (b, n, d), probabilities t (b, n)."""
    weights = np.ones(len(features)) if weights is None else np.asarray(weights, dtype=float)
    logits = features @ theta
    losses = np.array([log_sum_exp(h) for h in logits]) - np.sum(targets * logits, axis=1)
    return weights @ losses / np.sum(weights) + l2 / 2 * theta @ theta


def majorise_minimise(theta, features, targets, l2, steps, eta=1.0, curvature=None, order="given"):
    """Equation 4 of [WC20] on a full batch: every iterate. `curvature` is a fixed matrix in place of the bound."""
    iterates = [theta]
    observed = np.mean(np.einsum("jn,jnd->jd", targets, features), axis=0)
    for _ in range(steps):
        mu, sigma = batch_bound(theta, features, order)
        if curvature is not None:
            sigma = np.mean([f.T @ curvature @ f for f in features], axis=0)
        g = mu - observed + l2 * theta
        theta = theta - eta * np.linalg.solve(sigma + l2 * np.eye(len(theta)), g)
        iterates.append(theta)
    return np.array(iterates)


def local_upper_bound(eta, a, c, weights, v, r):
    """The change of the objective along theta - eta s, at most: the local certificate, r > 0."""
    return -eta * a + eta**2 * c / 2 + np.sum(weights * v * (np.expm1(eta * r) - eta * r) / r**2)


def low_rank_rows(theta, features, order="given"):
    """Algorithm 3 of [WC20], line 5, with z_j for z: r = sqrt(beta) l for each example and label, for the mean."""
    rows = []
    for f in features:
        f = f[PERMUTATIONS[order](f @ theta)]
        log_z, mean = -np.inf, np.zeros(len(theta))
        for y in range(len(f)):
            log_alpha = theta @ f[y]
            kappa = 1.0 if log_z == -np.inf else math.exp(log_alpha - np.logaddexp(log_z, log_alpha))
            rows.append(math.sqrt(beta_of(log_alpha - log_z) / len(features)) * (f[y] - mean))
            mean = mean + kappa * (f[y] - mean)
            log_z = np.logaddexp(log_z, log_alpha)
    return np.array(rows)


def algorithm_3(rows, k, cross_terms=True):
    """Lines 6 to 13 of Algorithm 3 of [WC20] for each row: V, S and D. V starts at 0, as in its proof.

    Without `cross_terms` it is Algorithm 4 of [JC12].
    """
    d = rows.shape[1]
    v, s, diagonal = np.zeros((k, d)), np.zeros(k), np.zeros(d)
    for r in rows:
        if not np.any(r):
            continue
        p = v @ r
        a = v.T @ p
        g = r - a
        s, q = np.linalg.eigh(np.diag(s) + np.outer(p, p))
        v = q.T @ v
        if cross_terms:
            diagonal = diagonal + np.linalg.norm(g) * np.linalg.norm(a)
        candidates = np.append(s, g @ g)
        least = int(np.argmin(candidates))
        if least < k and np.linalg.norm(g) > 1e-14 * np.linalg.norm(r):
            diagonal = diagonal + s[least] * np.sum(np.abs(v[least])) * np.abs(v[least])
            s[least] = g @ g
            v[least] = g / np.linalg.norm(g)
        else:
            diagonal = diagonal + np.sum(np.abs(g)) * np.abs(g)
    return v, s, diagonal


def algorithm_4(theta, features, labels, rates, k, l2):
    """Algorithm 4 of [WC20] with batches in place of single points: every iterate, by dense solves."""
    iterates = []
    for f, y, eta in zip(features, labels, rates, strict=True):
        v, s, diagonal = algorithm_3(low_rank_rows(theta, f), k)
        mu = batch_bound(theta, f)[0] - np.mean([fj[yj] for fj, yj in zip(f, y, strict=True)], axis=0)
        curvature = v.T @ np.diag(s) @ v + np.diag(diagonal) + l2 * np.eye(len(theta))
        theta = theta - eta * np.linalg.solve(curvature, mu + l2 * theta)
        iterates.append(theta)
    return np.array(iterates)


def low_rank_exact(rows, k):
    """Row by row, the least of k + 1 principal directions is moved to the diagonal: V'S V and D."""
    d = rows.shape[1]
    matrix, diagonal = np.zeros((d, d)), np.zeros(d)
    for r in rows:
        values, vectors = np.linalg.eigh(matrix + np.outer(r, r))
        matrix = sum((c * np.outer(v, v) for c, v in list(zip(values, vectors.T, strict=True))[-k:]), np.zeros((d, d)))
        if d > k:
            c, v = max(values[-k - 1], 0), vectors[:, -k - 1]
            diagonal = diagonal + c * np.abs(v) * np.sum(np.abs(v))
    return matrix, diagonal


def frequent_directions(rows, k, block):
    """Blocks of rows, each time the (k + 1)-th eigenvalue taken from the k largest: B'B and Delta."""
    d = rows.shape[1]
    matrix, delta = np.zeros((d, d)), 0.0
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        values, vectors = np.linalg.eigh(matrix + part.T @ part)
        least = max(values[-k - 1], 0) if d > k else 0.0
        kept = np.maximum(values[-k:] - least, 0)
        matrix = vectors[:, -k:] @ np.diag(kept) @ vectors[:, -k:].T
        delta += least
    return matrix, delta


def with_ones(inputs):
    return np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)


def contrasts(n):
    """Orthonormal columns (n, n - 1) that sum to 0: the first so many labels against the next."""
    columns = [np.concatenate([np.ones(k), [-k], np.zeros(n - k - 1)]) / math.sqrt(k * (k + 1)) for k in range(1, n)]
    return np.array(columns).T


def linear_model(inputs, labels, weights, l2, params):
    """sum_j w_j [log Z_j - h_{j y_j}] + sum_ki l2_i W_ki^2 / 2: the objective, its gradient (n, e) and Hessian.

    Params W are (n, e), the Hessian (n e, n e), and the weights are taken as they are.
    """
    n, e = params.shape
    logits = inputs @ params.T
    losses = [log_sum_exp(h) - h[y] for h, y in zip(logits, labels, strict=True)]
    p = np.array([softmax(h) for h in logits])
    matrix = np.diag(np.tile(l2, n))
    for k in range(n):
        for l in range(n):
            curvature = weights * p[:, k] * ((k == l) - p[:, l])
            matrix[k * e : (k + 1) * e, l * e : (l + 1) * e] += (curvature[:, None] * inputs).T @ inputs
    gradient = (weights[:, None] * (p - np.eye(n)[labels])).T @ inputs + l2 * params
    return weights @ losses + np.sum(l2 * params**2) / 2, gradient, matrix


def linear_optimum(inputs, labels, weights, l2, n):
    """Where `linear_model` is least, by Newton's method with halved steps: params (n, e)."""
    params = np.zeros((n, inputs.shape[1]))
    for _ in range(100):
        objective, gradient, matrix = linear_model(inputs, labels, weights, l2, params)
        # What all labels share changes nothing where it is not penalised: the least of all solutions.
        direction = np.linalg.lstsq(matrix, gradient.ravel(), rcond=1e-13)[0].reshape(params.shape)
        eta = 1.0
        while eta > 1e-3 and linear_model(inputs, labels, weights, l2, params - eta * direction)[0] > objective:
            eta /= 2
        if eta <= 1e-3 or np.max(np.abs(gradient)) < 1e-14:
            break
        params = params - eta * direction
    return params


def bfgs_inverse(inverse, steps, changes):
    """The inverse of the curvature after updates of BFGS, the oldest first (Nocedal and Wright 2006, equation 6.17)."""
    for s, y in zip(steps, changes, strict=True):
        rho = 1 / (s @ y)
        left = np.eye(len(s)) - rho * np.outer(s, y)
        inverse = left @ inverse @ left.T + rho * np.outer(s, s)
    return inverse
