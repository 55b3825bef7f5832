"""The model of a Hopper kernel whose CTAs fetch pieces of tiles into a ring in shared memory, and multiply them there.

    step of a tile   tensor cores, or what one CTA can fetch: bytes in flight per latency, and the issue of TMA boxes
    all tiles        the fullest CTA's steps, or what all CTAs together read from L2 and write through it
    the product      that, at the clocks which the power limit leaves, beside the bytes from memory

Where two of these take about as long, neither hides the other wholly, so they are joined by a norm instead of a
maximum. The constants are shared by all such kernels; a kernel adds its launch and its share of the tensor cores' rate.
They were fitted to the layers "models" of op planner and to op spmm (benchmarks/results/h200, 2026-11-22 to 26).
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from sparsek.core.device import H200, Card

# 4096 dense 16-bit FLOP a cycle of each SM at 1.98 GHz.
BOOST_FLOPS = 4096 * 1.98e9
# From a request of TMA until its bytes may be multiplied, where others are under way too.
LATENCY = 0.7e-6
BOX_SECONDS = 2.5e-8  # the issue of one TMA box
# Slots of the ring that are not in flight: one is multiplied, another is on average half awaited.
BUSY_SLOTS = 1.5
# Of copy bandwidth: reads alone are faster than a copy.
READ_SHARE = 1.15
# A launch, with the end of the kernel before it, over the card's `launch_seconds`.
GLUON_LAUNCHES, DRIVER_LAUNCHES, TRITON_LAUNCHES = 1.2, 0.9, 0.75
# A long product runs this much longer than at boost clocks, at most; and the seconds after which half of that is
# reached. The power limit acts on the mean of some milliseconds (cuBLAS: 740 TFLOPS for 0.2 ms, 650 for 1.7 ms).
THROTTLED, THROTTLE_SECONDS = 0.39, 0.9e-3


@dataclass(frozen=True)
class Ring:
    """A product as its CTAs see it: `units` rows of tiles times `columns`, for `workers` CTAs at a time.

    A tile has `steps` on average, `longest` in the longest unit. For one step: `multiply` seconds of the tensor
    cores, `copied` bytes into a CTA's shared memory in `boxes` boxes, `crossing` bytes from L2. A ring has `in_flight`
    bytes under way. A tile writes `stored` bytes and takes `more` seconds besides. All that is repeated in so many
    `launches`, for the items of a batch: each waits for the fullest CTA of the one before.
    """

    units: int
    columns: int
    workers: int
    steps: float
    longest: float
    multiply: float
    copied: float
    crossing: float
    in_flight: float
    boxes: float
    stored: float
    more: float = 0.0
    launches: int = 1


def flops_per_second(card: Card) -> float:
    """Dense 16-bit FLOP per second of one SM at boost clocks."""
    return BOOST_FLOPS * card.pace


def norm(power: float, *seconds: float) -> float:
    """(a^power + b^power)^(1 / power): the larger one if they differ much, more than that if they do not."""
    return sum(each**power for each in seconds) ** (1 / power)


def ring_seconds(card: Card, r: Ring, moved: float) -> float:
    """Seconds of a product that reads and writes `moved` bytes of memory at least, without its launch."""
    tiles = r.units * r.columns * r.launches
    fetch = r.copied / r.in_flight * LATENCY + r.boxes * BOX_SECONDS
    step = norm(3, r.multiply, fetch)
    spans = fullest(r.units, r.columns, r.workers, r.steps * step + r.more, r.longest * step + r.more)
    through = tiles * (r.steps * r.crossing + r.stored) / card.fabric
    busy = norm(3, r.launches * spans, through)
    multiplying = tiles * r.steps * r.multiply / r.workers
    return norm(1.5, throttled(busy, min(1.0, multiplying / busy)), moved / (READ_SHARE * card.bandwidth))


def throttled(seconds: float, share: float = 1.0) -> float:
    """The seconds of a kernel that takes `seconds` at boost clocks; tensor cores are busy for a `share` of them."""
    return seconds * (1 + THROTTLED * share * seconds / (seconds + THROTTLE_SECONDS))


def fullest(units: int, columns: int, workers: int, mean: float, longest: float) -> float:
    """Seconds of the fullest worker after `plan.schedule.balance`: tiles of `mean` seconds, the longest unit's of
    `longest`.

    At least the longest tile and the mean load; where a long tile takes about as long as the mean load, more than
    either. With p workers and more than f * p tiles, some worker has f + 1 tiles,
    at best of those that come last among the first f * p + 1, longest first. Lengths count as lognormal.
    """
    tiles = units * columns
    full = int(tiles / workers + 1e-9)
    # Parts of split rows may all be shorter than the mean of whole rows.
    found = max(longest, norm(3, tiles / workers * mean, max(0.0, longest - mean)))
    if not full or tiles == full * workers:
        return found
    place = min(1.0, full * workers / tiles)
    return max(found, (full + 1) * mean * _length(units, round(longest / mean, 3), round(place, 3)))


@cache
def _length(units: int, longest: float, place: float) -> float:
    """The length of the unit at this place, 0 to 1, of all units from the longest to the shortest, over the mean."""
    if units < 2 or longest <= 1:
        return 1.0
    z = NormalDist().inv_cdf(1 - 0.6 / units)
    sigma = z - math.sqrt(max(0.0, z * z - 2 * math.log(longest)))
    return math.exp(sigma * NormalDist().inv_cdf(min(1 - 1e-6, max(1e-6, 1 - place))) - sigma * sigma / 2)


def share_of_h200(card: Card) -> float:
    """The card's SMs over those of an H200."""
    return card.sm_count / H200.sm_count
