"""A line through points, and how sure its slope is. Knows numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """A line y = intercept + slope · x and the standard error of its slope, in the units of what was fitted."""

    intercept: float
    slope: float
    error: float


def linear_fit(clusters: Sequence[Sequence[tuple[float, float]]]) -> Fit | None:
    """Least squares through all points (x, y); None without two different x or with fewer than three clusters.

    The error takes a cluster (a request) as one observation, however many points it has (Liang and Zeger, "Longitudinal
    data analysis using generalized linear models", 1986; with the factor n / (n - 1) for n clusters).
    """
    clusters = [cluster for cluster in clusters if cluster]
    count = sum(map(len, clusters))
    if len(clusters) < 3:
        return None
    mean_x = math.fsum(x for cluster in clusters for x, _ in cluster) / count
    mean_y = math.fsum(y for cluster in clusters for _, y in cluster) / count
    spread = math.fsum((x - mean_x) ** 2 for cluster in clusters for x, _ in cluster)
    if spread <= 0:
        return None
    slope = math.fsum((x - mean_x) * (y - mean_y) for cluster in clusters for x, y in cluster) / spread
    pulls = [math.fsum((x - mean_x) * (y - mean_y - slope * (x - mean_x)) for x, y in cluster) for cluster in clusters]
    error = math.sqrt(len(clusters) / (len(clusters) - 1) * math.fsum(pull**2 for pull in pulls)) / spread
    return Fit(mean_y - slope * mean_x, slope, error)
