"""95 % confidence intervals of means over prompts, and of paired differences. Standard library only.

The prompts are the independent unit: samples of one prompt resemble each other, so that counting them as independent
makes intervals too narrow (arXiv 2411.00640, section 2.2). Hence scores come grouped by prompt, the mean is the mean of
the prompts' means, and the method follows from the scores:

- 0/1 scores, one sample a prompt: Wilson's interval (Wilson 1927; recommended by Brown, Cai and DasGupta 2001), which
  keeps its coverage near 0 and 1 and for few prompts, and has a width even when all prompts are right.
- 0/1 scores, several samples a prompt: Wilson's interval at the effective number of samples p (1 - p) / SE^2, where SE
  is the standard error clustered by prompt (Korn and Graubard 1998). It lies between the numbers of prompts and of
  samples, and is the number of prompts where the scores cannot tell (all right, all wrong, one prompt).
- other scores: mean +- t SE, with Student's t for prompts - 1 degrees of freedom. No interval from one prompt.

Differences of two evaluations, paired by prompt and seed, take the same unit:

- 0/1 scores, one pair a prompt, or no difference between any prompt: Bonett and Price's (2012) interval, the normal one
  after adding one prompt won and one prompt lost.
- otherwise: mean +- t SE over the prompts' mean differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, in the unit of the scores."""

    mean: float
    low: float | None
    """None, like `high`, when one prompt alone tells nothing of the spread."""
    high: float | None
    prompts: int
    samples: int
    """Scores, or pairs of them."""
    method: str
    """wilson, wilson_clustered, t or bonett_price."""


def mean_interval(scores: Sequence[Sequence[float]]) -> Interval:
    """Of the mean of `scores`: for each prompt its scores, at least one. Raises ValueError when there are none."""
    means, samples = _prompt_means(scores)
    prompts, mean = len(means), fmean(means)
    if any(score not in (0, 1) for prompt in scores for score in prompt):
        return _t_interval(means, samples)
    method = "wilson" if samples == prompts else "wilson_clustered"
    low, high = wilson(mean, _effective_samples(means, samples))
    return Interval(mean, low, high, prompts, samples, method)


def paired_interval(pairs: Sequence[Sequence[tuple[float, float]]]) -> Interval:
    """Of the mean of second - first: for each prompt its pairs (first, second). Raises ValueError without any."""
    means, samples = _prompt_means([[second - first for first, second in prompt] for prompt in pairs])
    binary = all(score in (0, 1) for prompt in pairs for pair in prompt for score in pair)
    if not binary or (samples > len(means) and len(set(means)) > 1):
        return _t_interval(means, samples)
    low, high = bonett_price(means)
    return Interval(fmean(means), low, high, len(means), samples, "bonett_price")


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's score interval of a share in [0, 1] among `count` > 0 trials."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2) / (1 + Z * Z / count)
    return (0.0 if share == 0 else max(0.0, middle - half)), (1.0 if share == 1 else min(1.0, middle + half))


def bonett_price(differences: Sequence[float]) -> tuple[float, float]:
    """Adjusted Wald interval of a mean of paired differences in [-1, 1] of 0/1 scores (equation 6 of the paper)."""
    count = len(differences) + 2
    mean = math.fsum(differences) / count
    spread = (math.fsum(one * one for one in differences) + 2) / count - mean * mean
    half = Z * math.sqrt(spread / count)
    return max(-1.0, mean - half), min(1.0, mean + half)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by bisection of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    low, high = Z, 13.0  # one degree of freedom has 12.71
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, freedom) < 0.95 else (low, middle)
    return high


def _t_inside(t: float, freedom: int) -> float:
    """P(|T| <= t)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = 0.0 if freedom == 1 else cosine if odd else 1.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _t_interval(means: Sequence[float], samples: int) -> Interval:
    mean, prompts = fmean(means), len(means)
    if prompts < 2:
        return Interval(mean, None, None, prompts, samples, "t")
    half = t_quantile(prompts - 1) * math.sqrt(variance(means) / prompts)
    return Interval(mean, mean - half, mean + half, prompts, samples, "t")


def _effective_samples(means: Sequence[float], samples: int) -> float:
    share, prompts = fmean(means), len(means)
    if samples == prompts or share in (0, 1) or prompts < 2:
        return prompts
    error_squared = variance(means) / prompts
    if error_squared == 0:
        return samples
    return min(samples, max(prompts, share * (1 - share) / error_squared))


def _prompt_means(scores: Sequence[Sequence[float]]) -> tuple[list[float], int]:
    if not scores or not all(scores):
        raise ValueError("there are no scores, or a prompt has none; leave that prompt out")
    return [fmean(prompt) for prompt in scores], sum(map(len, scores))
