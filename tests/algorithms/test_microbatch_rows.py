"""Tests of packed rows: they hold each sample and each common prefix once, and show a token its own sample only."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gleanrl.algorithms.batch import Sample, unscored_sample
from gleanrl.algorithms.microbatch import Packing, micro_batches


def visible(packing: Packing) -> np.ndarray:
    """Return which places of the row each place attends to, bool [L, L]. Fails if one attends to a place twice."""
    length = packing.positions.shape[1]
    seen = np.zeros((length, length), np.int64)
    places = np.arange(length)
    causal = [places[part] for part in packing.parts]
    for batch in packing.batches:
        causal += [row[real].numpy() for row, real in zip(batch.index, batch.real, strict=True)]
    for part in causal:
        seen[np.ix_(part, part)] += np.tri(part.size, dtype=np.int64)
    for later, part in packing.shared:
        seen[later, part] += 1
    assert seen.max() == 1
    return seen > 0


def sample(tokens: list[int], random: np.random.Generator) -> Sample:
    mask = random.random(len(tokens)) < 0.5
    mask[0], mask[-1] = False, True
    return unscored_sample(np.array(tokens, np.int32), mask)


# Lengths of a sample's sections. Samples of a draw have the same sections, except that each begins to differ from the
# others after some of them, so prefixes of several lengths are common to different samples.
SECTIONS = st.lists(st.integers(1, 150), min_size=1, max_size=4)


@hypothesis_settings(deadline=None)
@given(
    sections=SECTIONS,
    leaves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=8),
    budget=st.integers(1, 1200),
    seed=st.integers(0, 1000),
)
def test_a_packed_row_shows_each_token_the_earlier_tokens_of_its_sample(
    sections: list[int], leaves: list[tuple[int, int]], budget: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    common = [random.integers(0, 9, size).tolist() for size in sections]
    samples = []
    for level, kind in leaves:
        own = np.random.default_rng(kind).integers(0, 9, 40 * kind + 2).tolist()
        samples.append(sample([token for section in common[:level] for token in section] + own, random))
    micros = micro_batches(samples, budget, share=True)
    assert sorted(index for micro in micros for index in micro.samples) == list(range(len(samples)))
    for micro in micros:
        assert micro.packing is not None
        assert micro.tokens.shape == micro.packing.positions.shape == (1, micro.computed)
        assert micro.computed <= budget or len(micro.samples) == 1
        assert micro.computed <= micro.real == sum(samples[index].tokens.size - 1 for index in micro.samples)
        seen, start = visible(micro.packing), 0
        for one in (samples[index] for index in micro.samples):
            stop = start + int(one.mask.sum())
            for target, place in zip(one.mask.nonzero()[0], micro.index[start:stop].tolist(), strict=True):
                context = seen[place].nonzero()[0]
                order = micro.packing.positions[0, context].argsort()
                np.testing.assert_array_equal(micro.tokens[0, context][order].numpy(), one.tokens[:target])
                np.testing.assert_array_equal(micro.packing.positions[0, context][order].numpy(), np.arange(target))
            np.testing.assert_array_equal(micro.targets[start:stop].numpy(), one.tokens[one.mask])
            start = stop
        assert start == micro.targets.numel()


def test_common_prefixes_are_computed_once_at_every_level() -> None:
    """Four samples share a prompt; two of them also share the first turns after it."""
    random = np.random.default_rng(0)
    prompt, turns = random.integers(0, 500, 60).tolist(), random.integers(0, 500, 40).tolist()
    ends = [[500 + number, *random.integers(0, 500, 9).tolist()] for number in range(4)]
    samples = [sample(prompt + (turns if number < 2 else []) + end, random) for number, end in enumerate(ends)]
    (micro,) = micro_batches(samples, 1000, share=True)
    assert micro.computed == 60 + 40 + 4 * 9
    (unrelated,) = micro_batches([sample(end * 4, random) for end in ends], 1000, share=True)
    assert unrelated.computed == unrelated.real
