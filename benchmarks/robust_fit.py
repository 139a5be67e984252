"""Robust non-linear least squares for positive constants, in log space, inside bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# Residuals (of log time) beyond this count linearly instead of squared, so that one odd run cannot
# bend the fit.
OUTLIER = 0.08
# Pull towards the starting point, so that a constant which the rows do not determine stays where it began.
RIDGE = 1e-5
ITERATIONS = 60
_DIFFERENCE = 1e-4


def fit_positive(
    residuals: Callable[[Vector], Vector], start: Vector, lower: Vector, upper: Vector, weights: Vector
) -> Vector:
    """Constants in [lower, upper] that minimise the weighted pseudo-Huber loss of `residuals(constants)`.

    Levenberg-Marquardt on the logarithms (Marquardt 1963) with iteratively reweighted residuals; a step
    that leaves the bounds is projected back. All arguments of one length but `weights`, which has the
    residuals'.
    """
    low, high, origin = np.log(lower), np.log(upper), np.log(start)
    weights = weights / weights.sum()

    def loss(r: Vector, z: Vector) -> float:
        robust = 2 * OUTLIER**2 * (np.sqrt(1 + (r / OUTLIER) ** 2) - 1)
        return float((weights * robust).sum() + RIDGE * ((z - origin) ** 2).sum())

    z, damping = origin.copy(), 1e-2
    r = residuals(np.exp(z))
    best = loss(r, z)
    for _ in range(ITERATIONS):
        shifts = _DIFFERENCE * np.eye(len(z))
        slope = np.array([(residuals(np.exp(z + shift)) - r) / _DIFFERENCE for shift in shifts]).T
        w = weights / np.sqrt(1 + (r / OUTLIER) ** 2)
        curvature = slope.T @ (slope * w[:, None]) + RIDGE * np.eye(len(z))
        gradient = slope.T @ (w * r) + RIDGE * (z - origin)
        # A constant that presses against its bound is out of the step, else it would shorten the others'.
        free = ~(((z <= low) & (gradient > 0)) | ((z >= high) & (gradient < 0)))
        while damping < 1e9:
            step = np.zeros_like(z)
            damped = curvature + damping * np.diag(np.diag(curvature))
            step[free] = -np.linalg.solve(damped[np.ix_(free, free)], gradient[free])
            trial = np.clip(z + np.clip(step, -1.0, 1.0), low, high)
            trial_r = residuals(np.exp(trial))
            trial_loss = loss(trial_r, trial)
            if trial_loss < best:
                break
            damping *= 4
        else:
            break
        gained = best - trial_loss
        z, r, best, damping = trial, trial_r, trial_loss, max(damping / 5, 1e-9)
        if gained < 1e-9 * best:
            break
    return np.exp(z)
