"""Model configuration, weights, decoder, runner and sampler."""
