"""Optimizers and parts of a step beyond Adam's: Muon, Lion, averages, spikes, offloading."""
