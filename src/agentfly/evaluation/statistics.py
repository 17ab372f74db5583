"""Statistics: estimates over tasks with confidence intervals, from some attempts at each. Pure functions of numbers.

Attempts at one task are correlated, so the tasks are the independent observations, not the attempts. Each task counts
once, with the mean of its attempts, and intervals are clustered by task. More attempts make the mean of each task more
precise; only more tasks make the estimate for all tasks of their kind more precise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE_LEVEL = 0.95
"""How often such intervals contain the true value."""

_NORMAL_QUANTILE = 1.959963984540054
"""Half-width of an interval at `CONFIDENCE_LEVEL`, in standard errors, under the normal distribution."""

_ROUNDING = 1e-12
"""Relative differences of means below this are rounding errors."""

_NORMAL_FROM = 2000
"""With more degrees of freedom than this, Student's t is the normal distribution to four digits."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval at the level `CONFIDENCE_LEVEL`.

    Attributes:
        mean: the mean over the tasks.
        low, high: ends of the interval; None if there is only one task, or if all tasks have the same mean, so that
            their spread cannot be estimated.
        tasks: number of tasks.
    """

    mean: float
    low: float | None
    high: float | None
    tasks: int


def mean_over_tasks(scores: Sequence[Sequence[float]]) -> Estimate:
    """Average the attempts of each task, and then the tasks. The interval is Student's t over the tasks.

    Source: Miller, Adding Error Bars to Evals, https://arxiv.org/abs/2411.00640, section 2.2, with the t distribution
    instead of the normal one, for few tasks.

    Args:
        scores: for each task, the scores of its attempts, at least one; at least one task.
    """
    means = [math.fsum(task) / len(task) for task in scores]
    count = len(means)
    mean = math.fsum(means) / count
    error = _standard_error(means, mean) if count > 1 else 0.0
    if error <= _ROUNDING * max(map(abs, means)):
        return Estimate(mean, None, None, count)
    reach = student_t_quantile(count - 1) * error
    return Estimate(mean, mean - reach, mean + reach, count)


def proportion_over_tasks(successes: Sequence[Sequence[float]], *, attempts: int | None = None) -> Estimate:
    """Return the mean over tasks of the share of successful attempts, with a Wilson interval clustered by task.

    Numbers between 0 and 1, such as rewards, may be given instead of successes: they vary no more than shares do.

    Wilson's interval stays within 0 and 1, and has a width even if every attempt succeeded. It is computed for the
    number of independent attempts that would vary as much as the tasks do: at least the number of tasks, at most the
    number of attempts. With one attempt per task it is Wilson's own interval.

    Source: Wilson, Probable inference, 1927; the number of independent attempts: Korn and Graubard, Confidence
    intervals for proportions with small expected number of positive counts, 1998.

    Args:
        successes: for each task, whether its attempts succeeded, or numbers between 0 and 1; at least one attempt of at
            least one task.
        attempts: number of attempts that the numbers were made from; by default the number of numbers.
    """
    means = [math.fsum(task) / len(task) for task in successes]
    count, attempts = len(means), attempts or sum(map(len, successes))
    share = math.fsum(means) / count
    error = _standard_error(means, share) if count > 1 else math.inf
    independent = share * (1 - share) / error**2 if error > 0 else float(attempts)
    if share in (0.0, 1.0):
        independent = float(count)
    return Estimate(share, *_wilson(share, min(max(independent, count), attempts)), count)


def difference_of_shares(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Estimate:
    """Return how much the second of two shares over the same tasks is above the first, with a paired interval.

    The interval combines the intervals of the two shares (`proportion_over_tasks`). It is narrower if the shares of the
    tasks are correlated. It stays within -1 and 1, and has a width even if no task differs. In simulations of 2 to 100
    tasks with 1 to 8 attempts, it contained the true difference at least as often as Student's t, within chance.

    Source: Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired
    data, 1998, method 10; for clustered shares: Zou and Donner, Construction of confidence limits about effect
    measures: a general approach, 2008.

    Args:
        first, second: for each task, whether its attempts succeeded, or numbers between 0 and 1, in the same order of
            tasks; at least one attempt of at least one task.
    """
    one, other = proportion_over_tasks(first), proportion_over_tasks(second)
    means = [[math.fsum(task) / len(task) for task in tasks] for tasks in (first, second)]
    together = _correlation(*means, attempts=min(sum(map(len, first)), sum(map(len, second))))
    difference = other.mean - one.mean

    def reach(up: float, down: float) -> float:
        return math.sqrt(max(0.0, up * up + down * down - 2 * together * up * down))

    (one_low, one_high), (low, high) = _ends(one), _ends(other)
    return Estimate(
        difference,
        difference - reach(other.mean - low, one_high - one.mean),
        difference + reach(high - other.mean, one.mean - one_low),
        one.tasks,
    )


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of ``k`` attempts at a task succeeds: pass@k.

    Source: Evaluating Large Language Models Trained on Code, https://arxiv.org/abs/2107.03374, equation 1:
    1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: there are fewer attempts than ``k``, or more successes than attempts.
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(f"pass@{k} cannot be estimated from {successes} successes in {attempts} attempts.")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the chance that all of ``k`` attempts at a task succeed: pass^k.

    Source: τ-bench, https://arxiv.org/abs/2406.12045, section 3: C(c, k) / C(n, k).

    Raises:
        ValueError: there are fewer attempts than ``k``, or more successes than attempts.
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(f"pass^{k} cannot be estimated from {successes} successes in {attempts} attempts.")
    return math.comb(successes, k) / math.comb(attempts, k)


def student_t_quantile(degrees: int) -> float:
    """Return the half-width, in standard errors, of a `CONFIDENCE_LEVEL` interval for the given degrees of freedom."""
    if degrees > _NORMAL_FROM:
        return _NORMAL_QUANTILE
    low, high = 1.9, 13.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_coverage(middle, degrees) < CONFIDENCE_LEVEL else (low, middle)
    return (low + high) / 2


def _student_t_coverage(t: float, degrees: int) -> float:
    """Return the chance that a variable of Student's t distribution is between -t and t.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for number in range(1 + odd, degrees, 2):
        total += term
        term *= square * number / (number + 1)
    return (2 / math.pi) * (angle + sine * total) if odd else sine * total


def _wilson(share: float, count: float) -> tuple[float, float]:
    z = _NORMAL_QUANTILE
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, min(centre - reach, share)), min(1.0, max(centre + reach, share))


def _ends(estimate: Estimate) -> tuple[float, float]:
    low, high = estimate.low, estimate.high
    return estimate.mean if low is None else low, estimate.mean if high is None else high


def _correlation(first: Sequence[float], second: Sequence[float], *, attempts: int) -> float:
    """Return the correlation of two shares over the same tasks, with Newcombe's correction for few attempts.

    With few attempts, a positive correlation may be due to chance.
    """
    count = len(first)
    means = math.fsum(first) / count, math.fsum(second) / count
    spreads = [
        math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
        for values, mean in zip((first, second), means, strict=True)
    ]
    if min(spreads) <= _ROUNDING:
        return 0.0
    covariance = math.fsum((one - means[0]) * (other - means[1]) for one, other in zip(first, second, strict=True))
    covariance /= count
    if covariance > 0:
        covariance = max(0.0, covariance - 1 / (2 * attempts))
    return max(-1.0, covariance / (spreads[0] * spreads[1]))


def _standard_error(means: Sequence[float], mean: float) -> float:
    count = len(means)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (count - 1) / count)
