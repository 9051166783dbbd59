"""What joins playing and scoring: prefixes, pairs, labels, the data jobs of a world, and many answers to choose from."""

from rewarden.collect.join import JoinPairs
from rewarden.collect.samples import SampleN
from rewarden.collect.scores import ScoreSamples
from rewarden.collect.vote import Vote
from rewarden.collect.winners import BestOfNData
from rewarden.collect.world import WorldPairs, WorldStart
from rewarden.spec import Spec

COLLECTORS: dict[str, type[Spec]] = {
    "world_start": WorldStart,
    "world_pairs": WorldPairs,
    "join_pairs": JoinPairs,
    "sample_n": SampleN,
    "score_samples": ScoreSamples,
    "best_of_n_data": BestOfNData,
    "vote": Vote,
}
