"""The options of the command line are the library's configs: the same names, the same defaults."""

from __future__ import annotations

from locret_stream.cli.train_heads import AllocationOptions, HeadsOptions, TuningOptions
from locret_stream.training import AllocationConfig, TrainConfig, TuneConfig


def test_options_that_are_not_given_are_the_defaults_of_the_library():
    heads, division = HeadsOptions().config(), AllocationOptions().config("./llama", 131_072)
    assert heads == TrainConfig() and division == AllocationConfig()
    assert TuningOptions().config(heads, division) is None
    assert TuningOptions(tune=TuneConfig().steps).config(heads, division) == TuneConfig()


def test_options_that_are_given_reach_the_configs():
    heads = HeadsOptions(query_aware=True, output="retention", horizon=9, seed=3, held_out=0.2).config()
    assert heads == TrainConfig(query_tokens=64, output="retention", horizon=9, seed=3, held_out=0.2)
    heads_of_sentences = HeadsOptions(kernel=9, held_out_max=5, warmup=0.1).config()
    assert heads_of_sentences == TrainConfig(kernel=9, held_out_max=5, warmup=0.1)
    bundled = AllocationOptions(allocate_examples=5).config("bundled", 4_096)
    assert (bundled.units, bundled.chunk_size, bundled.examples) == (768, 256, 5)
    tuned = TuningOptions(tune=7, tune_chunk=64).config(heads, bundled)
    assert tuned == TuneConfig(steps=7, units=768, chunk_size=64, seed=3, held_out=0.2)
